"""The mean of one unit where it rests in another memory than the pieces that the optimizer updates.

Means may wait on the device for an optimizer on the host, or in host memory for one on the device.
Backwards add to them where they rest, norms and scaling act on them there, and they move once, unit
by unit or chunk by chunk, when the step needs them. Pieces take no gradient of another device:
theirs are parts of a stand-in without bytes (see resting.py).

    resting --join--> in both memories --rest--> resting
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.core.resting import Resting
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.core.offload import Arriving, HostLane
    from onecopy.core.swapped import DiskLane

__all__ = ["MeanTier", "RestingMean"]

Views = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanTier:
    """Where the mean of one unit rests, and how it moves from there.

    is_device: it rests on the device, and the pieces are in host memory; else the reverse.
    pieces: where the pieces are.
    numel: elements that move; behind them lie flags.
    wire: the dtype in which a mean of the device comes down for a step.
    disk: bounds what is in memory after a touch, where the pieces rest on disk.
    """

    lane: HostLane
    unit: str
    is_device: bool
    pieces: torch.device
    numel: int
    wire: torch.dtype
    disk: DiskLane | None


class RestingMean(Resting):
    """See the module's docstring; `whole` and its views are where the pieces are.

    Each owned piece has one of `views` as its `.grad`.

    Attributes:
        values: (t,) gradient dtype, where they rest.
        parts: for each owned piece its part of `values`.
    """

    def __init__(
        self, tier: MeanTier, values: torch.Tensor, cut: Callable[[torch.Tensor], Views]
    ) -> None:
        """From now on these values rest.

        Args:
            cut: makes the pieces' views of such a tensor.
        """
        super().__init__()
        self.values, self.parts = values, tuple(cut(values))
        self._tier = tier
        self._arriving: Arriving | None = None
        # Of `whole`, when it got the values; whether for somebody who may write uncounted.
        self._version, self._is_touched = 0, False
        whole = torch.empty_like(values, device=tier.pieces)
        self.take(whole, cut(whole))
        self.leave()

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
            self._arriving = self.read(0, self._moving(self.whole))

    def fetch(self) -> None:
        """For a step: the pieces' gradients have the values, until `put_back`."""
        self.start_fetch()
        self.join()

    def put_back(self) -> None:
        """After the step: they rest as they were, but for what the optimizer has changed."""
        if self._is_touched or self.whole._version != self._version:
            self.rest()
        else:
            self.leave()

    def read(self, low: int, target: torch.Tensor) -> Arriving:
        """For a part of a step: elements from number `low` on begin to come down likewise."""
        tier, source = self._tier, self.values[low : low + target.numel()]
        return tier.lane.down(target, source, tier.wire, tier.unit)

    def _bring(self) -> None:
        """All of their digits, unless they are on their way."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        else:
            buffers.grow(self.whole)
            self._copy(self.whole, self.values, is_up=not self._tier.is_device)
        self._version, self._is_touched = self.whole._version, False

    def rest(self) -> None:
        """What somebody may have changed counts; then the values rest again."""
        if self.is_joined:
            self._copy(self.values, self.whole, is_up=self._tier.is_device)
            self.leave()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *, is_up: bool) -> None:
        target, source, lane = self._moving(target), self._moving(source), self._tier.lane
        if is_up:
            lane.up(target, source, self._tier.unit)
        else:
            lane.down(target, source, source.dtype, self._tier.unit).wait()

    def _moving(self, values: torch.Tensor) -> torch.Tensor:
        """Without the flags."""
        return values[: self._tier.numel]

    def touch(self, tensors: Sequence[torch.Tensor], function: Callable[..., Any]) -> None:
        """Views are about to be used (see `guard.Gatherer`)."""
        super().touch(tensors, function)
        self._is_touched = True
        if self._tier.disk is not None:
            self._tier.disk.note_touch(self, tensors)

    def retire(self) -> None:
        """It is no gradient any more; whoever holds a part of it keeps the values."""
        self.leave_to_holders()
        if self._tier.disk is not None:
            self._tier.disk.forget(self)

    # Changes ----------------------------------------------------------------------------------

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
