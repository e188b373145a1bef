"""In which hops a gather or a reduce goes, and what each of them sends.

The ranks that share something are in one group (*near*), or in several, whose ranks of the same
place hold the same (*far*): replicas of the shard group, or the nodes over which it is spread. A
gather comes from far, then from near; a sum goes near, then far, and may wait in between. A group
that is itself spread over nodes is gathered and summed in hops of its own.

A long sum is made in *windows*, pieces of what each rank handles: while one is on its way to other
nodes, the next is decoded, added and coded.

Sources: MiCS (Zhang et al. 2022) section 3, ZeRO++ (Wang et al. 2023) section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from onecopy.comm.quantized import Quantized, Transports
from onecopy.comm.transport import Division, Finish, Hop, Mean, Transport, parts_to_sum, shares

if TYPE_CHECKING:
    from onecopy.comm.groups import Group, Groups
    from onecopy.comm.nodes import Nodes

__all__ = ["Hops", "Names", "Reduction", "Started", "Steps"]

Steps = Generator[None, None, torch.Tensor]
# What goes on, the bytes that this rank sends for it, and those of them that leave its node.
Started = tuple[Steps, int, int]
# The verb and the unit's name, for whoever tells of a wait.
Names = tuple[str, str]
# To whom, and how many bytes.
Sent = tuple[int, int]
Blocking = Callable[[Finish, "Group", Names], torch.Tensor]
Starting = Callable[[Callable[[], Finish], "Group"], Finish]


class Reduction(NamedTuple):
    """What a sum is made of, and what comes of it.

    hop: how the buffer is divided among the shard group.
    wire_dtype: in which it travels. dtype: of the sum. in_place: see Mean.
    """

    hop: Hop
    wire_dtype: torch.dtype
    dtype: torch.dtype
    in_place: bool = False


class Hops:
    """The hops of one model's transfers.

    Args:
        starting: begins one hop. blocking: waits for it.
    """

    def __init__(
        self, groups: Groups, transports: Transports, starting: Starting, blocking: Blocking
    ) -> None:
        self._groups = groups
        self._transports = transports
        self._starting = starting
        self._blocking = blocking
        # The sum of all ranks is multiplied by it once, by its owner, in the last hop that sums.
        self._scale = 1.0 / groups.world.size
        # The nodes over which it is spread, unless each of them, or each few, has all of it.
        self._spread = groups.nodes if groups.replica.size == 1 else None
        # By tag and kind of transfer: the hop, and what this rank sends for it.
        self._known: dict[tuple[int, Hashable], tuple[Hop, tuple[int, int]]] = {}

    # Gathers ----------------------------------------------------------------------------------

    def gather(
        self,
        flat: torch.Tensor,
        own: torch.Tensor | None,
        hop: Hop,
        names: Names,
        transport: Transport,
        *,
        secondary: torch.Tensor | None = None,
    ) -> Started:
        """See `Collectives.gather_values`.

        Args:
            transport: of the hop that goes far, or of the only one.
        """
        nodes, has_own = self._groups.nodes, own is not None
        sent = self._sent_by_gather(hop, flat.dtype, nodes, transport, has_own)
        if nodes is None or secondary is None:
            steps = self._gather_in(flat, own, hop, nodes, names, transport)
        else:
            steps = self._gather_over(flat, own, hop, nodes, names, (transport, secondary))
        return steps, *self._counted(sent, hop, (flat.dtype, transport, has_own))

    def _gather_in(
        self,
        flat: torch.Tensor,
        own: torch.Tensor | None,
        hop: Hop,
        nodes: Nodes | None,
        names: Names,
        transport: Transport,
    ) -> Steps:
        """Within a group that is spread over `nodes`, or is in one."""
        if nodes is not None:
            low, high = nodes.own_range(hop.numels)
            return self._gather_over(flat, own, hop, nodes, names, (transport, flat[low:high]))
        assert own is not None, "in one node only this rank has its slice"
        return self._gather_once(flat, own, hop, names, transport)

    def _gather_over(
        self,
        flat: torch.Tensor,
        own: torch.Tensor | None,
        hop: Hop,
        nodes: Nodes,
        names: Names,
        across: tuple[Transport, torch.Tensor],
    ) -> Steps:
        """Across nodes into what this rank handles, unless that has its values; then inside."""
        transport, part = across
        if own is not None:
            hops = _column_hops(hop, nodes)
            parts = part.split_with_sizes([sum(one.numels) for one in hops])
            transfers = [
                self._gather_once(
                    one,
                    own if column.numels[column.group.rank] else own[:0],
                    column,
                    names,
                    transport,
                )
                for column, one in zip(hops, parts, strict=True)
            ]
            yield from _together(transfers)
        plain = self._transports.plain
        inside = nodes.inside_hop(hop)
        return (yield from self._gather_in(flat, part, inside, nodes.inner, names, plain))

    def _gather_once(
        self,
        flat: torch.Tensor,
        own: torch.Tensor,
        hop: Hop,
        names: Names,
        transport: Transport,
    ) -> Steps:
        group = hop.group
        place = flat.narrow(0, sum(hop.numels[: group.rank]), hop.numels[group.rank])
        if group.size > 1:
            wait = self._starting(partial(transport.gather, flat, own, hop), group)
        if place.data_ptr() != own.data_ptr():
            # While the messages are on their way.
            place.copy_(own)
        if group.size > 1:
            yield
            self._blocking(wait, group, names)
        return flat

    def _sent_by_gather(
        self,
        hop: Hop,
        dtype: torch.dtype,
        nodes: Nodes | None,
        transport: Transport,
        has_own: bool,
    ) -> Iterator[Sent]:
        own = transport.num_bytes(hop, dtype)[hop.group.rank] if has_own else 0
        # The slice of this rank lies in the first of what it handles.
        to = hop.group if nodes is None else nodes.columns[0].group
        for place, rank in enumerate(to.ranks):
            if place != to.rank:
                yield rank, own
        if nodes is not None:
            plain, inside = self._transports.plain, nodes.inside_hop(hop)
            yield from self._sent_by_gather(inside, dtype, nodes.inner, plain, True)

    # Sums -------------------------------------------------------------------------------------

    def reduce(
        self,
        buffer: torch.Tensor,
        into: Reduction,
        names: Names,
        node_sum: torch.Tensor | None,
    ) -> Started:
        """Near, then far: the owner's slice of the mean of all ranks."""
        near = self._near_hop(into.hop)
        pieces = [
            near if window is None else near._replace(window=window, begin=window[0])
            for window in self._windows(near)
        ]
        transfers = [self._reduce_window(buffer, into, one, names, node_sum) for one in pieces]
        sent = self._sent_by_reduce(pieces, into)
        return _in_windows(transfers), *self._counted(sent, into.hop, ("reduce", *into[1:]))

    def reduce_inside(
        self,
        buffer: torch.Tensor,
        into: Reduction,
        names: Names,
        node_sum: torch.Tensor | None,
    ) -> Started:
        """Near only: the sum over this node, or replica, of what this rank handles."""
        near = self._near_hop(into.hop)

        def steps() -> Steps:
            part = yield from self._reduce_near(buffer, near, into, names)
            if node_sum is not None:
                return node_sum.add_(part)
            return part.to(into.dtype, copy=part is buffer)

        sent = self._sent_near(near, into)
        return steps(), *self._counted(sent, into.hop, ("inside", *into[1:]))

    def reduce_across(self, node_sum: torch.Tensor, into: Reduction, names: Names) -> Started:
        """Far, what was summed near before."""
        steps = self._reduce_far(node_sum, into, None, names)
        sent = self._sent_far(into, None)
        return steps, *self._counted(sent, into.hop, ("across", *into[1:]))

    def _near_hop(self, hop: Hop) -> Hop:
        return hop if self._spread is None else self._spread.inside_hop(hop)

    @property
    def _goes_far(self) -> bool:
        return self._spread is not None or self._groups.replica.size > 1

    def _windows(self, near: Hop) -> list[tuple[int, int] | None]:
        """Pieces of what each rank handles, the same for ranks that handle the same elsewhere."""
        inside = self._transports.inside
        are_equal = len({len(one) for one in self._groups.node_ranks}) == 1
        if not isinstance(inside, Quantized) or near.group.size == 1 or not are_equal:
            return [None]
        if self._spread is None or self._spread.inner is not None:
            return [None]
        longest, step = max(near.numels), inside.window_numel
        if longest <= step:
            return [None]
        return [(low, min(low + step, longest)) for low in range(0, longest, step)]

    def _reduce_window(
        self,
        buffer: torch.Tensor,
        into: Reduction,
        near: Hop,
        names: Names,
        node_sum: torch.Tensor | None,
    ) -> Steps:
        part = yield from self._reduce_near(buffer, near, into, names)
        if node_sum is not None:
            low, high = near.window or (0, node_sum.numel())
            part = node_sum[low:high].add_(part)
        if self._goes_far:
            return (yield from self._reduce_far(part, into, near.window, names))
        # Never in the storage of the local buffer, which this is in a world of one rank.
        return part.to(into.dtype, copy=part is buffer)

    def _reduce_near(self, buffer: torch.Tensor, near: Hop, into: Reduction, names: Names) -> Steps:
        nodes = self._groups.nodes if self._spread is None else self._spread.inner
        goes_far = self._goes_far
        in_place = into.in_place and not goes_far and nodes is None
        mean = Mean(into.dtype, 1.0 if goes_far else self._scale, in_place)
        return self._reduce_in(buffer, near, nodes, mean, names)

    def _reduce_in(
        self, buffer: torch.Tensor, hop: Hop, nodes: Nodes | None, mean: Mean, names: Names
    ) -> Steps:
        """Within a group that is spread over `nodes`, or is in one."""
        transport = self._transports.inside
        if nodes is None:
            return (yield from self._reduce_once(buffer, hop, mean, names, transport))
        inside, of_node = nodes.inside_hop(hop), Mean(mean.dtype, 1.0)
        part = yield from self._reduce_in(buffer, inside, nodes.inner, of_node, names)
        hops = _column_hops(hop, nodes)
        return (yield from self._sum_columns(part.to(buffer.dtype), hops, mean, names, transport))

    def _reduce_once(
        self, buffer: torch.Tensor, hop: Hop, mean: Mean, names: Names, transport: Transport
    ) -> Steps:
        """In one hop; by equal parts where one slice is far longer than others."""
        if hop.group.size == 1:
            # What travels further is made of it as it is.
            return buffer
        summed = hop.numels if hop.window is not None else parts_to_sum(hop.numels)
        if summed is not hop.numels:
            mean = mean._replace(in_place=False)
        start = partial(transport.reduce, buffer, mean, hop._replace(numels=summed))
        wait = self._starting(start, hop.group)
        yield
        part = self._blocking(wait, hop.group, names)
        if summed is not hop.numels:
            # With what all ranks have sent: given back before the sums of others come.
            del wait
            wait = self._starting(partial(transport.deal, part, summed, hop), hop.group)
            yield
            part = self._blocking(wait, hop.group, names)
        return part

    def _sum_columns(
        self,
        part: torch.Tensor,
        hops: list[Hop],
        mean: Mean,
        names: Names,
        transport: Transport,
    ) -> Steps:
        """Across nodes: what this rank handles, to the owners. Its own lies in the first."""
        parts = part.split_with_sizes([sum(one.numels) for one in hops])
        transfers = [
            self._sum(one, column, mean, names, transport)
            for column, one in zip(hops, parts, strict=True)
        ]
        return (yield from _together(transfers))[0]

    def _sum(
        self, buffer: torch.Tensor, hop: Hop, mean: Mean, names: Names, transport: Transport
    ) -> Steps:
        wait = self._starting(partial(transport.reduce, buffer, mean, hop), hop.group)
        yield
        return self._blocking(wait, hop.group, names)

    def _reduce_far(
        self, part: torch.Tensor, into: Reduction, window: tuple[int, int] | None, names: Names
    ) -> Steps:
        """From sums over this node, or this replica, to the mean of all ranks at its owner."""
        transport = self._transports.across
        mean, wire = Mean(into.dtype, self._scale), part.to(self._wire_dtype(into))
        if self._spread is not None:
            hops = _column_hops(into.hop, self._spread, window)
            return (yield from self._sum_columns(wire, hops, mean, names, transport))
        # All-reduce as reduce, then gather of the means: the order of summation is defined,
        # and every replica holds the same bits, those that travelled.
        far = self._replica_hop(into.hop)
        own = yield from self._sum(wire, far, mean, names, transport)
        whole = torch.empty_like(wire)
        own = own.to(wire.dtype)
        yield from self._gather_once(whole, own, far._replace(tag=far.tag - 1), names, transport)
        return whole.to(into.dtype)

    def _replica_hop(self, hop: Hop) -> Hop:
        """The hop between those that hold the same slice, by equal chunks of it."""
        replica, rank = self._groups.replica, hop.group.rank
        chunks = (hop.numels[rank] // replica.size,) * replica.size
        return Hop(replica, chunks, hop.tag, hop.exact_of(rank))

    def _wire_dtype(self, into: Reduction) -> torch.dtype:
        """In which a sum goes far: codes are best made of what was not rounded before."""
        is_coded = isinstance(self._transports.across, Quantized)
        return into.dtype if is_coded else into.wire_dtype

    # What they send ---------------------------------------------------------------------------

    def _counted(self, sent: Iterable[Sent], hop: Hop, kind: Hashable) -> tuple[int, int]:
        """The bytes that are sent, and those of them that leave the node.

        They are the same in every step, and there is one number for each rank: so they are counted
        when a unit is first sent like this.

        Args:
            sent: not begun: gone through only where it has to be counted.
            hop, kind: all that it depends on.
        """
        known = self._known.get((hop.tag, kind))
        if known is None or known[0] != hop:
            to = list(sent)
            away = sum(num_bytes for rank, num_bytes in to if self._groups.is_away(rank))
            known = hop, (sum(num_bytes for _, num_bytes in to), away)
            self._known[hop.tag, kind] = known
        return known[1]

    def _sent_by_reduce(self, pieces: list[Hop], into: Reduction) -> Iterator[Sent]:
        for one in pieces:
            yield from self._sent_near(one, into)
            yield from self._sent_far(into, one.window)

    def _sent_near(self, near: Hop, into: Reduction) -> Iterator[Sent]:
        nodes = self._groups.nodes if self._spread is None else self._spread.inner
        return self._sent_in(near, nodes, into)

    def _sent_in(self, hop: Hop, nodes: Nodes | None, into: Reduction) -> Iterator[Sent]:
        transport, rank = self._transports.inside, hop.group.rank
        if nodes is not None:
            yield from self._sent_in(nodes.inside_hop(hop), nodes.inner, into)
            for column in _column_hops(hop, nodes):
                yield from _sent(transport, column, into.wire_dtype)
            return
        summed = hop.numels if hop.window is not None else parts_to_sum(hop.numels)
        yield from _sent(transport, hop._replace(numels=summed), into.wire_dtype)
        if summed is not hop.numels:
            dealt = shares(rank, summed, hop.numels)
            for place, (to, numel) in enumerate(zip(hop.group.ranks, dealt, strict=True)):
                if place != rank:
                    yield to, numel * into.dtype.itemsize

    def _sent_far(self, into: Reduction, window: tuple[int, int] | None) -> Iterator[Sent]:
        transport, dtype = self._transports.across, self._wire_dtype(into)
        if self._spread is not None:
            for column in _column_hops(into.hop, self._spread, window):
                yield from _sent(transport, column, dtype)
        elif self._groups.replica.size > 1:
            far = self._replica_hop(into.hop)
            yield from _sent(transport, far, dtype)
            # Its chunk of the mean goes to each of the others.
            own = transport.num_bytes(far, dtype)[far.group.rank]
            others = (one for place, one in enumerate(far.group.ranks) if place != far.group.rank)
            yield from ((rank, own) for rank in others)


def _sent(transport: Transport, hop: Hop, dtype: torch.dtype) -> Iterator[Sent]:
    """What a rank sends of a buffer that is reduced: all but its own part."""
    sizes = zip(hop.group.ranks, transport.num_bytes(hop, dtype), strict=True)
    return (one for place, one in enumerate(sizes) if place != hop.group.rank)


def _column_hops(hop: Hop, nodes: Nodes, window: tuple[int, int] | None = None) -> list[Hop]:
    """The hops across nodes that a hop over all their ranks consists of, for this rank.

    Args:
        window: only these elements of what it handles.
    """
    low, high = nodes.own_range(hop.numels)
    first, last = (low, high) if window is None else (low + window[0], low + window[1])
    hops = []
    for column in nodes.columns:
        numels = []
        begin = max(low, first)
        for numel in column.numels(hop.numels):
            numels.append(max(0, min(low + numel, last) - max(low, first)))
            low += numel
        exact = Division(hop.numels, hop.exact).exact_between(begin, begin + sum(numels))
        start = 0 if window is None else window[0]
        hops.append(Hop(column.group, tuple(numels), hop.tag, exact, begin=start))
    return hops


def _in_windows(transfers: list[Steps]) -> Steps:
    """Side by side, so that each is on its way while others are worked on; one after another."""
    if len(transfers) == 1:
        return transfers[0]
    return _joined(transfers)


def _joined(transfers: list[Steps]) -> Steps:
    return torch.cat((yield from _together(transfers)))


def _together(transfers: list[Steps]) -> Generator[None, None, list[torch.Tensor]]:
    """Several transfers, each a step further before any goes on; their results."""
    results: dict[int, torch.Tensor] = {}
    running = dict(enumerate(transfers))
    while running:
        for number, steps in list(running.items()):
            try:
                next(steps)
            except StopIteration as stop:
                results[number] = stop.value
                del running[number]
        if running:
            yield
    return [results[number] for number in range(len(transfers))]
