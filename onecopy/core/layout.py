"""Where each parameter lies in its unit's flat buffer, and which slice each rank owns.

Integers only: no tensor, no rank, no process group. Two buffers share one layout:

flat buffer       [ p0 | p1 . | p2 ... | p3 | pad ]        num_slices equal slices, one after
                  |  slice 0   |  slice 1         |        another; a border may cut a parameter
gradient buffer   [ slice 0 | flags 0 ][ slice 1 | flags 1 ]

In the gradient buffer each slice is followed by its *trailer*: one flag for each parameter that
overlaps the slice (did any rank have a gradient for it?) and one more for the whole unit. A
reduce that sums the buffer also sums the flags, so the owner learns without a second message
which of its parameters to step. Trailers and alignment belong to the padding in byte formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Layout", "Piece", "Span"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one range of the flat buffer.

    index: number of the parameter in its unit.
    start: first element, counted from the start of the range.
    offset: first element within the flattened parameter.
    numel: number of elements, at least 1.
    """

    index: int
    start: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Span:
    """A part of one parameter in the gradient buffer.

    start: first element in the gradient buffer.
    offset: first element within the flattened parameter.
    numel: number of elements.
    flag: where in the gradient buffer this part's flag lies.
    """

    start: int
    offset: int
    numel: int
    flag: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Layout of one unit.

    numels: number of elements of each parameter, in order; 0 is allowed.
    num_slices: number of ranks in the shard group.
    num_replicas: number of ranks in the replica group, whose chunks must divide a gradient slice.
    alignment: in elements; parameters, slices and trailers start at multiples of it, because
        vectorised kernels want it and because results of a matrix product may depend on it.
    """

    numels: tuple[int, ...]
    num_slices: int
    num_replicas: int = 1
    alignment: int = 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each parameter in the flat buffer."""
        starts, position = [], 0
        for numel in self.numels:
            starts.append(position)
            position += _round_up(numel, self.alignment)
        return tuple(starts)

    @cached_property
    def slice_numel(self) -> int:
        """Elements of one slice."""
        end = self.starts[-1] + self.numels[-1] if self.numels else 0
        return _round_up(-(-end // self.num_slices), self.alignment)

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.num_slices * self.slice_numel

    @cached_property
    def stride(self) -> int:
        """Elements from one slice to the next in the gradient buffer: slice and trailer."""
        most = max(len(self.pieces(rank)) for rank in range(self.num_slices))
        multiple = math.lcm(self.alignment * self.num_replicas, self.num_replicas)
        return _round_up(self.slice_numel + most + 1, multiple)

    @property
    def gradient_numel(self) -> int:
        """Elements of the gradient buffer."""
        return self.num_slices * self.stride

    @property
    def unit_flag(self) -> int:
        """Where, within a stride, the flag of the whole unit lies: at the very end."""
        return self.stride - 1

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces in slice `rank`, in order; parameters that do not overlap it are left out."""
        low = rank * self.slice_numel
        return self.pieces_between(low, low + self.slice_numel)

    def pieces_between(self, low: int, high: int) -> tuple[Piece, ...]:
        """The pieces in elements [low, high) of the flat buffer."""
        found = []
        for index, (start, numel) in enumerate(zip(self.starts, self.numels, strict=True)):
            first, last = max(start, low), min(start + numel, high)
            if first < last:
                found.append(Piece(index, first - low, first - start, last - first))
        return tuple(found)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each parameter its parts in the gradient buffer; none where it has no elements."""
        spans: list[list[Span]] = [[] for _ in self.numels]
        for rank in range(self.num_slices):
            base = rank * self.stride
            for order, piece in enumerate(self.pieces(rank)):
                flag = base + self.slice_numel + order
                spans[piece.index].append(Span(base + piece.start, piece.offset, piece.numel, flag))
        return tuple(tuple(parts) for parts in spans)
