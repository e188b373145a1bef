"""The sink of one model of a recorded run: counts in each step, and keeps events of few steps."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onecopy import handle
from onecopy.core.unit import UnitState
from onecopy.events import SENT, Event
from onecopy.report.memory import MemoryLedger

if TYPE_CHECKING:
    from torch import nn

    from onecopy.report.step_meter import StepMeter

__all__ = ["Counts", "ModelRecorder"]

# A step with more events than that keeps its first ones.
MOST_EVENTS = 100_000


@dataclass(frozen=True, slots=True)
class Counts:
    """What a model did in a step.

    sent: bytes by kind of event. num_gathers, num_reduces: passes that gather, and that reduce, all
    units. gathered: bytes of the units that were gathered at once, at their peak.
    """

    sent: dict[str, int]
    num_gathers: int
    num_reduces: int
    gathered: int


class ModelRecorder:
    """See the module's docstring. Events of other threads (saves) come here, too."""

    def __init__(self, name: str, model: nn.Module, meter: StepMeter) -> None:
        self.name = name
        self.model = model
        self._meter = meter
        self._ledger: MemoryLedger | None = None
        self._kept: list[tuple[float, Event, dict[str, int]]] = []
        units = handle.of(model).engine.units
        self._bytes = {one.name: one.flat.numel() * one.flat.itemsize for one in units}
        self._gathered = {
            one.name for one in units if one.releases and one.state is not UnitState.SHARDED
        }
        self._now = self._peak = sum(self._bytes[name] for name in self._gathered)
        self._forget()

    def _forget(self) -> None:
        self._sent: Counter[str] = Counter()
        self._passes: Counter[str] = Counter()
        self._peak = self._now

    def __call__(self, event: Event) -> None:
        now, kind = time.perf_counter(), event.kind
        if event.seconds:
            self._meter.note(event, now)
        if kind in SENT:
            self._sent[kind] += event.num_bytes
            if kind == "gather" and event.unit not in self._gathered:
                self._gathered.add(event.unit)
                self._now += self._bytes.get(event.unit, 0)
                self._peak = max(self._peak, self._now)
        elif kind == "release":
            if event.unit in self._gathered:
                self._gathered.remove(event.unit)
                self._now -= self._bytes.get(event.unit, 0)
        elif kind == "pass":
            self._passes.update(event.what.split())
        if self._ledger is not None and len(self._kept) < MOST_EVENTS:
            self._kept.append((now, event, self._ledger.look(event.unit)))

    def take(self) -> Counts:
        """The counts of the step that ends now."""
        passes = self._passes
        counts = Counts(dict(self._sent), passes["gather"], passes["reduce"], self._peak)
        self._forget()
        return counts

    def look_closely(self, optimizer_bytes: int) -> None:
        """Keep every event, until `take_events`."""
        self._ledger = MemoryLedger(self.model, optimizer_bytes)
        handle.of(self.model).events.close_looks += 1

    def take_events(self) -> list[tuple[float, dict[str, Any]]]:
        """When each event was reported (by time.perf_counter) and its record, without defaults."""
        if self._ledger is None:
            return []
        kept, self._kept, self._ledger = self._kept, [], None
        found = handle.find(self.model)
        if found is not None:
            found.events.close_looks -= 1
        name = {"model": self.name} if self.name else {}
        return [(now, {**_plain(event), **name, "memory": memory}) for now, event, memory in kept]


def _plain(event: Event) -> dict[str, Any]:
    found = event._replace(seconds=round(event.seconds, 7))._asdict()
    defaults = Event._field_defaults
    return {name: value for name, value in found.items() if value != defaults.get(name)}
