"""Gather and reduce as handles: what a model's units ask for, and in which hops it is done.

Two verbs on flat tensors. `gather` collects every rank's slice into its final place; `reduce` sums
the ranks' gradient buffers, in rank order and in fp32 at least, and leaves each owner its slice of
the mean. Both return a `Pending` whose work is under way.

Volumes (per rank, elements of one flat buffer of n, where slices are equal): gather (N-1)/N n,
reduce (N-1)/N n over the shard group, 2 (R-1)/R n over a replica group of R ranks. Where they are
not, a rank sends its slice N-1 times in a gather, and all that is not its own in a reduce; where
one slice is far longer than others, all but an equal part, and then what of the sum is not its own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist

from onecopy.comm.agreement import Agreement
from onecopy.comm.groups import Group, Groups
from onecopy.comm.stall import Place
from onecopy.comm.transport import (
    Finish,
    Hop,
    Mean,
    Messages,
    Native,
    Nothing,
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
    """The transfers of one sharded model, reported as `events`."""

    def __init__(
        self,
        groups: Groups,
        *,
        key: str,
        model_number: int,
        native: bool,
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
        self._transport: Transport = Native() if native else Messages()
        self._is_imagined = groups.world.is_imagined
        if self._is_imagined:
            self._transport = Nothing(native=native)
        # Held: it lives as long as a model does.
        self._watchdog = watchdog
        if watchdog is not None:
            watchdog.add(self)

    def gather(
        self,
        flat: torch.Tensor,
        own: torch.Tensor,
        numels: Sequence[int],
        unit: int,
        *,
        verb: str = "gather",
    ) -> Pending:
        """Collect the slices of all ranks of the shard group into `flat`.

        Args:
            flat: (sum(numels),) complete after `finish`, the own slice at once.
            own: this rank's values, in the dtype of flat; may be its own slice.
            numels: elements of each slice, 0 allowed.
            unit: number of the unit, the same on all ranks.
            verb: names the wait for it: "gather" or "refresh".
        """
        group = self.groups.shard
        hop = Hop(group, numels, self._tag(unit, GATHER))
        steps = self._gather(flat, own, hop, self._names(verb, unit))
        return Pending(steps, own.nbytes * (group.size - 1))

    def reduce(
        self, buffer: torch.Tensor, numels: Sequence[int], master_dtype: torch.dtype, unit: int
    ) -> Pending:
        """Sum `buffer` over all ranks; the owner's slice of the mean is the result.

        Args:
            buffer: (sum(numels),) in the dtype of the wire; free again after `finish`.
            numels: elements of each slice with its trailer, multiples of the replica group's size.
            master_dtype: dtype of the sum and of the result.
            unit: number of the unit, the same on all ranks.
        """
        rank, replica = self.groups.shard.rank, self.groups.replica
        summed = parts_to_sum(numels)
        num_bytes = buffer.nbytes - summed[rank] * buffer.itemsize
        if summed is not numels:
            kept = shares(rank, summed, numels)[rank]
            num_bytes += (summed[rank] - kept) * master_dtype.itemsize
        own_bytes = numels[rank] * buffer.itemsize
        num_bytes += 2 * (own_bytes // replica.size) * (replica.size - 1)
        owned = Hop(self.groups.shard, numels, self._tag(unit, REDUCE))
        return Pending(self._reduce(buffer, summed, owned, master_dtype, unit), num_bytes)

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

    def _gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop, names: Names) -> Steps:
        group = hop.group
        place = flat.narrow(0, sum(hop.numels[: group.rank]), hop.numels[group.rank])
        if group.size > 1:
            wait = self._transport.gather(flat, own, hop)
        if place.data_ptr() != own.data_ptr():
            # While the messages are on their way.
            place.copy_(own)
        if group.size > 1:
            yield
            self._blocking(wait, group, names)
        return flat

    def _reduce(
        self,
        buffer: torch.Tensor,
        summed: Sequence[int],
        owned: Hop,
        master_dtype: torch.dtype,
        unit: int,
    ) -> Steps:
        """See `reduce`; `summed` says how many elements each rank sums, `owned` who gets them."""
        (shard, numels, tag), replica = owned, self.groups.replica
        names = self._names("reduce", unit)
        # The sum of all ranks is multiplied by 1/N once, by its owner, in the last hop that sums.
        scale = 1.0 / self.groups.world.size
        part = buffer
        if shard.size > 1:
            mean = Mean(master_dtype, scale if replica.size == 1 else 1.0)
            wait = self._transport.reduce(part, mean, Hop(shard, summed, tag))
            yield
            part = self._blocking(wait, shard, names)
            if summed is not numels:
                # With what all ranks have sent: given back before the sums of others come.
                del wait
                wait = self._transport.deal(part, summed, owned)
                yield
                part = self._blocking(wait, shard, names)
        if replica.size > 1:
            # All-reduce as reduce, then gather of the means: the order of summation is defined,
            # and every replica holds the same bits, those that travelled.
            wire = part.to(buffer.dtype)
            chunks = (wire.numel() // replica.size,) * replica.size
            hop = Hop(replica, chunks, tag)
            wait = self._transport.reduce(wire, Mean(master_dtype, scale), hop)
            yield
            own = self._blocking(wait, replica, names).to(wire.dtype)
            part = torch.empty_like(wire)
            hop = Hop(replica, chunks, self._tag(unit, GATHER))
            yield from self._gather(part, own, hop, names)
        # Never in the storage of the local buffer.
        return part.to(master_dtype, copy=part is buffer)

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
        self._transport.interrupt(self.groups.world, self._first_tag + TAGS_PER_MODEL - 1)
