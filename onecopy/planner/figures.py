"""The figures of a plan as lines of words, for the terminal and for pages alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from onecopy.planner import estimate
from onecopy.planner.memory import KINDS
from onecopy.planner.model_parallel import input_elements, pipeline_elements, tensor_elements
from onecopy.planner.recommend import PLACES, seconds
from onecopy.planner.sizes import shown
from onecopy.report.amounts import amount, unit_for

if TYPE_CHECKING:
    from onecopy.planner.plan import Plan
    from onecopy.planner.rows import Outside, Row

__all__ = ["Line", "Part", "footnotes", "heading", "label", "name_of", "parts", "unit_of"]


@dataclass(frozen=True, slots=True)
class Line:
    """One figure for every row of the plan. is_sum: of the lines above it."""

    name: str
    cells: tuple[str, ...]
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The table of one tier. title: what it is; empty for the first, that of devices."""

    title: str
    rows: tuple[Row, ...]
    lines: tuple[Line, ...]


TITLES = {
    "device": "",
    "host": 'With states in host memory (ZeRO-Offload), offload="cpu"',
    "nvme": 'With states on NVMe (ZeRO-Infinity), offload=Offload(optimizer="nvme", ...)',
}
# Where they may be with states on NVMe, and how it is marked.
PLACES_OF_GRADIENTS = {"device": "d", "host": "h"}
TIER_WORDS = {"device": "", "host": " with offload", "nvme": " with offload to NVMe"}


def heading(plan: Plan) -> str:
    """The question in one line."""
    options, batch = plan.options, plan.question.batch
    numel = plan.model.num_parameters
    name = plan.model.name
    size = name if name.endswith("parameters") else f"{name}, {shown(numel)} parameters"
    devices = "1 device" if options.devices == 1 else f"{options.devices:,} devices"
    nodes = options.devices // options.per_node
    if nodes > 1:
        devices += f" in {nodes:,} nodes"
    if options.model_parallel > 1:
        sizes = {
            "pipeline stages": options.pipeline,
            "data parallel": options.cluster.devices,
            "tensor parallel": options.tensor,
        }
        spread = " x ".join(f"{size:,} {name}" for name, size in sizes.items() if size > 1)
        devices += f", {spread}"
    samples = f"{batch.samples} x {batch.sequence:,} tokens at a time"
    if batch.backwards > 1:
        samples += f", {batch.backwards} times a step"
    dtype = options.policy.compute or "fp32"
    return f"{size} on {devices}: {dtype}, {options.optimizer}, {samples}"


def unit_of(plan: Plan) -> str:
    """The unit of all amounts in the table."""
    return unit_for(max(row.memory.total for row in plan.rows))


def parts(plan: Plan) -> Iterator[Part]:
    """A table for each tier that is shown."""
    for tier, title in TITLES.items():
        rows = tuple(row for row in plan.rows if row.way.tier == tier)
        if rows:
            yield Part(title, rows, tuple(_lines(plan, rows, tier)))


