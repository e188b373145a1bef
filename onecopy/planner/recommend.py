"""The fastest way that fits: which one, why, and how it is written.

Fastest means, in this order: states on the device, then in host memory, then on NVMe; the fewest
elements sent across nodes, then in all; parameters, then gradients in the fastest memory; no
activation computed twice; masters in one piece; the optimizer's step shared out over the ranks; no
gathers; the least memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from onecopy.config import STAGES, Config
from onecopy.planner.cluster import Cluster
from onecopy.planner.memory import KINDS
from onecopy.planner.options import IN_NODES, OPTIMIZERS, PlanOptions
from onecopy.planner.rows import NVME_PATH, Outside, Question, Row
from onecopy.planner.sized import row_for
from onecopy.planner.sources import Origin
from onecopy.policies import TIERS, Offload, Precision
from onecopy.report.amounts import amount, unit_for

__all__ = ["PLACES", "Recommendation", "advice_for", "preference", "recommend", "seconds"]

# Where nothing else decides.
ORDER = (*STAGES, *IN_NODES)
PLACES = {"host": "in host memory", "nvme": "on NVMe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A row, the configuration that gives it, and sentences that say why.

    code: a script up to the training loop. toml: `config` as a file.
    """

    row: Row
    config: Config
    code: str
    toml: str
    reasons: tuple[str, ...]


def recommend(question: Question, rows: Iterable[Row], origin: Origin) -> Recommendation | None:
    """The first of the rows that fit, in the order above; None where none does.

    Args:
        rows: all that were considered, also those that do not fit: they are reasons.
        origin: how code builds the model.
    """
    considered = sorted(rows, key=lambda row: _order(row, question.options.cluster))
    fitting = [row for row in considered if row.fits]
    if not fitting:
        return None
    row = fitting[0]
    config = Config(stage=row.stage, precision=row.way.policy, offload=row.way.offload)
    return Recommendation(
        row=row,
        config=config,
        code=_code(question, row, config, origin),
        toml=config.to_toml(),
        reasons=tuple(_reasons(question, row, considered)),
    )


def _order(row: Row, cluster: Cluster) -> tuple[object, ...]:
    way = row.way
    order = preference(
        row.stage,
        cluster,
        row.messages,
        row.memory.total,
        again=way.recompute,
        is_lean=way.is_lean,
    )
    # What travels between device and host in each step costs more than messages do.
    messages, *rest = order
    offload = way.offload or Offload()
    tiers = [TIERS.index(tier) for tier in (way.tier, offload.parameters, offload.gradients)]
    slowest, *moving = tiers
    return (slowest, messages, *moving, *rest, row.moved + row.swapped.total)


def preference(
    stage: int | str,
    cluster: Cluster,
    messages: tuple[Fraction, Fraction],
    num_bytes: int,
    *,
    again: bool = False,
    is_lean: bool = False,
) -> tuple[object, ...]:
    """The smaller, the faster: what ways to train are sorted by, in the order above.

    Args:
        messages: elements sent per parameter and step, across nodes and in all.
        num_bytes: of memory.
        again: activations are computed twice. is_lean: masters are kept split.
    """
    cut = row_for(stage, cluster)
    step = Fraction(1, cluster.num_owners(cut.optimizer))
    # One device has nobody to share with: then nothing is cut.
    least = num_bytes if cluster.devices > 1 else 0
    place = ORDER.index(stage) if stage in ORDER else len(ORDER)
    return (messages, again, is_lean, step, cut.releases, least, place)


# Why --------------------------------------------------------------------------------------------


def _reasons(question: Question, row: Row, considered: list[Row]) -> Iterable[str]:
    options, way = question.options, row.way
    if way.offload is not None:
        yield from _reasons_for_offload(row, way.offload, considered)
    alike = [one for one in considered if one.way.tier == way.tier]
    yield _reason_for_stage(row, alike, options.cluster)
    if way.recompute:
        if options.checkpoint_activations != "auto":
            yield "activation checkpointing: as you asked"
        else:
            kept = question.row(replace(way, recompute=False))
            yield (
                "activation checkpointing: with all activations kept this takes "
                f"{_needs(kept)}; it computes the blocks' forwards once more"
            )
    if way.is_lean:
        plain = question.row(replace(way, policy=replace(way.policy, master=None)))
        yield (
            f'master="bf16+16": with whole fp32 masters this takes {_needs(plain)}; training is '
            "the same to the last bit (docs/memory-lean.md)"
        )
    if way.policy.master == "bf16":
        yield "bf16 masters: as you asked; small updates are lost (docs/memory-lean.md)"
    elif way.policy.compute in ("bf16", "fp16"):
        yield (
            f"{way.policy.compute}: forward, backward and messages take 2 bytes an element; the "
            "optimizer updates fp32 masters (docs/precision.md)"
        )
    if "fused" in OPTIMIZERS[options.optimizer][1]:
        yield "fused=True: the optimizer's step makes no temporary tensors"
    if options.model_parallel == 1:
        yield "init_sharded: no process builds the whole model, values are made unit by unit"


