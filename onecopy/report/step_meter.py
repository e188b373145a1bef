"""Where the seconds of a step go, from events that say how long something has taken until now."""

from __future__ import annotations

from onecopy.events import Event
from onecopy.report.run_folder import SPLIT

__all__ = ["StepMeter"]

# Where an event's seconds belong; those of a wait belong to what it was for.
PARTS = {
    "step": "optimizer",
    "skip": "optimizer",
    "update": "optimizer",
    "save": "io",
    "stage": "io",
    "read": "io",
    "checkpoint": "io",
    "swap": "io",
    "keep": "io",
    "fetch": "io",
    "collect": "gather",
}
# An event is noted a little after what it tells of has ended.
TOLERANCE = 2e-5


class StepMeter:
    """Splits the seconds between two ends of steps; moments are those of time.perf_counter.

    What takes its time inside of something else (a wait within the optimizer's step) counts for
    itself, and not for what it lies in.
    """

    def __init__(self, now: float) -> None:
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._began = now
        self._split = dict.fromkeys(SPLIT, 0.0)
        # What has been counted and is inside of nothing so far: its begin, and all of its seconds.
        self._spans: list[tuple[float, float]] = []

    def note(self, event: Event, now: float) -> None:
        """Something with a duration has ended just now."""
        if event.what == "background" or (event.kind == "swap" and event.seconds):
            # The rank went on meanwhile.
            return
        seconds = min(event.seconds, now - self._began)
        begin, inside, spans = now - seconds - TOLERANCE, 0.0, self._spans
        while spans and spans[-1][0] >= begin:
            inside += spans.pop()[1]
        spans.append((now - seconds, max(seconds, inside)))
        what = event.what if event.kind == "wait" else event.kind
        part = PARTS.get(what, what)
        self._split[part if part in self._split else "agree"] += max(0.0, seconds - inside)

    def take(self, now: float) -> tuple[float, dict[str, float]]:
        """Seconds of the step that ends now and their split, which sums to them."""
        seconds, split = now - self._began, self._split
        split["compute"] = seconds - sum(split.values())
        self._begin(now)
        return seconds, split
