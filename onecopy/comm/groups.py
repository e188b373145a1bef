"""Shard and replica group of one model: which ranks own slices, which hold the same slice."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from onecopy.errors import CommunicationError, ConfigError, OneCopyError, ShardingError
from onecopy.extras import check_torch

if TYPE_CHECKING:
    from onecopy.comm.nodes import Nodes

# Before others import names that older ones lack.
check_torch()

__all__ = [
    "Group",
    "Groups",
    "advice_alone",
    "as_group",
    "check_backend",
    "end_host_group",
    "explained",
    "has_begun",
    "has_native_collectives",
    "host_group",
    "join_launched",
    "join_or_begin",
    "launched_node",
    "pair_group",
    "raise_explained",
    "timeout_of",
]


LOGGER = logging.getLogger("onecopy")
# Seconds for the other ranks to come, until this one says that it waits.
PATIENCE = 30.0
# What torchrun sets for each process that it starts.
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Others that start processes, and where they say how many.
OTHER_LAUNCHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks that communicate.

    process_group: torch's group, or None where this rank is alone.
    ranks: the global ranks, in order, which of a shard group is that of the slices. rank: this
        rank's place among them. size: how many.
    is_native: see ImaginedWorld.
    """

    process_group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    size: int = field(init=False)
    is_native: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))

    @property
    def is_imagined(self) -> bool:
        """Only this rank is there; see ImaginedWorld."""
        return self.process_group is None and self.size > 1


@dataclass(frozen=True, slots=True)
class Groups:
    """shard: the ranks over which states are cut; each owns one slice.

    replica: the ranks that hold the same slice; gradients are summed over them too.
    world: all ranks of this model.
    nodes: where the shard group is in several nodes, and hops go across and inside.
    node_ranks: the ranks of each node; none where all are in one.
    tensor, pipeline: the other groups that the model is spread over: see meshes.py.
    """

    shard: Group
    replica: Group
    world: Group
    nodes: Nodes | None = None
    node_ranks: tuple[tuple[int, ...], ...] = ()
    tensor: tuple[Group, ...] = ()
    pipeline: tuple[Group, ...] = ()
    _here: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        me = self.world.ranks[self.world.rank]
        here = next((one for one in self.node_ranks if me in one), self.world.ranks)
        object.__setattr__(self, "_here", frozenset(here))

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return max(1, len(self.node_ranks))

    def is_away(self, rank: int) -> bool:
        """Whether a rank of the world is in another node."""
        return rank not in self._here

    @property
    def model(self) -> tuple[Group, ...]:
        """The groups that the model is spread over, beside those that hold the same parameters."""
        return (*self.tensor, *self.pipeline)

    @property
    def all(self) -> list[Group]:
        """Every group that transfers are made in."""
        every, nodes = [self.world, self.shard, self.replica], self.nodes
        while nodes is not None:
            every += [nodes.inside, *(one.group for one in nodes.columns)]
            nodes = nodes.inner
        return list({id(one.process_group): one for one in every}.values())


@contextmanager
def explained(group: Group) -> Iterator[None]:
    """Around a transfer: its failure is an error that names the ranks.

    Raises:
        CommunicationError: instead of what the backend raises.
    """
    try:
        yield
    except RuntimeError as error:
        raise_explained(group, error)
        raise


def raise_explained(group: Group, error: RuntimeError) -> None:
    """Raise a CommunicationError that names the ranks, unless the error is one of ours already."""
    if not isinstance(error, OneCopyError):
        raise CommunicationError(
            f"rank {group.ranks[group.rank]}: a transfer with ranks {list(group.ranks)} failed "
            f"({error}). Most often a peer has ended; its own output says why"
        ) from error


def join_launched(backend: str | None = None, device: torch.device | None = None) -> None:
    """init_process_group() from the environment that a launcher has set.

    torchrun keeps its store when it starts the processes again, and with it the addresses of those
    that have died: a rank that reads one before it is written anew cannot connect, and the restart
    is spent (github.com/pytorch/pytorch/issues/135712). On one machine all ranks know how many
    restarts there were, so each gets a part of the store for itself. On several machines that
    number may differ; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps there, given to torchrun.

    Raises:
        CommunicationError: the other ranks did not come in time.
    """
    with _meeting():
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if restarts == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
            dist.init_process_group(backend, device_id=device)
            return
        store, rank, world_size = next(dist.rendezvous("env://"))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"restart-{restarts}", store),
            rank=rank,
            world_size=world_size,
            device_id=device,
        )


@contextmanager
def _meeting() -> Iterator[None]:
    """Around the forming of a group: who does not come is waited for, but not in silence."""
    rank, world_size, *place = (os.environ.get(name, "?") for name in RENDEZVOUS)
    here = f"rank {rank} of {world_size}"
    advice = (
        f"All {world_size} have to be started, with the same MASTER_ADDR and MASTER_PORT: torchrun "
        "sees to that, on several machines with the same --nnodes and --rdzv-endpoint on each. If "
        "they are there, a firewall may be between them: `onecopy doctor` tests the network"
    )
    waits = f"{here} has waited {PATIENCE:g} s for the others at {':'.join(place)}. {advice}"
    timer = threading.Timer(PATIENCE, LOGGER.warning, ["%s", waits])
    timer.daemon = True
    timer.start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).partition("\n")[0]
        raise CommunicationError(
            f"{here} has not met the others at {':'.join(place)} ({reason}). {advice}"
        ) from error
    finally:
        timer.cancel()


