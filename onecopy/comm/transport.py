"""How the bytes of one hop travel: the only file that issues collectives for units.

On Gloo as messages from rank to rank, tagged with the unit: half the bytes of Gloo's own
reduce_scatter, as fast as its broadcasts, a defined order of summation, and no order between units
that ranks would have to keep. Other backends (NCCL) use their native collectives.

Slices may be unequal, and empty, where parameters are not cut. The owner of a slice receives it
from every other rank before it sums: what is summed in one hop must be about equal.
"""

from __future__ import annotations

import datetime
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from onecopy.comm.groups import Group
from onecopy.comm.neighbours import Link, Neighbours, Post

__all__ = [
    "Division",
    "Finish",
    "Hop",
    "Mean",
    "Messages",
    "Native",
    "Nothing",
    "Parts",
    "Transport",
    "parts_to_sum",
    "shares",
]

# Waits for one hop and returns what it produced: the sum for a reduce, the buffer for a gather.
Finish = Callable[[], torch.Tensor]

# Elements that are summed and scaled at a time: two fp32 blocks fit the cache of a core.
BLOCK_NUMEL = 1 << 16
# How long a transfer that nobody waits for any more may take to end: a peer that has its last step
# still before it, on a busy machine, is to find what it needs for that.
LETTING_GO = datetime.timedelta(seconds=10)
# Of a range of elements.
_first, _end = itemgetter(0), itemgetter(1)


class Division(NamedTuple):
    """How a buffer is divided into the ranks' slices.

    numels: elements of each; some have none.
    exact: first and last + 1 element of what no code may round, ascending (flags of gradients).
    """

    numels: Sequence[int]
    exact: Sequence[tuple[int, int]] = ()

    def exact_between(self, low: int, high: int) -> list[tuple[int, int]]:
        """`exact` within elements [low, high), counted from there."""
        # Found, not looked for: each rank has one, and a hop asks for what each rank has.
        begin = bisect_right(self.exact, low, key=_end)
        stop = bisect_left(self.exact, high, lo=begin, key=_first)
        near = self.exact[begin:stop]
        cut = [(max(first, low) - low, min(end, high) - low) for first, end in near]
        return [(first, end) for first, end in cut if first < end]


class Hop(NamedTuple):
    """One exchange inside one group, of a buffer divided into its ranks' slices.

    window: only these elements of each slice, where it has them (Quantized alone can do it).
    begin: where the window begins that this is made of: tells the hops of one transfer apart.
    """

    group: Group
    numels: Sequence[int]
    tag: int
    exact: Sequence[tuple[int, int]] = ()
    window: tuple[int, int] | None = None
    begin: int = 0

    @property
    def is_even(self) -> bool:
        """All slices are equal."""
        return self.numels.count(self.numels[0]) == len(self.numels)

    def exact_of(self, place: int) -> list[tuple[int, int]]:
        """What is exact of that in the slice of one rank, counted from its start."""
        low, (first, last) = sum(self.numels[:place]), self.range_of(place)
        return Division(self.numels, self.exact).exact_between(low + first, low + last)

    def range_of(self, place: int) -> tuple[int, int]:
        """First and last + 1 element that are exchanged of the slice of one rank."""
        numel = self.numels[place]
        if self.window is None:
            return 0, numel
        return min(self.window[0], numel), min(self.window[1], numel)

    @property
    def lengths(self) -> list[int]:
        """How many elements are exchanged of each slice."""
        ranges = (self.range_of(place) for place in range(self.group.size))
        return [last - first for first, last in ranges]

    def split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """What is exchanged of each slice."""
        parts = buffer.split_with_sizes(list(self.numels))
        ranges = (self.range_of(place) for place in range(self.group.size))
        return [part[first:last] for part, (first, last) in zip(parts, ranges, strict=True)]


