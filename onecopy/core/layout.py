"""Where each parameter lies in its unit's flat buffer, and which slice each rank owns.

Integers only: no tensor, no rank, no process group. Two buffers share one layout:

flat buffer       [ p0 | p1 . | p2 ... | p3 | pad ]        one slice after another, by default
                  |  slice 0   |  slice 1         |        equal: a border may cut a parameter
gradient buffer   [ slice 0 | flags 0 ][ slice 1 | flags 1 ]

Some optimizers need whole parameters (matrices). Then each parameter has an *owner*, the slice
that holds it whole: parameters lie in the order of their owners and slices are as long as what
they hold, some of them empty. (Padding all to the longest would multiply memory where a unit has
fewer matrices than there are ranks.) Who owns what is balanced over all units of a model together.

In the gradient buffer each slice is followed by its *trailer*: one flag for each parameter that
overlaps the slice (did any rank have a gradient for it?) and one more for the whole unit. A
reduce that sums the buffer also sums the flags, so the owner learns without a second message
which of its parameters to step. Trailers and alignment belong to the padding in byte formulas.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

__all__ = ["ALIGNMENT_BYTES", "LARGE_LEAF_NUMEL", "Layout", "Piece", "Span", "balance"]

# Where parameters, slices and trailers start; see Layout.alignment.
ALIGNMENT_BYTES = 64
# Leaves outside of repeated blocks with so many elements are units of their own.
LARGE_LEAF_NUMEL = 100_000


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
    owners: for each parameter the slice that holds it whole; None cuts anywhere, into equal slices.
    """

    numels: tuple[int, ...]
    num_slices: int
    num_replicas: int = 1
    alignment: int = 1
    owners: tuple[int, ...] | None = None

    @property
    def is_whole(self) -> bool:
        """No parameter is cut: each lies completely in its owner's slice."""
        return self.owners is not None

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each parameter in the flat buffer."""
        return self._places[0]

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Where the slices begin in the flat buffer; one more, where the last one ends."""
        return self._places[1]

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Starts and borders: slices are filled one after another, each with what it owns."""
        owners = self.owners or (0,) * len(self.numels)
        starts, ends, position = [0] * len(owners), [0] * self.num_slices, 0
        for index in sorted(range(len(owners)), key=owners.__getitem__):
            starts[index] = position
            position += _round_up(self.numels[index], self.alignment)
            ends[owners[index]] = position
        if self.is_whole:
            return tuple(starts), tuple(accumulate(ends, max, initial=0))
        end = starts[-1] + self.numels[-1] if self.numels else 0
        numel = _round_up(-(-end // self.num_slices), self.alignment)
        return tuple(starts), tuple(rank * numel for rank in range(self.num_slices + 1))

    @cached_property
    def slice_numels(self) -> tuple[int, ...]:
        """Elements of each slice."""
        return tuple(high - low for low, high in pairwise(self.borders))

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.borders[-1]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements of each slice with its trailer, in the gradient buffer."""
        counts = [len(self.pieces(rank)) for rank in range(self.num_slices)]
        if not self.is_whole:
            counts = [max(counts)] * self.num_slices
        multiple = self.alignment * self.num_replicas
        return tuple(
            _round_up(numel + count + 1, multiple)
            for numel, count in zip(self.slice_numels, counts, strict=True)
        )

    @cached_property
    def trailers(self) -> tuple[tuple[int, int], ...]:
        """First and last + 1 element of each trailer in the gradient buffer.

        The last element of each is the flag of the whole unit.
        """
        ends = accumulate(self.strides)
        return tuple(
            (end - stride + numel, end)
            for end, stride, numel in zip(ends, self.strides, self.slice_numels, strict=True)
        )

    @property
    def gradient_numel(self) -> int:
        """Elements of the gradient buffer."""
        return sum(self.strides)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces in slice `rank`, in order; parameters that do not overlap it are left out."""
        return self.pieces_between(self.borders[rank], self.borders[rank + 1])

    def pieces_between(self, low: int, high: int) -> tuple[Piece, ...]:
        """The pieces in elements [low, high) of the flat buffer."""
        indices, starts = self._in_memory
        found = []
        # Of very many parameters few may lie there; one can begin before it.
        for place in range(max(bisect_right(starts, low) - 1, 0), bisect_left(starts, high)):
            index, start = indices[place], starts[place]
            first, last = max(start, low), min(start + self.numels[index], high)
            if first < last:
                found.append(Piece(index, first - low, first - start, last - first))
        return tuple(found)

    @cached_property
    def _in_memory(self) -> tuple[list[int], list[int]]:
        """Parameters that have elements, and their starts, in the order of the flat buffer."""
        with_elements = (index for index, numel in enumerate(self.numels) if numel)
        indices = sorted(with_elements, key=self.starts.__getitem__)
        return indices, [self.starts[index] for index in indices]

    def numels_of(self, index: int) -> list[int]:
        """How many elements of one parameter lie in each slice."""
        start = self.starts[index]
        end = start + self.numels[index]
        return [max(min(end, high) - max(start, low), 0) for low, high in pairwise(self.borders)]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each parameter its parts in the gradient buffer; none where it has no elements."""
        spans: list[list[Span]] = [[] for _ in self.numels]
        for rank, (first_flag, _) in enumerate(self.trailers):
            base = first_flag - self.slice_numels[rank]
            for order, piece in enumerate(self.pieces(rank)):
                span = Span(base + piece.start, piece.offset, piece.numel, first_flag + order)
                spans[piece.index].append(span)
        return tuple(tuple(parts) for parts in spans)


def balance(numels: Sequence[Sequence[int]], num_slices: int) -> list[tuple[int, ...]]:
    """Owners of whole parameters, so that all slices of a model together are about equal.

    The largest parameter that is left goes to the slice with the fewest elements so far, of these
    to the one with the fewest in the parameter's own unit. No slice gets more than the mean plus
    the largest parameter, nor more than 4/3 of what the best distribution gives the fullest one.

    Args:
        numels: for each unit the numbers of elements of its parameters.
        num_slices: number of ranks in the shard group.

    Returns:
        for each unit its parameters' owners, as `Layout` takes them.

    Source: longest processing time first (Graham, SIAM J. Appl. Math. 17, 1969, section 5).
    """
    owners = [[0] * len(unit) for unit in numels]
    totals = [0] * num_slices
    of_unit = [dict[int, int]() for _ in numels]
    every = [(unit, index) for unit, items in enumerate(numels) for index in range(len(items))]
    for unit, index in sorted(every, key=lambda place: -numels[place[0]][place[1]]):
        held = of_unit[unit]
        fewest = min(totals)
        emptiest = (rank for rank, total in enumerate(totals) if total == fewest)
        owner = min(emptiest, key=lambda rank: held.get(rank, 0))
        owners[unit][index] = owner
        totals[owner] += numels[unit][index]
        held[owner] = held.get(owner, 0) + numels[unit][index]
    return [tuple(one) for one in owners]
