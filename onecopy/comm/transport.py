"""How the bytes of one hop travel: the only file that issues collectives for units.

On Gloo as messages from rank to rank, tagged with the unit: half the bytes of Gloo's own
reduce_scatter, as fast as its broadcasts, a defined order of summation, and no order between units
that ranks would have to keep. Other backends (NCCL) use their native collectives.

Slices may be unequal, and empty, where parameters are not cut. The sum of a reduce then needs as
many parts of its owner's length as there are ranks, on Gloo and where the wire is narrower than
the sum.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from onecopy.comm.groups import Group

__all__ = ["Hop", "Mean", "Messages", "Native", "Transport", "Wait"]

# Waits for one hop and returns what it produced: the sum for a reduce, the buffer for a gather.
Wait = Callable[[], torch.Tensor]

# Elements that are summed and scaled at a time: two fp32 blocks fit the cache of a core.
BLOCK_NUMEL = 1 << 16


class Hop(NamedTuple):
    """One exchange inside one group: how many elements each rank's slice has; some have none."""

    group: Group
    numels: Sequence[int]
    tag: int

    @property
    def is_even(self) -> bool:
        """All slices are equal."""
        return self.numels.count(self.numels[0]) == len(self.numels)


class Mean(NamedTuple):
    """What a reduce makes of the ranks' parts: their sum in `dtype`, times `scale`."""

    dtype: torch.dtype
    scale: float


class Transport(Protocol):
    """How a hop is made."""

    def gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop) -> Wait: ...

    def reduce(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Wait: ...

    def interrupt(self, group: Group, tag: int) -> None: ...


class Messages:
    """Messages from rank to rank (Gloo); empty slices send none."""

    def gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop) -> Wait:
        group, slices = hop.group, flat.split_with_sizes(hop.numels)
        works = _exchange(hop, slices, [own for _ in group.ranks])

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return flat

        return wait

    def reduce(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Wait:
        group, slices = hop.group, buffer.split_with_sizes(hop.numels)
        own = slices[group.rank]
        parts = [own if rank == group.rank else torch.empty_like(own) for rank in range(group.size)]
        works = _exchange(hop, parts, slices)

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


class Native:
    """The backend's own collectives (NCCL)."""

    def gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop) -> Wait:
        group = hop.group
        if hop.is_even:
            works = [dist.all_gather_single(flat, own, group=group.process_group, async_op=True)]
        else:
            works = [
                dist.broadcast(part, source, group=group.process_group, async_op=True)
                for part, source in _parts_of_ranks(flat, hop, own)
            ]

        def wait() -> torch.Tensor:
            _wait_for(works)
            return flat

        return wait

    def reduce(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Wait:
        group = hop.group
        if buffer.dtype == mean.dtype:
            return self._reduce_on_the_way(buffer, mean, hop)
        # A ring would sum in the low precision of the wire: exchange the slices (the same bytes)
        # and sum them here.
        own = hop.numels[group.rank]
        received = buffer.new_empty(own * group.size)
        work = dist.all_to_all_single(
            received,
            buffer,
            [own] * group.size,
            list(hop.numels),
            group=group.process_group,
            async_op=True,
        )

        def wait_and_sum() -> torch.Tensor:
            _wait_for([work])
            return _mean_in_order(list(received.view(group.size, -1)), group.rank, mean)

        return wait_and_sum

    def _reduce_on_the_way(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Wait:
        """Sums are made by the backend as slices pass from rank to rank."""
        group = hop.group
        total = buffer.new_empty(hop.numels[group.rank])
        if hop.is_even:
            works = [
                dist.reduce_scatter_single(total, buffer, group=group.process_group, async_op=True)
            ]
        else:
            total.copy_(buffer.narrow(0, sum(hop.numels[: group.rank]), total.numel()))
            works = [
                dist.reduce(part, owner, group=group.process_group, async_op=True)
                for part, owner in _parts_of_ranks(buffer, hop, total)
            ]

        def wait() -> torch.Tensor:
            _wait_for(works)
            return total.mul_(mean.scale)

        return wait

    def interrupt(self, group: Group, tag: int) -> None:
        if group.process_group is not None:
            group.process_group.abort()


def _wait_for(works: Sequence[dist.Work | None]) -> None:
    """torch returns no work on ranks outside the group, which cannot be here."""
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def _parts_of_ranks(
    buffer: torch.Tensor, hop: Hop, own: torch.Tensor
) -> Iterator[tuple[torch.Tensor, int]]:
    """The slices that are not empty, this rank's replaced by `own`, with their global ranks."""
    group = hop.group
    for place, part in enumerate(buffer.split_with_sizes(hop.numels)):
        if part.numel():
            yield own if place == group.rank else part, group.ranks[place]


def _exchange(
    hop: Hop, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
) -> list[dist.Work]:
    """Start the messages of one hop: one to each peer, and one from it."""
    process_group, peers = _process_group(hop.group), _peers(hop.group)
    works = [
        process_group.recv([received[peer]], peer, hop.tag)
        for peer in peers
        if received[peer].numel()
    ]
    works += [
        process_group.send([sent[peer]], peer, hop.tag) for peer in peers if sent[peer].numel()
    ]
    return works


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
