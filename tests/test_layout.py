"""Where parameters lie: properties of any layout, and a small one by hand."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy.core.gradients import _parts
from onecopy.core.layout import Layout, Piece, Span, balance

NUMELS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any).map(tuple)


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    """Cut anywhere, or between parameters with any owners."""
    numels, num_slices = draw(NUMELS), draw(st.integers(1, 6))
    owners = st.tuples(*(st.integers(0, num_slices - 1) for _ in numels))
    return Layout(
        numels,
        num_slices=num_slices,
        num_replicas=draw(st.integers(1, 4)),
        alignment=draw(st.sampled_from((1, 4, 16))),
        owners=draw(st.none() | owners),
    )


LAYOUTS = _layouts()


@given(LAYOUTS)
def test_gradients_are_copied_in_three_parts_at_most(layout: Layout) -> None:
    """However many ranks cut a parameter, and into the same elements as its spans."""
    buffer = torch.zeros(layout.gradient_numel, dtype=torch.int64)
    for index, spans in enumerate(layout.spans):
        gradient = torch.arange(1, layout.numels[index] + 1)
        parts = _parts(buffer.zero_(), spans, layout)
        assert len(parts) <= 3
        for target, offset in parts:
            target.copy_(gradient[offset : offset + target.numel()].view(target.size()))
        for span in spans:
            found = buffer[span.start : span.start + span.numel]
            assert torch.equal(found, gradient[span.offset : span.offset + span.numel])
        assert buffer.count_nonzero() == layout.numels[index]


@given(LAYOUTS)
def test_slices_cover_every_element_once(layout: Layout) -> None:
    """Each element of each parameter is owned by exactly one rank, at the place `starts` says."""
    owned: dict[tuple[int, int], int] = {}
    for rank in range(layout.num_slices):
        for piece in layout.pieces(rank):
            assert piece.numel >= 1
            assert 0 <= piece.start <= layout.slice_numels[rank] - piece.numel
            for element in range(piece.numel):
                key = (piece.index, piece.offset + element)
                assert key not in owned
                owned[key] = layout.borders[rank] + piece.start + element
    assert len(owned) == sum(layout.numels)
    for (index, offset), place in owned.items():
        assert place == layout.starts[index] + offset


@given(LAYOUTS)
def test_gradient_buffer_has_room_for_slices_and_flags(layout: Layout) -> None:
    """Spans do not overlap one another, nor flags, nor the unit's flag, and flags are distinct."""
    used: set[int] = set()
    for index, spans in enumerate(layout.spans):
        assert sum(span.numel for span in spans) == layout.numels[index]
        for span in spans:
            places = {*range(span.start, span.start + span.numel), span.flag}
            assert len(places) == span.numel + 1
            assert not places & used
            used |= places
            # A flag lies in the trailer of the slice whose part it speaks of.
            (rank,) = (
                rank
                for rank, (first, end) in enumerate(layout.trailers)
                if first - layout.slice_numels[rank] <= span.start < first
            )
            first, end = layout.trailers[rank]
            assert first <= span.flag < end - 1
            assert span.start + span.numel <= first
    unit_flags = {end - 1 for _, end in layout.trailers}
    assert len(unit_flags) == layout.num_slices
    assert not unit_flags & used
    assert max(unit_flags) == layout.gradient_numel - 1


@given(LAYOUTS)
def test_alignment(layout: Layout) -> None:
    """Parameters, slices and strides start at multiples; replicas' chunks divide a stride."""
    for start in layout.starts:
        assert start % layout.alignment == 0
    for border, stride in zip(layout.borders, layout.strides, strict=False):
        assert border % layout.alignment == 0
        assert stride % (layout.alignment * layout.num_replicas) == 0
    assert layout.padded_numel == sum(layout.slice_numels) >= sum(layout.numels)
    assert layout.gradient_numel == sum(layout.strides)