def parts_to_sum(numels: Sequence[int]) -> Sequence[int]:
    """How to divide a buffer for summing it: as it is owned, unless one slice is far too long.

    An owner of more than two equal parts would take in N times its slice, several times the whole
    buffer, while others wait for it. All sum an equal part then, and send that on to its owners.
    """
    size, total = len(numels), sum(numels)
    if max(numels) * size <= 2 * total:
        return numels
    return tuple((total + place) // size for place in range(size))


def shares(rank: int, own: Sequence[int], other: Sequence[int]) -> list[int]:
    """How many elements of `rank`'s part lie in each part of another division of the buffer."""
    low, start, found = sum(own[:rank]), 0, []
    high = low + own[rank]
    for numel in other:
        found.append(max(0, min(high, start + numel) - max(low, start)))
        start += numel
    return found


class Mean(NamedTuple):
    """What a reduce makes of the ranks' parts: their sum in `dtype`, times `scale`.

    in_place: it may lie in this rank's part of the buffer, which nobody else reads.
    """

    dtype: torch.dtype
    scale: float
    in_place: bool = False


class Parts(NamedTuple):
    """A buffer, and how many elements of it each rank of a group sends, or is sent."""

    buffer: torch.Tensor
    numels: Sequence[int]

    @property
    def each(self) -> list[torch.Tensor]:
        """The parts, by rank."""
        return list(self.buffer.split_with_sizes(list(self.numels)))


class Transport(Protocol):
    """How a hop is made.

    gather: collect the ranks' slices into `flat`. reduce: sum the slices of one rank there.
    exchange: from each rank to each other what is meant for it, as it is.
    """

    def gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop) -> Finish: ...

    def reduce(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Finish: ...

    def exchange(self, received: Parts, sent: Parts, hop: Hop) -> Finish: ...

    def interrupt(self, group: Group, tag: int) -> None: ...

    def deal(self, part: torch.Tensor, numels: Sequence[int], hop: Hop) -> Finish:
        """From parts of `numels` elements on the ranks to the slices that they own."""
        rank = hop.group.rank
        total = part.new_empty(hop.numels[rank])
        received = Parts(total, shares(rank, hop.numels, numels))
        return self.exchange(received, Parts(part, shares(rank, numels, hop.numels)), hop)

    def num_bytes(self, hop: Hop, dtype: torch.dtype) -> list[int]:
        """What each rank's slice of a buffer of this dtype takes on its way."""
        return [numel * dtype.itemsize for numel in hop.numels]


class Nothing(Transport):
    """Sends nothing: in an imagined world buffers are only as large as they would be.

    Args:
        native: they are those of `Native`, not those of `Messages`.
    """

    def __init__(self, *, native: bool) -> None:
        self._is_native = native

    def gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop) -> Finish:
        return lambda: flat

    def reduce(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Finish:
        first = sum(hop.numels[: hop.group.rank])
        own = buffer[first : first + hop.numels[hop.group.rank]]
        one = torch.empty_like(own)
        is_summed_on_the_way = self._is_native and buffer.dtype == mean.dtype and hop.is_even
        if is_summed_on_the_way:
            return lambda: one
        # What is received beside it: as one tensor, since there may be very many ranks.
        count = hop.group.size - 1 if self._is_native else hop.group.size - 2
        rest = own.new_empty(own.numel() * count)

        def wait(rest: torch.Tensor = rest) -> torch.Tensor:
            # Kept as long as the caller keeps this function, as the parts are.
            return one if one.dtype == mean.dtype else one.to(mean.dtype)

        return wait

    def exchange(self, received: Parts, sent: Parts, hop: Hop) -> Finish:
        return lambda: received.buffer

    def interrupt(self, group: Group, tag: int) -> None:
        """Nobody waits."""


class Messages(Transport):
    """Messages from rank to rank (Gloo), or to and from neighbours; empty slices send none."""

    def __init__(self, neighbours: Neighbours | None = None) -> None:
        self._neighbours = neighbours

    def gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop) -> Finish:
        group, slices = hop.group, flat.split_with_sizes(hop.numels)
        messages = self._exchange(hop, slices, [own for _ in group.ranks])

        def wait() -> torch.Tensor:
            messages.wait()
            return flat

        return wait

    def reduce(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Finish:
        group, slices = hop.group, buffer.split_with_sizes(hop.numels)
        own = slices[group.rank]
        parts = [own if rank == group.rank else torch.empty_like(own) for rank in range(group.size)]
        messages = self._exchange(hop, parts, slices)

        def wait() -> torch.Tensor:
            messages.wait()
            return _mean_in_order(parts, group.rank, mean)

        return wait

    def exchange(self, received: Parts, sent: Parts, hop: Hop) -> Finish:
        to_us, from_us, rank = received.each, sent.each, hop.group.rank
        messages = self._exchange(hop, to_us, from_us)
        to_us[rank].copy_(from_us[rank])

        def wait() -> torch.Tensor:
            messages.wait()
            return received.buffer

        return wait

    def interrupt(self, group: Group, tag: int) -> None:
        """Close the connections: a receive that times out fails every transfer of the group."""
        if self._neighbours is not None:
            self._neighbours.interrupt()
        never = torch.empty(1)
        try:
            work = _process_group(group).recv([never], _peers(group)[0], tag)
            work.wait(datetime.timedelta(milliseconds=1))
        except RuntimeError:
            # The expected end: the time-out is the purpose.
            return

    def _exchange(
        self, hop: Hop, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> _UnderWay:
        """Start the messages of one hop: one to each peer, and one from it."""
        group, tag, near = hop.group, hop.tag, self._neighbours
        links: Mapping[int, Link] = {} if near is None else near.links
        process_group = _process_group(group)
        works: list[dist.Work | Post] = []
        # Now: what has begun is waited for also where another message cannot begin.
        messages = _UnderWay(works)
        for peer in _peers(group):
            into, link = received[peer], links.get(group.ranks[peer])
            if not into.numel():
                continue
            if near is None or link is None:
                works.append(process_group.recv([into], peer, tag))
            else:
                works.append(near.take(into, link, tag))
        for peer in _peers(group):
            part, link = sent[peer], links.get(group.ranks[peer])
            if not part.numel():
                continue
            if near is None or link is None:
                works.append(process_group.send([part], peer, tag))
            else:
                works.append(near.give(part, link, tag))
        return messages


class _UnderWay:
    """Messages that have been started.

    Gloo reads no further from a peer whose message has lost its memory: who deletes a model right
    after a step would find the group blocked. So what nobody has waited for is waited for here.
    """

    def __init__(self, works: list[dist.Work | Post]) -> None:
        self._works = works

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def __del__(self) -> None:
        # Where peers do not come, this rank has failed or will: then the group is of no use.
        while self._works and not sys.is_finalizing():
            with suppress(RuntimeError):
                self._works.pop().wait(LETTING_GO)


class Native(Transport):
    """The backend's own collectives (NCCL)."""

    def gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop) -> Finish:
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

    def reduce(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Finish:
        group = hop.group
        own = hop.numels[group.rank]
        if buffer.dtype == mean.dtype and hop.is_even:
            total = buffer.new_empty(own)
            work = dist.reduce_scatter_single(
                total, buffer, group=group.process_group, async_op=True
            )

            def wait() -> torch.Tensor:
                _wait_for([work])
                return total.mul_(mean.scale)

            return wait
        # A ring would sum in the low precision of the wire, and takes equal slices only: exchange
        # them (the same bytes) and sum them here.
        received = Parts(buffer.new_empty(own * group.size), [own] * group.size)
        finish = self.exchange(received, Parts(buffer, hop.numels), hop)

        def wait_and_sum() -> torch.Tensor:
            parts = list(finish().view(group.size, -1))
            return _mean_in_order(parts, group.rank, mean)

        return wait_and_sum

    def exchange(self, received: Parts, sent: Parts, hop: Hop) -> Finish:
        work: dist.Work | None = dist.all_to_all_single(
            received.buffer,
            sent.buffer,
            list(received.numels),
            list(sent.numels),
            group=hop.group.process_group,
            async_op=True,
        )

        def wait() -> torch.Tensor:
            _wait_for([work])
            return received.buffer

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


def _process_group(group: Group) -> dist.ProcessGroup:
    assert group.process_group is not None, "a rank that is alone sends nothing"
    return group.process_group


def _peers(group: Group) -> list[int]:
    """The other ranks, each rank starting with its right neighbour, so that none is swamped."""
    return [(group.rank + shift) % group.size for shift in range(1, group.size)]


def _mean_in_order(parts: list[torch.Tensor], own: int, mean: Mean) -> torch.Tensor:
    """(parts[0] + parts[1] + ...) * scale, in rank order; overwrites any part, `own` if told so.

    The order makes the sum the same on every backend and run, and equal to what one process gets
    that adds the ranks' gradients one after another. Goes through the parts in blocks that stay in
    the processor's cache: memory is read and written once, not once for each operation.
    """
    # What is summed first may be overwritten by the sum; of later ones it would be lost.
    if parts[0].dtype == mean.dtype and mean.in_place and own < 2:
        total = parts[own]
    elif parts[0].dtype == mean.dtype:
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
