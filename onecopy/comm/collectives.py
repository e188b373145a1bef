"""Gather and reduce as handles: what a model's units ask for.

Two verbs on flat tensors. `gather` collects every rank's slice into its final place; `reduce` sums
the ranks' gradient buffers, in rank order and in fp32 at least, and leaves each owner its slice of
the mean. Both return a `Pending` whose work is under way, in the hops of hops.py.

Volumes (per rank, elements of one flat buffer of n, where slices are equal): gather (N-1)/N n,
reduce (N-1)/N n over the shard group, 2 (R-1)/R n over a replica group of R ranks. Where they are
not, a rank sends its slice N-1 times in a gather, and all that is not its own in a reduce; where
one slice is far longer than others, all but an equal part, and then what of the sum is not its own.

Where ranks are in Y nodes of X ranks (see nodes.py): a gather takes (Y-1)/N n across nodes and
(X-1)/X n inside, a reduce as much the other way round. What is quantized takes the bytes that
coding.py counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from onecopy.comm.agreement import Agreement
from onecopy.comm.groups import Group, Groups, explained, raise_explained
from onecopy.comm.hops import Hops, Names, Reduction, Steps
from onecopy.comm.quantized import Quantized, Transports
from onecopy.comm.stall import Place
from onecopy.comm.transport import Division, Finish, Hop
from onecopy.comm.waits import Wait
from onecopy.comm.watchdog import Watchdog
from onecopy.events import Events

__all__ = ["Collectives", "Pending"]

R = TypeVar("R")

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
        self._hops = Hops(groups, transports, self._guarded, self._blocking)
        every = transports.weights, transports.inside, transports.across
        codes = [isinstance(one, Quantized) for one in every]
        # Blocks of what is reduced are coded together, whatever lies in them.
        self.quantizes_gradients = any(codes[1:])
        # What `gather_values` collects is not always what the owners have.
        self.quantizes_values = codes[0] and groups.shard.size > 1
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
        names, plain = self._names("gather", unit), self._transports.plain
        return Pending(*self._hops.gather(flat, own, hop, names, plain))

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
        names, weights = self._names(verb, unit), self._transports.weights
        return Pending(*self._hops.gather(flat, own, hop, names, weights, secondary=secondary))

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
        if self.groups.nodes is None or self.groups.replica.size > 1:
            rank = self.groups.shard.rank
            low = sum(numels[:rank])
            return low, low + numels[rank]
        return self.groups.nodes.own_range(numels)

    def reduce(  # noqa: PLR0913
        self,
        buffer: torch.Tensor,
        division: Division,
        master_dtype: torch.dtype,
        unit: int,
        *,
        node_sum: torch.Tensor | None = None,
        is_boundary: bool = True,
        in_place: bool = False,
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
            in_place: the result may lie in this rank's part of the buffer.
        """
        hop, in_place = self._shard_hop(division, unit), in_place and is_boundary
        into = Reduction(hop, buffer.dtype, master_dtype, in_place)
        names = self._names("reduce", unit)
        reduce = self._hops.reduce if is_boundary else self._hops.reduce_inside
        return Pending(*reduce(buffer, into, names, node_sum))

    def reduce_across(
        self, node_sum: torch.Tensor, division: Division, wire_dtype: torch.dtype, unit: int
    ) -> Pending:
        """What `reduce` has left at the sum over this node: sum it over the nodes.

        Args:
            node_sum: (part_numel,) in the dtype of the sum.
            wire_dtype: in which it travels.
        """
        into = Reduction(self._shard_hop(division, unit), wire_dtype, node_sum.dtype)
        return Pending(*self._hops.reduce_across(node_sum, into, self._names("reduce", unit)))

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

    def over_model(
        self, values: torch.Tensor, *, maximum: bool = False, pipeline_only: bool = False
    ) -> torch.Tensor:
        """Sum (or maximum) of what ranks with other parts of this model have; see meshes.py.

        Args:
            pipeline_only: over the pipeline stages: ranks of a tensor group have the same already.
        """
        groups = self.groups.pipeline if pipeline_only else self.groups.model
        for group in groups:
            self.over(group, values, maximum=maximum)
        return values

    def over(self, group: Group, values: torch.Tensor, *, maximum: bool = False) -> None:
        """Sum (or maximum) of a small tensor over one of the model's groups, in place."""
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        wait = Wait("agree", group.ranks, events=self.events)
        with explained(group), self.agreement.blocked(), wait:
            dist.all_reduce(values, operation, group=group.process_group)

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

    # Details ----------------------------------------------------------------------------------

    def _tag(self, unit: int, verb: int) -> int:
        return self._first_tag + 2 * unit + verb

    def _names(self, verb: str, unit: int) -> Names:
        return verb, self.unit_names[unit] if unit < len(self.unit_names) else ""

    def _shard_hop(self, division: Division, unit: int) -> Hop:
        tag = self._tag(unit, REDUCE)
        return Hop(self.groups.shard, division.numels, tag, division.exact)

    def _blocking(self, finish: Finish, group: Group, names: Names) -> torch.Tensor:
        """Wait for a hop; a failure names the ranks, and divergence explains it where it was."""
        verb, unit = names
        with Wait(verb, group.ranks, unit=unit, events=self.events):
            return self._guarded(finish, group)

    def _guarded(self, act: Callable[[], R], group: Group) -> R:
        """Begin a hop, or wait for it; where a peer has ended, that fails at once."""
        # As `explained` and `Agreement.blocked` do it, for what every transfer comes through: a
        # generator costs several times as much.
        agreement = self.agreement
        agreement.is_blocked = True
        try:
            return act()
        except RuntimeError as error:
            agreement.explain(error)
            raise_explained(group, error)
            raise
        finally:
            agreement.is_blocked = False

    def _interrupt(self) -> None:
        """Free a main thread that is blocked in a transfer which will never end."""
        for group in self.groups.all:
            if group.process_group is not None:
                self._transports.plain.interrupt(group, self._first_tag + TAGS_PER_MODEL - 1)
