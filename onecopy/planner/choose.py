"""`stage="auto"`: the planner's answer for the model, the optimizers and the ranks that are there.

`onecopy plan` knows a batch and says what it needs. `shard` knows none, so activations are what is
left: `ROOM` of a device may go to model states and the runtime's buffers. Of the stages that keep
to that, the one that `recommend.preference` puts first is taken. Stages give the same training, so
nothing else is chosen: what changes numbers, or asks something of the loop, is the user's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from onecopy.comm.compare import first_decides
from onecopy.config import Config
from onecopy.errors import ConfigError
from onecopy.memory.device import available_bytes
from onecopy.planner import estimate
from onecopy.planner.cluster import Cluster
from onecopy.planner.memory import KINDS, Memory
from onecopy.planner.optimizers import USUAL_STATES
from onecopy.planner.real_units import RealModels, possible_stages
from onecopy.planner.recommend import preference
from onecopy.planner.room import Room, room_of, shortage
from onecopy.report.amounts import amount, unit_for

if TYPE_CHECKING:
    from onecopy.comm.groups import Group
    from onecopy.core.unit import UnitSpec
    from onecopy.planner.real_units import OptimizerOf

__all__ = ["ROOM", "Choice", "choose_stage"]

# The share of a device that model states and buffers may have. Activations, temporary tensors and
# what the allocator cannot use get the rest.
ROOM = Fraction(7, 10)
PERCENT = f"{100 * ROOM} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the planner found for `stage="auto"`.

    stage: None where none fits. memory: by stage, bytes of states and buffers of the fullest rank.
    capacity: bytes of the smallest device. enough: ranks that would do, where none fits.
    assumed: whether the states of an optimizer were not known. outside: by stage, what is too small
    for the states that leave the devices, in a sentence; stages for which nothing is are not there.
    """

    stage: int | str | None
    memory: dict[int | str, Memory]
    capacity: int
    enough: int | None = None
    assumed: bool = False
    outside: Mapping[int | str, str] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Bytes that states and buffers may take."""
        return int(self.capacity * ROOM)

    @property
    def reason(self) -> str:
        """The choice and why, in one line."""
        assert self.stage is not None, "what does not fit is refused"
        needs = {stage: one.total for stage, one in self.memory.items()}
        text = (
            f'stage="auto" is stage {self.stage} ({_cuts(self.stage)}): model states and '
            f"buffers take at most {_shown(needs[self.stage])} of {_shown(self.room)} a rank "
            f"({PERCENT} of {_shown(self.capacity)})"
        )
        over = [stage for stage, need in needs.items() if need > self.room]
        if over:
            text += "; too much: " + ", ".join(
                f"stage {stage} with {_shown(needs[stage])}" for stage in over
            )
        host = self.memory[self.stage].host.total
        if host:
            text += f"; {_shown(host)} a rank lie in host memory"
        nvme = self.memory[self.stage].nvme.total
        if nvme:
            text += f"; {_shown(nvme)} a rank lie on NVMe"
        if self.assumed:
            text += f"; {USUAL_STATES} optimizer states a parameter assumed"
        return text


def choose_stage(
    config: Config,
    world: Group,
    models: Sequence[Sequence[UnitSpec]],
    optimizer_of: OptimizerOf,
    nodes: Sequence[Sequence[int]] = (),
) -> tuple[Config, Choice]:
    """`config`, which says "auto", with a stage, the same on all ranks, and how it was found.

    All ranks call it together, with equal settings. The smallest of their devices decides.

    Args:
        models: the units of each model that will train at once.
        optimizer_of: what updates a parameter, if that is known yet.
        nodes: the ranks of each; none is one node.

    Raises:
        ConfigError: no stage fits, or the model lies on the CPU and `config.memory` does not say
            how much of it a rank may have.
    """
    capacity = config.capacity or available_bytes(models[0][0].device)
    if capacity is None:
        raise ConfigError(
            'stage="auto" on the CPU: say what one rank may hold, memory="16GiB" for example. The '
            "host's memory is shared by its ranks, and how much of it is free changes, so it is "
            "no ground for a choice"
        )
    cluster = Cluster.of_nodes([len(one) for one in nodes or (world.ranks,)])
    stages = possible_stages(config, cluster)
    room = room_of(config, world, models, optimizer_of, stages, nodes)
    real = RealModels(models, optimizer_of, config)
    decide = partial(_choose, real=real, cluster=cluster, config=config)
    choice = first_decides(world, (capacity, room), decide)
    if choice.stage is None:
        raise ConfigError(_refusal(choice, world.size, config))
    chosen = {"stage": choice.stage, "memory": None}
    return Config.make(config, chosen, origin=choice.reason), choice


def _choose(
    seen: Sequence[tuple[int, Room | None]],
    *,
    real: RealModels,
    cluster: Cluster,
    config: Config,
) -> Choice:
    rooms = [room for _, room in seen if room is not None]
    memory = {stage: real.memory(stage, cluster) for stage in possible_stages(config, cluster)}
    problems = {stage: shortage(rooms, stage, config) if rooms else None for stage in memory}
    choice = Choice(
        stage=None,
        memory=memory,
        capacity=min(capacity for capacity, _ in seen),
        assumed=not real.all_known,
        outside={stage: text for stage, text in problems.items() if text is not None},
    )

    is_even = len(set(cluster.node_sizes)) == 1
    node_size = cluster.devices_per_node if is_even else None

    def order(stage: int | str) -> tuple[object, ...]:
        sent = estimate.elements_in_hops(stage, cluster.devices, node_size=node_size)
        return preference(stage, cluster, (sent.across, sent.total), memory[stage].total)

    fitting = [stage for stage in memory if memory[stage].total <= choice.room]
    fitting = [stage for stage in fitting if stage not in choice.outside]
    if fitting:
        return replace(choice, stage=min(fitting, key=order))
    least = min(memory, key=lambda stage: memory[stage].total)
    more = (cluster.of_size(cluster.devices << doubling) for doubling in range(1, 9))
    enough = (one.devices for one in more if real.memory(least, one).total <= choice.room)
    return replace(choice, enough=next(enough, None))


def _refusal(choice: Choice, world_size: int, config: Config) -> str:
    fitting = [one for one, memory in choice.memory.items() if memory.total <= choice.room]
    if fitting:
        # Only what leaves the devices is too much.
        return f'stage="auto": {choice.outside[fitting[-1]]} (stage {fitting[-1]})'
    stage = min(choice.memory, key=lambda one: choice.memory[one].total)
    least = choice.memory[stage]
    parts = ", ".join(
        f"{KINDS[kind]} {_shown(size)}" for kind, size in least.by_kind().items() if size
    )
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    remedies = ["give more memory"]
    if choice.enough:
        remedies.insert(0, f"train on {choice.enough} ranks")
    if config.precision_policy.compute in (None, "fp32"):
        remedies.append('compute in 16 bit (precision="bf16")')
    if config.offload is None and config.precision_policy.master != "bf16+16":
        remedies.append('keep optimizer states in host memory (offload="cpu", docs/offload.md)')
    if not config.step_in_backward:
        remedies.append("keep no gradients (step_in_backward=True, docs/memory-lean.md)")
    return (
        f'stage="auto": no stage fits on {ranks} with {_shown(choice.capacity)} each, of which '
        f"{_shown(choice.room)} ({PERCENT}) are for model states and buffers. Stage "
        f"{stage} needs least, {_shown(least.total)}: {parts}. Remedies: {', or '.join(remedies)}; "
        "a stage that is given as a number is not checked"
    )


def _cuts(stage: int | str) -> str:
    """The paper's name of a stage; how far each state is cut, where nodes matter."""
    row = estimate.row_of(stage)
    return row.cuts if row.needs_nodes else row.name


def _shown(num_bytes: int) -> str:
    unit = unit_for(num_bytes)
    return f"{amount(num_bytes, unit)} {unit}"
