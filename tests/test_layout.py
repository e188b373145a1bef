"""Where parameters lie: properties of any layout, and a small one by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onecopy.core.layout import Layout, Piece, Span

LAYOUTS = st.builds(
    Layout,
    st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any).map(tuple),
    num_slices=st.integers(1, 6),
    num_replicas=st.integers(1, 4),
    alignment=st.sampled_from((1, 4, 16)),
)


@given(LAYOUTS)
def test_slices_cover_every_element_once(layout: Layout) -> None:
    """Each element of each parameter is owned by exactly one rank, at the place `starts` says."""
    owned: dict[tuple[int, int], int] = {}
    for rank in range(layout.num_slices):
        for piece in layout.pieces(rank):
            assert piece.numel >= 1
            assert 0 <= piece.start <= layout.slice_numel - piece.numel
            for element in range(piece.numel):
                key = (piece.index, piece.offset + element)
                assert key not in owned
                owned[key] = rank * layout.slice_numel + piece.start + element
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
            assert span.flag // layout.stride == span.start // layout.stride
    unit_flags = {rank * layout.stride + layout.unit_flag for rank in range(layout.num_slices)}
    assert not unit_flags & used
    assert max(used | unit_flags) < layout.gradient_numel


@given(LAYOUTS)
def test_alignment(layout: Layout) -> None:
    """Parameters, slices and strides start at multiples; replicas' chunks divide a stride."""
    for start in layout.starts:
        assert start % layout.alignment == 0
    assert layout.slice_numel % layout.alignment == 0
    assert layout.stride % (layout.alignment * layout.num_replicas) == 0
    assert layout.padded_numel >= sum(layout.numels)


def test_a_border_cuts_a_parameter() -> None:
    """By hand: 3, 0 and 5 elements over 2 ranks."""
    layout = Layout((3, 0, 5), num_slices=2)
    assert layout.starts == (0, 3, 3)
    assert (layout.slice_numel, layout.padded_numel) == (4, 8)
    assert layout.pieces(0) == (Piece(0, 0, 0, 3), Piece(2, 3, 0, 1))
    assert layout.pieces(1) == (Piece(2, 0, 1, 4),)
    assert layout.stride == 4 + 2 + 1
    assert layout.spans == (
        (Span(0, 0, 3, 4),),
        (),
        (Span(3, 0, 1, 5), Span(7, 1, 4, 11)),
    )
