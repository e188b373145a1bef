"""The mean of one unit where it rests in another memory than the pieces that the optimizer updates.

Means may wait on the device for an optimizer on the host, or in host memory for one on the device.
Backwards add to them where they rest, norms and scaling act on them there, and they move once, unit
by unit, when the step needs them. Pieces take no gradient of another device: theirs are parts of a
stand-in without bytes, which wear a guard, so that whoever touches one finds its values.

    resting --join--> in both memories --rest--> resting
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.core.guard import guard_class
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.core.offload import Arriving, HostLane

__all__ = ["MeanTier", "RestingMean"]

Views = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanTier:
    """Where the mean of one unit rests, and how it moves from there.

    is_device: it rests on the device, and the pieces are in host memory; else the reverse.
    pieces: where the pieces are.
    numel: elements that move; behind them lie flags.
    wire: the dtype in which a mean of the device comes down for a step.
    """

    lane: HostLane
    unit: str
    is_device: bool
    pieces: torch.device
    numel: int
    wire: torch.dtype


class RestingMean:
    """See the module's docstring.

    Attributes:
        values: (t,) gradient dtype, where they rest.
        whole: (t,) like it where the pieces are; its storage is empty while they rest.
        views: for each owned piece its part of `whole`, which becomes its `.grad`.
        parts: the same of `values`.
        is_joined: `whole` has the values, and somebody may have changed them.
    """

    def __init__(
        self, tier: MeanTier, values: torch.Tensor, cut: Callable[[torch.Tensor], Views]
    ) -> None:
        """From now on these values rest.

        Args:
            cut: makes the pieces' views of such a tensor.
        """
        self.values = values
        self.whole = torch.empty_like(values, device=tier.pieces)
        self.views, self.parts = tuple(cut(self.whole)), tuple(cut(values))
        self.is_joined = True
        self._tier = tier
        self._plain = type(self.whole)
        self._guard = guard_class(self._plain, weakref.ref(self))
        self._num_owners = buffers.num_owners(self.whole)
        self._arriving: Arriving | None = None
        # Of `whole`, when it got the values; whether for somebody who may write uncounted.
        self._version, self._is_touched = 0, False
        self._leave()

    def at_rest(self, gradient: torch.Tensor) -> torch.Tensor:
        """This gradient of a piece where it rests; itself where it does not."""
        if not self.is_joined:
            for view, part in zip(self.views, self.parts, strict=True):
                if view is gradient:
                    return part
        return gradient

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What holds values on the device, and in host memory."""
        both = self.values, self.whole
        return both if self._tier.is_device else both[::-1]

    # Moves ------------------------------------------------------------------------------------

    def start_fetch(self) -> None:
        """A step will need the values: let them begin to come down, rounded as on the wire."""
        if self._tier.is_device and not self.is_joined and self._arriving is None:
            buffers.grow(self.whole)
            self._arriving = self._down(self.whole, self.values, self._tier.wire)

    def fetch(self) -> None:
        """For a step: the pieces' gradients have the values, until `leave`."""
        if self.is_joined:
            return
        self.start_fetch()
        if self._arriving is None:
            buffers.grow(self.whole)
            self._up(self.whole, self.values)
        self._note_join()

    def leave(self) -> None:
        """After the step: they rest as they were, but for what the optimizer has changed."""
        if self._is_touched or self.whole._version != self._version:
            self.rest()
        else:
            self._leave()

    def join(self) -> None:
        """Bring the values to the pieces, all of their digits; nothing where they are there."""
        if self.is_joined:
            return
        buffers.grow(self.whole)
        if self._tier.is_device:
            self._arriving = self._down(self.whole, self.values, self.values.dtype)
        else:
            self._up(self.whole, self.values)
        self._note_join()

    def rest(self) -> None:
        """What somebody may have changed counts; then the values rest again."""
        if not self.is_joined:
            return
        if self._tier.is_device:
            self._up(self.values, self.whole)
        else:
            self._down(self.values, self.whole, self.whole.dtype).wait()
        self._leave()

    def add(self, mean: torch.Tensor, pieces: Sequence[nn.Parameter]) -> None:
        """Add another mean, which is where this one rests.

        Args:
            pieces: the owned ones. Where a gradient is gone, it starts from zero; one that somebody
                has put there takes its place.
        """
        self.rest()
        for view, part, piece in zip(self.views, self.parts, pieces, strict=True):
            if piece.grad is None:
                part.zero_()
            elif piece.grad is not view:
                part.copy_(piece.grad)
                piece.grad = view
        self.values.add_(mean)
        self._follow()

    def zero(self) -> None:
        """Make all values zero."""
        self.values.zero_()
        self._follow()

    def _follow(self) -> None:
        """Somebody may hold views of the memory where the pieces are."""
        if self.is_joined:
            self.whole.copy_(self.values)

    # What the guard asks ----------------------------------------------------------------------

    def touch(self, tensors: Sequence[torch.Tensor], function: Callable[..., Any]) -> None:
        """Views are about to be used (see `guard.Gatherer`)."""
        self.join()
        self._is_touched = True

    def is_released(self, parameter: torch.Tensor) -> bool:
        """Whether a view should wear its guard."""
        return not self.is_joined

    # Details ----------------------------------------------------------------------------------

    def _down(self, target: torch.Tensor, source: torch.Tensor, dtype: torch.dtype) -> Arriving:
        numel = self._tier.numel
        return self._tier.lane.down(target[:numel], source[:numel], dtype, self._tier.unit)

    def _up(self, target: torch.Tensor, source: torch.Tensor) -> None:
        numel = self._tier.numel
        self._tier.lane.up(target[:numel], source[:numel], self._tier.unit)

    def _note_join(self) -> None:
        """The values are there, or arriving."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        for view in self.views:
            view.__class__ = self._plain
        self._version = self.whole._version
        self.is_joined = True

    def _leave(self) -> None:
        """Give the memory of `whole` back; not while somebody has a view of it."""
        is_held = buffers.num_owners(self.whole) > self._num_owners
        if self.is_joined and not is_held and self.whole.untyped_storage().resizable():
            buffers.free(self.whole)
            for view in self.views:
                view.__class__ = self._guard
            self.is_joined = self._is_touched = False
