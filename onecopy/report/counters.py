"""A sink that adds up the bytes of events, by kind, between two looks.

This file owns sums only. What the numbers should be is `planner.estimate`'s business.
"""

from __future__ import annotations

from collections import Counter

from onecopy.events import Event


class BytesCounter:
    """Sums `num_bytes` of every event by its kind: `onecopy.events.add_sink(model, counter)`.

    For gather, reduce and refresh that is what this rank sends.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        self._bytes[str(event.kind)] += event.num_bytes

    def take(self) -> dict[str, int]:
        """Bytes by kind since the last `take`, which this one resets."""
        taken = dict(self._bytes)
        self._bytes.clear()
        return taken
