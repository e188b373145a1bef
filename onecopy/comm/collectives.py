"""Gather and reduce as handles: the only file that issues collectives for units.

Two verbs on flat tensors. `gather` collects every rank's slice into its final place; `reduce` sums
the ranks' gradient buffers, in rank order and in fp32 at least, and leaves each owner its slice of
the mean. Both return a `Pending` whose work is under way.

On Gloo both are messages from rank to rank, tagged with the unit: half the bytes of Gloo's own
reduce_scatter, as fast as its broadcasts, a defined order of summation, and no order between units
that ranks would have to keep. Other backends (NCCL) use their native collectives.

Volumes (per rank, elements of one flat buffer of n): gather (N-1)/N n, reduce (N-1)/N n over the
shard group, 2 (R-1)/R n over a replica group of R ranks.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from onecopy.comm.agreement import Agreement
from onecopy.comm.groups import Group, Groups
from onecopy.errors import CommunicationError, OneCopyError
from onecopy.events import Events

__all__ = ["Collectives", "Pending"]

Steps = Generator[None, None, torch.Tensor]
# Waits for one hop and returns what it produced: the sum for a reduce, the buffer for a gather.
Wait = Callable[[], torch.Tensor]

# Tags: each model has a range of its own in the process group, each unit two tags in it.
TAGS_PER_MODEL = 1 << 16
GATHER, REDUCE = 0, 1

# Elements that are summed and scaled at a time: two fp32 blocks fit the cache of a core.
BLOCK_NUMEL = 1 << 16


class Pending:
    """A transfer under way. `finish` waits for it and returns its result, once.

    Attributes:
        num_bytes: bytes that this rank sends for it.
    """

    __slots__ = ("_result", "_steps", "num_bytes")

    def __init__(self, steps: Steps, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._result: torch.Tensor | None = None
        self._steps: Steps | None = steps
        self.advance()

    def advance(self) -> bool:
        """Wait for the hop under way and start what follows it; True when none follows."""
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration as stop:
                self._result, self._steps = stop.value, None
        return self._steps is None

    def finish(self) -> torch.Tensor:
        """Wait for all that is left; returns the gathered buffer, or the owner's mean."""
        while self._steps is not None:
            self.advance()
        assert self._result is not None, "a transfer ends with a result"
        return self._result