OPTION = {"host": "--host-memory", "nvme": "--nvme"}


def _reasons_for_offload(row: Row, offload: Offload, considered: list[Row]) -> Iterable[str]:
    """Why states leave the device, and what that takes elsewhere."""
    on_device = [one for one in considered if one.way.offload is None]
    least = min(on_device, key=lambda one: one.memory.total)
    names = ["parameters" if row.way.moves_parameters else "masters", "optimizer states"]
    if offload.gradients == offload.optimizer:
        names.insert(1, "gradients")
    what = ", ".join(names[:-1]) + f" and {names[-1]}"
    yield (
        f"offload: with all on the devices {least.way.name} needs least, {_needs(least)}; with "
        f"{what} {PLACES[row.way.tier]} a device needs {_needs(row)}, and a rank moves "
        f"{_size(row.moved)} to and fro a step (docs/offload.md)"
    )
    if row.way.tier == "nvme":
        yield from _reasons_for_nvme(row, considered)
    for tier, outside in row.outside.items():
        unit = unit_for(outside.node)
        known = f"which is not checked: say {OPTION[tier]}"
        if outside.capacity is not None:
            known = f"of {amount(outside.capacity, unit)} {unit}"
        yield (
            f"each node needs {amount(outside.node, unit)} {unit} {PLACES[tier]} for that, {known}"
        )


def _reasons_for_nvme(row: Row, considered: list[Row]) -> Iterable[str]:
    """Why not in host memory, and what reads and writes cost."""
    above = [one for one in considered if one.way.tier == "host" and one.fits_device]
    if above:
        least = min(above, key=lambda one: one.outside["host"].node)
        yield (
            f"NVMe: in host memory {least.way.name} takes "
            f"{_of_capacity(least.outside['host'])} of each node"
        )
    swapped = row.swapped
    text = (
        f"a rank reads {_size(swapped.read)} from NVMe a step and writes {_size(swapped.written)}"
    )
    if row.seconds.nvme is not None:
        text += f", {seconds(row.seconds.nvme)} s for a node if reads and writes follow each other"
    yield text