def _lines(plan: Plan, rows: tuple[Row, ...], tier: str) -> Iterator[Line]:
    """A table, a line for each figure."""
    unit = unit_of(plan)

    def line(name: str, cell: Callable[[Row], float | None], *, is_sum: bool = False) -> Line:
        values = [cell(row) for row in rows]
        cells = tuple("-" if value is None else amount(value, unit) for value in values)
        return Line(name, cells, is_sum)

    is_device = tier == "device"
    if is_device and any(row.paper is not None for row in rows):
        yield line("states in the ZeRO paper", lambda row: row.paper)
    yield line(
        "model states here" if is_device else "states on the device", lambda row: row.memory.states
    )
    for kind, name in KINDS.items():
        indent = "  " if kind in ("parameters", "gradients", "optimizer") else ""
        cell = partial(_part, kind=kind)
        # Of what is elsewhere nothing needs a line.
        if is_device or any(map(cell, rows)):
            yield line(indent + name, cell)
    yield line("all of it, at most", lambda row: row.memory.total, is_sum=True)
    capacity = amount(plan.options.capacity, unit).removesuffix(".0")
    yield Line(f"of {capacity} {unit}", tuple(map(_share, rows)), is_sum=True)
    for other in PLACES:
        if any(other in row.outside for row in rows):
            yield from _lines_outside(plan, rows, other)
    if not is_device:
        yield line("moved a step to and fro", lambda row: row.moved)
    if tier == "nvme":
        yield line("read a step from NVMe", lambda row: row.swapped.read)
        yield line("written a step to NVMe", lambda row: row.swapped.written)
    yield from _lines_of_time(rows)
    if plan.options.cluster.devices > 1:
        yield line("sent a step inside nodes", lambda row: row.sent.inside)
        yield line("sent a step across nodes", lambda row: row.sent.across)
    yield Line("largest model that fits", tuple(map(_largest, rows)))


def _lines_outside(plan: Plan, rows: tuple[Row, ...], tier: str) -> Iterator[Line]:
    """What lies in a slower memory, by rank and by node."""
    unit, found = unit_of(plan), [row.outside.get(tier) for row in rows]

    def cells(cell: Callable[[Outside], str]) -> tuple[str, ...]:
        return tuple("-" if one is None else cell(one) for one in found)

    if any(one is not None and one.states for one in found):
        yield Line(f"states {PLACES[tier]}", cells(lambda one: amount(one.states, unit)))
    if any(one is not None and one.buffers for one in found):
        yield Line(f"buffers {PLACES[tier]}", cells(lambda one: amount(one.buffers, unit)))
    yield Line("all ranks of a node", cells(lambda one: amount(one.node, unit)), is_sum=True)
    if (known := plan.options.capacity_of(tier)) is not None:
        limit = f"of {amount(known, unit).removesuffix('.0')} {unit}"
        yield Line(limit, cells(_share_outside), is_sum=True)


def _lines_of_time(rows: tuple[Row, ...]) -> Iterator[Line]:
    """Where speeds were said."""
    lanes = {
        "s a step to and fro": "link",
        "s a step on NVMe": "nvme",
        "s a step inside nodes": "inside",
        "s a step across nodes": "across",
    }
    for name, lane in lanes.items():
        values = [getattr(row.seconds, lane) for row in rows]
        if any(value is not None for value in values):
            yield Line(name, tuple("-" if one is None else seconds(one) for one in values))
    shares = [row.seconds.computing for row in rows]
    if any(share is not None for share in shares):
        cells = tuple("-" if share is None else f"{100 * share:.0f} %" for share in shares)
        yield Line("computing, at least", cells)


def footnotes(plan: Plan) -> Iterator[str]:
    """What the table's figures are, as far as this plan needs it said."""
    if any(row.paper is not None for row in plan.rows):
        yield (
            "The paper counts 16-bit gradients; here the optimizer reads fp32 ones, and stage 3 "
            "makes 16-bit parameters from the masters when they are gathered."
        )
    if any(row.memory.total < row.memory.sum for row in plan.rows):
        yield "All of it is less than the sum: gradients come as activations go."
    if any(row.way.recompute for row in plan.rows):
        where = ", from inputs that wait in host memory" if plan.options.moves_inputs else ""
        yield f"*: activations of blocks are computed again in backward{where}."
    yield from _notes_on_tiers(plan)
    if any(row.way.is_lean for row in plan.rows):
        yield '+: with master="bf16+16".'
    yield from _notes_on_parts(plan)
    if plan.options.checkpoint_activations == "auto" and any(row.largest for row in plan.rows):
        yield "Largest model: more blocks like these, their activations computed again."
    for note in plan.notes:
        yield f"{note[0].upper()}{note[1:]}."


