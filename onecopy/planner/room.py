"""Before anything has moved: is there room for the states that leave the devices?

Ranks of a node share its host memory and its drive. Each rank says what it will need of them, and
what it sees there; the first rank adds up, and all ranks raise together.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onecopy.comm.compare import first_decides
from onecopy.comm.processes import own_process
from onecopy.config import Config
from onecopy.errors import ConfigError
from onecopy.memory.host import free_host_memory, free_space
from onecopy.planner.cluster import Cluster
from onecopy.planner.real_units import RealModels
from onecopy.policies import Offload
from onecopy.report.amounts import amount, unit_for

if TYPE_CHECKING:
    from onecopy.comm.groups import Group
    from onecopy.core.unit import UnitSpec
    from onecopy.planner.real_units import OptimizerOf

__all__ = ["Room", "check_room", "room_of", "shortage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one rank needs outside its device, and what is there for all ranks of its node.

    node: which machine, or container. host: bytes of memory, or None for unknown; `given_up` are
    those that this rank has now and will not need. drive: which one, and its free bytes.
    needs: by stage, bytes in host memory and on NVMe.
    """

    rank: int
    node: str
    host: int | None
    given_up: int
    drive: tuple[int, int] | None
    needs: Mapping[int | str, tuple[int, int]]


def check_room(
    config: Config,
    world: Group,
    models: Sequence[Sequence[UnitSpec]],
    optimizer_of: OptimizerOf,
    nodes: Sequence[Sequence[int]] = (),
) -> None:
    """Refuse what would fill a node's host memory or its drive; all ranks call it together.

    Of optimizers whose states are not known, none are counted.

    Args:
        models: the units of each model that will train at once.
        optimizer_of: what updates a parameter, if that is known yet.
        nodes: the ranks of each; none is one node.

    Raises:
        ConfigError: names the tier, the need, what is there, and remedies.
    """
    stage = config.chosen_stage
    room = room_of(config, world, models, optimizer_of, (stage,), nodes)
    if room is None:
        return
    problem = first_decides(world, room, lambda rooms: shortage(rooms, stage, config))
    if problem is not None:
        raise ConfigError(problem)


def room_of(
    config: Config,
    world: Group,
    models: Sequence[Sequence[UnitSpec]],
    optimizer_of: OptimizerOf,
    stages: Iterable[int | str],
    nodes: Sequence[Sequence[int]] = (),
) -> Room | None:
    """Of this rank; None where nothing leaves the device, or the other ranks are not there."""
    offload = config.offload
    if not isinstance(offload, Offload) or offload.is_all_on_device or world.is_imagined:
        return None
    real = RealModels(models, optimizer_of, config, assumes=False)
    parameters = [one for specs in models for spec in specs for _, one in spec.parameters]
    is_cpu = models[0][0].device.type == "cpu"
    needs = {}
    nodes = nodes or (world.ranks,)
    cluster = Cluster.of_nodes([len(one) for one in nodes])
    rank = [one for node in nodes for one in node].index(world.ranks[world.rank])
    for stage in stages:
        memory = real.memory(stage, cluster, rank)
        # Without an accelerator the device's part is host memory, too.
        host = memory.on_host + (memory.states if is_cpu else 0)
        needs[stage] = host, real.file_bytes(stage, cluster, rank)
    # The boot, and the namespace of the container; one machine has one name where neither is known.
    node = " ".join(own_process().split()[:2]) or platform.node()
    return Room(
        rank=world.ranks[world.rank],
        node=node,
        host=free_host_memory(),
        # Whole parameters, which go as they are laid out.
        given_up=sum(one.nbytes for one in parameters if one.device.type == "cpu"),
        drive=None if offload.path is None else free_space(Path(offload.path)),
        needs=needs,
    )


def shortage(rooms: Sequence[Room], stage: int | str, config: Config) -> str | None:
    """What is too small for all ranks of a node together, the first that is found."""
    offload = config.offload
    assert isinstance(offload, Offload), "asked only with offload"
    for here in _grouped(rooms, lambda one: one.node):
        seen = [one.host for one in here if one.host is not None]
        need = sum(one.needs[stage][0] for one in here)
        if seen and need > (have := min(seen) + sum(one.given_up for one in here)):
            return _refusal("host memory", here, (need, have), _remedies_for_host(offload))
    drives = [one for one in rooms if one.drive is not None]
    for here in _grouped(drives, lambda one: (one.node, one.drive and one.drive[0])):
        need = sum(one.needs[stage][1] for one in here)
        have = min(one.drive[1] for one in here if one.drive is not None)
        if need > have:
            where = f"the drive of {offload.path}"
            return _refusal(where, here, (need, have), _remedies_for_drive(offload))
    return None


def _grouped(rooms: Iterable[Room], key: Callable[[Room], object]) -> Iterable[list[Room]]:
    groups: dict[object, list[Room]] = {}
    for one in rooms:
        groups.setdefault(key(one), []).append(one)
    return groups.values()


def _refusal(tier: str, here: list[Room], sizes: tuple[int, int], remedies: list[str]) -> str:
    ranks = ", ".join(str(one.rank) for one in here[:8]) + (", ..." if len(here) > 8 else "")
    who = f"rank {ranks}" if len(here) == 1 else f"the ranks of its node ({ranks})"
    need, have = map(_shown, sizes)
    return (
        f"offload: {tier} is too small. The states and buffers of {who} need {need} there, and "
        f"{have} can be had. Remedies: {', or '.join(remedies)}"
    )


def _remedies_for_host(offload: Offload) -> list[str]:
    if offload.optimizer == "host":
        return [
            'put states on a drive (offload="nvme:/path")',
            "leave some on the devices (Offload(fraction=...))",
            "train on more nodes",
            "raise the limit of the container, if it has one",
        ]
    remedies = ["give smaller buffers (Offload(buffer_bytes=...))", "train on more nodes"]
    if "host" in (offload.gradients, offload.parameters):
        remedies.insert(0, 'put everything on the drive (offload="nvme:/path")')
    return remedies


def _remedies_for_drive(offload: Offload) -> list[str]:
    remedies = ["give a path with more space", "train on more nodes"]
    if offload.gradients == "nvme":
        remedies.insert(1, 'keep gradients in faster memory (gradients="host", or "device")')
    return remedies


def _shown(num_bytes: int) -> str:
    unit = unit_for(num_bytes)
    return f"{amount(num_bytes, unit)} {unit}"
