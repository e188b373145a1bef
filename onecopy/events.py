"""What the runtime reports: one record and a list of sinks.

Progress lines, counters, traces and tests are sinks: any callable that takes an `Event`. Without
a sink an event is not even built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from onecopy import handle

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Event", "Events", "Kind", "Sink", "add_sink"]

Kind = Literal[
    "gather",
    "release",
    "reduce",
    "refresh",
    "wait",
    "step",
    "skip",
    "scale",
    "agree",
    "read",
    "stage",
    "save",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that the runtime did on this rank.

    kind: gather (a unit's values are being collected), release, reduce (a unit's gradients are
        being summed to their owners), refresh (values of updated slices travel), wait (this rank
        was blocked until a transfer ended), step (one optimizer step), skip (a step that was not
        made, because gradients had overflowed), scale (the loss scale has changed), agree (ranks
        compared what they want next), read (values came from files), stage (what is to be saved
        was copied to host memory), save (a checkpoint was written; one of async_save is reported
        from the thread that has written it).
    unit: name of the unit; empty where no single unit is meant.
    phase: forward, backward, step or api: the moment of the training step.
    num_bytes: bytes that this rank sends, copies to be saved, or reads from files or writes to
        them; 0 for other local events.
    group: shard or replica, the group the bytes travel in; empty for local events.
    seconds: time that this rank was blocked (wait, stage and save only); a save in the background
        blocks nobody but takes as long.
    what: what it was blocked in (wait only): gather, reduce or refresh of the unit, or agree (ranks
        compared what they want next, or shared a small number, such as a norm).
    value: the loss scale from now on (scale only).
    """

    kind: Kind
    unit: str
    phase: str
    num_bytes: int = 0
    group: str = ""
    seconds: float = 0.0
    what: str = ""
    value: float = 0.0


Sink = Callable[[Event], Any]


class Events:
    """The sinks of one sharded model, and the phase that its events carry."""

    __slots__ = ("phase", "sinks")

    def __init__(self, sinks: tuple[Sink, ...] = ()) -> None:
        self.sinks: list[Sink] = list(sinks)
        self.phase = "api"

    def emit(  # noqa: PLR0913
        self,
        kind: Kind,
        unit: str = "",
        *,
        num_bytes: int = 0,
        group: str = "",
        seconds: float = 0.0,
        what: str = "",
        value: float = 0.0,
    ) -> None:
        """Hand one event to every sink, in the order in which the sinks were added."""
        if not self.sinks:
            return
        event = Event(
            kind=kind,
            unit=unit,
            phase=self.phase,
            num_bytes=num_bytes,
            group=group,
            seconds=seconds,
            what=what,
            value=value,
        )
        for sink in self.sinks:
            sink(event)


def add_sink(model: nn.Module, sink: Sink) -> Callable[[], None]:
    """Let `sink` receive every later event of a sharded model.

    Returns a function that removes the sink again.

    Raises:
        ShardingError: the model is not sharded.
    """
    sinks: list[Sink] = handle.of(model).events.sinks
    sinks.append(sink)
    return lambda: sinks.remove(sink) if sink in sinks else None