class Collectives:
    """The transfers of one sharded model."""

    def __init__(
        self, groups: Groups, *, key: str, model_number: int, native: bool, events: Events
    ) -> None:
        self.groups = groups
        self.agreement = Agreement(groups.world, key, self._interrupt)
        self._events = events
        # From TAGS_PER_MODEL on: small tags, 0 above all, are those of the user's own messages.
        self._first_tag = (1 + model_number % (1 << 14)) * TAGS_PER_MODEL
        self._hop: _Hop = _NativeHop() if native else _MessageHop()

    def gather(self, flat: torch.Tensor, own: torch.Tensor, unit: int) -> Pending:
        """Collect the slices of all ranks of the shard group into `flat`.

        Args:
            flat: (num_slices * slice_numel,) complete after `finish`, the own slice at once.
            own: (slice_numel,) this rank's values, in the dtype of flat; may be its own slice.
            unit: number of the unit, the same on all ranks.
        """
        group = self.groups.shard
        num_bytes = flat.nbytes // group.size * (group.size - 1)
        return Pending(self._gather(flat, own, group, unit), num_bytes)

    def reduce(self, buffer: torch.Tensor, master_dtype: torch.dtype, unit: int) -> Pending:
        """Sum `buffer` over all ranks; the owner's slice of the mean is the result.

        Args:
            buffer: (num_slices * stride,) in the dtype of the wire; free again after `finish`.
            master_dtype: dtype of the sum and of the result.
            unit: number of the unit, the same on all ranks.
        """
        shard, replica = self.groups.shard, self.groups.replica
        num_bytes = buffer.nbytes // shard.size * (shard.size - 1)
        num_bytes += 2 * (buffer.nbytes // shard.size // replica.size) * (replica.size - 1)
        return Pending(self._reduce(buffer, master_dtype, unit), num_bytes)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the first rank's values, in place (at `shard` only)."""
        group = self.groups.world
        if group.size > 1 and tensor.numel():
            dist.broadcast(tensor, src=group.ranks[0], group=group.process_group)

    def sum_of(
        self, values: torch.Tensor, *, maximum: bool = False, what: str = "a norm"
    ) -> torch.Tensor:
        """Sum (or maximum) of a small tensor over the ranks that own different slices.

        Args:
            what: names it where ranks turn out to want different things.
        """
        group = self.groups.shard
        if group.size > 1:
            operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            self.agreement.scheduled(what)
            with self.agreement.blocked():
                dist.all_reduce(values, operation, group=group.process_group)
        return values

    # Hops -------------------------------------------------------------------------------------

    def _gather(self, flat: torch.Tensor, own: torch.Tensor, group: Group, unit: int) -> Steps:
        place = flat.view(group.size, -1)[group.rank]
        if group.size > 1:
            wait = self._hop.gather(flat, own, group, self._first_tag + 2 * unit + GATHER)
        if place.data_ptr() != own.data_ptr():
            # While the messages are on their way.
            place.copy_(own)
        if group.size > 1:
            yield
            self._blocking(wait, group)
        return flat

    def _reduce(self, buffer: torch.Tensor, master_dtype: torch.dtype, unit: int) -> Steps:
        shard, replica = self.groups.shard, self.groups.replica
        tag = self._first_tag + 2 * unit + REDUCE
        # The sum of all ranks is multiplied by 1/N once, by its owner, in the last hop that sums.
        scale = 1.0 / self.groups.world.size
        part = buffer
        if shard.size > 1:
            wait = self._hop.reduce(
                part, shard, Mean(master_dtype, scale if replica.size == 1 else 1.0), tag
            )
            yield
            part = self._blocking(wait, shard)
        if replica.size > 1:
            # All-reduce as reduce, then gather of the means: the order of summation is defined,
            # and every replica holds the same bits, those that travelled.
            wire = part.to(buffer.dtype)
            wait = self._hop.reduce(wire, replica, Mean(master_dtype, scale), tag)
            yield
            own = self._blocking(wait, replica).to(wire.dtype)
            part = torch.empty_like(wire)
            yield from self._gather(part, own, replica, unit)
        # Never in the storage of the local buffer.
        return part.to(master_dtype, copy=part is buffer)

    def _blocking(self, wait: Wait, group: Group) -> torch.Tensor:
        """Wait for a hop; a failure names the ranks, and divergence explains it where it was."""
        started = time.perf_counter() if self._events.sinks else 0.0
        try:
            with self.agreement.blocked():
                result = wait()
        except OneCopyError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {group.ranks[group.rank]}: a transfer with ranks {list(group.ranks)} "
                f"failed ({error}). Most often a peer has ended; its own output says why"
            ) from error
        if self._events.sinks:
            self._events.emit("wait", seconds=time.perf_counter() - started)
        return result

    def _interrupt(self) -> None:
        """Free a main thread that is blocked in a transfer which will never end."""
        self._hop.interrupt(self.groups.world, self._first_tag + TAGS_PER_MODEL - 1)


class Mean(NamedTuple):
    """What a reduce makes of the ranks' parts: their sum in `dtype`, times `scale`."""

    dtype: torch.dtype
    scale: float


class _Hop(Protocol):
    """One exchange inside one group."""

    def gather(self, flat: torch.Tensor, own: torch.Tensor, group: Group, tag: int) -> Wait: ...

    def reduce(self, buffer: torch.Tensor, group: Group, mean: Mean, tag: int) -> Wait: ...

    def interrupt(self, group: Group, tag: int) -> None: ...


