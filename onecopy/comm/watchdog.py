"""Tells when training stands still: which rank waits for what, and what the others are doing.

A thread of each rank looks, every few seconds, at what the rank waits for (`waits.py`), and at one
number in the process group's store, that of the latest question. While training moves that is all.
A rank that has waited for longer than `Config.stall_seconds` asks; each rank answers with its last
position and the innermost lines of what it runs; and of all ranks that wait, the lowest tells.

Nothing here knows a backend, and nothing here ends a wait: see `agreement.py` for that.

Where the process that holds the store is itself stopped, whoever asks the store waits, too. A
second thread, which asks nobody, tells of that.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from onecopy.comm import stall
from onecopy.comm.groups import Group
from onecopy.comm.processes import own_process, state_of
from onecopy.comm.stall import Answer, Peer, Place, WaitNow
from onecopy.comm.waits import Wait, waits

__all__ = ["Watchdog", "watch"]

LOGGER = logging.getLogger("onecopy")

LOOK_AT_MOST_EVERY = 4.0
LONGEST_PAUSE = 600.0
# Seconds, beside two pauses, in which a rank that runs has answered.
ANSWERS_WITHIN = 1.0
# A rank that was to tell, and has not renewed its claim for so many looks, does it no longer.
STALE_AFTER = 3


class Watched(Protocol):
    """A sharded model, seen from here."""

    @property
    def place(self) -> Place:
        """Where this rank is in the model's training."""