@given(LAYOUTS)
def test_whole_parameters(layout: Layout) -> None:
    """Equal slices where any border may cut; else each parameter in its owner's slice, whole."""
    if layout.owners is None:
        assert len(set(layout.slice_numels)) == len(set(layout.strides)) == 1
        return
    for index, (numel, owner) in enumerate(zip(layout.numels, layout.owners, strict=True)):
        owned = [
            (rank, piece)
            for rank in range(layout.num_slices)
            for piece in layout.pieces(rank)
            if piece.index == index
        ]
        assert [(rank, piece.offset, piece.numel) for rank, piece in owned] == (
            [(owner, 0, numel)] if numel else []
        )
    for rank, numel in enumerate(layout.slice_numels):
        held = [
            numel
            for numel, owner in zip(layout.numels, layout.owners, strict=True)
            if owner == rank
        ]
        # Nothing is padded to the longest slice.
        assert numel < sum(held) + layout.alignment * len(held) + 1


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_balance(numels: list[list[int]], num_slices: int) -> None:
    """No slice gets more than the mean and one parameter, nor 4/3 of the best there is."""
    owners = balance(numels, num_slices)
    assert [len(unit) for unit in owners] == [len(unit) for unit in numels]
    totals = [0] * num_slices
    for numel, owner in zip(itertools.chain(*numels), itertools.chain(*owners), strict=True):
        totals[owner] += numel
    every = list(itertools.chain(*numels))
    assert max(totals) <= sum(every) / num_slices + max(every, default=0)
    assert max(totals) <= 4 / 3 * _best(every, num_slices)


def _best(numels: list[int], num_slices: int) -> int:
    """The smallest possible total of the fullest slice, found by trying everything."""
    reachable = {(0,) * num_slices}
    for numel in numels:
        reachable = {
            tuple(sorted((*totals[:rank], totals[rank] + numel, *totals[rank + 1 :])))
            for totals in reachable
            for rank in range(num_slices)
        }
    return min(max(totals) for totals in reachable)


def test_balance_spreads_the_matrices_of_each_unit() -> None:
    """Of slices that are equally full, the one with least of the same unit: gathers are even."""
    blocks = [(3, 1, 4, 4)] * 4
    assert [sorted(owners) for owners in balance(blocks, 4)] == [[0, 1, 2, 3]] * 4


def test_slices_of_whole_parameters() -> None:
    """By hand: 3, 0, 5 and 2 elements; rank 1 owns nothing, rank 2 the first and the last."""
    layout = Layout((3, 0, 5, 2), num_slices=3, owners=(2, 1, 0, 2))
    assert layout.starts == (5, 5, 0, 8)
    assert (layout.borders, layout.slice_numels) == ((0, 5, 5, 10), (5, 0, 5))
    assert layout.pieces(0) == (Piece(2, 0, 0, 5),)
    assert layout.pieces(1) == ()
    assert layout.pieces(2) == (Piece(0, 0, 0, 3), Piece(3, 3, 0, 2))
    # Each slice is followed by its flags and the unit's.
    assert layout.strides == (7, 1, 8)
    assert layout.trailers == ((5, 7), (7, 8), (13, 16))
    assert layout.spans == ((Span(8, 0, 3, 13),), (), (Span(0, 0, 5, 5),), (Span(11, 0, 2, 14),))


def test_a_border_cuts_a_parameter() -> None:
    """By hand: 3, 0 and 5 elements over 2 ranks."""
    layout = Layout((3, 0, 5), num_slices=2)
    assert layout.starts == (0, 3, 3)
    assert (layout.slice_numels, layout.padded_numel) == ((4, 4), 8)
    assert layout.pieces(0) == (Piece(0, 0, 0, 3), Piece(2, 3, 0, 1))
    assert layout.pieces(1) == (Piece(2, 0, 1, 4),)
    assert layout.strides == (4 + 2 + 1, 4 + 2 + 1)
    assert layout.spans == (
        (Span(0, 0, 3, 4),),
        (),
        (Span(3, 0, 1, 5), Span(7, 1, 4, 11)),
    )
