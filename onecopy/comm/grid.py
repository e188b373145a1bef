"""Blocks on a square grid of ranks: broadcasts and sums along its rows and columns.

A hop starts at once and is waited for by calling what it has returned. Each of the two groups of a
rank sees its hops in the same order on all ranks, as backends want it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.groups import Group, explained
from onecopy.comm.meshes import groups_along
from onecopy.comm.transport import Finish
from onecopy.comm.waits import Wait
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from onecopy.events import Events

__all__ = ["Grid", "grid_of", "spread", "sum_at", "sum_over"]


@dataclass(frozen=True, slots=True)
class Grid:
    """Where this rank is among q x q ranks.

    row: the ranks of its row, in the order of the columns. column: those of its column.
    """

    row: Group
    column: Group

    @property
    def size(self) -> int:
        """q."""
        return self.row.size

    def __deepcopy__(self, memo: dict[int, Any]) -> Grid:
        """The ranks of a copied layer are the same."""
        return self


def grid_of(mesh: DeviceMesh) -> Grid:
    """The grid of a mesh of two dimensions: its rows, and the ranks in each.

    Raises:
        ShardingError: it has not two dimensions of one size.
    """
    if mesh.ndim != 2 or mesh.size(0) != mesh.size(1):
        sizes = " x ".join(str(mesh.size(dim)) for dim in range(mesh.ndim))
        raise ShardingError(
            f"a grid has two dimensions of one size, and this mesh is {sizes}: pass the two that "
            'spread a matrix, for example mesh["tp_row", "tp_column"] of sizes 2 and 2'
        )
    column, row = groups_along(mesh, with_single=True)
    if tuple(mesh.get_coordinate() or ()) != (column.rank, row.rank):
        raise ShardingError(
            f"the ranks of this mesh are {mesh.mesh.tolist()}: a grid needs them in ascending order"
        )
    return Grid(row, column)


def spread(own: Tensor, group: Group, source: int, events: Events | None = None) -> Finish:
    """Give all ranks of a row or column the block of the one at place `source`.

    Args:
        own: this rank's block, contiguous; all ranks have the same shape.
    """
    if group.size == 1:
        return lambda: own
    is_source = group.rank == source
    block = own if is_source else torch.empty_like(own)
    work = dist.broadcast(block, group=group.process_group, group_src=source, async_op=True)
    _report(events, block, (group.size - 1) * is_source)
    return lambda: _finish(work, block, group)


def sum_at(part: Tensor, group: Group, target: int, events: Events | None = None) -> Finish:
    """The sum of the ranks' parts, which counts at place `target` alone; overwrites `part`."""
    if group.size == 1:
        return lambda: part
    work = dist.reduce(part, group=group.process_group, group_dst=target, async_op=True)
    _report(events, part, int(group.rank != target))
    return lambda: _finish(work, part, group)


def sum_over(part: Tensor, group: Group, events: Events | None = None) -> Tensor:
    """The sum of the ranks' parts, on all of them; overwrites `part`."""
    if group.size == 1:
        return part
    work = dist.all_reduce(part, group=group.process_group, async_op=True)
    # Of a ring: each part once to be summed, and once to be known.
    _report(events, part, 2 * (group.size - 1) / group.size)
    return _finish(work, part, group)


def _finish(work: dist.Work | None, result: Tensor, group: Group) -> Tensor:
    assert work is not None, "this rank is in the group"
    with explained(group), Wait("exchange", group.ranks):
        work.wait()
    return result


def _report(events: Events | None, block: Tensor, times: float) -> None:
    if events is not None and times:
        num_bytes = int(block.numel() * block.element_size() * times)
        events.emit("exchange", num_bytes=num_bytes, group="grid")