class Watchdog:
    """Of one rank, for all its models in one default process group.

    Attributes:
        seconds: how long a wait may last before it is told of.
        default_store: of the process group; held, so that no other one can be taken for it.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.seconds = float("inf")
        self.default_store = store
        # A connection of its own: the main thread may be blocked in the other one.
        self._store = dist.PrefixStore("onecopy/watchdog", store).clone()  # type: ignore[attr-defined]
        self._rank = rank
        # Replaced, never changed: the watching thread goes through it.
        self._models: tuple[weakref.ref[Watched], ...] = ()
        self._started = self._moved_at = time.perf_counter()
        self._place: Place | None = None
        self._answered = self._store.add("question", 0)
        # What was told of: a wait, how often, and when it is due again.
        self._told: tuple[Wait | None, int, float] = (None, 0, 0.0)
        self._stop = threading.Event()
        # When the look under way has begun.
        self._look_began: float | None = None
        self._claim: tuple[str, str] | None = None
        self._rival: tuple[str, int] = ("", 0)
        host = f"process {os.getpid()} on {socket.gethostname()}"
        self._store.set(f"here/{rank}", f"{host}|{own_process()}")
        self._start()

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return min(self.seconds / 8, LOOK_AT_MOST_EVERY)

    def add(self, model: Watched) -> None:
        """Watch a model, for as long as it lives."""
        alive = [one for one in self._models if one() is not None]
        self._models = (*alive, weakref.ref(model))

    def look(self) -> None:
        """Answer what was asked, and tell of a stall that is due."""
        self._look_began = time.perf_counter()
        self._look(self._look_began)
        self._look_began = None

    def look_at_looks(self) -> bool:
        """Tell, if it is so, that this rank waits and that the store says nothing of the others."""
        now, began = time.perf_counter(), self._look_began
        wait = _longest_wait(now)
        # A look that tells waits for answers.
        longest = self.seconds + 4 * self.pause + ANSWERS_WITHIN
        is_stuck = began is not None and now - began > longest
        if not is_stuck or wait is None or now - wait.since < self.seconds:
            return False
        what = f"the {wait.verb} of unit {wait.unit}" if wait.unit else wait.verb
        LOGGER.warning(
            f"rank {self._rank} has waited {now - wait.since:.0f} s in {what}; "
            f"the process group's store has not answered for {now - (began or now):.0f} s: the "
            "process that holds it (rank 0, or torchrun) is stopped or cannot be reached"
        )
        return True

    def _look(self, now: float) -> None:
        self._note_place(now)
        self._answer(self._store.add("question", 0))
        wait = _longest_wait(now)
        if wait is None or now - wait.since < self.seconds / 2:
            self._resign()
            return
        told, count, due = self._told
        if told is not wait:
            count, due = 0, wait.since + self.seconds
        self._told = wait, count, due
        if self._is_lowest(wait.ranks) and now >= due:
            self._tell(wait)
            pause = min(self.seconds * 2 ** (count + 1), max(LONGEST_PAUSE, self.seconds))
            self._told = wait, count + 1, time.perf_counter() + pause

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """Tell the others that this rank has ended."""
        try:
            self._store.set(f"here/{self._rank}", "|ended")
        except dist.DistError:
            # The store has ended earlier.
            return

    # This rank --------------------------------------------------------------------------------

    def _note_place(self, now: float) -> None:
        # No name of this function keeps a model alive while the store is asked.
        places = [one.place for one in (found() for found in self._models) if one is not None]
        # Of several models the one that was used more.
        place = max(places, key=lambda one: one.position, default=None)
        if place != self._place:
            self._place, self._moved_at = place, now
            # Last words, should it fall silent.
            self._post(Answer(self._answered, 0.0, place))

    def _post(self, answer: Answer) -> None:
        self._store.set(f"answer/{self._rank}", answer.to_json())

    def _answer(self, number: int) -> None:
        if number == self._answered:
            return
        self._answered = number
        now, frames = time.perf_counter(), stall.now()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        found = [
            WaitNow(
                one.verb,
                one.unit,
                now - one.since,
                name if (name := names.get(ident, "")).startswith(stall.BACKGROUND) else "",
                stall.stack(frames.get(ident)),
            )
            for ident, one in waits().items()
        ]
        moved = now - self._moved_at
        lines, others = stall.main_stack(frames), stall.stacks_beside(frames)
        del frames
        self._post(Answer(number, moved, self._place, found, lines, others))

    # The one that tells -----------------------------------------------------------------------

    def _is_lowest(self, ranks: Sequence[int]) -> bool:
        """Whether no lower one of these ranks waits; known from the second look on."""
        digest = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:12]
        key, (rival, looks) = f"tells/{digest}", self._rival
        before = self._claim
        found = self._store.compare_set(key, "", f"{self._rank} 0").decode()
        rank, beat = (int(part) for part in found.split())
        self._rival = (found, looks + 1 if found == rival else 0)
        if rank == self._rank or self._rank < rank or self._rival[1] >= STALE_AFTER:
            mine = f"{self._rank} {beat + 1}"
            if self._store.compare_set(key, found, mine).decode() == mine:
                self._claim = key, mine
        elif before is not None:
            self._claim = None
        return rank == self._rank and before is not None and before[0] == key

    def _resign(self) -> None:
        if self._claim is not None:
            key, mine = self._claim
            self._store.compare_set(key, mine, "")
            self._claim = None

    def _tell(self, wait: Wait) -> None:
        number = self._store.add("question", 1)
        self._answer(number)
        peers = {rank: self._peer(rank) for rank in wait.ranks}
        between = max(self.pause / 4, 0.01)
        # So many looks, and not so many seconds: where the machine stands still, nobody answers.
        for _ in range(math.ceil((2 * self.pause + ANSWERS_WITHIN) / between)):
            late = [rank for rank, one in peers.items() if _may_answer(one, number)]
            if not late or self._stop.wait(between):
                break
            peers.update({rank: self._peer(rank) for rank in late})
        mine = peers[self._rank].answer
        # Unless it has ended while the others answered.
        if mine is not None and mine.waits and any(one is wait for one in waits().values()):
            longest = max(mine.waits, key=lambda one: one.seconds)
            LOGGER.warning(stall.report(self._rank, longest, number, peers))

    def _peer(self, rank: int) -> Peer:
        store, answer = self._store, None
        if not store.check([f"here/{rank}"]):
            return Peer(None, "", "")
        process, _, detail = store.get(f"here/{rank}").decode().partition("|")
        if store.check([f"answer/{rank}"]):
            answer = Answer.from_json(store.get(f"answer/{rank}").decode())
        return Peer(answer, process, "ended" if detail == "ended" else state_of(detail))

    # The thread -------------------------------------------------------------------------------

    def _start(self) -> None:
        stop, reference = self._stop, weakref.ref(self)
        thread, second = (
            threading.Thread(target=body, args=(reference, stop), name=name, daemon=True)
            for body, name in ((_watch, "onecopy-watchdog"), (_watch_looks, "onecopy-watchdog-2"))
        )
        self._thread = thread
        finalizer = weakref.finalize(self, stop.set)
        finalizer.atexit = False
        atexit.register(_close_at_exit, reference, stop, thread)
        thread.start()
        second.start()


def _longest_wait(now: float) -> Wait | None:
    return max(waits().values(), key=lambda one: now - one.since, default=None)


def _may_answer(peer: Peer, number: int) -> bool:
    """Whether it is there, and has not answered this question yet."""
    has_answered = peer.answer is not None and peer.answer.number == number
    return bool(peer.process) and not peer.state and not has_answered


_watchdogs: weakref.WeakValueDictionary[int, Watchdog] = weakref.WeakValueDictionary()


def watch(world: Group, seconds: float | None) -> Watchdog | None:
    """The watchdog of this rank, which tells of stalls from `seconds` on.

    It lives as long as somebody holds it. None where there is nobody to wait for, or where no
    seconds are given. The only data rank of a model may wait for its tensor parallel ranks.
    """
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if world.is_imagined or is_alone or seconds is None:
        return None
    store = dist.distributed_c10d._get_default_store()
    found = _watchdogs.get(id(store))
    if found is None:
        found = _watchdogs[id(store)] = Watchdog(store, world.ranks[world.rank])
    found.seconds = min(found.seconds, seconds)
    return found


def _watch(reference: weakref.ref[Watchdog], stop: threading.Event) -> None:
    """Body of the watching thread."""
    pause = 0.05
    while not stop.wait(pause):
        watchdog = reference()
        if watchdog is None:
            return
        try:
            watchdog.look()
        except dist.DistError:
            # The store has gone away with its rank; the main thread hears of it where it waits.
            return
        pause = watchdog.pause
        # Held while it waits, this thread would keep it alive.
        del watchdog


def _watch_looks(reference: weakref.ref[Watchdog], stop: threading.Event) -> None:
    """Body of the second thread."""
    pause = 0.05
    while not stop.wait(pause):
        watchdog = reference()
        if watchdog is None:
            return
        is_told = watchdog.look_at_looks()
        pause = max(LONGEST_PAUSE, watchdog.seconds) if is_told else watchdog.pause
        del watchdog


def _close_at_exit(
    reference: weakref.ref[Watchdog], stop: threading.Event, thread: threading.Thread
) -> None:
    """Stop the thread before the interpreter goes, and tell the other ranks."""
    stop.set()
    thread.join(timeout=1.0)
    watchdog = reference()
    if watchdog is not None and not thread.is_alive():
        watchdog.close()
