"""Tensors that all ranks of a group have, of which each rank keeps a part (P_a of ZeRO-R).

Volume (per rank, of a tensor of S bytes over N ranks): (N-1)/N S for each time it is made whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from onecopy.comm.compare import gather_numbers
from onecopy.comm.groups import Group, as_group, explained
from onecopy.comm.waits import Wait
from onecopy.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from onecopy.events import Events

__all__ = ["collect", "fingerprint", "group_of", "ranks_with_others"]

CHECKED_BYTES = 1 << 20
# Odd: no byte's weight is lost when sums wrap around.
FACTOR = 0x9E3779B1


def group_of(partition: DeviceMesh | dist.ProcessGroup, setting: str) -> Group:
    """The ranks of a device mesh of one dimension, or of a process group.

    Raises:
        ConfigError: the mesh has several dimensions, or this rank is in none of them; `setting`
            names what was given.
    """
    if isinstance(partition, dist.ProcessGroup):
        process_group: dist.ProcessGroup = partition
    elif getattr(partition, "ndim", None) == 1:
        process_group = partition.get_group()
    else:
        names = getattr(partition, "mesh_dim_names", None)
        raise ConfigError(
            f"{setting} is {f'a mesh of the dimensions {names}' if names else repr(partition)}: "
            'give the one dimension whose ranks have the same inputs, mesh["tp"], or its process '
            "group"
        )
    group = as_group(process_group)
    if group is None:
        ranks = dist.get_process_group_ranks(process_group)
        raise ConfigError(f"{setting} has the ranks {ranks}, and this is rank {dist.get_rank()}")
    return group


def collect(
    part: torch.Tensor, group: Group, *, name: str, events: Events | None = None
) -> torch.Tensor:
    """Parts of all ranks, one after another.

    Args:
        part: (n,) contiguous, n the same on all ranks.
        name: what it is a part of.
        events: where to report what is sent, and how long that blocked.

    Returns:
        (N n,), in the order of the group's ranks.

    Raises:
        CommunicationError: a peer has ended.
    """
    if group.process_group is None:
        return part
    whole = part.new_empty(group.size * part.numel())
    if events is not None:
        num_bytes = part.nbytes * (group.size - 1)
        events.emit("collect", name, num_bytes=num_bytes, group="model")
    with Wait("collect", group.ranks, unit=name, events=events), explained(group):
        # As bytes: Gloo does not know all dtypes.
        parts, own = whole.view(torch.uint8), part.view(torch.uint8)
        dist.all_gather_single(parts, own, group=group.process_group)
    return whole


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """(2,) the length of a tensor, and a checksum of its bytes and their places.

    Args:
        values: (n,) contiguous.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in values.view(torch.uint8).split(CHECKED_BYTES):
        weights = torch.arange(1, piece.numel() + 1, device=values.device) * FACTOR
        total = total * FACTOR + (weights * piece).sum()
    return torch.stack([total.new_tensor(values.numel()), total])


def ranks_with_others(mine: torch.Tensor, group: Group) -> list[int]:
    """The global ranks whose tensor is another one, bit for bit, than that of the first rank.

    A collective of a few bytes.

    Args:
        mine: the `fingerprint` of this rank's.
    """
    sums = gather_numbers(group, mine)
    return [rank for rank, one in zip(group.ranks, sums, strict=True) if one != sums[0]]
