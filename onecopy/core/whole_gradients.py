"""Whole gradients, put together from the owned pieces where somebody asks for their values.

One unit at a time: its owners' means are gathered on all ranks (agreed like the touch of a
parameter), and kept while a tensor taken from them is alive. What was written into them goes back
to the owned pieces, only the elements that changed, at the latest before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.dtensors import like, local_of
from onecopy.core.views import view_of
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.comm.collectives import Collectives
    from onecopy.core.unit import Unit

__all__ = ["WholeGradients"]


class _Whole:
    """The whole gradients of one unit.

    flat: (padded_numel,) in the dtype of the parameters, as a plain `param.grad` would have.
    own: (s,) what this rank's slice of it was when it was last brought to the pieces.
    views: for each parameter of the unit its gradient.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.flat = torch.empty(
            unit.layout.padded_numel, dtype=unit.flat.dtype, device=unit.flat.device
        )
        self.own = self.flat.new_zeros(unit.layout.slice_numels[unit.slice.rank])
        self.views = [
            view_of(self.flat, start, view)
            for start, view in zip(unit.layout.starts, unit.views, strict=True)
        ]
        # As users see them.
        self.shown = [
            like(parameter, view)
            for parameter, view in zip(unit.parameters, self.views, strict=True)
        ]
        self._addresses = [view.data_ptr() for view in self.views]
        self._version = self.flat._version
        self._num_owners = buffers.num_owners(self.flat)

    @property
    def is_held(self) -> bool:
        """Somebody has a tensor of it."""
        return buffers.num_owners(self.flat) > self._num_owners

    def gather(self, collectives: Collectives) -> None:
        """Fill it with what the pieces are now; a collective."""
        unit = self.unit
        for place in unit.slice.places:
            gradient = unit.slice.pieces[place.index].grad
            part = self.own[place.start : place.start + place.numel]
            if gradient is None:
                part.zero_()
            else:
                assert unit.gradients is not None, "what has a gradient is trainable"
                gradient = unit.gradients.mean.at_rest(gradient)
                part.copy_(unit.slice.from_piece(place.index, gradient))
        collectives.gather(self.flat, self.own, unit.layout.slice_numels, unit.number).finish()
        self._version = self.flat._version

    def note(self) -> None:
        """Its values are those of the pieces: what has changed is not a write of the user's."""
        self._version = self.flat._version
        self.own.copy_(self._now())

    def take_writes(self, *, uncounted: bool) -> None:
        """Bring what was written into it to the owned pieces."""
        if self._version == self.flat._version and not uncounted:
            return
        for shown, address, start, like_it in zip(
            self.shown, self._addresses, self.unit.layout.starts, self.unit.views, strict=True
        ):
            view = local_of(shown)
            if view.numel() and view.data_ptr() != address:
                # `gradient.data = ...`
                fresh = view_of(self.flat, start, like_it)
                fresh.copy_(view)
                view.data = fresh
        now, unit = self._now(), self.unit
        changed = now != self.own
        for place in unit.slice.places:
            part = slice(place.start, place.start + place.numel)
            _write(unit, place.index, now[part], changed[part])
        self.note()

    def _now(self) -> torch.Tensor:
        low, high = self.unit.layout.borders[self.unit.slice.rank :][:2]
        return self.flat[low:high]


class WholeGradients:
    """The whole gradients of one model that somebody looks at.

    Attributes:
        are_kept: also those of which nobody holds a tensor.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.are_kept = False
        self._collectives = collectives
        self._found: dict[Unit, _Whole] = {}
        # By the identity of what is shown, which lives as long as it is here.
        self._places: dict[int, tuple[Unit, int]] = {}

    def get(self, unit: Unit, what: str) -> Sequence[torch.Tensor]:
        """The whole gradients of one unit as the pieces are now; a collective.

        Args:
            what: names the use where ranks turn out to do different things.
        """
        self._collectives.agreement.agree(what)
        if unit not in self._found:
            found = self._found[unit] = _Whole(unit)
            self._places.update((id(one), (unit, index)) for index, one in enumerate(found.shown))
        else:
            self._found[unit].take_writes(uncounted=True)
        self._found[unit].gather(self._collectives)
        return self._found[unit].shown

    def place_of(self, value: object) -> tuple[Unit, int] | None:
        """Whose gradient this very tensor is, or None."""
        return self._places.get(id(value))

    def take_writes(self, *, uncounted: bool = False) -> None:
        """Bring what was written to the owned pieces.

        Args:
            uncounted: also what torch does not count (numpy, `.data`), which costs a comparison.
        """
        for whole in self._found.values():
            whole.take_writes(uncounted=uncounted)

    def forget_unheld(self) -> None:
        """Give back the memory of those of which nobody holds a tensor."""
        if not self.are_kept:
            for whole in [whole for whole in self._found.values() if not whole.is_held]:
                whole.take_writes(uncounted=True)
                for shown in whole.shown:
                    del self._places[id(shown)]
                del self._found[whole.unit]

    def change(
        self, function: Callable[[torch.Tensor], Any], place: tuple[Unit, int] | None = None
    ) -> None:
        """What is here follows a change that is made to the pieces: one parameter's, or all.

        Called before it is made, so that writes are taken over first.
        """
        found = list(self._found.values())
        if place is not None:
            found = [self._found[place[0]]] if place[0] in self._found else []
        for whole in found:
            whole.take_writes(uncounted=True)
            function(whole.flat if place is None else whole.views[place[1]])
            whole.note()

    def drop(self) -> None:
        """The gradients are gone, or about to change."""
        self._found.clear()
        self._places.clear()


def _write(unit: Unit, index: int, values: torch.Tensor, changed: torch.Tensor) -> None:
    """Give this rank's piece those of its values, in memory order, that were changed."""
    piece = unit.slice.pieces[index]
    if piece.grad is None:
        if changed.any():
            values = values.to(unit.slice.device, unit.dtypes.gradient, copy=True)
            piece.grad = unit.slice.as_piece(index, values)
        return
    assert unit.gradients is not None, "what has a gradient is trainable"
    gradient = unit.gradients.mean.at_rest(piece.grad)
    values, changed = unit.slice.as_piece(index, values), unit.slice.as_piece(index, changed)
    changed = changed.to(gradient.device)
    gradient.copy_(torch.where(changed, values.to(gradient), gradient))
