"""The order in which units are needed: recorded once, then foreseen.

A step falls into *segments*: one for each outermost forward, one for each backward. The first time
a segment runs, each of its uses is agreed on by all ranks and recorded. From then on it is a
frozen sequence: uses that follow it need no agreement, and the next units are prefetched. A
segment that leaves its sequence goes on without prefetch, agreeing again, and is recorded anew.

Because every recorded use was agreed on, the ranks' sequences are equal by construction.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onecopy.core.unit import Unit

__all__ = ["Schedule"]

MOST_SEGMENTS = 64


class Schedule:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[Unit, ...]] = OrderedDict()
        self._key: Hashable | None = None
        self._expected: tuple[Unit, ...] = ()
        self._last_uses: dict[Unit, int] = {}
        self._uses: list[Unit] = []
        self._is_followed = False
        self._has_warned = False

    @property
    def is_running(self) -> bool:
        """A segment has begun and not ended."""
        return self._key is not None

    @property
    def is_recording(self) -> bool:
        """The running segment is not, or no longer, foreseen."""
        return not self._is_followed

    def knows(self, key: Hashable) -> bool:
        """Whether a segment with this key has been recorded."""
        return key in self._known

    def begin(self, key: Hashable) -> None:
        """A segment starts; segments with the same key are expected to be alike."""
        self._key = key
        self._expected = self._known.get(key, ())
        self._last_uses = {unit: position for position, unit in enumerate(self._expected)}
        self._is_followed = key in self._known
        self._uses = []

    def use(self, unit: Unit) -> bool:
        """Count a use; whether it was foreseen."""
        position = len(self._uses)
        self._uses.append(unit)
        if not self._is_followed:
            return False
        if position < len(self._expected) and self._expected[position] is unit:
            return True
        self._leave(unit, position)
        return False

    def upcoming(self) -> Iterator[Unit]:
        """The units that will be needed next, in order; none while recording."""
        if self._is_followed:
            # Few are asked for, of very many: no copy of the rest.
            for position in range(len(self._uses), len(self._expected)):
                yield self._expected[position]

    def expects(self, unit: Unit) -> bool:
        """Whether a unit will be needed again in this segment; False while recording."""
        return self._is_followed and self._last_uses.get(unit, -1) >= len(self._uses)

    def end(self, *, failed: bool = False) -> None:
        """The segment is over; what was recorded is frozen, unless it ended by an exception."""
        if self._key is not None and not failed:
            if not self._is_followed or len(self._uses) < len(self._expected):
                self._known[self._key] = tuple(self._uses)
            self._known.move_to_end(self._key)
            while len(self._known) > MOST_SEGMENTS:
                self._known.popitem(last=False)
        self._key, self._is_followed, self._expected, self._uses = None, False, (), []
        self._last_uses = {}

    def _leave(self, unit: Unit, position: int) -> None:
        self._is_followed = False
        if self._has_warned:
            return
        self._has_warned = True
        expected = self._expected[position].name if position < len(self._expected) else "no unit"
        warnings.warn(
            f"the order in which units are used has changed: expected {expected}, used "
            f"{unit.name} ({self._key}). Results stay correct; such steps run without prefetch "
            "and are recorded again. This is said once",
            stacklevel=2,
        )