def _notes_on_parts(plan: Plan) -> Iterator[str]:
    """What tensor parallel ranks and pipeline stages send, which the table has no line for."""
    options, transformer = plan.options, plan.model.transformer
    if options.model_parallel == 1:
        return
    yield (
        "Each rank's part of the model: its parameters over the tensor parallel ranks, the blocks "
        "over the pipeline stages, of which the fullest is shown."
    )
    if transformer is None:
        return
    batch, width = plan.question.batch, estimate.widths_of(options.policy, 0).compute
    if options.tensor > 1:
        is_again = any(row.way.recompute for row in plan.rows)
        elements = tensor_elements(transformer, batch.tokens, recompute=is_again)
        share = batch.backwards * (options.tensor - 1) / (options.tensor * options.pipeline)
        yield _also_sent("tensor parallelism", "in all-reduces", width * elements * share)
        if options.partitions_inputs:
            collected = input_elements(transformer, batch.tokens)
            what = "making inputs of blocks whole"
            yield _also_sent(what, "in all-gathers", width * collected * share)
    if options.pipeline > 1:
        num_bytes = width * batch.backwards * pipeline_elements(transformer, batch.tokens)
        yield _also_sent("a pipeline stage", "to its neighbours", num_bytes)
        if batch.backwards > 1:
            yield (
                "Each micro-batch gathers and reduces here; onecopy.parallel.micro_batches lets "
                "those of a step share that."
            )


def _also_sent(who: str, how: str, num_bytes: float) -> str:
    unit = unit_for(num_bytes)
    return f"Beside what is sent there, {who} sends {amount(num_bytes, unit)} {unit} a step {how}."


def _notes_on_tiers(plan: Plan) -> Iterator[str]:
    """What is known of the memories outside the devices, and what is not."""
    offloads = [row.way.offload for row in plan.rows if row.way.offload is not None]
    if any(one.parameters == "host" for one in offloads):
        yield '^: with parameters="host", too: each gather brings them up.'
    if any(one.parameters == "nvme" for one in offloads):
        yield 'v: with parameters="nvme", too: each gather reads them.'
    for place, mark in PLACES_OF_GRADIENTS.items():
        if any(one.gradients == place != one.optimizer for one in offloads):
            yield f'{mark}: with gradients="{place}".'
    known = plan.options.capacity_of
    tiers = {tier for row in plan.rows for tier in row.outside if known(tier) is None}
    if "host" in tiers:
        yield "How much the host has is not known: say --host-memory, which limits the model, too."
    if "nvme" in tiers:
        yield "How much the drives have is not known: say --nvme, which limits the model, too."
    if any(row.swapped.total and row.seconds.nvme is None for row in plan.rows):
        yield "How long reads and writes take is not known: say --nvme-read and --nvme-write."
    if any(row.seconds.computing is not None for row in plan.rows):
        yield "Computing: the share of the time if nothing moved meanwhile; much of it does."


def label(row: Row) -> str:
    """The stage, with the marks that `footnotes` explains."""
    way = row.way
    marks = ("*" if way.recompute else "") + ("+" if way.is_lean else "")
    if way.offload is not None:
        marks += {"device": "", "host": "^", "nvme": "v"}[way.offload.parameters]
        if way.offload.gradients != way.offload.optimizer:
            marks += PLACES_OF_GRADIENTS[way.offload.gradients]
    return f"{way.name}{marks}"


def name_of(row: Row) -> str:
    """The stage and the tier in words."""
    return row.way.name + TIER_WORDS[row.way.tier]


def _part(row: Row, kind: str) -> int | None:
    return row.memory.by_kind()[kind]


def _share(row: Row) -> str:
    return f"{100 * row.share:.0f} %" if row.fits_device else "too much"


def _share_outside(found: Outside) -> str:
    assert found.capacity is not None, "it was asked before"
    return f"{100 * found.node / found.capacity:.0f} %" if found.fits else "too much"


def _largest(row: Row) -> str:
    return "-" if row.largest is None else shown(float(f"{row.largest:.3g}"))
