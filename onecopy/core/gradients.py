"""The gradients of one unit, from autograd's hooks to the owned slice.

    add (once per parameter)  ->  start_reduce  ->  finish_reduce  ->  pieces' .grad

Tensor roles (g = gradient_numel of the layout, t of them this rank's stride: slice and trailer):
    buffer  (g,) wire dtype; this rank's gradients as they arrive; storage freed when not needed
    carry   (g,) dtype of sums; local sums of backwards under no_sync, where the wire is lower
    node_sum  (part_numel,) dtype of sums; where stage.sums_at_boundary: the sum over this node's
            ranks, and over backwards, of what this rank handles, until it is summed over the nodes
    mean    (t,) gradient dtype; the owner's mean over ranks, summed over backwards; the pieces'
                 `.grad` are its views: see owned_mean.py. Where the buffer is kept, the mean of one
                 backward lies in this rank's part of it, until other gradients come there

A parameter that got no gradient on any rank since the last zero_grad leaves its piece's `.grad`
alone, so that the optimizer skips it as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from onecopy.comm.transport import Division
from onecopy.core.dtensors import local_values
from onecopy.core.layout import Layout, Span
from onecopy.core.owned_mean import OwnedMean
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.comm.collectives import Collectives, Pending
    from onecopy.core.loss_scale import LossScale
    from onecopy.core.offload import Arriving
    from onecopy.core.stages import Stage
    from onecopy.core.unit import Unit

__all__ = ["Gradients"]


class Gradients:
    """See the module's docstring."""

    def __init__(self, unit: Unit, collectives: Collectives, stage: Stage) -> None:
        self.unit = unit
        self._collectives = collectives
        self._keeps_buffer = stage.keeps_gradient_buffer
        layout, dtypes = unit.layout, unit.dtypes
        self._make_buffer()
        self._slice_numel = layout.slice_numels[unit.slice.rank]
        self._stride = layout.strides[unit.slice.rank]
        # Flags are no values: they are not quantized with them.
        self._division = Division(layout.strides, layout.trailers)
        self.mean: OwnedMean = OwnedMean(unit, dtypes.reduce)
        if self._keeps_buffer:
            self.mean.lie_in(self.buffer, sum(layout.strides[: unit.slice.rank]))
        # While nobody holds a gradient that lies in it.
        self._num_owners = buffers.num_owners(self.buffer)
        self._sum_dtype = dtypes.sums
        self._all = frozenset(index for index, parts in enumerate(layout.spans) if parts)
        # The parameters whose gradients make this unit complete: all, or those that came last
        # time where some never come.
        self._expected = self._all
        self.carry: torch.Tensor | None = None
        self.node_sum: torch.Tensor | None = None
        # It was there before the running backward began.
        self._goes_on = False
        # The reduce under way ends with the mean of all ranks, not with the sum over this node.
        self._is_boundary = True
        # Which parameters have a gradient in the buffer or in the carry, since the last reduce.
        self._filled: set[int] = set()
        self._carried: set[int] = set()
        # Which have arrived in the backward that is running.
        self._arrived: set[int] = set()
        # Which this rank has brought to no reduce of the running backward.
        self._absent = self._all
        self._pending: Pending | None = None
        # Where means rest in host memory: one on its way there, and its flags.
        placement = unit.slice.placement
        is_below = placement is not None and placement.gradients != "device"
        self._lane = unit.slice.lane if is_below else None
        self._arriving: tuple[torch.Tensor, Arriving, list[bool] | None] | None = None
        self._unit_flag: torch.Tensor | None = None
        self._own_flag = False
        self._flag_is_wanted = False
        self._loss_scale: LossScale | None = None
        # 0-d, where gradients are scaled: 1 says that a mean is not finite.
        self.found_inf: torch.Tensor | None = None
        # What this rank's gradients count; see uneven.py.
        self.weight = 1.0
        # Before gradients come: it has no memory, or others have a part of it.
        self.needs_buffer = False
        self._free_buffer()

    @property
    def is_complete(self) -> bool:
        """All parameters that get a gradient have it, of the running backward."""
        return self._expected <= self._arrived

    @property
    def has_all(self) -> bool:
        """Every parameter has its gradient: nothing can need the unit's values any more.

        A unit that is merely complete, because the others got none last time either, may still be
        read by operations before it (through `detach`, or frozen in mid-run).
        """
        return len(self._arrived) == len(self._all)

    @property
    def absent(self) -> frozenset[int]:
        """The parameters that have no gradient of this rank's, so far in this backward."""
        if self._pending is None and (self._filled or self._carried):
            return self._absent - self._filled - self._carried
        return self._absent

    @property
    def local_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What holds gradients that are not the owner's yet."""
        return self.buffer, self.carry, self.node_sum

    def begin_backward(self) -> None:
        """A backward begins whose gradients are reduced."""
        self.mean.is_fresh = False
        self._goes_on = self.node_sum is not None
        if not self._goes_on:
            self._absent = self._all

    @property
    def has_local(self) -> bool:
        """There are gradients of this rank that no reduce has taken."""
        return self._pending is None and bool(self._filled or self._carried)

    def add(self, index: int, gradient: torch.Tensor) -> bool:
        """Take the gradient of parameter `index`; a second one in the same reduce is added.

        Returns whether the unit is complete now. (Called for every parameter: kept short.)
        """
        if self._pending is not None:
            # A late gradient (reentrant checkpointing): the buffer is still being sent.
            self.finish_reduce()
        if self.needs_buffer:
            self._take_buffer()
        if type(gradient) is not torch.Tensor:
            gradient = local_values(self.unit.parameters[index], gradient)
        target, filled, arrived = self._wholes[index], self._filled, self._arrived
        if self.weight != 1.0:
            if not self.weight:
                arrived.add(index)
                return self.is_complete
            gradient = gradient * self.weight
        if target is None or index in filled or gradient.is_sparse:
            self._add_parts(index, gradient)
        else:
            target.copy_(gradient)
        filled.add(index)
        arrived.add(index)
        return len(arrived) >= len(self._expected) and self._expected <= arrived

    def _add_parts(self, index: int, gradient: torch.Tensor) -> None:
        """The rarer ways to take a gradient: cut by a slice border, sparse, or a second one."""
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        flat = self.unit.slice.in_memory_order(index, gradient)
        for target, offset in self._parts[index]:
            part = flat[offset : offset + target.numel()].view(target.size())
            if index in self._filled:
                target.add_(part)
            else:
                target.copy_(part)

    def keep_local(self) -> None:
        """End of a backward under no_sync: keep the sums on this rank, in fp32 at least."""
        self._arrived.clear()
        if self.buffer.dtype == self._sum_dtype or not self._filled:
            return
        self._zero_missing()
        if self.carry is None:
            self.carry = self.buffer.to(self._sum_dtype)
        else:
            self.carry.add_(self.buffer)
        self._carried |= self._filled
        self._filled.clear()
        self._free_buffer()

    def start_reduce(self, *, unit_flag: bool | None = None, is_boundary: bool = True) -> None:
        """Begin to sum this unit's gradients to their owners; missing ones count as zero.

        Args:
            unit_flag: a message that rides along, one bit for the whole unit; see
                `read_unit_flag`.
            is_boundary: False leaves it at a sum over this node.
        """
        if self.needs_buffer:
            self._take_buffer()
        self._zero_missing()
        if self.carry is not None:
            self.carry.add_(self.buffer)
            self.buffer.copy_(self.carry)
            self.carry = None
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        self._absent = self.absent
        self._write_flags(bool(unit_flag))
        self._flag_is_wanted, self._own_flag = unit_flag is not None, bool(unit_flag)
        # Late parameters make all expected again; absent ones are not waited for next time.
        late = not self._arrived <= self._expected
        self._expected = self._all if late or not self._arrived else frozenset(self._arrived)
        self._is_boundary = is_boundary
        self._pending = self._collectives.reduce(
            self.buffer,
            self._division,
            self._sum_dtype,
            self.unit.number,
            node_sum=self.node_sum,
            is_boundary=is_boundary,
            in_place=self.mean.has_home,
        )

    def start_across(self) -> None:
        """Begin to sum over the nodes what earlier backwards have left in them."""
        assert self.node_sum is not None, "a backward has left something"
        self._flag_is_wanted, self._is_boundary = False, True
        self._pending = self._collectives.reduce_across(
            self.node_sum, self._division, self.buffer.dtype, self.unit.number
        )

    def advance_reduce(self) -> bool:
        """Let a reduce of several hops start its next one; True when the last has ended."""
        return self._pending is None or self._pending.advance()

    def leave_buffer(self) -> bool:
        """Wait until the reduce under way has read the buffer, and give that back; True at its end.

        What follows a hop inside a node takes time, and only this rank's part of the memory.
        """
        if self._pending is None or self.needs_buffer:
            return self._pending is None
        has_ended = self._pending.advance()
        self._free_buffer()
        return has_ended

    @property
    def reduce_bytes(self) -> tuple[int, int]:
        """Bytes that this rank sends for the reduce under way, and those that leave its node."""
        assert self._pending is not None, "a reduce is under way"
        return self._pending.num_bytes, self._pending.across_bytes

    def finish_reduce(self, *, keep: bool = True) -> None:
        """Wait for the reduce, if one is under way, and add its mean to the owned slice.

        Where gradients are offloaded, `settle` does the latter.

        Args:
            keep: False drops the result (after an exception).
        """
        if self._pending is None:
            return
        result = self._pending.finish()
        self._pending = None
        present = self._filled | self._carried
        complete = len(present) == len(self._all)
        self._filled.clear()
        self._carried.clear()
        self._arrived.clear()
        self._free_buffer()
        if not self._is_boundary:
            self.node_sum = result
            return
        # What earlier backwards have brought is not dropped with a failed one.
        keep, self.node_sum = keep or self.node_sum is not None, None
        if self._flag_is_wanted:
            self._unit_flag = result[-1].clone()
        if keep and self.mean.owned:
            flags = None
            if not complete:
                own = [place.index in present for place, _ in self.mean.owned]
                flags = self._collectives.read(result[self._slice_numel :][: len(own)], own)
            if self._lane is None:
                self._take(result, flags)
                return
            self.settle()
            owned = result[: self._slice_numel]
            target = torch.empty(self._stride, dtype=self._sum_dtype, device=self.mean.device)
            arriving = self._lane.down(
                buffers.want_huge_pages(target)[: self._slice_numel],
                owned,
                self.buffer.dtype,
                self.unit.name,
            )
            self._arriving = target, arriving, flags

    def settle(self) -> None:
        """Add what has arrived in host memory to the owned slice there."""
        if self._arriving is None:
            return
        (result, arriving, flags), self._arriving = self._arriving, None
        arriving.wait()
        result[self._slice_numel :].zero_()
        self._take(result, flags)

    def _take(self, result: torch.Tensor, flags: list[bool] | None) -> None:
        if self._loss_scale is not None and self.found_inf is not None:
            self._loss_scale.unscale(self.mean.parts_of(result), self.found_inf)
        self.mean.add(result, flags)
        if self.mean.has_home:
            # It may lie in the buffer, where others may not come before it is elsewhere.
            self.needs_buffer = True

    def read_unit_flag(self) -> bool:
        """Whether any rank had set the flag of the last reduce (waits for an accelerator)."""
        flag, self._unit_flag = self._unit_flag, None
        return flag is not None and self._collectives.read(flag.view(1), [self._own_flag])[0]

    def zero(self, *, set_to_none: bool) -> None:
        """What `zero_grad` means: no gradients, or zeros where there were some."""
        self.clear(keep_means=not set_to_none)
        self.mean.zero()
        self.forget_overflow()

    def clear(self, *, keep_means: bool = False) -> None:
        """Forget local gradients, and the owned means too unless told to keep them."""
        self._filled.clear()
        self._carried.clear()
        self._arrived.clear()
        self.carry = None
        self.drop_sum()
        self._arriving = None
        self._free_buffer()
        if not keep_means:
            self.mean.drop()
            self.forget_overflow()

    def drop_sum(self) -> None:
        """Forget what is summed in this node; a reduce under way begins anew."""
        self.node_sum, self._goes_on = None, False

    def forget_backward(self) -> None:
        """A backward has failed: what only it has brought goes."""
        earlier = self.node_sum if self._goes_on else None
        self.clear(keep_means=earlier is not None or not self.mean.is_fresh)
        self.node_sum = earlier
        self._expected = self._all

    def forget_parameter(self, index: int) -> None:
        """The gradient of one parameter is gone: what is summed in nodes, too."""
        if self.node_sum is None:
            return
        first, end = self._collectives.part_range(self.unit.layout.strides)
        for span in self.unit.layout.spans[index]:
            for low, high in ((span.start, span.start + span.numel), (span.flag, span.flag + 1)):
                if low < end and high > first:
                    self.node_sum[max(low - first, 0) : high - first] = 0

    def scale_by(self, loss_scale: LossScale) -> None:
        """From now on what is reduced is this many times too large."""
        self._loss_scale = loss_scale
        self.found_inf = torch.zeros((), device=self.mean.device)

    def forget_overflow(self) -> None:
        """The gradients that were not finite are gone."""
        if self.found_inf is not None:
            self.found_inf.zero_()

    # Details ----------------------------------------------------------------------------------

    def _make_buffer(self) -> None:
        """The buffer, and the views by which gradients and flags are written to it."""
        layout, device = self.unit.layout, self.unit.flat.device
        self.buffer = torch.zeros(
            layout.gradient_numel, dtype=self.unit.dtypes.reduce, device=device
        )
        self._trailers = _trailers(self.buffer, layout)
        self._unit_flags = [trailer[..., -1] for trailer in self._trailers]
        # Where each parameter's gradient goes: parts in memory order, and a view shaped like the
        # parameter where no slice border cuts it.
        self._parts = [_parts(self.buffer, spans, layout) for spans in layout.spans]
        self._wholes = [
            self.buffer.as_strided(view.size(), view.stride(), spans[0].start)
            if len(spans) == 1
            else None
            for spans, view in zip(layout.spans, self.unit.views, strict=True)
        ]
        # What lies between parameters, where it would count in the scale of a block.
        self._gaps = _gaps(self.buffer, layout) if self._collectives.quantizes_gradients else []

    def _take_buffer(self) -> None:
        self.needs_buffer = False
        if not self._keeps_buffer:
            buffers.grow(self.buffer)
        elif not self.mean.move_out(self._is_held):
            # Somebody has kept gradients that lie there: theirs it is, as in plain PyTorch.
            self._make_buffer()

    def _is_held(self) -> bool:
        """Somebody has a tensor of the buffer's memory."""
        return buffers.num_owners(self.buffer) > self._num_owners

    def _free_buffer(self) -> None:
        if not self._keeps_buffer and not self.needs_buffer and self._pending is None:
            buffers.free(self.buffer)
            self.needs_buffer = True

    def _zero_missing(self) -> None:
        if len(self._filled) == len(self._all):
            return
        for index, parts in enumerate(self._parts):
            if index not in self._filled:
                for target, _ in parts:
                    target.zero_()

    def _write_flags(self, unit_flag: bool) -> None:
        present = self._filled | self._carried
        complete = len(present) == len(self._all)
        for trailer in self._trailers:
            trailer.fill_(int(complete))
        if not complete:
            for index in present:
                for span in self.unit.layout.spans[index]:
                    self.buffer[span.flag] = 1
        for flag in self._unit_flags:
            flag.fill_(int(unit_flag))


