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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from onecopy.core.compiling import not_compiled
from onecopy.core.loss_scale import refuse_bypass
from onecopy.core.owned_gradient import OwnedGradient
from onecopy.core.step_in_backward import StepInBackward

if TYPE_CHECKING:
    from types import FrameType

    from onecopy.core.engine import Engine
    from onecopy.core.gradients import Gradients
    from onecopy.core.unit import Unit

__all__ = ["Backward", "Call"]

MOST_FORWARDS_IN_KEY = 64

_current_task = torch._C._current_graph_task_id
_is_grad_enabled = torch.is_grad_enabled


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module in forward; lives as long as its part of the autograd graph."""

    units: tuple[Unit, ...]


class Backward:
    """See the module's docstring.

    Attributes:
        sync: False under no_sync: gradients stay on this rank.
        stepper: updates units within backward; None where the step does that.
    """

    def __init__(self, engine: Engine) -> None:
        self.sync = True
        self.stepper = StepInBackward(engine) if engine.config.step_in_backward else None
        self._engine = engine
        self._tasks: list[int] = []
        self._frames = 0
        # False within torch.autograd.grad, which leaves gradients to the caller.
        self._accumulates = True
        self._order: list[Gradients] = []
        # How many ranks have data, 0 where this one has none; None where nobody has said so.
        self.num_active: int | None = None
        self._next = 0
        # So many of the order may be launched before the end; the last one never is.
        self._num_early = 0
        # Parameters without a gradient: of this rank's, as last told to the others; of any rank's.
        self._told: frozenset[tuple[int, int]] = frozenset()
        self._absent_everywhere: set[tuple[int, int]] = set()
        self._in_flight: deque[Gradients] = deque()
        # Units that need no more of this backward: complete, or left behind for good.
        self._done: set[Unit] = set()
        self._passed: set[Unit] = set()

    # Moments ----------------------------------------------------------------------------------

    @not_compiled
    def before_call(self, call: Call, _: Any = None) -> None:
        """A gradient has reached an output of one call of a module."""
        for unit in call.units:
            unit.open_calls.discard(call)
            if _is_grad_enabled():
                unit.keep_for_graph()
        self.before_units(call.units)

    def before_units(self, units: tuple[Unit, ...]) -> None:
        """The units' values are needed in backward."""
        self.enter()
        engine = self._engine
        if not engine.stage.releases:
            return
        for unit in units:
            if unit in self._done:
                continue
            if unit.releases:
                for passed in engine.release_passed(unit):
                    self._pass(passed)
            engine.demand(unit)

    def before_recomputation(self, units: tuple[Unit, ...]) -> None:
        """A module runs forward within backward: checkpointing."""
        self.enter()
        engine = self._engine
        if self.stepper is not None:
            self.stepper.refuse_taken(units)
        if not engine.stage.releases:
            return
        for unit in units:
            # Needed again, also where an earlier segment over the same weights is complete.
            self._done.discard(unit)
            if unit.releases:
                engine.release_passed(unit)
            engine.demand(unit)

    def _pass(self, unit: Unit) -> None:
        """Backward has left a unit behind. For good? Then it is reduced with what it has.

        Were it to wait for gradients that never come on this rank, a rank that has them would
        wait for this one, and this one for its slices.
        """
        if not self._accumulates:
            return
        schedule = self._engine.schedule
        is_foreseen = not schedule.is_recording and unit not in schedule.upcoming()
        if unit.gradients is not None and (is_foreseen or not unit.open_calls):
            self._passed.add(unit)
            if self.sync:
                with torch.no_grad():
                    self._launch_complete()

    def gradient_arrived(self, gradients: Gradients, index: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated the gradient of one parameter."""
        gradient = parameter.grad
        if type(gradient) is OwnedGradient:
            # No hook has seen this backward before: it was to be hidden by now.
            gradient = gradient.take_arrived()
        if _current_task() not in self._tasks:
            self.enter()
        if gradient is None:
            return
        parameter.grad = None
        if self.stepper is not None:
            self.stepper.arrived(gradients, index, is_nested=len(self._tasks) > 1)
        if gradients.needs_buffer:
            self._make_room()
        if _is_grad_enabled():
            # Under create_graph the graph of the gradient will need the values again: no release.
            with torch.no_grad():
                gradients.add(index, gradient)
        elif gradients.add(index, gradient):
            if gradients.has_all:
                self._done.add(gradients.unit)
                self._engine.release(gradients.unit)
            if self.sync:
                self._launch_complete()

    def enter(self) -> None:
        """Called first by every hook in backward: knows a new graph task, and its end."""
        task = _current_task()
        if task in self._tasks:
            return
        frames, accumulates, roots = _running_backwards()
        if self._tasks and frames != self._frames + len(self._tasks):
            # The backward before this one ended by an exception: its tasks are not around us.
            self.abort()
        if not self._tasks:
            if accumulates and self._engine.loss_scale is not None:
                # Not in inner tasks: checkpointing starts them from inside the model.
                refuse_bypass(roots, self._engine)
            self._frames = frames
            self._accumulates = accumulates
            self._begin()
        self._tasks.append(task)
        Variable._execution_engine.queue_callback(partial(self._leave, task))

    def output_factor(self) -> float:
        """What a gradient is multiplied by that enters the model's outputs."""
        self.enter()
        scale = self._engine.loss_scale
        return scale.value if scale is not None and self._accumulates else 1.0

    def input_factor(self) -> float:
        """What a gradient is multiplied by that leaves through the model's inputs."""
        return 1.0 / self.output_factor()

    def segment_key(self) -> tuple[Hashable, ...]:
        """Names the backward that would follow the forwards run so far."""
        engine = self._engine
        which = f"of trainability {engine.trainability}"
        return ("backward", which, *engine.forwards[:MOST_FORWARDS_IN_KEY])

    def _begin(self) -> None:
        engine = self._engine
        if self.stepper is not None and self._accumulates:
            self.stepper.begin()
        engine.events.phase = "backward"
        engine.begin_segment(self.segment_key())
        engine.forwards.clear()
        self._next = 0
        self._done.clear()
        self._passed.clear()
        if self._accumulates:
            engine.owned.hide()
            if engine.loss_scale is not None:
                engine.loss_scale.begin_backward()
            for gradients in engine.gradients:
                gradients.begin_backward()
            if self.sync:
                self._agree_on_order()

    def weigh(self, num_active: int | None) -> None:
        """Let gradients be the mean over that many ranks; 0 lets this rank's count as nothing."""
        self.num_active = num_active
        num_ranks = self._engine.collectives.groups.world.size
        for gradients in self._engine.gradients:
            gradients.weight = num_ranks / num_active if num_active else float(num_active is None)

    def forget_order(self) -> None:
        """There are other units than before: the next backward agrees anew."""
        self._order = []

    def _agree_on_order(self) -> None:
        """The units to reduce, in order: as they were used, if that was so on all ranks."""
        engine = self._engine
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

    @not_compiled
    def _leave(self, task: int) -> None:
        """Callback at the end of a graph task; the outermost one's is the end of the backward."""
        if task not in self._tasks:
            return
        self._tasks.remove(task)
        if not self._tasks:
            with torch.no_grad():
                try:
                    self._end()
                except BaseException:
                    if self.stepper is not None:
                        # An optimizer may raise: still open, so that `recover` cleans up.
                        self._tasks.append(task)
                    raise

    def _end(self) -> None:
        if self._engine.stage.releases or (self.sync and self._accumulates):
            # A rank that has come here wants no more units: one that does must hear of it.
            self._engine.collectives.agreement.scheduled("the end of backward")
        if not self._accumulates:
            pass
        elif self.sync:
            self._reduce_rest()
            self._done.clear()
        else:
            for gradients in self._engine.gradients:
                gradients.keep_local()
        self._engine.rest()
        if self.sync and self._accumulates:
            are_applied = self.stepper is not None and self.stepper.end()
            self._engine.owned.show(self._absent_everywhere, are_applied=are_applied)
        self._engine.schedule.end()
        self._engine.events.phase = "api"

    # Reduces ----------------------------------------------------------------------------------

    def _launch_complete(self) -> None:
        """Launch what is complete and next in the order, but not what waits for the end."""
        while self._next < self._num_early:
            gradients = self._order[self._next]
            if not gradients.is_complete and gradients.unit not in self._passed:
                return
            self._launch(gradients)
            self._next += 1

    def _launch(self, gradients: Gradients, *, unit_flag: bool | None = None) -> None:
        gradients.start_reduce(unit_flag=unit_flag)
        self._engine.events.emit(
            "reduce", gradients.unit.name, num_bytes=gradients.reduce_bytes, group="world"
        )
        # Bounded: while this one is on its way, older ones finish their hops.
        for older in list(self._in_flight):
            if older.advance_reduce():
                self._in_flight.remove(older)
                self._finish(older)
        self._in_flight.append(gradients)

    def _finish(self, gradients: Gradients, *, keep: bool = True) -> None:
        gradients.finish_reduce(keep=keep)
        if self.stepper is not None and keep:
            self.stepper.reduced(gradients, is_done=gradients.unit in self._done)

    def _finish_all(self, *, keep: bool = True) -> None:
        while self._in_flight:
            self._finish(self._in_flight.popleft(), keep=keep)

    def _make_room(self) -> None:
        """Where gradients are cut, at most one unit's full gradients exist at a time."""
        if self._engine.stage.cut_gradients:
            self._finish_all()

    def _reduce_rest(self) -> None:
        """Launch what is left of the order, finish everything, and reduce late gradients."""
        order = self._order
        rest = order[self._next :]
        late = [one for one in self._engine.gradients if one not in rest and one.has_local]
        for gradients in rest[:-1]:
            self._launch(gradients)
        if rest:
            news = bool(late) or self._absent_here() != self._told
            self._launch(rest[-1], unit_flag=news)
        self._finish_all()
        if order and order[-1].read_unit_flag():
            self._exchange_news(late)

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
        self._absent_everywhere = {(int(unit), int(index)) for unit, index in places}
        self._reduce_late({int(number) for numbers, _ in news for number in numbers.split()})

    def _reduce_late(self, numbers: set[int]) -> None:
        for gradients in self._engine.gradients:
            if gradients.unit.number not in numbers:
                continue
            if self.stepper is not None:
                self.stepper.refuse_taken((gradients.unit,))
            self._launch(gradients)
            if gradients not in self._order:
                # Used from now on: part of the pattern, before the last, which carries the flag.
                self._order.insert(self._num_early, gradients)
                self._num_early += 1
        self._finish_all()

    # Around the step --------------------------------------------------------------------------

    def flush(self) -> bool:
        """Before a step: reduce what no_sync has left, and drop a backward that failed.

        Returns whether there was something left.
        """
        self.recover()
        were_local = any(gradients.has_local for gradients in self._engine.gradients)
        if were_local:
            for gradients in self._engine.gradients:
                gradients.begin_backward()
            with torch.no_grad():
                self._agree_on_order()
                self._next = 0
                self._reduce_rest()
                self._engine.owned.show(self._absent_everywhere)
        return were_local

    def recover(self) -> None:
        """Outside of any backward: if one is still open, it has failed."""
        if self._tasks:
            self.abort()

    def abort(self) -> None:
        """A backward ended by an exception: leave no trace of it, on all ranks together.

        Ranks may have launched different numbers of reduces: all launch as many as the furthest
        has, drop the results, and forget gradients that only this backward had brought. Where
        gradients of earlier backwards were accumulating, what the failed one has already added
        stays, as in plain PyTorch: zero_grad() is the way to a clean start.
        """
        engine = self._engine
        self._tasks.clear()
        if not self._accumulates:
            pass
        elif not self.sync:
            with torch.no_grad():
                for gradients in engine.gradients:
                    gradients.keep_local()
        else:
            taken = [] if self.stepper is None else self.stepper.taken
            reports = engine.collectives.agreement.exchange(
                "recovery from an exception in backward", " ".join(map(str, (self._next, *taken)))
            )
            launched, *taken = _merge(reports)
            self._done.clear()
            with torch.no_grad():
                for gradients in self._order[self._next : launched]:
                    self._launch(gradients)
                while self._in_flight:
                    gradients = self._in_flight.popleft()
                    # What one rank has applied, all ranks have sent whole.
                    self._finish(gradients, keep=gradients.unit.number in taken)
                if self.stepper is not None:
                    self.stepper.failed(taken)
            for gradients in engine.gradients:
                gradients.clear(keep_means=not gradients.is_fresh)
                gradients.expect_all()
        engine.schedule.end(failed=True)
        engine.rest()
        engine.events.phase = "api"


def _merge(reports: Sequence[str]) -> list[int]:
    """How many reduces the furthest rank has launched, then the units that any has updated."""
    numbers = [[int(number) for number in report.split()] for report in reports]
    return [max(one[0] for one in numbers), *{taken for one in numbers for taken in one[1:]}]


def _running_backwards() -> tuple[int, bool, Sequence[Any]]:
    """How many runs of the autograd engine the Python stack of this thread holds, whether the
    innermost accumulates gradients (`backward`, not `torch.autograd.grad`), and its roots.

    On an accelerator hooks run in a thread of the engine's, whose stack holds none, while the
    caller's thread waits. Where several threads have a run, nobody can tell whose this is: then it
    is taken to accumulate, from unknown roots.
    """
    mine = _runs_on(sys._getframe())
    if mine[0]:
        return mine
    others = [found for frame in sys._current_frames().values() if (found := _runs_on(frame))[0]]
    return (0, *others[0][1:]) if len(others) == 1 else mine


def _runs_on(innermost: FrameType) -> tuple[int, bool, Sequence[Any]]:
    """The same of one stack."""
    count, accumulates, frame = 0, True, innermost
    roots: Sequence[Any] = ()
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            if not count:
                accumulates = frame.f_locals.get("kwargs", {}).get("accumulate_grad", True)
                roots = frame.f_locals.get("t_outputs", ())
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count, accumulates, roots
