"""The reduces of one backward, launched in one order that all ranks have agreed on.

The order is the reverse of the order in which units were first used in forward. Each unit of it is
reduced in every backward, with zeros where this rank has no gradient, so parameters that are unused
on some ranks cannot hang the job. What lies outside that pattern (a unit used for the first time, a
second reentrant checkpoint over the same weights, a parameter that has no gradient any more) sets a
flag that rides along with the last reduce: all ranks see it, and exchange the news.

Where sums stay in nodes until the last backward of a step (stage.sums_at_boundary), so do the news:
a flag would reach the own node only.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from onecopy.core.engine import Engine
    from onecopy.core.gradients import Gradients
    from onecopy.core.step_in_backward import StepInBackward
    from onecopy.core.unit import Unit

__all__ = ["Reduces"]

# Means that are on their way to host memory at a time: one travels while the next is reduced.
MOST_ARRIVING = 2


class Reduces:
    """See the module's docstring.

    Attributes:
        done: units whose gradients have all arrived in this backward.
        passed: units that this backward has left behind for good, with what they have.
        num_launched: how many of the order have been launched.
        absent_everywhere: unit and number there of the parameters that no rank has a gradient for.
        is_boundary: the reduces of this backward end with the means of all ranks.
    """

    def __init__(self, engine: Engine, stepper: StepInBackward | None) -> None:
        self.done: set[Unit] = set()
        self.passed: set[Unit] = set()
        self.num_launched = 0
        self.absent_everywhere: set[tuple[int, int]] = set()
        self.is_boundary = True
        self._engine = engine
        self._stepper = stepper
        self._order: list[Gradients] = []
        # So many of the order may be launched before the end; the last one never is.
        self._num_early = 0
        # The parameters without a gradient of this rank's, as last told to the others.
        self._told: frozenset[tuple[int, int]] = frozenset()
        self._in_flight: deque[Gradients] = deque()
        # With gradients outside the pattern on this rank, of backwards before the boundary.
        self._left_over: set[Gradients] = set()
        # Reduced, and on their way to host memory.
        self._arriving: deque[Gradients] = deque()

    def begin(self, *, is_boundary: bool = True) -> None:
        """A backward begins whose gradients are reduced in it, or later."""
        self.num_launched, self.is_boundary = 0, is_boundary
        self.done.clear()
        self.passed.clear()
        for gradients in self._engine.gradients:
            gradients.begin_backward()

    def forget_order(self) -> None:
        """There are other units than before: the next backward agrees anew."""
        self._order = []

    def agree_on_order(self) -> None:
        """The units to reduce, in order: as they were used, if that was so on all ranks."""
        engine = self._engine
        if not engine.stage.releases:
            # No use of a unit tells a rank that saves meanwhile that the others wait for it.
            engine.collectives.agreement.scheduled("the reduces of a backward")
        if self._order:
            return
        # Where some units are released, ranks may differ in the use of those that stay. These are
        # reduced when a backward ends, when no rank waits for another one's slices any more.
        staying = [one for one in engine.gradients[::-1] if self._waits_for_end(one.unit)]
        used = [
            unit.gradients
            for unit in reversed(engine.used)
            if unit.gradients is not None and not self._waits_for_end(unit)
        ]
        proposal = " ".join(str(gradients.unit.number) for gradients in used)
        proposals = engine.collectives.agreement.exchange("the order of reduces", proposal)
        if not used or any(other != proposal for other in proposals):
            used = [one for one in engine.gradients[::-1] if one not in staying]
        self._order = used + staying
        self._num_early = len(self._order) - max(1, len(staying))

    def _waits_for_end(self, unit: Unit) -> bool:
        return self._engine.stage.releases and not unit.releases

    def launch_complete(self) -> None:
        """Launch what is complete and next in the order, but not what waits for the end."""
        while self.num_launched < self._num_early:
            gradients = self._order[self.num_launched]
            if not gradients.is_complete and gradients.unit not in self.passed:
                return
            self._launch(gradients)
            self.num_launched += 1

    def make_room(self) -> None:
        """Where gradients are cut, at most one unit's full gradients exist at a time."""
        if not self._engine.stage.cut_gradients:
            return
        if self._engine.collectives.groups.num_nodes == 1:
            # Nothing goes far, that would be worth the memory.
            self._finish_all()
            return
        for gradients in list(self._in_flight):
            if gradients.leave_buffer():
                self._in_flight.remove(gradients)
                self._finish(gradients)

    @property
    def has_sums(self) -> bool:
        """Sums are in nodes, of all ranks alike, that are to be summed over the nodes."""
        return any(one.node_sum is not None for one in self._engine.gradients)

    @property
    def has_local(self) -> bool:
        """no_sync has left gradients on the ranks."""
        gradients = self._engine.gradients
        return any(one.has_local for one in gradients if one not in self._left_over)

    def complete(self) -> None:
        """Launch what is left of the order, finish everything, and exchange the news."""
        order = self._order
        rest = order[self.num_launched :]
        late = [one for one in self._engine.gradients if one not in rest and one.has_local]
        for gradients in rest[:-1]:
            self._launch(gradients)
        if not self.is_boundary:
            for gradients in rest[-1:]:
                self._launch(gradients)
            self._finish_all()
            for gradients in late:
                gradients.keep_local()
            self._left_over.update(late)
            self.done.clear()
            return
        if rest:
            self._launch(rest[-1], unit_flag=bool(late) or self._absent_here() != self._told)
        self._finish_all()
        if order and order[-1].read_unit_flag():
            self._exchange_news(late)
        self._settle()
        self.done.clear()
        self._left_over.clear()

    def complete_sums(self) -> None:
        """Sum over the nodes what is in them, and exchange the news of all these backwards."""
        self._engine.collectives.agreement.scheduled("the sums of gradients over nodes")
        self.is_boundary = True
        with_sums = [one for one in self._order if one.node_sum is not None]
        late = [one for one in self._engine.gradients if one.has_local]
        for gradients in with_sums:
            gradients.start_across()
            self._follow(gradients)
        self._finish_all()
        self._exchange_news(late)
        self._settle()
        self._left_over.clear()

    def drop(self, num_launched: int, kept: Collection[int]) -> None:
        """After an exception: launch as many as the furthest rank has, and drop the results.

        Args:
            kept: numbers of the units whose results are used all the same.
        """
        self.done.clear()
        for gradients in self._order[self.num_launched : num_launched]:
            self._launch(gradients)
        while self._in_flight:
            gradients = self._in_flight.popleft()
            self._finish(gradients, keep=gradients.unit.number in kept)
        self._settle()

    # Details ----------------------------------------------------------------------------------

    def _launch(self, gradients: Gradients, *, unit_flag: bool | None = None) -> None:
        gradients.start_reduce(unit_flag=unit_flag, is_boundary=self.is_boundary)
        self._follow(gradients)

    def _follow(self, gradients: Gradients) -> None:
        """A reduce is under way."""
        num_bytes, across_bytes = gradients.reduce_bytes
        self._engine.events.emit(
            "reduce",
            gradients.unit.name,
            num_bytes=num_bytes,
            group="world",
            across_bytes=across_bytes,
        )
        # Bounded: while this one is on its way, older ones finish their hops.
        for older in list(self._in_flight):
            if older.advance_reduce():
                self._in_flight.remove(older)
                self._finish(older)
        self._in_flight.append(gradients)

    def _finish(self, gradients: Gradients, *, keep: bool = True) -> None:
        gradients.finish_reduce(keep=keep)
        if not self.is_boundary:
            return
        self._arriving.append(gradients)
        if self._stepper is not None and keep:
            self._settle()
            self._stepper.reduced(gradients, is_done=gradients.unit in self.done)
        self._settle(MOST_ARRIVING)

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def _settle(self, but: int = 0) -> None:
        """Take what has arrived in host memory; the last `but` may still be on their way."""
        while len(self._arriving) > but:
            gradients = self._arriving.popleft()
            gradients.settle()
            for tell in self._engine.arrivals:
                tell(gradients.unit)

    def _absent_here(self) -> frozenset[tuple[int, int]]:
        """The parameters, by unit and number there, that have no gradient of this rank's."""
        return frozenset(
            (gradients.unit.number, index)
            for gradients in self._engine.gradients
            for index in gradients.absent
        )

    def _exchange_news(self, late: list[Gradients]) -> None:
        """All ranks know that some rank has gradients outside the pattern, which are reduced too,
        or that it lacks others than before: where every rank does, `param.grad` is None.
        """
        self._told = self._absent_here()
        mine = " ".join(str(gradients.unit.number) for gradients in late)
        absent = " ".join(f"{unit}.{index}" for unit, index in sorted(self._told))
        exchange = self._engine.collectives.agreement.exchange
        news = [one.split("|") for one in exchange("late gradients", f"{mine}|{absent}")]
        everywhere = set.intersection(*(set(lacking.split()) for _, lacking in news))
        places = (one.split(".") for one in everywhere)
        self.absent_everywhere = {(int(unit), int(index)) for unit, index in places}
        self._reduce_late({int(number) for numbers, _ in news for number in numbers.split()})

    def _reduce_late(self, numbers: set[int]) -> None:
        for gradients in self._engine.gradients:
            if gradients.unit.number not in numbers:
                continue
            if self._stepper is not None:
                self._stepper.refuse_taken((gradients.unit,))
            self._launch(gradients)
            if gradients not in self._order:
                # Used from now on: part of the pattern, before what waits for the end.
                self._order.insert(self._num_early, gradients)
                self._num_early += 1
        self._finish_all()
