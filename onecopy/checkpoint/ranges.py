"""Ranges: what one rank saves of a tensor, or loads of it.

A rank's part of a parameter, and of each optimizer state that is like the parameter, is a range of
its elements in the order in which they lie in memory. Mostly that is the row-major order; where it
is another (channels_last), the range is cut into boxes there and the boxes are turned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onecopy.checkpoint.boxes import Box, boxes_of_range, whole_box

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Range", "Values", "memory_order", "whole_tensor"]

# Larger boxes are cut, so that memory is bounded, and a rank of a larger world reads little more
# than it needs.
MAX_ITEM_BYTES = 1 << 26

Values = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [offset, offset + numel) of a tensor, or of a box of it, in its memory order.

    key: the tensor's name in the checkpoint.
    shape: of the whole tensor.
    order: its dimensions from the slowest to the fastest in memory.
    values: given two places, counted from `offset`, the elements between them: 1-D, in memory
        order; for loading, a view that is written to.
    within: the box that the elements are counted in; None for the whole tensor.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int
    values: Values
    order: tuple[int, ...]
    within: Box | None = None

    def boxes(self) -> Iterator[tuple[Box, Callable[[], torch.Tensor]]]:
        """The boxes of this range in the tensor's coordinates, and for each how to get its values.

        The values are shaped like the box.
        """
        if not self.numel and not self.offset:
            yield whole_box(self.shape), lambda: self.values(0, 0).view(self.shape)
            return
        counted = self.within or whole_box(self.shape)
        in_memory = [counted.sizes[dim] for dim in self.order]
        limit = MAX_ITEM_BYTES // self.dtype.itemsize
        for box in boxes_of_range(in_memory, self.offset, self.offset + self.numel, limit):
            place = box.permuted(self.order).moved(counted.offsets)
            yield place, lambda box=box: self._view(box)  # type: ignore[misc]

    def _view(self, box: Box) -> torch.Tensor:
        first = box.start - self.offset
        values = self.values(first, first + box.numel).view(box.sizes)
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        return values.permute(places)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the slowest to the fastest."""
    strides = tensor.stride()
    # Of a dimension of one element the stride says nothing.
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def whole_tensor(key: str, tensor: torch.Tensor) -> Range:
    """All of a tensor, which one rank saves or each loads."""
    order = memory_order(tensor)
    in_memory = tensor.permute(order)
    if not in_memory.is_contiguous():
        order, in_memory = tuple(range(tensor.dim())), tensor.contiguous()
    flat = in_memory.detach().view(-1)
    return Range(
        key,
        tuple(tensor.shape),
        tensor.dtype,
        0,
        tensor.numel(),
        lambda start, stop: flat[start:stop],
        order,
    )