def join_or_begin() -> None:
    """Join those that a launcher has started with this process, or be a world of one rank.

    Raises:
        ConfigError: the environment says that there are other ranks, and not how to reach them.
    """
    there = [name for name in RENDEZVOUS if os.environ.get(name)]
    wants_others = "RANK" in there or os.environ.get("WORLD_SIZE", "1") != "1"
    if not wants_others:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in RENDEZVOUS if name not in there]
    if missing:
        raise ConfigError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} set in the environment and "
            f"{', '.join(missing)} not, so this process cannot find the others: start all of them "
            "with torchrun --nproc-per-node=N train.py, which sets these for each, or unset them "
            "to train alone"
        )
    join_launched()


def has_begun() -> bool:
    """Whether there is a process group already."""
    return dist.is_initialized()


def advice_alone(group: Group) -> str | None:
    """What to say to a process that is alone where there could be several."""
    if group.process_group is not None or group.is_imagined or "RANK" in os.environ:
        return None
    for launcher, name in OTHER_LAUNCHERS.items():
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            return (
                f"this process trains alone, as each of the {count} that {launcher} has started: "
                f"it does not set RANK and WORLD_SIZE. Start one torchrun on each node, {launcher} "
                "torchrun --nproc-per-node=N ... train.py (docs/launching.md)"
            )
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if num_devices > 1:
        return (
            f"this process trains alone, on one of {num_devices} accelerators: torchrun "
            f"--nproc-per-node={num_devices} train.py uses them all"
        )
    return None


def launched_node() -> str | None:
    """The node of this process, as torchrun numbers them; None where it has started all in one."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    is_in_one = local is None or local == os.environ.get("WORLD_SIZE")
    return None if is_in_one else os.environ.get("GROUP_RANK")


@dataclass(frozen=True, slots=True)
class ImaginedWorld:
    """A world of which only one rank is there: nothing is sent, the others do what it does.

    In the place of a mesh, for the simulator.

    native: transfers take the memory that a backend's own collectives take (NCCL), else that of
        messages from rank to rank (Gloo).
    """

    size: int
    rank: int = 0
    native: bool = False


def host_group(world: Group) -> Group:
    """The same ranks with a process group of their own, for messages in host memory.

    What another thread sends through it does not mix with what training sends. A collective.
    """
    group = dist.new_group(list(world.ranks), backend="gloo", use_local_synchronization=True)
    return Group(group, world.ranks, world.rank)


def as_group(process_group: dist.ProcessGroup | None) -> Group | None:
    """A process group as this rank sees it; None where this rank is not among them."""
    ranks, me = tuple(dist.get_process_group_ranks(process_group)), dist.get_rank()
    if me not in ranks:
        return None
    return Group(process_group if len(ranks) > 1 else None, ranks, ranks.index(me))


def pair_group(group: Group) -> Group:
    """The first and the last of these ranks, with a process group of their own; only they call."""
    ranks = (group.ranks[0], group.ranks[-1])
    process_group = dist.new_group(list(ranks), use_local_synchronization=True)
    return Group(process_group, ranks, ranks.index(group.ranks[group.rank]))


def end_host_group(group: Group) -> None:
    """End a group of `host_group`, through which nothing is under way, before the interpreter ends.

    A thread of Gloo may still be about to let go of the last message. It needs the interpreter for
    that, and would abort the process without one. When the group goes, it is waited for.
    """
    if group.process_group is None:
        return
    if dist.is_initialized():
        # Unless it has gone with an earlier default group.
        with suppress(ValueError):
            dist.destroy_process_group(group.process_group)
    object.__setattr__(group, "process_group", None)


def timeout_of(group: Group) -> timedelta:
    """How long a transfer in host memory may take."""
    assert group.process_group is not None, "a rank that is alone transfers nothing"
    timeout: timedelta = group.process_group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def check_backend(group: Group, device: torch.device) -> None:
    """Say so before the first transfer where the group's backend cannot carry `device`.

    Raises:
        ShardingError: no backend for the device.
    """
    if group.process_group is None:
        return
    kinds = {kind.type for kind in group.process_group._device_types}
    if device.type not in kinds:
        raise ShardingError(
            f"the model lies on {device}, but the process group only carries {sorted(kinds)}: move "
            "the model before shard, or initialise the group with a backend for that device "
            "(init_process_group() without a backend name takes one for each kind of device)"
        )


def has_native_collectives(group: Group, device: torch.device) -> bool:
    """Whether the backend's own gather and reduce_scatter are the better choice (not on Gloo)."""
    if group.process_group is None:
        return group.is_native
    return bool(group.process_group._get_backend(device).name() != "gloo")
