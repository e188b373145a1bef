"""A master kept as the bf16 values it rounds to and 16 more bits, exact to the last bit.

Where parameters stay, the flat buffer already holds what the owned fp32 slice rounds to. The fp32
bits are those of the rounded value, moved to the upper half of a word, plus a signed difference:

    bits(master) = (bits(bf16) << 16) + rest,    -2^15 <= rest <= 2^15

One value too many for 16 bits: halfway between two bf16 values torch rounds to the even one, from
above and from below. So -2^15 stands for both, and places where it means +2^15 are listed; among
ordinary values that is one element in 2^17.

Split is the state at rest, which `rest` brings about; `join` makes the fp32 slice for a step or for
a look at the pieces.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from onecopy.core.resting import Resting
from onecopy.memory import buffers

__all__ = ["SplitMaster"]

# The lowest number of 16 bits.
HALF_WAY = -(1 << 15)
ROW = 1024
LOWEST_BIT_OF_BF16 = 1 << 16


class SplitMaster(Resting):
    """See the module's docstring; `whole` is the (s,) fp32 slice, and `views` are the pieces."""

    def __init__(
        self, own: torch.Tensor, whole: torch.Tensor, pieces: Collection[nn.Parameter]
    ) -> None:
        super().__init__()
        self._own = own
        self._rest = torch.empty_like(own, dtype=torch.int16)
        self._ties = torch.empty(0, dtype=torch.int64, device=own.device)
        self.take(whole, pieces)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is held beside the bf16 slice."""
        return self.whole, self._rest, self._ties

    def _bring(self) -> None:
        """Make the fp32 slice."""
        buffers.grow(self.whole)
        self._write(self.whole, 0)

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the fp32 slice: a view of it, or a copy while split."""
        if self.is_joined:
            return self.whole[start:stop]
        values = torch.empty(stop - start, dtype=self.whole.dtype, device=self._own.device)
        self._write(values, start)
        return values

    def _write(self, values: torch.Tensor, start: int) -> None:
        """Fill a tensor with the elements of the fp32 slice from `start` on."""
        stop = start + values.numel()
        own = self._own[start:stop]
        with torch.no_grad():
            bits = values.view(torch.int32)
            bits.copy_(own.view(torch.int16)).bitwise_left_shift_(16).add_(self._rest[start:stop])
            ties = self._ties[(self._ties >= start) & (self._ties < stop)] - start
            bits[ties] += LOWEST_BIT_OF_BF16
            rounded = values.to(own.dtype)
            if _differ(rounded, own):
                # Somebody has written into the parameters, and the rest belongs to other values.
                # Next to zero and infinity it makes more of a difference than bf16 can tell.
                values.copy_(torch.where(rounded == own, values, own.to(values.dtype)))

    def rest(self) -> None:
        """Round the fp32 slice into the parameters, keep the rest and give its memory back."""
        if not self.is_joined:
            return
        with torch.no_grad():
            self._own.copy_(self.whole)
            bits = self.whole.view(torch.int32)
            # The lower halves of the words: the upper ones are the bf16 values, or one less.
            self._rest.copy_(bits)
            half_way = _places_of_lowest(self._rest)
            # The upper half is even where the value was rounded down.
            self._ties = half_way[(bits[half_way] & LOWEST_BIT_OF_BF16) == 0]
        self.leave()

    def _can_leave(self) -> bool:
        """Also where somebody holds views of the pieces."""
        return self.whole.untyped_storage().resizable()


def _differ(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether any bit differs; overwrites nothing. (Four times as fast as torch.equal.)"""
    bits = left.view(torch.int16) ^ right.view(torch.int16)
    return bool(bits.numel()) and any(bool(bound) for bound in bits.aminmax())


def _places_of_lowest(rest: torch.Tensor) -> torch.Tensor:
    """Where `rest` is HALF_WAY, in order: (n,) int64.

    Minima of rows first: comparing and collecting all elements would take longer than Adam.
    """
    end = rest.numel() // ROW * ROW
    rows = rest[:end].view(-1, ROW)
    found = (rows.amin(1) == HALF_WAY).nonzero()
    places = (rows[found.squeeze(1)] == HALF_WAY).nonzero()
    tail = (rest[end:] == HALF_WAY).nonzero().squeeze(1)
    return torch.cat([found.squeeze(1)[places[:, 0]] * ROW + places[:, 1], tail + end])
