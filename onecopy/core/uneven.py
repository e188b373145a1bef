"""Ranks whose data differ in size: different numbers of batches, different numbers of tokens.

A mean over ranks is the mean over the data only where all ranks bring the same amount. `join` goes
on until the last rank has no batch any more: a rank that has none repeats its last one, so that it
takes part in every transfer of the loop, whatever the loop does, and its gradients count as
nothing. `loss_weight` makes means over tokens of different number into the mean over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

from onecopy import handle
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.core.backward import Backward
    from onecopy.core.engine import Engine

__all__ = ["Joined", "join", "loss_weight"]

Batch = TypeVar("Batch")
EMPTY, EXHAUSTED, ACTIVE = 0, 1, 2


class Joined(Generic[Batch]):
    """The batches of `join`.

    Attributes:
        is_active: the batch that was given last is a new one. While it is False this rank repeats
            its last batch for the others' sake: leave such a batch out of your own statistics.
    """

    def __init__(self, models: Sequence[nn.Module], batches: Iterable[Batch]) -> None:
        self._owners = [handle.of(one) for one in models]
        self._batches = batches
        self.is_active = True

    def __iter__(self) -> Iterator[Batch]:
        backwards: list[Backward] = [owner.backward for owner in self._owners]
        last: list[Batch] = []
        self.is_active = True
        batches = iter(self._batches)
        try:
            while True:
                if self.is_active:
                    try:
                        last = [next(batches)]
                    except StopIteration:
                        self.is_active = False
                num_active = self._count_active(bool(last))
                if not num_active:
                    return
                for backward in backwards:
                    backward.weigh(num_active if self.is_active else 0)
                yield last[0]
        finally:
            for backward in backwards:
                backward.weigh(None)

    def _count_active(self, has_last: bool) -> int:
        """How many ranks have a new batch; a collective."""
        engine: Engine = self._owners[0].engine
        state = ACTIVE if self.is_active else EXHAUSTED if has_last else EMPTY
        states = engine.share(state, "the next batch of join")
        num_active = states.count(ACTIVE)
        if num_active and EMPTY in states:
            ranks = engine.collectives.groups.world.ranks
            empty = [rank for rank, one in zip(ranks, states, strict=True) if one == EMPTY]
            raise ShardingError(
                f"ranks {empty} have no batch at all, so join has none to repeat there: give every "
                "rank at least one"
            )
        return num_active


def join(model: nn.Module | Sequence[nn.Module], batches: Iterable[Batch]) -> Joined[Batch]:
    """Iterate over batches of which ranks have different numbers, until no rank has any more.

        for batch in onecopy.join(model, loader):
            ...  # the loop as it is

    Gradients are the mean over the ranks that still have data, as one process would compute that
    trains on the same batches. A rank without data repeats its last batch and contributes nothing;
    batch norms, whose statistics are each rank's own, see the repeated batch. All ranks must use
    it alike, and none may leave the loop early.

    Args:
        model: the sharded model that the loop trains, or several.
        batches: this rank's; each must have at least one.

    Returns:
        an iterable of batches; its `is_active` tells new ones from repeated ones.

    Raises:
        ShardingError: the model is not sharded; or, on all ranks, some rank has no batch at all.
    """
    return Joined([model] if isinstance(model, nn.Module) else list(model), batches)


def loss_weight(model: nn.Module, count: float) -> float:
    """What to multiply a rank's mean loss by, so that gradients are those of the global mean.

        loss = cross_entropy(...)  # the mean over this rank's tokens
        (loss * onecopy.loss_weight(model, num_tokens)).backward()

    Without it gradients are the mean of the ranks' means, in which a token of a short batch counts
    more than one of a long batch. A collective of one number: all ranks must call it.

    Args:
        count: how many tokens (or samples) this rank's mean was taken over.

    Returns:
        count * ranks / sum of the ranks' counts; within `join` only ranks with data count.

    Raises:
        ShardingError: the model is not sharded, or all counts are zero.
    """
    owner = handle.of(model)
    engine: Engine = owner.engine
    backward: Backward = owner.backward
    num_active = backward.num_active
    if num_active == 0:
        count = 0
    counts = engine.share(float(count), "a loss weight")
    total = sum(counts)
    if not total > 0:
        raise ShardingError(f"the ranks' counts are {counts}: at least one must be positive")
    return count * (len(counts) if num_active is None else num_active) / total
