"""From events to lines: what a rank writes of each step of a recorded loop.

Of each step there is one line. It is written when the next step ends, since what is logged after
`optimizer.step()` belongs to the step just made, and since a device has made the numbers by then.
A few steps are looked at closely: every event of them is written, with the memory at that moment.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from onecopy import handle
from onecopy.core.compiling import not_compiled
from onecopy.events import add_sink
from onecopy.planner.sharded import ModelTraffic, model_traffic
from onecopy.recording.description import device_name
from onecopy.recording.tracing import TraceWriter
from onecopy.report import memory
from onecopy.report.logged import Logged
from onecopy.report.model_recorder import Counts, ModelRecorder
from onecopy.report.step_meter import StepMeter
from onecopy.report.trackers import Trackers, numbers_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from onecopy.core.optimizer import Binding
    from onecopy.recording.folder import RunFiles

__all__ = ["Recorder", "Wishes"]

# Steps of this process that are looked at closely: the first two that go by the recorded order of
# use, then those at every doubling of a thousand.
FIRST_CLOSE = 2
CLOSE_AGAIN = 1000
# Memory is measured in the first steps, and then so seldom that it costs 1/500 of the time.
ALWAYS_MEASURED = 3
PATIENCE = 500


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What `record` was told beside models and optimizers; see there."""

    trackers: Sequence[Any] = ()
    trace: int = 0
    resume: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """One rank's part of a recording, from entering to leaving."""

    def __init__(
        self,
        files: RunFiles,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        wishes: Wishes,
    ) -> None:
        now = time.perf_counter()
        self._files = files
        # Added to a moment of perf_counter it gives the time of the run.
        self._offset = time.time() - files.started - now
        self._process = os.getpid()
        self._wishes = wishes
        is_first = files.found is not None
        self._trackers = Trackers(wishes.trackers if is_first else ())
        self._trace = TraceWriter(files.folder) if wishes.trace and is_first else None
        self._meter = StepMeter(now)
        self._models = [ModelRecorder(name, one, self._meter) for name, one in models.items()]
        self._optimizers = optimizers
        owners = [handle.of(one) for one in models.values()]
        self._traffic = [(owner.engine, self._traffic_of(owner)) for owner in owners]
        # Steps that each optimizer has made since the last end of a step.
        self._made: Counter[int] = Counter()
        self._num_ended = self._step = 0
        self._pending: tuple[dict[str, Any], Logged] | None = None
        self._logged = Logged()
        self._measured = self._measuring_took = 0.0
        removers = [add_sink(one.model, one) for one in self._models]
        hooks = [
            one.register_step_post_hook(partial(self._after_step, number))
            for number, one in enumerate(optimizers)
        ]
        self._removers = [*removers, *(hook.remove for hook in hooks)]
        self._tell_begin()
        self._look_closely()

    # Moments ----------------------------------------------------------------------------------

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Numbers of the step just made; without an optimizer they make a step."""
        self._logged.add(numbers)
        if not self._optimizers:
            self._end_step(skipped=False)

    def close(self, status: str, error: str | None) -> None:
        """The loop has ended."""
        for remove in self._removers:
            remove()
        self._write_events(self._step + 1)
        self._write_pending()
        self._trackers.flush()
        self._files.finish(status, error, self._time_of(time.perf_counter()))
        if self._trace is not None:
            self._trace.finish(ended_well=error is None)

    @not_compiled
    def _after_step(self, number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if os.getpid() != self._process:
            # A copy of the process (fork) has no part in the recording.
            return
        binding = self._binding_of(optimizer)
        is_skipped = binding is not None and binding.is_skipped
        if not is_skipped:
            self._made[number] += 1
        if number == 0:
            self._end_step(skipped=is_skipped)

    def _binding_of(self, optimizer: torch.optim.Optimizer) -> Binding | None:
        """How it is attached now: a model that was partitioned anew has another one."""
        for one in self._models:
            found = handle.find(one.model)
            for binding in () if found is None else found.bindings:
                if binding.optimizer is optimizer:
                    return binding  # type: ignore[no-any-return]
        return None

    # A step -----------------------------------------------------------------------------------

    def _end_step(self, *, skipped: bool) -> None:
        now = time.perf_counter()
        self._num_ended += 1
        binding = self._binding_of(self._optimizers[0]) if self._optimizers else None
        # A run that goes on from a checkpoint goes on counting.
        self._step = max(self._step + 1, 0 if binding is None else binding.num_steps)
        seconds, split = self._meter.take(now)
        counts = [one.take() for one in self._models]
        line: dict[str, Any] = {
            "step": self._step,
            "time": round(self._time_of(now), 7),
            **_rounded(seconds, split),
            "sent": _summed(one.sent for one in counts),
            "expected": self._expected(counts),
            "memory": self._memory(now, sum(one.gathered for one in counts)),
        }
        if skipped:
            line["skipped"] = True
        self._write_events(self._step)
        self._keep(line)
        self._look_closely()
        if self._wishes.trace:
            self._hand_over(self._num_ended - FIRST_CLOSE - self._wishes.trace)

    def _hand_over(self, num_steps: int) -> None:
        """So many steps after the first one that is not traced, what there is for the trace."""
        if num_steps == 0:
            # The line of the last one has just been written.
            self._files.steps.flush()
        elif num_steps == 1 and self._trace is not None:
            # To make this step, the others have come here, too, after the one before it.
            self._trace.start()

    def _keep(self, line: dict[str, Any]) -> None:
        """Until the step's numbers are known."""
        is_first = self._pending is None
        self._write_pending()
        if self._optimizers and not is_first:
            # What was logged before the first step is of the first.
            self._logged = Logged()
        self._pending = line, self._logged
        if not self._optimizers:
            self._logged = Logged()

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        (line, logged), self._pending = self._pending, None
        metrics = logged.read()
        if metrics:
            line["metrics"] = metrics
        self._files.steps.write(line)
        if self._trackers:
            self._trackers.log(line["step"], numbers_of(line, metrics))

    def _expected(self, counts: Sequence[Counts]) -> dict[str, int]:
        expected: Counter[str] = Counter()
        for place, (recorder, count) in enumerate(zip(self._models, counts, strict=True)):
            found = handle.find(recorder.model)
            if found is not None and found.engine is not self._traffic[place][0]:
                # It was partitioned anew.
                self._traffic[place] = found.engine, self._traffic_of(found)
            traffic = self._traffic[place][1]
            expected["gather"] += count.num_gathers * traffic.gather
            expected["gather"] += traffic.gather_once if count.num_gathers else 0
            expected["reduce"] += count.num_reduces * traffic.reduce
            expected["reduce"] += traffic.reduce_once if count.num_reduces else 0
            for number, num_steps in self._made.items():
                expected["refresh"] += num_steps * traffic.refresh.get(number, 0)
        self._made.clear()
        return {kind: num_bytes for kind, num_bytes in expected.items() if num_bytes}

    def _traffic_of(self, found: Any) -> ModelTraffic:
        numbers = {id(one): number for number, one in enumerate(self._optimizers)}
        units = {
            numbers[id(binding.optimizer)]: list(binding.units)
            for binding in found.bindings
            if id(binding.optimizer) in numbers
        }
        return model_traffic(found.engine, units)

    def _memory(self, now: float, gathered: int) -> dict[str, int]:
        """Bytes at the end of a step, with gradients, as far as they are measured in it."""
        found = {"gathered": gathered}
        is_due = now - self._measured > PATIENCE * self._measuring_took
        if not is_due and self._num_ended > ALWAYS_MEASURED and not self._is_close(self._num_ended):
            return found
        only = self._optimizers[0] if len(self._optimizers) == 1 else None
        states = [memory.measure(one.model, only) for one in self._models]
        found["parameters"] = sum(one.parameters for one in states)
        found["gradients"] = sum(one.gradients for one in states)
        found["optimizer"] = self._optimizer_bytes()
        if only is not None:
            # What rests on disk has no memory here.
            in_memory = memory.of_optimizer(only)
            found["optimizer"] += sum(one.optimizer - in_memory for one in states)
        if host := sum(one.host for one in states):
            found["host"] = host
        if nvme := sum(one.nvme for one in states):
            found["nvme"] = nvme
        found |= memory.of_process(self._device)
        self._measured, self._measuring_took = now, time.perf_counter() - now
        return found

    def _optimizer_bytes(self) -> int:
        return sum(memory.of_optimizer(one) for one in self._optimizers)

    # Close looks ------------------------------------------------------------------------------

    def _is_close(self, number: int) -> bool:
        """Whether the step of this process with that number, from 1, is looked at closely."""
        if self._wishes.trace:
            return FIRST_CLOSE <= number < FIRST_CLOSE + self._wishes.trace
        doublings, rest = divmod(number, CLOSE_AGAIN)
        is_doubling = rest == 0 and doublings > 0 and doublings & (doublings - 1) == 0
        return number in (FIRST_CLOSE, FIRST_CLOSE + 1) or is_doubling

    def _look_closely(self) -> None:
        """The next step begins."""
        if self._is_close(self._num_ended + 1):
            optimizer_bytes = self._optimizer_bytes()
            for one in self._models:
                one.look_closely(optimizer_bytes)

    def _write_events(self, step: int) -> None:
        found = [event for one in self._models for event in one.take_events()]
        for moment, event in sorted(found, key=lambda one: one[0]):
            when = round(self._time_of(moment), 7)
            self._files.events.write({"step": step, "time": when, **event})
        if found:
            self._files.events.flush()

    # Details ----------------------------------------------------------------------------------

    def _tell_begin(self) -> None:
        group = handle.of(self._models[0].model).engine.collectives.groups.world
        begin = {
            "rank": group.ranks[group.rank],
            "host": socket.gethostname(),
            "device": device_name(self._device),
            "pid": self._process,
            "time": round(self._time_of(time.perf_counter()), 6),
            "clocks": [round(moment, 7) for moment in self._files.clocks],
        }
        for file in (self._files.steps, self._files.events):
            file.write({"begin": begin})
            file.flush()

    @property
    def _device(self) -> torch.device:
        device: torch.device = handle.of(self._models[0].model).engine.units[0].flat.device
        return device

    def _time_of(self, moment: float) -> float:
        return moment + self._offset


def _rounded(seconds: float, split: Mapping[str, float]) -> dict[str, Any]:
    """To tenths of microseconds, and so that the sum is still that of the parts."""
    parts = {name: round(value, 7) for name, value in split.items()}
    whole = round(seconds, 7)
    rest = sum(value for name, value in parts.items() if name != "compute")
    parts["compute"] = round(whole - rest, 7)
    return {"seconds": whole, "split": parts}


def _summed(found: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in found:
        total.update(one)
    return {kind: num_bytes for kind, num_bytes in total.items() if num_bytes}
