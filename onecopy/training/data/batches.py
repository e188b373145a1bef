"""Which sequences a rank trains on, step by step, and which it is evaluated on.

All ranks share one order of sequences, and each takes its own part of every step's, so N ranks
with B sequences see exactly the batch that one process with N * B sequences would see: losses
stay comparable at any number of ranks, and a run can be resumed on another number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.training.data.corpus import Corpus
from onecopy.training.data.order import Order
from onecopy.training.data.windows import IGNORED

__all__ = ["Batches", "Shard", "held_out_batches", "steps_per_epoch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of each batch is this process's: `batch` sequences."""

    rank: int
    world_size: int
    batch: int


class Batches:
    """Endless batches of this rank, shuffled by `seed`: for each step a list, a pair per backward.

    A pair is (tokens, targets), each (batch, context) int64; `targets` is `tokens` moved on by one
    token, `IGNORED` where the loss must not count. All ranks must give the same corpus,
    `accumulate` and `seed`. A step's sequences are the next ones of the order, cut first into
    backwards and then into ranks: they do not depend on either, as long as their number is the
    same. Each epoch has every sequence once; a step that begins at its end goes on in the next.
    """

    def __init__(self, corpus: Corpus, shard: Shard, seed: int, accumulate: int = 1) -> None:
        self._windows = corpus.windows(corpus.train)
        self._order = Order(len(self._windows), seed)
        self._shard = shard
        self._shape = (accumulate, shard.world_size, shard.batch)
        self._taken = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[tuple[Tensor, Tensor]]:
        """The next step's."""
        accumulate, world_size, batch = self._shape
        num = accumulate * world_size * batch
        numbers = self._order.numbers(self._taken, num).view(self._shape)
        self._taken += num
        return [self._windows.take(part[self._shard.rank]) for part in numbers]

    def state_dict(self) -> dict[str, int]:
        """The place in the data, equal on all ranks: how many sequences were taken."""
        return {"sequences": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from that place."""
        self._taken = state["sequences"]


def steps_per_epoch(corpus: Corpus, shard: Shard, accumulate: int) -> float:
    """Steps in which every sequence is trained on once; a fraction where the last is shared."""
    sequences = accumulate * shard.world_size * shard.batch
    return len(corpus.windows(corpus.train)) / sequences


def held_out_batches(
    corpus: Corpus, shard: Shard, max_sequences: int = 512
) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of the held-out text as (tokens, targets), each (<= batch, context) int64.

    The sequences do not overlap, are spread evenly over the text, and are the same at any number
    of ranks. Every rank gets equally many batches of equal sizes, because at stage 3 the ranks
    must run equally many forwards: where sequences run out, the first is repeated with targets
    that are `IGNORED`, which the loss leaves out.
    """
    windows = corpus.windows(corpus.held_out)
    wanted = min(len(windows), max_sequences)
    chosen = torch.arange(wanted) * len(windows) // wanted  # (wanted,) sequence numbers
    repeats = torch.zeros(-wanted % shard.world_size, dtype=chosen.dtype)
    mine = slice(shard.rank, None, shard.world_size)
    numbers = torch.cat([chosen, repeats])[mine]
    counts = (torch.arange(wanted + len(repeats)) < wanted)[mine]
    batches = []
    for part, is_counted in zip(numbers.split(shard.batch), counts.split(shard.batch), strict=True):
        tokens, targets = windows.take(part)
        batches.append((tokens, targets.masked_fill(~is_counted[:, None], IGNORED)))
    return batches
