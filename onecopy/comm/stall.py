"""What ranks say of themselves when training stands still, and the report made of it. No torch."""

from __future__ import annotations

import json
import linecache
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

__all__ = ["Answer", "Peer", "Place", "WaitNow", "report", "stack"]

MOST_LINES = 3
# Stands for a number of seconds, where ranks that do the same are told of together.
SECONDS = "<seconds>"
# Threads that work beside training, by how their names begin.
BACKGROUND = "onecopy writes"
_OWN = str(Path(__file__).parent.parent)
_NOT_THE_USERS = tuple(
    f"{path}/" for path in (_OWN, *(sysconfig.get_paths()[k] for k in ("stdlib", "purelib")))
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is in its training.

    position: how many uses of units it has counted. wish: the last of them. phase: see `Event`.
    step: number of the step under way, from 1.
    """

    position: int
    wish: str
    phase: str
    step: int

    def __str__(self) -> str:
        return f"use {self.position}, {self.wish}, {self.when}"

    @property
    def when(self) -> str:
        """The phase and the step."""
        at = "between two steps" if self.phase == "api" else self.phase
        return f"{at}, step {self.step}"


@dataclass(frozen=True, slots=True)
class WaitNow:
    """A wait that has not ended: verb and unit as in `Wait`, the seconds so far, and the stack.

    thread: name of a thread that works beside training; empty for training itself.
    """

    verb: str
    unit: str
    seconds: float
    thread: str
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank is doing.

    number: of the question. moved: seconds since it has last counted a use of a unit, or, before
        the first one, since shard. lines: what the main thread runs, innermost first. others: the
        same for threads that work beside it, by name.
    """

    number: int
    moved: float
    place: Place | None
    waits: Sequence[WaitNow] = ()
    lines: Sequence[str] = ()
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """As text for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """The counterpart of `to_json`."""
        found = json.loads(text)
        place = found["place"] and Place(**found["place"])
        waits = [WaitNow(**one) for one in found["waits"]]
        return cls(**{**found, "place": place, "waits": waits})


@dataclass(frozen=True, slots=True)
class Peer:
    """What is known of a rank in any case.

    answer: the latest, to whichever question; None where it has never said anything. process: its
    number and machine, empty where it has not come to `shard`. state: "stopped" or "ended" where
    the machine of both can tell, or it has said so, else empty.
    """

    answer: Answer | None
    process: str
    state: str


def stack(frame: FrameType | None) -> list[str]:
    """The innermost line of a thread, and the innermost ones of code that is the user's own."""
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_LINES:
        name, number = frame.f_code.co_filename, frame.f_lineno
        is_own = not name.startswith(("<", *_NOT_THE_USERS))
        if is_own or not lines:
            source = linecache.getline(name, number).strip()
            place = f"{name}:{number} in {frame.f_code.co_name}"
            lines.append(f"{place}: {source}" if source else place)
        frame = frame.f_back
    return lines


def stacks_beside(frames: Mapping[int, FrameType]) -> dict[str, list[str]]:
    """Those of threads that work beside training, by name."""
    return {
        thread.name: stack(frames.get(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.name.startswith(BACKGROUND)
    }


def main_stack(frames: Mapping[int, FrameType]) -> list[str]:
    """That of the main thread."""
    ident = threading.main_thread().ident
    return stack(frames.get(ident)) if ident is not None else []


def now() -> dict[int, FrameType]:
    """What every thread of this process runs at the moment."""
    return dict(sys._current_frames())


# The report ------------------------------------------------------------------------------------


def report(rank: int, wait: WaitNow, number: int, peers: Mapping[int, Peer]) -> str:
    """What stands still, and what each rank does: first those that the others wait for.

    Args:
        rank: the one that tells.
        wait: its longest.
        number: of the question that ranks were to answer.
        peers: all ranks that take part, itself included.
    """
    mine = peers[rank].answer
    what = _wait_text(wait, mine.place if mine is not None else None)
    beside = "" if not wait.thread else f" ({wait.thread}, while training may go on)"
    title = "training stands still" if not wait.thread else "a checkpoint stands still"
    blocks: dict[tuple[int, str, tuple[str, ...]], list[int]] = {}
    seconds: dict[tuple[int, str, tuple[str, ...]], float] = {}
    for one, peer in sorted(peers.items()):
        order, text, lines, since = _said(peer, number, wait)
        key = (order, text, tuple(lines))
        blocks.setdefault(key, []).append(one)
        seconds[key] = max(seconds.get(key, 0.0), since)
    when = "" if wait.thread or mine is None or mine.place is None else f" ({mine.place.when})"
    told = [f"{title}: rank {rank} has waited {wait.seconds:.0f} s{beside}: it {what}{when}"]
    for key in sorted(blocks):
        _, text, lines = key
        ranks = blocks[key]
        text = text.replace(SECONDS, f"{seconds[key]:.0f} s")
        if len(ranks) > 1:
            told.append(f"  ranks {_ranges(ranks)}: each {text}")
        else:
            told.append(f"  rank {ranks[0]} {text}")
        told += [f"      {line}" for line in lines]
    return "\n".join(told)


def _said(peer: Peer, number: int, asked_for: WaitNow) -> tuple[int, str, Sequence[str], float]:
    """Where to put a rank, what to say of it, its lines, and the seconds that belong there."""
    answer = peer.answer
    where = f" ({peer.process})" if peer.process else ""
    if answer is None or answer.number != number:
        return 0, _silent(peer) + where, (), 0.0
    place = answer.place
    waits = [one for one in answer.waits if one.thread == asked_for.thread] or [
        one for one in answer.waits if not one.thread
    ]
    if waits:
        wait = max(waits, key=lambda one: one.seconds)
        at = f", at {place}" if place is not None else ""
        return 2, f"{_wait_text(wait, place)}, for {SECONDS}{at}", wait.lines, wait.seconds
    lines = answer.others.get(asked_for.thread, answer.lines)
    since = f", after {place}" if place is not None else ""
    return 1, f"does not wait; it has not moved for {SECONDS}{since}{where}", lines, answer.moved


def _silent(peer: Peer) -> str:
    if peer.state == "ended":
        return "has ended"
    if not peer.process:
        return "has not come to onecopy.shard yet, or has ended"
    last = ""
    if peer.answer is not None and peer.answer.place is not None:
        last = f"; last heard of at {peer.answer.place}"
    if peer.state == "stopped":
        return f"does not answer, its process is stopped (kill -CONT lets it go on){last}"
    return f"does not answer: it is stopped, gone, or in code that keeps Python's lock{last}"


def _wait_text(wait: WaitNow, place: Place | None) -> str:
    if wait.verb == "checkpoint":
        return "waits for the others in a checkpoint"
    if wait.verb == "load":
        return "loads a checkpoint together with the others"
    if wait.verb == "exchange":
        return "waits for activations of the others"
    if wait.unit:
        return f"waits for the {wait.verb} of unit {wait.unit}"
    wish = f" on {place.wish}" if place is not None else ", in shard"
    return f"waits for the others to {wait.verb}{wish}"


def _ranges(ranks: Sequence[int]) -> str:
    """0, 3-7, 9."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)
