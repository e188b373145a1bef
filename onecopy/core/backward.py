"""One backward: gradients in, reduces out, in the same order on every rank.

The way from `loss.backward()` to the wire is three own frames:

    Backward.gradient_arrived  ->  Gradients.start_reduce  ->  Collectives.reduce

Reduces are launched in one order that all ranks have agreed on, the reverse of the order in which
the units were first used in forward; each unit of it is reduced in every backward, with zeros
where this rank has no gradient. So parameters that are unused on some ranks cannot hang the job.
A gradient outside that pattern (a unit used for the first time, a second reentrant checkpoint over
the same weights) sets a flag that rides along with the last reduce: all ranks see it, exchange
what is left, and reduce it too.

No reduce outlives the backward: when `backward()` returns, the owned slices are complete.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["Backward"]

MOST_FORWARDS_IN_KEY = 64


class Backward:
    """See the module's docstring.

    Attributes:
        sync: False under no_sync: gradients stay on this rank.
    """

    def __init__(self, engine: Engine) -> None:
        self.sync = True
        self._engine = engine
        self._tasks: list[int] = []
        self._frames = 0
        self._order: list[Unit] | None = None
        self._next = 0
        self._in_flight: deque[Unit] = deque()
        self._done: set[Unit] = set()
        self._fresh: set[Unit] = set()

    # Moments ----------------------------------------------------------------------------------

    def before_units(self, units: tuple[Unit, ...], _: Any = None) -> None:
        """A gradient has reached an output of the units' module."""
        self.enter()
        if not self._engine.stage.releases:
            return
        for unit in units:
            if unit not in self._done:
                self._engine.release_passed(unit)
                self._engine.demand(unit)

    def gradient_arrived(self, unit: Unit, index: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated the gradient of one parameter."""
        self.enter()
        gradients, gradient = unit.gradients, parameter.grad
        assert gradients is not None, "only trainable units have gradient hooks"
        if gradient is None:
            return
        parameter.grad = None
        # Under create_graph the graph of the gradient will need the values again.
        values_needed = torch.is_grad_enabled()
        with torch.no_grad():
            if gradients.needs_buffer:
                self._make_room()
            gradients.add(index, gradient)
            if gradients.is_complete:
                self._done.add(unit)
                if not values_needed:
                    self._engine.release(unit)
                if self.sync:
                    self._launch_complete()

    def enter(self) -> None:
        """Called first by every hook in backward: knows a new graph task, and its end."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        frames = _num_backward_frames()
        if self._tasks and frames != self._frames + len(self._tasks):
            # The backward before this one ended by an exception: its tasks are not around us.
            self.abort()
        if not self._tasks:
            self._frames = frames
            self._begin()
        self._tasks.append(task)
        Variable._execution_engine.queue_callback(partial(self._leave, task))

    def segment_key(self) -> tuple[Hashable, ...]:
        """Names the backward that would follow the forwards run so far."""
        return ("backward", *self._engine.forwards[:MOST_FORWARDS_IN_KEY])

    def _begin(self) -> None:
        engine = self._engine
        engine.events.phase = "backward"
        engine.schedule.begin(self.segment_key())
        engine.forwards.clear()
        self._next = 0
        self._done.clear()
        self._fresh.clear()
        if self.sync and self._order is None:
            self._order = self._agree_on_order()

    def _agree_on_order(self) -> list[Unit]:
        """The units to reduce, in order: as they were used, if that was so on all ranks."""
        trainable = self._engine.trainable_units
        used = [unit for unit in reversed(self._engine.used) if unit.gradients is not None]
        proposal = " ".join(str(unit.number) for unit in used)
        proposals = self._engine.collectives.agreement.exchange("the order of reduces", proposal)
        if used and all(other == proposal for other in proposals):
            return used
        return trainable[::-1]

    def _leave(self, task: int) -> None:
        """Callback at the end of a graph task; the outermost one's is the end of the backward."""
        if task not in self._tasks:
            return
        self._tasks.remove(task)
        if not self._tasks:
            with torch.no_grad():
                self._end()

    # Reduces ----------------------------------------------------------------------------------

    def _launch_complete(self) -> None:
        """Launch what is complete and next in the order; the last one waits for the end."""
        order = self._order
        assert order is not None, "a synchronising backward has an order"
        while self._next < len(order) - 1:
            gradients = order[self._next].gradients
            if gradients is None or not gradients.is_complete:
                return
            self._launch(order[self._next])
            self._next += 1

    def _launch(self, unit: Unit, *, unit_flag: bool = False) -> None:
        gradients = unit.gradients
        assert gradients is not None, "only trainable units are reduced"
        gradients.start_reduce(unit_flag=unit_flag)
        self._engine.events.emit(
            "reduce", unit.name, num_bytes=gradients.reduce_bytes, group="world"
        )
        # Bounded: while this one is on its way, older ones finish their hops.
        for older in list(self._in_flight):
            assert older.gradients is not None, "only trainable units are reduced"
            if older.gradients.advance_reduce():
                self._in_flight.remove(older)
                self._finish(older)
        self._in_flight.append(unit)

    def _make_room(self) -> None:
        """Where gradients are cut, at most one unit's full gradients exist at a time."""
        if self._engine.stage.cut_gradients:
            while self._in_flight:
                self._finish(self._in_flight.popleft())

    def _finish(self, unit: Unit, *, read_unit_flag: bool = False, keep: bool = True) -> bool:
        gradients = unit.gradients
        assert gradients is not None, "only trainable units are reduced"
        if gradients.mean is None:
            self._fresh.add(unit)
        return gradients.finish_reduce(read_unit_flag=read_unit_flag, keep=keep)

    def _end(self) -> None:
        if self.sync:
            self._reduce_rest()
        else:
            for unit in self._engine.trainable_units:
                assert unit.gradients is not None, "trainable units have gradients"
                unit.gradients.keep_local()
        self._engine.rest()
        self._engine.schedule.end()
        self._engine.events.phase = "api"

    def _reduce_rest(self) -> None:
        """Launch what is left of the order, finish everything, and reduce late gradients."""
        order = self._order
        assert order is not None, "a synchronising backward has an order"
        rest = order[self._next :]
        late = [
            unit
            for unit in self._engine.trainable_units
            if unit not in rest and unit.gradients is not None and unit.gradients.has_local
        ]
        for unit in rest:
            self._launch(unit, unit_flag=bool(late) and unit is order[-1])
        flagged = False
        while self._in_flight:
            unit = self._in_flight.popleft()
            flagged |= self._finish(unit, read_unit_flag=unit is order[-1])
        if flagged:
            self._reduce_late(late)

    def _reduce_late(self, late: list[Unit]) -> None:
        """All ranks know that some rank has gradients outside the pattern: reduce them too."""
        order, units = self._order, self._engine.units
        assert order is not None, "a synchronising backward has an order"
        mine = " ".join(str(unit.number) for unit in late)
        theirs = self._engine.collectives.agreement.exchange("late gradients", mine)
        for number in sorted({int(item) for other in theirs for item in other.split()}):
            self._launch(units[number])
            if units[number] not in order:
                # Used from now on: part of the pattern, before the last, which carries the flag.
                order.insert(len(order) - 1, units[number])
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    # Around the step --------------------------------------------------------------------------

    def flush(self) -> None:
        """Before a step: reduce what no_sync has left, and drop a backward that failed."""
        self.recover()
        trainable = self._engine.trainable_units
        if any(unit.gradients is not None and unit.gradients.has_local for unit in trainable):
            if self._order is None:
                self._order = self._agree_on_order()
            self._next = 0
            with torch.no_grad():
                self._reduce_rest()

    def recover(self) -> None:
        """A forward begins outside of any backward: if one is still open, it has failed."""
        if self._tasks:
            self.abort()

    def abort(self) -> None:
        """A backward ended by an exception: leave no trace of it, on all ranks together.

        Ranks may have launched different numbers of reduces: all launch as many as the furthest
        has, drop the results, and forget gradients that only this backward had brought.
        """
        engine, order = self._engine, self._order
        self._tasks.clear()
        if self.sync and order is not None:
            launched = engine.collectives.agreement.exchange(
                "recovery from an exception in backward", str(self._next)
            )
            with torch.no_grad():
                for unit in order[self._next : max(int(item) for item in launched)]:
                    self._launch(unit)
                while self._in_flight:
                    self._finish(self._in_flight.popleft(), keep=False)
        for unit in engine.trainable_units:
            if unit.gradients is not None:
                unit.gradients.clear(keep_means=unit not in self._fresh)
        engine.schedule.end(failed=True)
        engine.rest()
        engine.events.phase = "api"


def _num_backward_frames() -> int:
    """How many runs of the autograd engine the Python stack of this thread holds."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return count
