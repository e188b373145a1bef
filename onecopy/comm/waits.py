"""What the threads of this process wait for: known while they do, an event when they are done."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from onecopy.events import Events

__all__ = ["Wait", "waits"]


class Wait:
    """Around everything that blocks until other ranks have come: `with Wait("gather", ranks):`.

    Inside another one of the same thread it is a part of that, and not known by itself.

    Attributes:
        verb: gather, reduce, refresh, agree (ranks compare or count something), checkpoint (they
            tell one another of their parts), load (they read theirs, and tell), or exchange
            (activations go from rank to rank).
        ranks: the global ranks that take part.
        unit: name of the unit; empty where no single unit is meant.
        since: when it began, by time.perf_counter.
    """

    __slots__ = ("_events", "_is_outermost", "_thread", "ranks", "since", "unit", "verb")

    def __init__(
        self, verb: str, ranks: Sequence[int], *, unit: str = "", events: Events | None = None
    ) -> None:
        self.verb = verb
        self.ranks = ranks
        self.unit = unit
        self._events = events

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self.since = time.perf_counter()
        self._is_outermost = _waits.setdefault(self._thread, self) is self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_outermost:
            _waits.pop(self._thread, None)
        if error is None and self._events is not None and self._events.sinks:
            seconds = time.perf_counter() - self.since
            self._events.emit("wait", self.unit, what=self.verb, seconds=seconds)


# By thread. Only the thread itself adds and removes; others look.
_waits: dict[int, Wait] = {}


def waits() -> dict[int, Wait]:
    """What each thread of this process waits for now, by the thread's number."""
    return dict(_waits)
