"""A master that is kept as codes: the weights of units in which nothing is trained.

The owned slice is coded in blocks, once, and what the codes say is from then on what the weights
are. A gather decodes the slice; the codes of what was decoded are the same again (see codec.py), so
that nothing more is lost if it travels quantized. Whoever looks at a piece finds the values, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy.comm.codec import CODED_DTYPES, decode, encode
from onecopy.comm.coding import Coding
from onecopy.core.resting import Resting
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.core.unit import UnitSpec

__all__ = ["CodedMaster", "code_frozen"]


class CodedMaster(Resting):
    """See the module's docstring; `whole` is the (s,) slice, and `views` are the pieces."""

    def __init__(
        self, whole: torch.Tensor, pieces: Collection[nn.Parameter], coding: Coding
    ) -> None:
        super().__init__()
        self._coding = coding
        num_bytes = coding.num_bytes(whole.numel())
        self._payload = torch.zeros(num_bytes, dtype=torch.uint8, device=whole.device)
        self.take(whole, pieces)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What holds the codes."""
        return self.whole, self._payload

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the slice: a view of it, or a copy while it is coded."""
        if self.is_joined:
            return self.whole[start:stop]
        return self.write(self.whole.new_empty(self.whole.numel()))[start:stop]

    def write(self, values: torch.Tensor) -> torch.Tensor:
        """Fill `values`, (s,) of any dtype that can be coded, with what the codes say."""
        with torch.no_grad():
            decode(self._payload, self._coding, values)
        return values

    def _bring(self) -> None:
        buffers.grow(self.whole)
        self.write(self.whole)

    def rest(self) -> None:
        """Code the slice and give its memory back."""
        if not self.is_joined:
            return
        with torch.no_grad():
            encode(self.whole, self._coding, self._payload)
        self.leave()


def code_frozen(specs: Iterable[UnitSpec], coding: Coding) -> list[UnitSpec]:
    """The same units; those in which nothing is trained, and whose parameters are cut, coded."""
    return [
        replace(spec, coding=coding)
        if not (spec.trainable or spec.stays) and spec.dtypes.compute in CODED_DTYPES
        else spec
        for spec in specs
    ]
