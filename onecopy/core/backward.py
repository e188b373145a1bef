"""One backward: gradients in, reduces out, in the same order on every rank.

The way from `loss.backward()` to the wire:

    Backward.gradient_arrived -> Reduces.launch_complete -> Gradients.start_reduce
                              -> Collectives.reduce

No reduce outlives the backward: when `backward()` returns, the owned slices are complete.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from onecopy.core.compiling import not_compiled
from onecopy.core.loss_scale import refuse_bypass
from onecopy.core.owned_gradient import OwnedGradient
from onecopy.core.reduces import Reduces
from onecopy.core.step_in_backward import StepInBackward
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from types import FrameType

    from onecopy.core.engine import Engine
    from onecopy.core.gradients import Gradients
    from onecopy.core.unit import Unit

__all__ = ["Backward", "Call", "trains"]

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
        num_backwards: how many have ended that accumulate gradients.
        local_until: while there were fewer, gradients stay on this rank, too.
        takes_by_hand: `take_by_hand` will be called after backwards that are made in two parts.
        was_split: there was one.
        reduces: what has been launched, and what is yet to be.
        stepper: updates units within backward; None where the step does that.
    """

    def __init__(self, engine: Engine) -> None:
        self.sync = True
        self.num_backwards = self.local_until = 0
        self.takes_by_hand = self.was_split = False
        # Whether the running backward, or the last one, is to be reduced.
        self._reduces = True
        self.stepper = StepInBackward(engine) if engine.config.step_in_backward else None
        self.reduces = Reduces(engine, self.stepper)
        self._engine = engine
        self._tasks: list[int] = []
        self._frames = 0
        # False within torch.autograd.grad, which leaves gradients to the caller.
        self._accumulates = True
        # How many ranks have data, 0 where this one has none; None where nobody has said so.
        self.num_active: int | None = None
        # Backwards that were reduced since the last step, and how many the last step had. While
        # that is unknown, and where a GradScaler looks into the optimizer, none leaves sums.
        self._num_reduced = 0
        self._num_expected: int | None = None
        self._leaves_sums = engine.stage.sums_at_boundary and self.stepper is None
        engine.owned.complete = self.flush

    # Moments ----------------------------------------------------------------------------------

    @not_compiled
    def before_call(self, call: Call, _: Any = None) -> None:
        """A gradient has reached an output of one call of a module."""
        for unit in call.units:
            unit.open_calls.discard(call)
            if _is_grad_enabled():
                unit.keep_for_graph()
        self.before_units(call.units)
        if self._engine.events.close_looks:
            for unit in call.units:
                self._engine.events.emit("enter", unit.name)

    def before_units(self, units: tuple[Unit, ...]) -> None:
        """The units' values are needed in backward."""
        self.enter()
        engine = self._engine
        if not engine.stage.releases:
            return
        for unit in units:
            if unit in self.reduces.done:
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
            self.reduces.done.discard(unit)
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
        is_foreseen = not schedule.is_recording and not schedule.expects(unit)
        if unit.gradients is not None and (is_foreseen or not unit.open_calls):
            self.reduces.passed.add(unit)
            if self._reduces:
                with torch.no_grad():
                    self.reduces.launch_complete()

    def gradient_arrived(self, gradients: Gradients, index: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated the gradient of one parameter."""
        gradient = parameter.grad
        if type(gradient) is OwnedGradient:
            # No hook has seen this backward before: it was to be hidden by now.
            gradient = gradient.take_arrived()
        else:
            # Before the backward is entered, which takes what it finds there for the user's.
            parameter.grad = None
        if _current_task() not in self._tasks:
            self.enter()
        if gradient is None:
            return
        parameter.grad = None
        if self.stepper is not None:
            self.stepper.arrived(gradients, index, is_nested=len(self._tasks) > 1)
        if gradients.needs_buffer:
            self.reduces.make_room()
        if _is_grad_enabled():
            # Under create_graph the graph of the gradient will need the values again: no release.
            with torch.no_grad():
                gradients.add(index, gradient)
        elif gradients.add(index, gradient):
            if gradients.has_all:
                self._leave_unit(gradients.unit)
            if self._reduces:
                self.reduces.launch_complete()

    def _leave_unit(self, unit: Unit) -> None:
        """Nothing in this backward can need its values any more, as far as is known."""
        self.reduces.done.add(unit)
        if self._engine.events.close_looks:
            self._engine.events.emit("leave", unit.name)
        self._engine.release(unit)

    def enter(self) -> None:
        """Called first by every hook in backward: knows a new graph task, and its end."""
        task = _current_task()
        if task in self._tasks:
            return
        frames, accumulates, roots, is_split = _running_backwards()
        if self._tasks and frames != self._frames + len(self._tasks):
            # The backward before this one ended by an exception: its tasks are not around us.
            self.abort()
        if not self._tasks:
            if is_split:
                self._look_at_split()
            if accumulates and self._engine.loss_scale is not None:
                # Not in inner tasks: checkpointing starts them from inside the model.
                refuse_bypass(roots, self._engine)
            self._frames = frames
            self._accumulates = accumulates
            self._begin()
        self._tasks.append(task)
        Variable._execution_engine.queue_callback(partial(self._leave, task))

    def _look_at_split(self) -> None:
        """A pipeline makes this backward in two parts: for the inputs now, for the weights later.

        The second part has no hooks: it adds to `param.grad` by hand what nobody would reduce.
        """
        if not self.takes_by_hand:
            raise ShardingError(
                "a schedule that makes backwards in two parts (zero bubble, DualPipe) adds weight "
                "gradients by hand, past the hooks that reduce them. Say when they are complete: "
                "with onecopy.parallel.micro_batches(stages, num): schedule.step(...)"
            )
        if self._engine.owned.are_shown:
            raise ShardingError(
                "a schedule that makes backwards in two parts (zero bubble, DualPipe) would add a "
                "rank's own gradients to reduced ones of an earlier step of the schedule. Call "
                "optimizer.zero_grad() before each, or accumulate by more micro-batches, or use "
                "Schedule1F1B or ScheduleInterleaved1F1B"
            )
        self.was_split = True

    def take_by_hand(self) -> None:
        """Reduce the gradients of this rank's that such a schedule has put into `param.grad`."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for gradients in self._engine.gradients:
                for index, parameter in enumerate(gradients.unit.parameters):
                    gradient = parameter.grad
                    if gradient is not None and type(gradient) is not OwnedGradient:
                        parameter.grad = None
                        gradients.add(index, gradient)
                gradients.keep_local()
        self.flush()

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
        travels = ["gather"] if engine.gathers else []
        self._reduces = self.sync and self.num_backwards >= self.local_until
        if self._reduces and self._accumulates:
            travels.append("reduce")
        engine.events.emit("pass", what=" ".join(travels))
        engine.begin_segment(self.segment_key())
        engine.forwards.clear()
        self.reduces.begin(is_boundary=self._is_boundary)
        if self._accumulates:
            engine.owned.hide()
            if engine.loss_scale is not None:
                engine.loss_scale.begin_backward()
            if self._reduces:
                self.reduces.agree_on_order()

    @property
    def _is_boundary(self) -> bool:
        """This backward sums over nodes what it and those before it have summed in them.

        As many backwards as the last step had are expected; if more come, the step sums the rest.
        """
        if not self._leaves_sums or self._num_expected is None:
            return True
        return self._num_reduced + 1 == self._num_expected

    def begin_step(self, *, is_scaled_by_hand: bool) -> None:
        """A step begins, or gradients are given up: the next backward is its first.

        Args:
            is_scaled_by_hand: a GradScaler, which unscales what it finds in the optimizer.
        """
        self._leaves_sums = self._leaves_sums and not is_scaled_by_hand
        self._num_expected = self._num_reduced or self._num_expected
        self._num_reduced = 0

    def give_up(self) -> None:
        """Gradients were cleared: the next backward is the first of its step."""
        self._num_reduced = 0

    def weigh(self, num_active: int | None) -> None:
        """Let gradients be the mean over that many ranks; 0 lets this rank's count as nothing."""
        self.num_active = num_active
        num_ranks = self._engine.collectives.groups.world.size
        for gradients in self._engine.gradients:
            gradients.weight = num_ranks / num_active if num_active else float(num_active is None)

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
        if self._engine.stage.releases or (self._reduces and self._accumulates):
            # A rank that has come here wants no more units: one that does must hear of it.
            self._engine.collectives.agreement.scheduled("the end of backward")
        if not self._accumulates:
            pass
        elif self._reduces:
            self.reduces.complete()
        else:
            for gradients in self._engine.gradients:
                gradients.keep_local()
        self._engine.rest()
        self.num_backwards += self._accumulates
        if self._reduces and self._accumulates:
            self._num_reduced += 1
            are_applied = self.stepper is not None and self.stepper.end()
            owned, reduces = self._engine.owned, self.reduces
            # Which parameters no rank has used is known with the sums: none is missed until then.
            owned.show(
                reduces.absent_everywhere if reduces.is_boundary else (),
                are_applied=are_applied,
                are_complete=reduces.is_boundary,
            )
        self._engine.schedule.end()
        self._engine.events.phase = "api"

    # Around the step --------------------------------------------------------------------------

    def flush(self) -> bool:
        """Before a step: reduce what no_sync has left on ranks and what backwards have left in
        nodes, and drop a backward that failed.

        Returns whether something was left on ranks.
        """
        self.recover()
        reduces, owned = self.reduces, self._engine.owned
        were_local = reduces.has_local
        if were_local or reduces.has_sums:
            if reduces.has_sums:
                # What the user has removed since is removed from the sums too.
                owned.settle(uncounted=True)
            with torch.no_grad():
                if were_local:
                    self._engine.events.emit("pass", what="reduce")
                    reduces.begin()
                    reduces.agree_on_order()
                    reduces.complete()
                else:
                    reduces.complete_sums()
                owned.show(reduces.absent_everywhere)
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
        elif not self._reduces:
            with torch.no_grad():
                for gradients in engine.gradients:
                    gradients.keep_local()
        else:
            taken = [] if self.stepper is None else self.stepper.taken
            mine = " ".join(map(str, (self.reduces.num_launched, *taken)))
            exchange = engine.collectives.agreement.exchange
            reports = exchange("recovery from an exception in backward", mine)
            launched, *taken = _merge(reports)
            with torch.no_grad():
                # What one rank has applied, all ranks have sent whole.
                self.reduces.drop(launched, kept=taken)
                if self.stepper is not None:
                    self.stepper.failed(taken)
            for gradients in engine.gradients:
                gradients.forget_backward()
        engine.schedule.end(failed=True)
        engine.rest()
        engine.events.phase = "api"


def _merge(reports: Sequence[str]) -> list[int]:
    """How many reduces the furthest rank has launched, then the units that any has updated."""
    numbers = [[int(number) for number in report.split()] for report in reports]
    return [max(one[0] for one in numbers), *{taken for one in numbers for taken in one[1:]}]


def trains() -> bool:
    """Whether the backward that runs here is for the parameters' gradients, at once or later.

    `torch.autograd.grad` is not: pipelines, for one, learn shapes by it from memory that nobody has
    written.
    """
    _, accumulates, _, is_split = _running_backwards()
    return accumulates or is_split


def _running_backwards() -> tuple[int, bool, Sequence[Any], bool]:
    """How many runs of the autograd engine the Python stack of this thread holds, whether the
    innermost accumulates gradients (`backward`, not `torch.autograd.grad`), its roots, and whether
    it is the first part of a backward that torch's pipelining splits.

    On an accelerator hooks run in a thread of the engine's, whose stack holds none, while the
    caller's thread waits. Where several threads have a run, nobody can tell whose this is: then it
    is taken to accumulate, from unknown roots.
    """
    mine = _runs_on(sys._getframe())
    if mine[0]:
        return mine
    others = [found for frame in sys._current_frames().values() if (found := _runs_on(frame))[0]]
    return (0, *others[0][1:]) if len(others) == 1 else mine


def _runs_on(innermost: FrameType) -> tuple[int, bool, Sequence[Any], bool]:
    """The same of one stack."""
    count, accumulates, is_split, frame = 0, True, False, innermost
    roots: Sequence[Any] = ()
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            if not count:
                accumulates = frame.f_locals.get("kwargs", {}).get("accumulate_grad", True)
                roots = frame.f_locals.get("t_outputs", ())
            count += 1
        is_split = is_split or frame.f_code.co_name == "stage_backward_input"
        frame = frame.f_back  # type: ignore[assignment]
    return count, accumulates, roots, is_split