def _gaps(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The parts of the buffer that hold no gradient; trailers among them."""
    gaps, end = [], 0
    for span in sorted((one for spans in layout.spans for one in spans), key=lambda one: one.start):
        if span.start > end:
            gaps.append(buffer[end : span.start])
        end = span.start + span.numel
    return [*gaps, buffer[end:]] if end < buffer.numel() else gaps


def _trailers(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Views of all trailers: one strided view where they are equal, else one for each slice."""
    if layout.is_whole:
        return [buffer[first:end] for first, end in layout.trailers]
    return [buffer.view(layout.num_slices, -1)[:, layout.slice_numels[0] :]]


def _parts(
    buffer: torch.Tensor, spans: Sequence[Span], layout: Layout
) -> list[tuple[torch.Tensor, int]]:
    """Views that one parameter's gradient goes to, each with its first element in the parameter.

    At most three, however many ranks there are: slices that lie completely in the parameter are the
    rows of one view.
    """
    full = None if layout.is_whole else layout.slice_numels[0]
    rows = [span for span in spans if span.numel == full]
    rest = [span for span in spans if span.numel != full]
    found = [(buffer[span.start : span.start + span.numel], span.offset) for span in rest]
    if rows:
        sizes, strides = (len(rows), rows[0].numel), (layout.strides[0], 1)
        found.append((buffer.as_strided(sizes, strides, rows[0].start), rows[0].offset))
    return found
