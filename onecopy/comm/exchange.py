"""Activations from rank to rank, with autograd: what sequence parallelism needs.

`exchange` cuts tensors along one dimension, sends part r to rank r, and joins what comes along
another one: the sequence is cut before it and the heads after it, or the other way round. Its
gradient is the same exchange with the two dimensions swapped. All tensors of a call travel together
in one message to each rank: (N-1)/N of their bytes leave this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.compare import gather_numbers
from onecopy.comm.groups import Group, as_group, explained
from onecopy.comm.meshes import purpose_of
from onecopy.comm.waits import Wait
from onecopy.errors import MismatchError, ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from onecopy.events import Events

__all__ = ["check_same", "exchange", "group_of"]

# Of each process group: the shapes that its ranks have found equal.
_compared: WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = WeakKeyDictionary()


def group_of(where: DeviceMesh | dist.ProcessGroup) -> Group:
    """The ranks of one sequence: those of a process group, or along a mesh's one dimension.

    Of a mesh of several dimensions, the one whose name says that it is for the sequence.

    Raises:
        ShardingError: the mesh has no such dimension, or several; or this rank is not in it.
    """
    if isinstance(where, dist.ProcessGroup):
        process_group = where
    elif where.ndim == 1:
        process_group = where.get_group()
    else:
        names = [one for one in where.mesh_dim_names or () if purpose_of(one) == "sequence"]
        if len(names) != 1:
            raise ShardingError(
                f"this mesh has dimensions {where.mesh_dim_names or where.ndim}: pass the one over "
                'which the sequence is cut, for example mesh["sp"]'
            )
        process_group = where.get_group(names[0])
    group = as_group(process_group)
    if group is None:
        ranks = dist.get_process_group_ranks(process_group)
        raise ShardingError(f"rank {dist.get_rank()} is not in the group, whose ranks are {ranks}")
    return group


def exchange(
    tensors: Sequence[Tensor], group: Group, *, cut: int, join: int, events: Events | None = None
) -> tuple[Tensor, ...]:
    """Cut tensors along `cut`, give each rank its part, and join what comes along `join`.

    Args:
        tensors: of one dtype; the group's size divides dimension `cut` of each. All ranks pass the
            same shapes.
        cut, join: two dimensions, counted from the front.
        events: of the sharded model that this is a part of: they count the bytes.

    Returns:
        for each tensor, one with dimension `cut` divided, and `join` multiplied, by the size.
    """
    if group.process_group is None:
        return tuple(tensors)
    moved: tuple[Tensor, ...] = _Exchange.apply(group, (cut, join), events, *tensors)  # type: ignore[no-untyped-call]
    return moved


def check_same(group: Group, tensors: Sequence[Tensor], what: str, remedy: str) -> None:
    """Have all ranks the same shapes? Asked when shapes are new, which costs one small collective.

    A transport can only end the process, or hang, where they are not.

    Raises:
        MismatchError: on all ranks; says what each has.
    """
    if group.process_group is None:
        return
    shapes = tuple(tuple(one.shape) for one in tensors)
    known = _compared.setdefault(group.process_group, set())
    if shapes in known:
        return
    own = torch.tensor([size for shape in shapes for size in shape], device=tensors[0].device)
    found = gather_numbers(group, own)
    if any(other != found[0] for other in found):
        dims = tensors[0].ndim
        first = ", ".join(
            f"rank {rank} {tuple(sizes[:dims])}"
            for rank, sizes in zip(group.ranks, found, strict=True)
        )
        raise MismatchError(f"{what} differ in shape: {first}. {remedy}")
    known.add(shapes)


class _Exchange(torch.autograd.Function):
    """One exchange; see `exchange`."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, dims: tuple[int, int], events: Events | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.dims, ctx.events = group, dims, events
        return _move(tensors, group, dims, events)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        cut, join = ctx.dims
        moved = _Exchange.apply(ctx.group, (join, cut), ctx.events, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, None, *moved)


def _move(
    tensors: Sequence[Tensor], group: Group, dims: tuple[int, int], events: Events | None
) -> tuple[Tensor, ...]:
    (cut, join), size = dims, group.size
    parts = [one.unflatten(cut, (size, -1)).movedim(cut, 0) for one in tensors]
    numels = [part[0].numel() for part in parts]
    # One copy into the message, and one out of it.
    sent = tensors[0].new_empty(size, sum(numels))
    received = torch.empty_like(sent)
    for place, part in zip(sent.split(numels, 1), parts, strict=True):
        place.unflatten(1, part.shape[1:]).copy_(part)
    _send(received, sent, group)
    if events is not None:
        num_bytes = sent.numel() * sent.element_size() // size * (size - 1)
        events.emit("exchange", num_bytes=num_bytes, group="sequence")
    return tuple(
        place.unflatten(1, part.shape[1:]).movedim(0, join).flatten(join, join + 1)
        for place, part in zip(received.split(numels, 1), parts, strict=True)
    )


def _send(received: Tensor, sent: Tensor, group: Group) -> None:
    with explained(group), Wait("exchange", group.ranks):
        dist.all_to_all_single(received, sent, group=group.process_group)