class _MessageHop:
    """Messages from rank to rank (Gloo)."""

    def gather(self, flat: torch.Tensor, own: torch.Tensor, group: Group, tag: int) -> Wait:
        process_group, peers = _process_group(group), _peers(group)
        slices = flat.chunk(group.size)
        works = [process_group.recv([slices[peer]], peer, tag) for peer in peers]
        works += [process_group.send([own], peer, tag) for peer in peers]

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return flat

        return wait

    def reduce(self, buffer: torch.Tensor, group: Group, mean: Mean, tag: int) -> Wait:
        process_group, peers = _process_group(group), _peers(group)
        slices = buffer.chunk(group.size)
        parts = [slices[group.rank] for _ in group.ranks]
        for peer in peers:
            parts[peer] = torch.empty_like(slices[peer])
        works = [process_group.recv([parts[peer]], peer, tag) for peer in peers]
        works += [process_group.send([slices[peer]], peer, tag) for peer in peers]

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return _mean_in_order(parts, group.rank, mean)

        return wait

    def interrupt(self, group: Group, tag: int) -> None:
        """Close the connections: a receive that times out fails every transfer of the group."""
        never = torch.empty(1)
        try:
            work = _process_group(group).recv([never], _peers(group)[0], tag)
            work.wait(datetime.timedelta(milliseconds=1))
        except RuntimeError:
            # The expected end: the time-out is the purpose.
            return


class _NativeHop:
    """The backend's own collectives (NCCL)."""

    def gather(self, flat: torch.Tensor, own: torch.Tensor, group: Group, tag: int) -> Wait:
        work = dist.all_gather_single(flat, own, group=group.process_group, async_op=True)

        def wait() -> torch.Tensor:
            _wait_for(work)
            return flat

        return wait

    def reduce(self, buffer: torch.Tensor, group: Group, mean: Mean, tag: int) -> Wait:
        if buffer.dtype == mean.dtype:
            total = buffer.new_empty(buffer.numel() // group.size)
            work = dist.reduce_scatter_single(
                total, buffer, group=group.process_group, async_op=True
            )

            def wait() -> torch.Tensor:
                _wait_for(work)
                return total.mul_(mean.scale)

            return wait
        # A ring would sum in the low precision of the wire: exchange the slices (the same bytes)
        # and sum them here.
        received = torch.empty_like(buffer)
        work = dist.all_to_all_single(received, buffer, group=group.process_group, async_op=True)

        def wait_and_sum() -> torch.Tensor:
            _wait_for(work)
            return _mean_in_order(list(received.view(group.size, -1)), group.rank, mean)

        return wait_and_sum

    def interrupt(self, group: Group, tag: int) -> None:
        if group.process_group is not None:
            group.process_group.abort()


def _wait_for(work: dist.Work | None) -> None:
    """torch returns no work on ranks outside the group, which cannot be here."""
    assert work is not None, "this rank is in the group"
    work.wait()


def _process_group(group: Group) -> dist.ProcessGroup:
    assert group.process_group is not None, "a rank that is alone sends nothing"
    return group.process_group


def _peers(group: Group) -> list[int]:
    """The other ranks, each rank starting with its right neighbour, so that none is swamped."""
    return [(group.rank + shift) % group.size for shift in range(1, group.size)]


def _mean_in_order(parts: list[torch.Tensor], own: int, mean: Mean) -> torch.Tensor:
    """(parts[0] + parts[1] + ...) * scale, in rank order; overwrites any part but `own`.

    The order makes the sum the same on every backend and run, and equal to what one process gets
    that adds the ranks' gradients one after another. Goes through the parts in blocks that stay in
    the processor's cache: memory is read and written once, not once for each operation.
    """
    if parts[0].dtype == mean.dtype:
        # The result lies in a received part, so that no further memory is needed.
        total = parts[1 if own == 0 else 0]
    else:
        total = torch.empty_like(parts[0], dtype=mean.dtype)
    blocks = [part.split(BLOCK_NUMEL) for part in parts]
    for block, first, second, *rest in zip(total.split(BLOCK_NUMEL), *blocks, strict=True):
        if block.dtype == first.dtype:
            torch.add(first, second, out=block)
        else:
            block.copy_(first).add_(second)
        for other in rest:
            block.add_(other)
        if mean.scale != 1.0:
            block.mul_(mean.scale)
    return total
