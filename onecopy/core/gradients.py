"""The gradients of one unit, from autograd's hooks to the owned slice.

    add (once per parameter)  ->  start_reduce  ->  finish_reduce  ->  pieces' .grad

Tensor roles (N slices, t = stride of the layout: slice and trailer):
    buffer  (N t,) wire dtype; this rank's gradients as they arrive; storage freed when not needed
    carry   (N t,) master dtype; local sums of backwards under no_sync, where the wire is lower
    mean    (t,)   master dtype; the owner's mean over ranks, summed over backwards; the pieces'
                   `.grad` are its views

A parameter that got no gradient on any rank since the last zero_grad leaves its piece's `.grad`
alone, so that the optimizer skips it as in plain PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onecopy.core.layout import Span
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.comm.collectives import Collectives, Pending
    from onecopy.core.stages import Stage
    from onecopy.core.unit import Unit

__all__ = ["Gradients"]


class Gradients:
    """See the module's docstring."""

    def __init__(self, unit: Unit, collectives: Collectives, stage: Stage) -> None:
        self._unit = unit
        self._collectives = collectives
        self._keeps_buffer = stage.keeps_gradient_buffer
        layout, dtypes = unit.layout, unit.dtypes
        self.buffer = torch.zeros(
            layout.gradient_numel, dtype=dtypes.reduce, device=unit.flat.device
        )
        self._trailers = self.buffer.view(layout.num_slices, layout.stride)[:, layout.slice_numel :]
        self._targets = [
            _targets(self.buffer, spans, parameter)
            for spans, parameter in zip(layout.spans, unit.parameters, strict=True)
        ]
        self._all = frozenset(index for index, parts in enumerate(layout.spans) if parts)
        # The parameters whose gradients make this unit complete: all, or those that came last
        # time where some never come.
        self._expected = self._all
        self.carry: torch.Tensor | None = None
        # Which parameters have a gradient in the buffer or in the carry, since the last reduce.
        self._filled: set[int] = set()
        self._carried: set[int] = set()
        # Which have arrived in the backward that is running.
        self._arrived: set[int] = set()
        self._pending: Pending | None = None
        if not self._keeps_buffer:
            buffers.free(self.buffer)

    @property
    def is_complete(self) -> bool:
        """All parameters that get a gradient have it, of the running backward."""
        return self._expected <= self._arrived

    @property
    def needs_buffer(self) -> bool:
        """The next gradient will make the buffer take its memory."""
        return buffers.is_freed(self.buffer)

    @property
    def has_local(self) -> bool:
        """There are gradients of this rank that no reduce has taken."""
        return self._pending is None and bool(self._filled or self._carried)

    @property
    def mean(self) -> torch.Tensor | None:
        """The owner's mean, held by the pieces' `.grad` alone: zero_grad frees it."""
        for piece in self._unit.pieces.values():
            base = None if piece.grad is None else piece.grad._base
            if base is not None and base.numel() == self._unit.layout.stride:
                return base
        return None

    @property
    def in_flight(self) -> bool:
        """A reduce is under way."""
        return self._pending is not None

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of parameter `index`; a second one in the same reduce is added."""
        if self._pending is not None:
            # A late gradient (reentrant checkpointing): the buffer is still being sent.
            self.finish_reduce(read_unit_flag=False)
        if buffers.is_freed(self.buffer):
            buffers.grow(self.buffer)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        targets = self._targets[index]
        again = index in self._filled
        parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]
        if targets.whole is not None:
            parts = ((targets.whole, gradient),)
        else:
            flat = self._unit.in_memory_order(index, gradient)
            parts = tuple(
                (target, flat[span.offset : span.offset + span.numel])
                for target, span in targets.parts
            )
        for target, part in parts:
            if again:
                target.add_(part)
            else:
                target.copy_(part)
        self._filled.add(index)
        self._arrived.add(index)

    def keep_local(self) -> None:
        """End of a backward under no_sync: keep the sums on this rank, in master precision."""
        self._arrived.clear()
        if self.buffer.dtype == self._unit.dtypes.master or not self._filled:
            return
        self._zero_missing()
        if self.carry is None:
            self.carry = self.buffer.to(self._unit.dtypes.master)
        else:
            self.carry.add_(self.buffer)
        self._carried |= self._filled
        self._filled.clear()
        self._free_buffer()

    def start_reduce(self, *, unit_flag: bool) -> None:
        """Begin to sum this unit's gradients to their owners; missing ones count as zero.

        Args:
            unit_flag: a message that rides along, one bit for the whole unit; see
                `finish_reduce`.
        """
        if buffers.is_freed(self.buffer):
            buffers.grow(self.buffer)
        self._zero_missing()
        if self.carry is not None:
            self.carry.add_(self.buffer)
            self.buffer.copy_(self.carry)
            self.carry = None
        self._write_flags(unit_flag)
        # Late parameters make all expected again; absent ones are not waited for next time.
        late = not self._arrived <= self._expected
        self._expected = self._all if late or not self._arrived else frozenset(self._arrived)
        self._pending = self._collectives.reduce(
            self.buffer, self._unit.dtypes.master, self._unit.number
        )

    def advance_reduce(self) -> bool:
        """Let a reduce of several hops start its next one; True when the last has ended."""
        return self._pending is None or self._pending.advance()

    @property
    def reduce_bytes(self) -> int:
        """Bytes that this rank sends for the reduce under way."""
        assert self._pending is not None, "a reduce is under way"
        return self._pending.num_bytes

    def finish_reduce(self, *, read_unit_flag: bool, keep: bool = True) -> bool:
        """Wait for the reduce and add its mean to the owned slice.

        Args:
            read_unit_flag: whether the caller needs the flag (on an accelerator that costs a
                synchronisation).
            keep: False drops the result (after an exception).

        Returns:
            whether any rank had set the unit's flag; False if it was not read.
        """
        if self._pending is None:
            return False
        result = self._pending.finish()
        self._pending = None
        layout = self._unit.layout
        complete = len(self._filled | self._carried) == len(self._all)
        self._filled.clear()
        self._carried.clear()
        self._arrived.clear()
        self._free_buffer()
        flagged = read_unit_flag and bool(result[layout.unit_flag] > 0)
        if keep and self._unit.pieces:
            flags = None
            if not complete:
                flags = (result[layout.slice_numel : layout.stride] > 0).tolist()
            self._accumulate(result, flags)
        return flagged

    def zero(self, *, set_to_none: bool) -> None:
        """What `zero_grad` means: no gradients, or zeros where there were some."""
        mean = self.mean
        self.clear(keep_means=not set_to_none)
        if mean is not None and not set_to_none:
            mean.zero_()

    def clear(self, *, keep_means: bool = False) -> None:
        """Forget local gradients, and the owned means too unless told to keep them."""
        self._filled.clear()
        self._carried.clear()
        self._arrived.clear()
        self._expected = self._all
        self.carry = None
        self._free_buffer()
        if not keep_means:
            for piece in self._unit.pieces.values():
                piece.grad = None

    # Details ----------------------------------------------------------------------------------

    def _free_buffer(self) -> None:
        if not self._keeps_buffer:
            buffers.free(self.buffer)

    def _zero_missing(self) -> None:
        if len(self._filled) == len(self._all):
            return
        for index, targets in enumerate(self._targets):
            if index not in self._filled:
                targets.zero_()

    def _write_flags(self, unit_flag: bool) -> None:
        present = self._filled | self._carried
        if len(present) == len(self._all):
            self._trailers.fill_(1)
        else:
            self._trailers.zero_()
            for index in present:
                for span in self._unit.layout.spans[index]:
                    self.buffer[span.flag] = 1
        self._trailers[:, -1].fill_(int(unit_flag))

    def _accumulate(self, result: torch.Tensor, flags: list[bool] | None) -> None:
        """Add a mean to the owned slice; pieces without a gradient so far start from it."""
        unit = self._unit
        pieces = unit.layout.pieces(self._collectives.groups.shard.rank)
        owned = [unit.pieces[piece.index] for piece in pieces]
        mean = self.mean
        if mean is None:
            mean = result
        else:
            for place, piece in zip(pieces, owned, strict=True):
                region = mean[place.start : place.start + place.numel]
                if piece.grad is None:
                    region.zero_()
                elif piece.grad.data_ptr() != region.data_ptr():
                    region.copy_(piece.grad)
                    piece.grad = region
            mean.add_(result)
        for order, (place, piece) in enumerate(zip(pieces, owned, strict=True)):
            if piece.grad is None and (flags is None or flags[order]):
                piece.grad = mean[place.start : place.start + place.numel]


class _Targets:
    """Where one parameter's gradient goes in the buffer.

    whole: a view shaped like the parameter, where no slice border cuts it.
    parts: 1-D views in memory order, where one does.
    """

    __slots__ = ("parts", "whole")

    def __init__(
        self, whole: torch.Tensor | None, parts: tuple[tuple[torch.Tensor, Span], ...]
    ) -> None:
        self.whole = whole
        self.parts = parts

    def zero_(self) -> None:
        """No gradient: zeros."""
        for target, _ in self.parts:
            target.zero_()


def _targets(buffer: torch.Tensor, spans: tuple[Span, ...], parameter: torch.Tensor) -> _Targets:
    parts = tuple((buffer[span.start : span.start + span.numel], span) for span in spans)
    whole = None
    if len(spans) == 1:
        whole = buffer.as_strided(parameter.size(), parameter.stride(), spans[0].start)
    return _Targets(whole, parts)
