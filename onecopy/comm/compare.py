"""At shard: are all ranks about to do the same? Says which name differs, before any transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from onecopy.comm.groups import Group, Groups, explained
from onecopy.comm.waits import Wait
from onecopy.errors import MismatchError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from onecopy.config import Config

__all__ = [
    "check_equal",
    "first_decides",
    "gather_numbers",
    "gather_objects",
    "number_of_model",
    "ranks_of_model",
]

T = TypeVar("T")
R = TypeVar("R")


def gather_objects(group: Group, value: Any) -> list[Any]:
    """The `value` of every rank, in order. For small, rare things."""
    if group.process_group is None:
        return [value] * group.size
    values: list[Any] = [None] * group.size
    with Wait("agree", group.ranks):
        dist.all_gather_object(values, value, group=group.process_group)
    # torch orders by rank, a group may be in another order.
    of_rank = dict(zip(sorted(group.ranks), values, strict=True))
    return [of_rank[rank] for rank in group.ranks]


def gather_numbers(group: Group, numbers: torch.Tensor) -> list[list[int]]:
    """Some whole numbers, (n,) int64, of every rank, in the group's order; on the host.

    Raises:
        CommunicationError: a peer has ended.
    """
    if group.process_group is None:
        return [numbers.tolist()]
    every = numbers.new_empty(group.size * numbers.numel())
    with explained(group), Wait("agree", group.ranks):
        dist.all_gather_single(every, numbers, group=group.process_group)
    found: list[list[int]] = every.view(group.size, -1).tolist()
    return found


def first_decides(group: Group, value: T, decide: Callable[[list[T]], R]) -> R:
    """What the first rank makes of the values of all, on every rank.

    Only the first rank gets the values: many ranks may have much to say. `decide` must not raise.
    """
    if group.process_group is None:
        return decide([value])
    values: list[Any] | None = [None] * group.size if group.rank == 0 else None
    with Wait("agree", group.ranks):
        dist.gather_object(value, values, group=group.process_group, group_dst=0)
    answer = [None if values is None else decide(values)]
    with Wait("agree", group.ranks):
        dist.broadcast_object_list(answer, group=group.process_group, group_src=0)
    return answer[0]  # type: ignore[return-value]


def ranks_of_model(groups: Groups) -> Group:
    """All ranks that have a part of a model, without a process group; a collective of them."""
    if not groups.model:
        return groups.world
    ranks = list(groups.world.ranks)
    me = ranks[groups.world.rank]
    for group in groups.model:
        ranks = sorted({rank for line in gather_objects(group, ranks) for rank in line})
    return Group(None, tuple(ranks), ranks.index(me))


def number_of_model(world: Group) -> tuple[int, str]:
    """How many models these ranks have sharded before, and a name for this one.

    Ranks shard their models in the same order, so each counts the same. The count lives in the
    process group's store, as long as the group does, and under torchrun, which may keep its store
    for the processes that it starts after a failure, longer: then each rank finds its own count of
    the run before, and the highest is the first that nobody has used.
    """
    if world.process_group is None:
        return 0, "0"
    ranks = hashlib.sha256(repr(world.ranks).encode()).hexdigest()[:12]
    store = dist.distributed_c10d._get_default_store()
    own = f"onecopy/models/{ranks}/{world.ranks[world.rank]}"
    count = store.add(own, 1)
    highest = max(gather_objects(world, count))
    if count < highest:
        store.add(own, highest - count)
    return highest - 1, f"{ranks}/{highest - 1}"


def check_equal(
    world: Group, model: nn.Module, config: Config, units: list[str], optimizers: list[str]
) -> None:
    """Compare parameters, buffers, settings, units and optimizers over the ranks.

    Raises:
        MismatchError: names the first of them that differs, and the ranks.
    """
    mine = _signature(model, config, units)
    mine.append(("optimizers", " and ".join(optimizers) or "none"))
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(gather_objects(world, digest))) == 1:
        return
    everyone = gather_objects(world, mine)
    for rank, theirs in enumerate(everyone):
        for (what, ours), (other_what, other) in zip(everyone[0], theirs, strict=False):
            if (what, ours) != (other_what, other):
                raise MismatchError(
                    f"ranks have different models or settings: rank {world.ranks[0]} has {what} "
                    f"{ours}, rank {world.ranks[rank]} has {other_what} {other}. Build the same "
                    "model with the same settings on every rank (values may differ: those of the "
                    f"first rank, {world.ranks[0]}, are used); where ranks hold other parts of a "
                    "model (pipeline, tensor parallel), say who holds which with mesh="
                )
        if len(theirs) != len(everyone[0]):
            longer = max(theirs, everyone[0], key=len)
            raise MismatchError(
                f"ranks have different models: rank {world.ranks[0]} has {len(everyone[0])} "
                f"parameters, buffers and settings, rank {world.ranks[rank]} has {len(theirs)}; "
                f"the first that only one has is {longer[min(len(theirs), len(everyone[0]))]}"
            )


def _signature(model: nn.Module, config: Config, units: list[str]) -> list[tuple[str, str]]:
    found = [
        (
            f"parameter {name}",
            f"shape {tuple(parameter.shape)}, {parameter.dtype}, strides {parameter.stride()}, "
            f"requires_grad={parameter.requires_grad}",
        )
        for name, parameter in model.named_parameters()
    ]
    found += [
        (f"buffer {name}", f"shape {tuple(buffer.shape)}, {buffer.dtype}")
        for name, buffer in model.named_buffers()
    ]
    found += [
        (f"setting {item.name}", repr(getattr(config, item.name)))
        for item in fields(config)
        if item.compare
    ]
    return [*found, ("units", ", ".join(units))]
