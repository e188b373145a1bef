"""Gather and reduce as handles: what a model's units ask for, and in which hops it is done.

Two verbs on flat tensors. `gather` collects every rank's slice into its final place; `reduce` sums
the ranks' gradient buffers, in rank order and in fp32 at least, and leaves each owner its slice of
the mean. Both return a `Pending` whose work is under way.

Volumes (per rank, elements of one flat buffer of n, where slices are equal): gather (N-1)/N n,
reduce (N-1)/N n over the shard group, 2 (R-1)/R n over a replica group of R ranks. Where they are
not, a rank sends its slice N-1 times in a gather, and all that is not its own in a reduce; where
one slice is far longer than others, all but an equal part, and then what of the sum is not its own.

Where ranks are in Y nodes of X ranks (see nodes.py): a gather takes (Y-1)/N n across nodes and
(X-1)/X n inside, a reduce as much the other way round. What is quantized takes the bytes that
coding.py counts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import torch
import torch.distributed as dist

from onecopy.comm.agreement import Agreement
from onecopy.comm.groups import Group, Groups
from onecopy.comm.quantized import Quantized, Transports
from onecopy.comm.stall import Place
from onecopy.comm.transport import (
    Division,
    Finish,
    Hop,
    Mean,
    Transport,
    parts_to_sum,
    shares,
)
from onecopy.comm.waits import Wait
from onecopy.comm.watchdog import Watchdog
from onecopy.errors import CommunicationError, OneCopyError
from onecopy.events import Events

__all__ = ["Collectives", "Pending"]

Steps = Generator[None, None, torch.Tensor]
# The verb and the unit's name, for whoever tells of a wait.
Names = tuple[str, str]

# Tags: each model has a range of its own in the process group, each unit two tags in it.
TAGS_PER_MODEL = 1 << 16
GATHER, REDUCE = 0, 1


class Pending:
    """A transfer under way. `finish` waits for it and returns its result, once.

    It goes in hops. A buffer that is reduced is read by the first of them alone: it is free again
    when `advance` has returned.

    Attributes:
        num_bytes: bytes that this rank sends for it.
        across_bytes: those of them that leave its node.
    """

    __slots__ = ("_result", "_steps", "across_bytes", "num_bytes")

    def __init__(self, steps: Steps, num_bytes: int, across_bytes: int = 0) -> None:
        self.num_bytes, self.across_bytes = num_bytes, across_bytes
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
    """The transfers of one sharded model, reported as `events`."""

    def __init__(
        self,
        groups: Groups,
        *,
        key: str,
        model_number: int,
        transports: Transports,
        events: Events,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.groups = groups
        self.agreement = Agreement(groups.world, key, self._interrupt, events)
        self.events = events
        # By number; set when there are units.
        self.unit_names: Sequence[str] = ()
        # From TAGS_PER_MODEL on: small tags, 0 above all, are those of the user's own messages.
        self._first_tag = (1 + model_number % (1 << 14)) * TAGS_PER_MODEL
        self._transports = transports
        self._is_imagined = groups.world.is_imagined
        # The sum of all ranks is multiplied by it once, by its owner, in the last hop that sums.
        self._scale = 1.0 / groups.world.size
        # Held: it lives as long as a model does.
        self._watchdog = watchdog
        if watchdog is not None:
            watchdog.add(self)

    def gather(
        self, flat: torch.Tensor, own: torch.Tensor, numels: Sequence[int], unit: int
    ) -> Pending:
        """Collect the slices of all ranks of the shard group into `flat`, exactly.

        Args:
            flat: (sum(numels),) complete after `finish`, the own slice at once.
            own: this rank's values, in the dtype of flat; may be its own slice.
            numels: elements of each slice, 0 allowed.
            unit: number of the unit, the same on all ranks.
        """
        hop = Hop(self.groups.shard, numels, self._tag(unit, GATHER))
        return self._start_gather(
            flat, own, hop, self._names("gather", unit), self._transports.plain
        )

    def gather_values(
        self,
        flat: torch.Tensor,
        own: torch.Tensor | None,
        numels: Sequence[int],
        unit: int,
        *,
        verb: str = "gather",
        secondary: torch.Tensor | None = None,
    ) -> Pending:
        """Collect what parameters compute with, as `gather` does; quantized, where that is wanted.

        All ranks have the same values then: what `as_sent` makes of each slice.

        Args:
            flat: complete after `finish`; the own slice at once, where nothing is quantized.
            own: this rank's values, in the dtype of flat; may be its own slice. None where
                `secondary` has the values, which then leave no node.
            numels: elements of each slice, 0 allowed.
            unit: number of the unit, the same on all ranks.
            verb: names the wait for it: "gather" or "refresh".
            secondary: where there are nodes, memory of its own for what this rank handles of the
                slices (`part_numel` elements), filled when the first hop has ended.
        """
        hop = Hop(self.groups.shard, numels, self._tag(unit, GATHER))
        names, transport = self._names(verb, unit), self._transports.weights
        return self._start_gather(flat, own, hop, names, transport, secondary)

    @property
    def quantizes_values(self) -> bool:
        """What `gather_values` collects is not always what the owners have."""
        is_alone = self.groups.shard.size == 1
        return isinstance(self._transports.weights, Quantized) and not is_alone

    def as_sent(self, own: torch.Tensor) -> torch.Tensor:
        """What `gather_values` makes of this rank's slice, on all ranks."""
        weights = self._transports.weights
        if isinstance(weights, Quantized) and self.quantizes_values:
            return weights.as_sent(own)
        return own

    def part_numel(self, numels: Sequence[int]) -> int:
        """How many elements this rank handles of a buffer with slices of so many."""
        low, high = self.part_range(numels)
        return high - low

    def part_range(self, numels: Sequence[int]) -> tuple[int, int]:
        """The first, and the last + 1, element of them."""
        if self.groups.nodes is None:
            rank = self.groups.shard.rank
            low = sum(numels[:rank])
            return low, low + numels[rank]
        return self.groups.nodes.own_range(numels)

    def reduce(
        self,
        buffer: torch.Tensor,
        division: Division,
        master_dtype: torch.dtype,
        unit: int,
        *,
        node_sum: torch.Tensor | None = None,
        is_boundary: bool = True,
    ) -> Pending:
        """Sum `buffer` over all ranks; the owner's slice of the mean is the result.

        Args:
            buffer: (sum of the division,) in the dtype of the wire; free again after `finish`.
            division: elements of each slice with its trailer, multiples of the replica group's
                size; trailers are exact.
            master_dtype: dtype of the sum and of the result.
            unit: number of the unit, the same on all ranks.
            node_sum: (part_numel,) sums over this node of earlier backwards, which count too.
            is_boundary: False leaves it at the sum over this node, which is then the result.
        """
        replica, nodes = self.groups.replica, self.groups.nodes
        hop = self._shard_hop(division, unit)
        names = self._names("reduce", unit)
        if nodes is None:
            mean = Mean(master_dtype, self._scale if replica.size == 1 else 1.0)
            num_bytes, across = self._bytes_inside(buffer.dtype, hop, master_dtype)
            steps = self._reduce_inside(buffer, hop, mean, names)
        else:
            inside = hop._replace(group=nodes.inside, numels=nodes.numels(hop.numels))
            transport, across = self._transports.inside, 0
            num_bytes = _sent(transport, inside, buffer.dtype)
            steps = self._sum(buffer, inside, Mean(master_dtype, 1.0), names, transport)
        if is_boundary:
            more, leaving = self._bytes_across(hop, self._wire(buffer.dtype, master_dtype))
            num_bytes, across = num_bytes + more, across + leaving
        wire = buffer.dtype if is_boundary else None
        return Pending(
            self._reduce(steps, node_sum, wire, hop, names, master_dtype), num_bytes, across
        )

    def reduce_across(
        self, node_sum: torch.Tensor, division: Division, wire_dtype: torch.dtype, unit: int
    ) -> Pending:
        """What `reduce` has left at the sum over this node: sum it over the nodes.

        Args:
            node_sum: (part_numel,) in the dtype of the sum.
            wire_dtype: in which it travels.
        """
        hop = self._shard_hop(division, unit)
        num_bytes, across = self._bytes_across(hop, self._wire(wire_dtype, node_sum.dtype))
        names = self._names("reduce", unit)
        steps = self._reduce_across(node_sum, wire_dtype, hop, names, node_sum.dtype)
        return Pending(steps, num_bytes, across)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the first rank's values, in place (at `shard` only)."""
        group = self.groups.world
        if group.process_group is not None and tensor.numel():
            # Gloo knows neither strides (it sends what lies behind the first element) nor all
            # dtypes.
            whole = tensor.contiguous()
            data = whole.view(-1).view(torch.uint8)
            dist.broadcast(data, src=group.ranks[0], group=group.process_group)
            if whole is not tensor:
                tensor.copy_(whole)

    def sum_of(
        self, values: torch.Tensor, *, maximum: bool = False, what: str = "a norm"
    ) -> torch.Tensor:
        """Sum (or maximum) of a small tensor over the ranks that own different slices.

        Args:
            what: names it where ranks turn out to want different things.
        """
        group = self.groups.shard
        if group.process_group is not None:
            operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            self.agreement.scheduled(what)
            with Wait("agree", group.ranks, events=self.events), self.agreement.blocked():
                dist.all_reduce(values, operation, group=group.process_group)
        return values

    def share(self, value: float, what: str, device: torch.device) -> list[float]:
        """One number of every rank, in rank order; a collective.

        Args:
            what: names it where ranks turn out to want different things.
            device: one that the group can carry.
        """
        world = self.groups.world
        if self._is_imagined:
            return [value] * world.size
        values = torch.zeros(world.size, dtype=torch.float64, device=device)
        values[world.rank] = value
        if world.size > 1:
            self.agreement.scheduled(what)
            with Wait("agree", world.ranks, events=self.events), self.agreement.blocked():
                dist.all_reduce(values, group=world.process_group)
        numbers: list[float] = values.tolist()
        return numbers

    def read(self, flags: torch.Tensor, expected: list[bool]) -> list[bool]:
        """Which of some numbers that ranks have made together are positive, on the host.

        Args:
            flags: 1-D.
            expected: what is read in an imagined world, where there are no values.
        """
        return expected if self._is_imagined else (flags > 0).tolist()

    @property
    def place(self) -> Place:
        """Where this rank is in training."""
        agreement, events = self.agreement, self.events
        return Place(agreement.position, agreement.last_wish, events.phase, events.num_steps + 1)

    # Hops -------------------------------------------------------------------------------------

    def _tag(self, unit: int, verb: int) -> int:
        return self._first_tag + 2 * unit + verb

    def _names(self, verb: str, unit: int) -> Names:
        return verb, self.unit_names[unit] if unit < len(self.unit_names) else ""

    def _shard_hop(self, division: Division, unit: int) -> Hop:
        tag = self._tag(unit, REDUCE)
        return Hop(self.groups.shard, division.numels, tag, division.exact)

    def _wire(self, wire_dtype: torch.dtype, sum_dtype: torch.dtype) -> torch.dtype:
        """In which a sum goes across nodes: codes are best made of what was not rounded before."""
        return sum_dtype if isinstance(self._transports.across, Quantized) else wire_dtype

    def _bytes_inside(
        self, dtype: torch.dtype, hop: Hop, master_dtype: torch.dtype
    ) -> tuple[int, int]:
        """What a reduce over the shard group sends, in one hop, and what of it leaves the node."""
        (group, rank), summed = (hop.group, hop.group.rank), parts_to_sum(hop.numels)
        sent = self._transports.inside.num_bytes(hop._replace(numels=summed), dtype)
        if summed is not hop.numels:
            dealt = shares(rank, summed, hop.numels)
            sent = [
                one + part * master_dtype.itemsize for one, part in zip(sent, dealt, strict=True)
            ]
        sent[rank] = 0
        away = zip(group.ranks, sent, strict=True)
        return sum(sent), sum(one for to, one in away if self.groups.is_away(to))

    def _bytes_across(self, hop: Hop, dtype: torch.dtype) -> tuple[int, int]:
        """What a reduce sends to those that hold the same part, and what of it leaves the node."""
        replica, transport = self.groups.replica, self._transports.across
        if self.groups.nodes is None:
            chunks = self._replica_hop(hop)
            sizes, own = transport.num_bytes(chunks, dtype), replica.rank
            # Its chunk of the mean goes to each of the others.
            pairs = zip(replica.ranks, sizes, strict=True)
            sent = [(to, size + sizes[own]) for to, size in pairs if to != replica.ranks[own]]
            away = sum(size for to, size in sent if self.groups.is_away(to))
            return sum(size for _, size in sent), away
        leaving = sum(_sent(transport, one, dtype) for one in self._column_hops(hop))
        return leaving, leaving

    def _column_hops(self, hop: Hop) -> list[Hop]:
        """The hops across nodes that a hop over all ranks consists of, for this rank."""
        nodes = self.groups.nodes
        assert nodes is not None, "there are nodes"
        low, _ = nodes.own_range(hop.numels)
        hops = []
        for column in nodes.columns:
            numels = column.numels(hop.numels)
            high = low + sum(numels)
            exact = Division(hop.numels, hop.exact).exact_between(low, high)
            hops.append(Hop(column.group, numels, hop.tag, exact))
            low = high
        return hops

    def _replica_hop(self, hop: Hop) -> Hop:
        """The hop between those that hold the same slice, by equal chunks of it."""
        replica, rank = self.groups.replica, hop.group.rank
        chunks = (hop.numels[rank] // replica.size,) * replica.size
        return Hop(replica, chunks, hop.tag, hop.exact_of(rank))

    def _start_gather(
        self,
        flat: torch.Tensor,
        own: torch.Tensor | None,
        hop: Hop,
        names: Names,
        transport: Transport,
        secondary: torch.Tensor | None = None,
    ) -> Pending:
        nodes = self.groups.nodes
        own_bytes = 0
        if own is not None:
            own_bytes = transport.num_bytes(hop, own.dtype)[hop.group.rank]
        if nodes is None:
            assert own is not None, "without nodes only this rank has its slice"
            steps = self._gather(flat, own, hop, names, transport)
            away = sum(self.groups.is_away(rank) for rank in hop.group.ranks)
            return Pending(steps, own_bytes * (hop.group.size - 1), own_bytes * away)
        low, high = nodes.own_range(hop.numels)
        part = flat[low:high] if secondary is None else secondary
        inside_bytes = part.nbytes * (nodes.inside.size - 1)
        across_bytes = own_bytes * (self.groups.num_nodes - 1)
        steps = self._gather_in_hops(flat, own, part, hop, names, transport)
        return Pending(steps, inside_bytes + across_bytes, across_bytes)

    def _gather(
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
            wait = transport.gather(flat, own, hop)
        if place.data_ptr() != own.data_ptr():
            # While the messages are on their way.
            place.copy_(own)
        if group.size > 1:
            yield
            self._blocking(wait, group, names)
        return flat

    def _gather_in_hops(
        self,
        flat: torch.Tensor,
        own: torch.Tensor | None,
        part: torch.Tensor,
        hop: Hop,
        names: Names,
        transport: Transport,
    ) -> Steps:
        """Across nodes into `part`, unless that has its values; then inside this one."""
        nodes = self.groups.nodes
        assert nodes is not None, "there are nodes"
        if own is not None:
            hops = self._column_hops(hop)
            parts = part.split_with_sizes([sum(one.numels) for one in hops])
            yield from _together(
                self._gather(
                    one,
                    own if across.numels[across.group.rank] else own[:0],
                    across,
                    names,
                    transport,
                )
                for across, one in zip(hops, parts, strict=True)
            )
        inside = Hop(nodes.inside, nodes.numels(hop.numels), hop.tag)
        yield from self._gather(flat, part, inside, names, self._transports.plain)
        return flat

    def _sum(
        self, buffer: torch.Tensor, hop: Hop, mean: Mean, names: Names, transport: Transport
    ) -> Steps:
        """One hop of a reduce; a group of one rank has the sum already."""
        if hop.group.size == 1:
            return buffer.to(mean.dtype, copy=True).mul_(mean.scale)
        wait = transport.reduce(buffer, mean, hop)
        yield
        return self._blocking(wait, hop.group, names)

    def _reduce_inside(self, buffer: torch.Tensor, hop: Hop, mean: Mean, names: Names) -> Steps:
        """Over the shard group, by equal parts where one slice is far longer than others."""
        if hop.group.size == 1:
            # What travels between replicas is made of it as it is.
            return buffer
        summed = parts_to_sum(hop.numels)
        wait = self._transports.inside.reduce(buffer, mean, hop._replace(numels=summed))
        yield
        part = self._blocking(wait, hop.group, names)
        if summed is not hop.numels:
            # With what all ranks have sent: given back before the sums of others come.
            del wait
            wait = self._transports.inside.deal(part, summed, hop)
            yield
            part = self._blocking(wait, hop.group, names)
        return part

    def _reduce(
        self,
        inside: Steps,
        node_sum: torch.Tensor | None,
        wire_dtype: torch.dtype | None,
        hop: Hop,
        names: Names,
        dtype: torch.dtype,
    ) -> Steps:
        """After the hop inside: what was summed before counts too, and then the hop across."""
        part = yield from inside
        if node_sum is not None:
            part = node_sum.add_(part)
        if wire_dtype is None:
            is_buffer = node_sum is None and hop.group.size == 1
            return part.to(dtype, copy=is_buffer)
        part = yield from self._reduce_across(part, wire_dtype, hop, names, dtype)
        return part

    def _reduce_across(
        self,
        part: torch.Tensor,
        wire_dtype: torch.dtype,
        hop: Hop,
        names: Names,
        dtype: torch.dtype,
    ) -> Steps:
        """From sums over this node, or this replica, to the mean of all ranks at its owner."""
        nodes, replica = self.groups.nodes, self.groups.replica
        mean, transport = Mean(dtype, self._scale), self._transports.across
        wire_dtype = self._wire(wire_dtype, dtype)
        if nodes is not None:
            hops = self._column_hops(hop)
            parts = part.to(wire_dtype).split_with_sizes([sum(one.numels) for one in hops])
            # The slice that is this rank's own lies in the first.
            return (
                yield from _together(
                    self._sum(one, across, mean, names, transport)
                    for across, one in zip(hops, parts, strict=True)
                )
            )
        if replica.size > 1:
            # All-reduce as reduce, then gather of the means: the order of summation is defined,
            # and every replica holds the same bits, those that travelled.
            wire = part.to(wire_dtype)
            across = self._replica_hop(hop)
            own = yield from self._sum(wire, across, mean, names, transport)
            part = torch.empty_like(wire)
            gathered = across._replace(tag=hop.tag - REDUCE + GATHER)
            yield from self._gather(part, own.to(wire_dtype), gathered, names, transport)
        # Never in the storage of the local buffer, which this is in a world of one rank.
        return part.to(dtype, copy=hop.group.size == 1 and replica.size == 1)

    def _blocking(self, finish: Finish, group: Group, names: Names) -> torch.Tensor:
        """Wait for a hop; a failure names the ranks, and divergence explains it where it was."""
        verb, unit = names
        try:
            with (
                Wait(verb, group.ranks, unit=unit, events=self.events),
                self.agreement.blocked(),
            ):
                return finish()
        except OneCopyError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {group.ranks[group.rank]}: a transfer with ranks {list(group.ranks)} "
                f"failed ({error}). Most often a peer has ended; its own output says why"
            ) from error

    def _interrupt(self) -> None:
        """Free a main thread that is blocked in a transfer which will never end."""
        for group in self.groups.all:
            if group.process_group is not None:
                self._transports.plain.interrupt(group, self._first_tag + TAGS_PER_MODEL - 1)


def _sent(transport: Transport, hop: Hop, dtype: torch.dtype) -> int:
    """What a rank sends of a buffer that is reduced: all but its own part."""
    sizes = transport.num_bytes(hop, dtype)
    return sum(sizes) - sizes[hop.group.rank]


def _together(transfers: Iterable[Steps]) -> Steps:
    """Several hops side by side; the result is the first one's."""
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
    return results[0]
