"""Ranges: what one rank saves of a tensor, or loads of it.

A rank's part of a parameter, and of each optimizer state that is like the parameter, is a range of
its elements in the order in which they lie in memory. Mostly that is the row-major order; where it
is another (channels_last), the range is cut into boxes there and the boxes are turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onecopy.checkpoint.boxes import Box, boxes_of_range, whole_box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onecopy.checkpoint.places import Place
    from onecopy.core.swapped import DiskLane

__all__ = ["Part", "Range", "Values", "memory_order", "whole_tensor"]

# Larger boxes are cut, so that memory is bounded, and a rank of a larger world reads little more
# than it needs.
MAX_ITEM_BYTES = 1 << 26

Values = Callable[[int, int], torch.Tensor]
Put = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [offset, offset + numel) of a tensor, or of a box of it, in its memory order.

    key: the tensor's name in the checkpoint.
    shape: of the whole tensor.
    order: its dimensions from the slowest to the fastest in memory.
    values: given two places, counted from `offset`, the elements between them: 1-D, in memory
        order; for loading, a view that is written to, or a copy that `put` takes back.
    within: the box that the elements are counted in; None for the whole tensor.
    put: given a place and elements, lets these be the values from there on.
    lane: of the drive where the values rest; None where they are in memory.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int
    values: Values
    order: tuple[int, ...]
    within: Box | None = None
    put: Put | None = None
    lane: DiskLane | None = None

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.numel * self.dtype.itemsize

    def boxes(self) -> Iterator[tuple[Box, Part]]:
        """The boxes of this range in the tensor's coordinates, and the values of each."""
        if not self.numel and not self.offset and self.within is None:
            sizes = tuple(self.shape[dim] for dim in self.order)
            yield whole_box(self.shape), Part(self, whole_box(sizes))
            return
        counted = self.within or whole_box(self.shape)
        in_memory = [counted.sizes[dim] for dim in self.order]
        limit = MAX_ITEM_BYTES // self.dtype.itemsize
        for box in boxes_of_range(in_memory, self.offset, self.offset + self.numel, limit):
            place = box.permuted(self.order).moved(counted.offsets)
            yield place, Part(self, box)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a range: what is written at once, and read at once or in windows.

    of: the range.
    box: in the order of memory.
    """

    of: Range
    box: Box

    def values(self) -> torch.Tensor:
        """All of them, in the tensor's coordinates."""
        return self.window((0,) * len(self.box.sizes), self._turned(self.box.sizes))

    def window(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Some of them, to be looked at or written to; `offsets` count from the box."""
        strides = self._strides()
        first, last = self._span(offsets, sizes, strides)
        if self.of.put is not None and last - first == math.prod(sizes):
            # All of it is written to: nothing need be read before.
            flat = torch.empty(last - first, dtype=self.of.dtype)
        else:
            flat = self.of.values(first, last)
        return flat.as_strided(tuple(sizes), strides)

    def take(self, offsets: Sequence[int], window: torch.Tensor) -> None:
        """Something was written to a window of them."""
        if self.of.put is not None:
            first, last = self._span(offsets, window.shape, window.stride())
            self.of.put(first, window.as_strided((last - first,), (1,)))

    def _strides(self) -> tuple[int, ...]:
        sizes = self.box.sizes
        return self._turned([math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))])

    def _turned(self, in_memory: Sequence[int]) -> tuple[int, ...]:
        """What belongs to the dimensions in the order of memory, in that of the tensor."""
        order = self.of.order
        return tuple(in_memory[order.index(dim)] for dim in range(len(order)))

    def _span(
        self, offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
    ) -> tuple[int, int]:
        """The places in the range between which a window lies."""
        first = self.box.start - self.of.offset
        first += sum(one * stride for one, stride in zip(offsets, strides, strict=True))
        if not math.prod(sizes):
            return first, first
        steps = zip(sizes, strides, strict=True)
        return first, first + sum((size - 1) * stride for size, stride in steps) + 1


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the slowest to the fastest."""
    strides = tensor.stride()
    # Of a dimension of one element the stride says nothing.
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def whole_tensor(key: str, tensor: torch.Tensor, place: Place | None = None) -> Range:
    """All of a tensor, which one rank saves or each loads; at a place of a larger one."""
    order = memory_order(tensor)
    in_memory = tensor.permute(order)
    if not in_memory.is_contiguous():
        order, in_memory = tuple(range(tensor.dim())), tensor.contiguous()
    flat = in_memory.detach().view(-1)
    shape = tuple(tensor.shape)
    return Range(
        key,
        shape if place is None else place.shape,
        tensor.dtype,
        0,
        tensor.numel(),
        lambda start, stop: flat[start:stop],
        order,
        None if place is None else Box(place.offsets, shape, 0),
    )
