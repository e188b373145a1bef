"""Boxes: how a range of a flattened tensor looks in the tensor's own coordinates.

A rank owns a range of each parameter, cut anywhere. Checkpoints know tensors by their names and
coordinates, so the range becomes a few boxes: a partial row, whole rows, a partial row, and so on
inwards. Each box is contiguous in the flattened tensor. Integers only.

    shape (3, 4), range [2, 11):      . . 0 0
                                      1 1 1 1
                                      2 2 2 .
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Box", "boxes_of_range", "overlapping", "whole_box"]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor.

    offsets: first element in each dimension. sizes: number of elements in each dimension.
    start: first element in the flattened (row-major) tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def moved(self, steps: Sequence[int]) -> Box:
        """The same box of a larger tensor, in which this one's tensor begins at `steps`."""
        offsets = tuple(one + step for one, step in zip(self.offsets, steps, strict=True))
        return Box(offsets, self.sizes, self.start)

    def permuted(self, order: Sequence[int]) -> Box:
        """The box with its dimensions in another order; `order[i]` is where dimension i goes."""
        places = sorted(range(len(order)), key=order.__getitem__)
        return Box(
            tuple(self.offsets[place] for place in places),
            tuple(self.sizes[place] for place in places),
            self.start,
        )


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor, empty ones too."""
    return Box((0,) * len(shape), tuple(shape), 0)


def boxes_of_range(
    shape: Sequence[int], start: int, stop: int, max_numel: int | None = None
) -> list[Box]:
    """Elements [start, stop) of the flattened tensor as boxes, in order.

    Each is the largest that begins where the one before ends: at most 2 * dimensions - 1 of them.

    Args:
        shape: of the tensor; () has one element.
        max_numel: no box shall have more elements (one of a single element always may).
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes: list[Box] = []
    position = start
    while position < stop:
        box = _largest_at(shape, strides, position, min(stop - position, max_numel or stop))
        boxes.append(box)
        position += box.numel
    return boxes


def _largest_at(shape: Sequence[int], strides: Sequence[int], position: int, max_numel: int) -> Box:
    offsets = tuple(position // stride % size for stride, size in zip(strides, shape, strict=True))
    for dim, stride in enumerate(strides):
        if position % stride == 0 and stride <= max_numel:
            count = min(max_numel // stride, shape[dim] - offsets[dim])
            sizes = (1,) * dim + (count,) + tuple(shape[dim + 1 :])
            return Box(offsets, sizes, position)
    return Box((), (), position)


class _HasPlace(Protocol):
    """A box, or a chunk of torch.distributed.checkpoint."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...


B = TypeVar("B", bound=_HasPlace)


def overlapping(boxes: Sequence[B]) -> Iterator[tuple[B, B]]:
    """Pairs of boxes of one tensor that have an element in common."""
    boxes = [box for box in boxes if math.prod(box.sizes)]
    if not boxes or not boxes[0].offsets:
        yield from itertools.pairwise(boxes)
        return
    # Along the dimension that tells most of them apart only neighbours need be compared.
    sweep = max(range(len(boxes[0].offsets)), key=lambda dim: len({b.offsets[dim] for b in boxes}))
    boxes.sort(key=lambda box: box.offsets[sweep])
    for number, box in enumerate(boxes):
        end = box.offsets[sweep] + box.sizes[sweep]
        for other in boxes[number + 1 :]:
            if other.offsets[sweep] >= end:
                break
            if _overlap(box, other):
                yield box, other


def _overlap(first: _HasPlace, second: _HasPlace) -> bool:
    return all(
        start < other + other_count and other < start + count
        for start, count, other, other_count in zip(
            first.offsets, first.sizes, second.offsets, second.sizes, strict=True
        )
    )
