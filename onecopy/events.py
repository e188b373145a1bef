"""What the runtime reports: one record and a list of sinks.

Progress lines, counters, traces and tests are sinks: any callable that takes an `Event`. Without
a sink an event is not even built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from onecopy import handle

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SENT", "Event", "Events", "Kind", "Sink", "add_sink"]

# What an event can be of; `Event` says what each means.
Kind = Literal[
    "pass",
    "gather",
    "release",
    "reduce",
    "refresh",
    "swap",
    "wait",
    "step",
    "skip",
    "update",
    "speculation",
    "scale",
    "read",
    "stage",
    "save",
    "keep",
    "fetch",
    "collect",
    "enter",
    "leave",
    "exchange",
]
# Those in which bytes of units travel from rank to rank.
SENT = ("gather", "reduce", "refresh")


class Event(NamedTuple):
    """One thing that the runtime did on this rank.

    kind: pass (a forward or a backward of the whole model begins), gather (a unit's values are
        being collected), release, reduce (a unit's gradients are being summed to their owners),
        refresh (values of updated slices travel), swap (bytes of a unit move between the device and
        host memory, or between that and disk), wait (this rank was blocked until a transfer ended,
        or until ranks had agreed), step (one optimizer step), skip (a step that was not
        made, because gradients had overflowed), update (the optimizer was run on one unit, within
        backward), speculation (what became of a unit's update that was begun before its step, with
        speculative_step), scale (the loss scale has changed), read (values came from files), stage
        (what is to be saved was copied to host memory), save (a checkpoint was written; one of
        async_save is reported from the thread that has written it), keep (the input of a
        checkpointed module is kept for backward), fetch (it begins to come back from where it was
        kept), collect (its parts travel, to be whole again), enter and leave (the computation of a
        unit begins and ends, in forward or backward; only while somebody looks closely, see
        `Events.close_looks`), exchange (activations travelled between the ranks of one sequence, or
        activations and weights between those of a grid).
    unit: name of the unit; empty where no single unit is meant. Of keep, fetch and collect the name
        of the module, which is that of its unit most often.
    phase: forward, backward, step or api: the moment of the training step.
    num_bytes: bytes that this rank sends, moves between device and host, copies to be saved, or
        reads from files or writes to them; of keep those that this rank holds; 0 for other local
        events.
    group: shard or replica, the group the bytes travel in, or model, that of collect, or sequence
        or grid, those of an exchange; empty for local events.
    seconds: how long it took, until now: wait, stage and save, which block this rank (a save in the
        background blocks nobody but takes as long), step and skip (without a closure), update. Of a
        swap with the disk how long that took; this rank went on meanwhile.
    what: of a wait, what this rank was blocked in: gather, reduce, refresh or swap of the unit, or
        agree (ranks compared what they want next, or shared a small number, such as a norm); keep,
        fetch or collect of a checkpointed module. Of keep and fetch where it is kept or comes from,
        "device", "host" or "nvme". Of a
        pass, what travels for it of all units, as far as the stage cuts them: "gather", "reduce",
        "gather reduce". Of a swap, "up" to the device or "down" from it, "read" from disk or
        "write" to it. Of step, skip and update, the optimizer's class. Of a speculation, "kept"
        (the step has taken it), "redone" (something that went in has changed: the step has made the
        update), "late" (the thread had not come to it: likewise) or "dropped" (no step was made of
        it). Of a save in the background, "background".
    value: of scale the loss scale from now on; of a swap with the disk how many seconds ago it has
        ended.
    across_bytes: of num_bytes that travel to other ranks, those that leave this rank's node.
    """

    kind: Kind
    unit: str
    phase: str
    num_bytes: int = 0
    group: str = ""
    seconds: float = 0.0
    what: str = ""
    value: float = 0.0
    across_bytes: int = 0


# Whatever is called with each event; what it returns does not matter.
Sink = Callable[[Event], Any]


class Events:
    """The sinks of one sharded model, and the phase that its events carry.

    Attributes:
        num_steps: how many steps its optimizer has made, as checkpoints count them.
        close_looks: how many sinks want to see units enter and leave, too.
    """

    __slots__ = ("close_looks", "num_steps", "phase", "sinks")

    def __init__(self, sinks: tuple[Sink, ...] = ()) -> None:
        self.sinks: list[Sink] = list(sinks)
        self.phase = "api"
        self.num_steps = 0
        self.close_looks = 0

    def follow(self, before: Events) -> None:
        """The model was partitioned anew: whoever has looked at it goes on looking."""
        self.sinks = before.sinks
        self.num_steps = before.num_steps
        self.close_looks = before.close_looks

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
        across_bytes: int = 0,
    ) -> None:
        """Hand one event to every sink, in the order in which the sinks were added."""
        if not self.sinks:
            return
        # By place: an event is made in a microsecond, there are many.
        event = Event(kind, unit, self.phase, num_bytes, group, seconds, what, value, across_bytes)
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
