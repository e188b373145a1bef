"""The mean of one unit's gradients in the slice that this rank owns, wherever it lies.

It lies beside the pieces that the optimizer updates, and their `.grad` are its views; or in another
memory than they (resting_mean.py); or on disk (swapped.py). Backwards add to it there, norms and
scaling act on it there, unit by unit, and the step takes it from there.

Where a rank keeps the buffer of all its gradients, the mean begins in that part of it which the
rank owns, as ZeRO's first stage counts it. When other gradients come it moves to memory of its own.

Tensor roles (t of the unit's gradient elements are this rank's stride: its slice and a trailer):
    value   (t,) gradient dtype; where it lies elsewhere, what stands for it beside the pieces
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from onecopy.core.offload import HOST
from onecopy.core.resting_mean import MeanTier, RestingMean
from onecopy.core.swapped import Swapped

if TYPE_CHECKING:
    from onecopy.core.layout import Piece
    from onecopy.core.unit import Unit

__all__ = ["OwnedMean"]

# The kind of state that it is on disk.
MEAN = "mean"


class OwnedMean:
    """See the module's docstring.

    Attributes:
        owned: the places of the owned pieces, and the pieces.
        is_fresh: it comes from the running backward alone.

    Args:
        wire: the dtype in which gradients are reduced.
    """

    def __init__(self, unit: Unit, wire: torch.dtype) -> None:
        self._unit = unit
        places = unit.slice.places
        self.owned = [(place, unit.slice.pieces[place.index]) for place in places]
        if unit.dtypes.gradient != unit.dtypes.master:
            for _, piece in self.owned:
                piece.grad_dtype = None
        self._stride = unit.layout.strides[unit.slice.rank]
        self._split_sizes = _split_sizes(places, self._stride)
        self.is_fresh = False
        # Where it rests in another memory than the pieces, and what does.
        self._tier = self._make_tier(wire)
        self._resting: RestingMean | None = None
        # The part of a buffer in which a new one lies.
        self._home: torch.Tensor | None = None
        # Where it is to be on disk: what rests there, once there has been something.
        self._on_disk: Swapped | None = None

    @property
    def value(self) -> torch.Tensor | None:
        """The mean, held by the pieces' `.grad` alone: zero_grad frees it."""
        for _, piece in self.owned:
            base = None if piece.grad is None else piece.grad._base
            if base is not None and base.numel() == self._stride:
                return base
        return None

    def parts_of(self, result: torch.Tensor) -> Sequence[torch.Tensor]:
        """1-D: the parts of a (t,) tensor that belong to the owned pieces, in their order."""
        # One call makes all views; the gaps between pieces are every other one.
        return result.split_with_sizes(self._split_sizes)[1::2]

    def add(self, result: torch.Tensor, flags: list[bool] | None) -> None:
        """Add another mean, which is where this one lies, or is to go to disk.

        Args:
            flags: for each owned piece whether any rank had a gradient; None where all had.
        """
        with self.at_hand(changes=True):
            self._accumulate(result, flags)
        self.put_away(behind=True)

    def zero(self) -> None:
        """Make all values zero, if there are any."""
        value = self.value
        if self._resting is not None:
            self._resting.zero()
        elif value is not None:
            with self.at_hand(changes=True):
                value.zero_()

    def drop(self) -> None:
        """The pieces have no gradient."""
        for piece in self._unit.slice.pieces.values():
            piece.grad = None
        self._forget()

    def note_removal(self) -> None:
        """Somebody has removed gradients of pieces: with the last of them the mean is gone."""
        if self._resting is not None and self.value is None:
            self._forget()

    def _forget(self) -> None:
        """What has rested on the device, or in host memory, is the mean no more."""
        if self._resting is not None:
            self._resting.retire()
            self._resting = None

    # In a part of a buffer --------------------------------------------------------------------

    def lie_in(self, buffer: torch.Tensor, start: int) -> None:
        """From now on a new one lies in this buffer, from its element `start` on, if it can.

        It can where it is as wide as what the buffer holds, and is not offloaded.
        """
        unit = self._unit
        dtype = unit.dtypes.gradient
        if dtype.itemsize != buffer.itemsize or unit.slice.placement is not None:
            return
        # No view of the buffer: it is itself the base of the pieces' gradients.
        empty = torch.empty(0, dtype=dtype, device=buffer.device)
        self._home = empty.set_(buffer.untyped_storage(), start, (self._stride,), (1,))

    @property
    def has_home(self) -> bool:
        """It may lie in a buffer."""
        return self._home is not None

    def move_out(self, is_held: Callable[[], bool]) -> bool:
        """Others need the buffer that it may lie in: give it memory of its own, if it does.

        Args:
            is_held: whether others have tensors of the buffer. Then it stays for good, with them;
                the answer is False.
        """
        home = self._home
        assert home is not None, "there is one where it may lie"
        there = [
            order
            for order, (_, piece) in enumerate(self.owned)
            if piece.grad is not None and piece.grad._base is home
        ]
        for order in there:
            self.owned[order][1].grad = None
        stays = is_held()
        if there:
            views = self._views(home if stays else home.clone())
            for order in there:
                self.owned[order][1].grad = views[order]
        if stays:
            self._home = None
        return not stays

    # Where it lies ----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the mean lies, and backwards add to it."""
        if self._tier is None:
            return self._unit.slice.device
        return self._unit.flat.device if self._tier.is_device else HOST

    def at_rest(self, gradient: torch.Tensor) -> torch.Tensor:
        """This gradient of a piece where its values lie."""
        return gradient if self._resting is None else self._resting.at_rest(gradient)

    def start_fetch(self) -> None:
        """A step is about to take the mean."""
        if self._resting is not None:
            self._resting.start_fetch()

    @property
    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What holds the mean on the device, and in host memory."""
        if self._resting is not None:
            return self._resting.tensors
        return (None, self.value) if self._unit.slice.is_offloaded else (self.value, None)

    @contextmanager
    def in_master_dtype(self) -> Iterator[None]:
        """Inside, the pieces' gradients are beside them, in the dtype that torch.optim wants."""
        if self._resting is not None:
            self._resting.fetch()
        kept = [
            (piece, piece.grad)
            for piece in self._unit.slice.pieces.values()
            if piece.grad is not None and piece.grad.dtype != piece.dtype
        ]
        for piece, gradient in kept:
            piece.grad = gradient.to(piece.dtype)
        try:
            yield
        finally:
            for piece, gradient in kept:
                piece.grad = gradient
            kept.clear()
            if self._resting is not None:
                self._resting.put_back()

    # On disk ----------------------------------------------------------------------------------

    @property
    def resting(self) -> RestingMean | Swapped | None:
        """What it rests as in another memory than the pieces, or on disk, if it does now."""
        mean = self.value
        for one in (self._resting, self._on_disk):
            if one is not None and not one.is_joined and one.whole is mean:
                return one
        return None

    @property
    def is_on_disk(self) -> bool:
        """It rests there."""
        return isinstance(self.resting, Swapped)

    @property
    def bytes_on_disk(self) -> int:
        """Of the mean, where it rests there."""
        on_disk = self._on_disk
        if on_disk is None or not self.is_on_disk or on_disk.is_being_written:
            return 0
        return on_disk.whole.nbytes

    @contextmanager
    def at_hand(self, *, changes: bool) -> Iterator[None]:
        """Inside, the mean is in memory; afterwards it is where it was before."""
        if self._on_disk is None or not self.is_on_disk:
            yield
            return
        with self._on_disk.at_hand(changes=changes):
            yield

    def settle(self) -> None:
        """Before a step in chunks: what somebody has touched rests again."""
        if self._resting is not None:
            self._resting.rest()
        self.put_away()

    def put_away(self, *, behind: bool = False) -> None:
        """The mean goes to disk, where it is to be; `behind`: the write may go on."""
        disk = self._unit.slice.disk
        if disk is None or not disk.has_gradients:
            return
        mean = self.value
        if mean is None:
            return
        kind = (MEAN, mean.dtype)
        views = [piece.grad for _, piece in self.owned if piece.grad is not None]
        views = [view for view in views if view._base is mean]
        if self._on_disk is None:
            self._on_disk = Swapped(disk.files, kind)
        is_new = self._on_disk.whole is not mean
        if is_new or not all(map(self._on_disk.stands_for, views)):
            if not is_new:
                self._on_disk.join()
            self._on_disk.take(mean, views)
        self._on_disk.rest(behind=behind)

    # Details ----------------------------------------------------------------------------------

    def _accumulate(self, result: torch.Tensor, flags: list[bool] | None) -> None:
        """Add a mean to the owned slice; pieces without a gradient so far start from it."""
        if self._tier is not None:
            self._accumulate_at_rest(self._tier, result, flags)
            return
        mean = self.value
        if mean is None:
            self.is_fresh = not self._has_foreign
            views = self._views(self._first(result))
            for view, (_, piece) in zip(views, self.owned, strict=True):
                if piece.grad is not None:
                    view.add_(piece.grad)
                    piece.grad = view
        else:
            views = self._views(mean)
            for view, (_, piece) in zip(views, self.owned, strict=True):
                if piece.grad is None:
                    view.zero_()
                elif piece.grad.data_ptr() != view.data_ptr():
                    view.copy_(piece.grad)
                    piece.grad = view
            mean.add_(result)
        for order, (_, piece) in enumerate(self.owned):
            if piece.grad is None and (flags is None or flags[order]):
                piece.grad = views[order]

    def _first(self, result: torch.Tensor) -> torch.Tensor:
        """A mean that begins with this one."""
        if self._home is None:
            return result.to(self._unit.dtypes.gradient)
        if result.data_ptr() == self._home.data_ptr():
            # It was summed there.
            return self._home
        return self._home.copy_(result)

    @property
    def _has_foreign(self) -> bool:
        """Somebody has put gradients there, where there is no mean: it is added to them."""
        for _, piece in self.owned:
            if piece.grad is not None:
                return True
        return False

    def _accumulate_at_rest(
        self, tier: MeanTier, result: torch.Tensor, flags: list[bool] | None
    ) -> None:
        """`_accumulate` where the mean rests."""
        resting, is_added = self._resting, False
        if resting is None or self.value is not resting.whole:
            self.is_fresh = not self._has_foreign
            self._forget()
            first = result.to(self._unit.dtypes.gradient)
            if not self.is_fresh:
                first = torch.zeros_like(first)
            self._resting = RestingMean(tier, first, self._views)
            is_added, resting = self.is_fresh, self._resting
        if not is_added:
            resting.add(result, [piece for _, piece in self.owned])
        for order, (_, piece) in enumerate(self.owned):
            if piece.grad is None and (flags is None or flags[order]):
                piece.grad = resting.views[order]

    def _views(self, mean: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a mean that are the owned pieces' gradients, shaped like the pieces."""
        views = self.parts_of(mean)
        if not self._unit.layout.is_whole:
            return views
        return [
            self._unit.slice.as_piece(place.index, view)
            for (place, _), view in zip(self.owned, views, strict=True)
        ]

    def _make_tier(self, wire: torch.dtype) -> MeanTier | None:
        owned, placement = self._unit.slice, self._unit.slice.placement
        if placement is None or (placement.gradients == "device") is not owned.is_offloaded:
            return None
        return MeanTier(
            lane=placement.lane,
            unit=self._unit.name,
            is_device=owned.is_offloaded,
            pieces=owned.device,
            numel=self._unit.layout.slice_numels[owned.rank],
            wire=wire,
            disk=placement.disk,
        )


def _split_sizes(places: tuple[Piece, ...], numel: int) -> list[int]:
    """gap, piece, gap, piece, ..., gap: the sizes of all of them, some gaps empty."""
    sizes, position = [], 0
    for place in places:
        sizes += [place.start - position, place.numel]
        position = place.start + place.numel
    return [*sizes, numel - position]
