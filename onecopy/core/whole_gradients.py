"""Whole gradients, put together from the owned pieces where somebody asks for their values.

One unit at a time: its owners' means are gathered on all ranks (agreed like the touch of a
parameter), and kept while a tensor taken from them is alive. What was written into them goes back
to the owned pieces, only the elements that changed, at the latest before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.views import view_of
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.comm.collectives import Collectives
    from onecopy.core.unit import Unit

__all__ = ["WholeGradients"]


class _Whole:
    """The whole gradients of one unit.

    flat: (padded_numel,) in the dtype of the parameters, as a plain `param.grad` would have.
    views: for each parameter of the unit its gradient.
    """

    def __init__(self, unit: Unit, flat: torch.Tensor) -> None:
        self.flat = flat
        self.views = [
            view_of(flat, start, parameter)
            for start, parameter in zip(unit.layout.starts, unit.parameters, strict=True)
        ]
        self._version = flat._version
        self._num_owners = buffers.num_owners(flat)

    @property
    def is_held(self) -> bool:
        """Somebody has a tensor of it."""
        return buffers.num_owners(self.flat) > self._num_owners

    def was_written(self) -> bool:
        """Whether it has been changed since the last time this was asked."""
        before, self._version = self._version, self.flat._version
        return before != self._version


class WholeGradients:
    """The whole gradients of one model that somebody looks at.

    Attributes:
        are_kept: also those of which nobody holds a tensor.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.are_kept = False
        self._collectives = collectives
        self._found: dict[Unit, _Whole] = {}

    def get(self, unit: Unit, index: int, what: str) -> torch.Tensor:
        """The whole gradient of one parameter as the pieces are now; a collective.

        Args:
            what: names the use where ranks turn out to do different things.
        """
        self._collectives.agreement.agree(what)
        if unit not in self._found:
            flat = torch.empty(
                unit.layout.padded_numel, dtype=unit.flat.dtype, device=unit.flat.device
            )
            self._found[unit] = _Whole(unit, flat)
        whole = self._found[unit]
        self._gather(unit, whole.flat)
        whole.was_written()
        return whole.views[index]

    def place_of(self, value: object) -> tuple[Unit, int] | None:
        """Whose gradient this very tensor is, or None."""
        for unit, whole in self._found.items():
            for index, view in enumerate(whole.views):
                if view is value:
                    return unit, index
        return None

    def take_writes(self) -> None:
        """Bring what was written to the owned pieces."""
        for unit, whole in self._found.items():
            if whole.was_written():
                for index in unit.pieces:
                    _write_back(unit, index, whole.views[index])

    def forget_unheld(self) -> None:
        """Give back the memory of those of which nobody holds a tensor."""
        if not self.are_kept:
            self._found = {unit: whole for unit, whole in self._found.items() if whole.is_held}

    def change(
        self, function: Callable[[torch.Tensor], Any], place: tuple[Unit, int] | None = None
    ) -> None:
        """What is here follows a change that was made to the pieces: one parameter's, or all."""
        for unit, whole in self._found.items():
            if place is None:
                function(whole.flat)
            elif unit is place[0]:
                function(whole.views[place[1]])
            # Not a write of the user's.
            whole.was_written()

    def drop(self) -> None:
        """The gradients are gone, or about to change."""
        self._found.clear()

    def _gather(self, unit: Unit, flat: torch.Tensor) -> None:
        shard_rank, layout = unit.shard_rank, unit.layout
        own = flat.new_zeros(layout.slice_numels[shard_rank])
        for place in layout.pieces(shard_rank):
            gradient = unit.pieces[place.index].grad
            if gradient is not None:
                values = unit.from_piece(place.index, gradient)
                own[place.start : place.start + place.numel].copy_(values)
        self._collectives.gather(flat, own, layout.slice_numels, unit.number).finish()


def _write_back(unit: Unit, index: int, gradient: torch.Tensor) -> None:
    """Give this rank's piece the elements of a whole gradient that differ from its own."""
    piece = unit.pieces[index]
    values = own_part(unit, index, gradient)
    if piece.grad is None:
        if values.any():
            piece.grad = values.to(unit.dtypes.gradient)
        return
    changed = values != piece.grad.to(values.dtype)
    piece.grad.copy_(torch.where(changed, values.to(piece.grad.dtype), piece.grad))


def own_part(unit: Unit, index: int, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole gradient, shaped like its piece."""
    place = unit.place_of(index)
    values = unit.in_memory_order(index, gradient)
    return unit.as_piece(index, values[place.offset : place.offset + place.numel])