def seconds(value: float) -> str:
    """In three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of_capacity(found: Outside) -> str:
    unit = unit_for(found.node)
    if found.capacity is None:
        return f"{amount(found.node, unit)} {unit}"
    return f"{amount(found.node, unit)} of {amount(found.capacity, unit)} {unit}"


def _size(num_bytes: int) -> str:
    unit = unit_for(num_bytes)
    return f"{amount(num_bytes, unit)} {unit}"


def _reason_for_stage(row: Row, considered: list[Row], cluster: Cluster) -> str:
    cut = row_for(row.stage, cluster)
    what = row.way.name if cut.needs_nodes else f"{row.way.name} ({cut.name})"
    if cluster.devices == 1:
        return f"{what}: one device sends nothing and has nobody to share states with"
    total, across = map(float, (row.elements.total, row.elements.across))
    sent = f"{what}: a rank sends {total:.3g} times the model's elements a step"
    if across:
        sent += f", {across:.3g} of it across nodes"
    cheaper = {one.way.name: one for one in considered if one.messages < row.messages}
    if cheaper:
        # The last one considered of each stage holds least.
        needs = ", ".join(f"{name} needs {_needs(one)}" for name, one in cheaper.items())
        return f"{sent}; less does not fit: {needs}"
    alike = sorted({str(one.stage) for one in considered if one.messages == row.messages})
    if len(alike) == 1:
        return f"{sent}, the least"
    return (
        f"{sent}, the least; of the stages that send so little ({', '.join(alike)}) it "
        "fits, shares out the optimizer's step, and holds least"
    )


def _needs(row: Row) -> str:
    unit = unit_for(row.memory.total)
    return f"{amount(row.memory.total, unit)} of {amount(row.capacity, unit)} {unit}"


def advice_for(question: Question, rows: list[Row]) -> tuple[str, ...]:
    """Where nothing fits: what would change that, the nearest first."""
    options = question.options
    offloaded = [row for row in rows if row.way.offload is not None]
    least = min((row for row in rows if row.way.offload is None), key=lambda row: row.memory.total)
    found = [f"{least.way.name} comes nearest, with {_needs(least)}"]
    parts = least.memory.at_peak
    largest = max(parts, key=lambda kind: parts[kind])
    unit = unit_for(least.memory.total)
    found.append(
        f"the largest part of it is {KINDS[largest]}, {amount(parts[largest], unit)} {unit}"
    )
    if options.checkpoint_activations == "off":
        found.append("let activations be computed again: --checkpoint-activations auto")
    if options.micro_batch > 1:
        found.append("compute fewer samples at a time: --micro-batch 1, and --accumulate more")
    if options.stage is not None:
        found.append("leave --stage out, to see whether another one fits")
    if options.policy.compute in (None, "fp32"):
        found.append("compute in 16 bit: --precision bf16")
    enough = _enough_devices(question, least)
    if enough:
        found.append(f"{enough} devices like these would do at {least.way.name}")
    found.append(
        "step_in_backward=True keeps no gradients (docs/memory-lean.md says what it asks of a loop)"
    )
    found += _with_offload(offloaded)
    return tuple(found)


def _with_offload(rows: list[Row]) -> Iterable[str]:
    """What states in slower memory leave on a device, and why that does not do either."""
    for tier, place in PLACES.items():
        of_tier = [row for row in rows if row.way.tier == tier]
        on_device = [row for row in of_tier if row.fits_device]
        if of_tier and not on_device:
            least = min(of_tier, key=lambda row: row.memory.total)
            yield f"with states {place} {least.way.name} still needs {_needs(least)}"
        if on_device:
            row = min(on_device, key=lambda row: sum(one.node for one in row.outside.values()))
            takes = [
                f"{_of_capacity(one)} {PLACES[name]}"
                for name, one in row.outside.items()
                if not one.fits
            ]
            yield (
                f"with states {place} {row.way.name} fits on the devices, with {_needs(row)}, "
                f"but each node takes {' and '.join(takes)}"
            )


def _enough_devices(question: Question, row: Row) -> int | None:
    """The first doubling of the devices on which a row would fit, if more of them help."""
    options = question.options
    devices = options.devices
    for _ in range(8):
        devices *= 2
        per_node = options.per_node
        more = replace(options, devices=devices, devices_per_node=per_node)
        other = Question(question.shape, more)
        if other.fits_all(other.memory(row.way, question.shape)):
            return devices
    return None


# How --------------------------------------------------------------------------------------------

LINE = 100  # columns of code

DEVICE = """\
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
"""


def _code(question: Question, row: Row, config: Config, origin: Origin) -> str:
    """A script that runs under torchrun, up to the training loop."""
    options = question.options
    nodes = options.devices // options.per_node
    launch = f"torchrun --nproc-per-node={options.per_node} train.py"
    if nodes > 1:
        launch = launch.replace("torchrun", f"torchrun --nnodes={nodes}")
    third = [line for line in origin.imports if line.startswith("from ")]
    own = [line for line in origin.imports if not line.startswith("from ")]
    given = ', place="host"' if options.moves_inputs else ""
    given += ', partition=mesh["tp"]' if options.partitions_inputs else ""
    again = [f"onecopy.checkpoint_activations(model{given})"] if row.way.recompute else []
    if again and origin.is_hugging_face:
        again.insert(0, "model.config.use_cache = False")
    optimizer = OPTIMIZERS[options.optimizer][1]
    is_spread = options.model_parallel > 1
    if is_spread:
        third.append("from torch.distributed.device_mesh import init_device_mesh")
    return "\n".join(
        [
            f"# {launch}" + (" on each node" if nodes > 1 else ""),
            "import os",
            "",
            "import torch",
            *third,
            "",
            *own,
            "import onecopy",
            "",
            DEVICE,
            *(_part(options, origin) if is_spread else _whole(origin)),
            *again,
            f"optimizer = torch.optim.{optimizer}",
            *_where(config),
            *_call(config, ["mesh=mesh"] if is_spread else []),
            "",
        ]
    )


def _whole(origin: Origin) -> list[str]:
    return ["with onecopy.init_sharded():", f"    model = {origin.build}"]


def _part(options: PlanOptions, origin: Origin) -> list[str]:
    """The mesh, and what each rank has of the model."""
    sizes = {"pp": options.pipeline, "dp": options.cluster.devices, "tp": options.tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
    shape, names = ", ".join(map(str, kept.values())), json.dumps(list(kept))
    lines = [
        'device = torch.accelerator.current_accelerator() or torch.device("cpu")',
        f"mesh = init_device_mesh(device.type, [{shape}], mesh_dim_names={names})",
        f"model = {origin.build}",
    ]
    if options.pipeline > 1:
        lines.append('# of it the blocks of stage mesh["pp"].get_local_rank() (docs/pipelines.md)')
    if options.tensor > 1:
        lines.append('# parallelize_module(model, mesh["tp"], ...) (docs/tensor-parallel.md)')
    return lines


def _where(config: Config) -> list[str]:
    """What only the user knows of the drives."""
    if isinstance(config.offload, Offload) and config.offload.path == NVME_PATH:
        return [f"# {NVME_PATH}: a folder on each node's drive"]
    return []


def _call(config: Config, more: list[str]) -> list[str]:
    """The call of shard, in as many lines as it needs."""
    stage, precision = json.dumps(config.stage), _written(config.precision_policy)
    settings = [f"stage={stage}", f"precision={precision}", *more]
    if isinstance(config.offload, Offload):
        settings.append(f"offload={config.offload.written()}")
    arguments = ["model", "optimizer", *settings]
    call = f"onecopy.shard({', '.join(arguments)})"
    if len(call) <= LINE:
        return [call]
    return ["onecopy.shard(", *(f"    {argument}," for argument in arguments), ")"]


def _written(policy: Precision) -> str:
    """A policy as an argument of shard, as short as it can be."""
    if policy == Precision(compute=policy.compute):
        return f'"{policy.compute}"' if policy.compute else "None"
    return f"onecopy.{policy.written()}"
