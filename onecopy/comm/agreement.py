"""Ranks agree on what comes next, so that a different wish is an error and not a hang.

Every use of a unit that needs a transfer has a *position*: a count that is the same on all ranks
as long as they do the same. A transfer that the schedule does not foresee is first put to the
vote: each rank posts its wish for the position to the process group's store. All wish the same:
go on. One differs: every rank raises `DivergenceError` at once. One is missing: it may merely be
late (it compiles, it loads data), so it is waited for (`watchdog.py` tells of it), and an error
only when it has ended (each rank says so at its end, and which error has brought it about; of one
that was killed the others on its machine say so) or when the process group's timeout is over.

Transfers that the schedule foresees are only counted. A rank that makes no progress for a moment
looks at the positions that the others have posted and casts its votes for them afterwards: so a
rank blocked in a scheduled transfer also finds out, and the watching thread interrupts it.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from onecopy.comm.groups import Group
from onecopy.comm.processes import has_ended, own_process
from onecopy.comm.waits import Wait
from onecopy.errors import CommunicationError, DivergenceError, OneCopyError
from onecopy.events import Events

__all__ = ["Agreement"]

# A rank whose position has not moved for LOOK_AFTER seconds looks at the others; it goes on
# looking, ever more seldom, so that an idle program costs its store nothing.
LOOK_AFTER = 0.5
LOOK_AT_MOST_EVERY = 5.0
GONE_WITHIN = 0.5
LOOKS_FOR_GONE = 20
HISTORY = 65_536
# Characters of another rank's error.
LONGEST_FAILURE = 2_000
_STORE_IS_GONE = (
    "the process group's store is gone ({}): the rank that holds it, most often rank 0, has ended; "
    "its own output says why"
)
# What a verdict can be, by the name that it has in the store.
_KINDS: dict[str, type[OneCopyError]] = {
    kind.__name__: kind for kind in (CommunicationError, DivergenceError)
}
FOR_ALL = (
    "All ranks save, load, run backward and use whole values together, in the same order: look for "
    "control flow that depends on the rank or its data, such as `if rank == 0:` around a save, an "
    "evaluation or a print. In forward, ranks may run different modules at stages 0 to 2, at stage "
    "3 those that are named in keep_gathered=(...)"
)


class Agreement:
    """The votes of one sharded model.

    Attributes:
        position: how many uses of units have been counted so far.
        is_blocked: the main thread waits for a transfer; see `blocked`.
    """

    def __init__(
        self, group: Group, key: str, interrupt: Callable[[], None], events: Events
    ) -> None:
        self.position = 0
        self._group = group
        self._events = events
        self._interrupt = interrupt
        self._wishes: deque[str] = deque(maxlen=HISTORY)
        self._voted: set[int] = set()
        self._lock = threading.Lock()
        self.is_blocked = False
        self._is_voting = False
        self._verdict: tuple[type[OneCopyError], str] | None = None
        self._processes: dict[int, str] = {}
        self._store: dist.Store | None = None
        if group.process_group is not None:
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"onecopy/{key}", store)
            self._store.set(f"process/{group.rank}", own_process())
            self._store.set(f"at/{group.rank}", "0|the end of shard")
            self._start_watching()

    @property
    def last_wish(self) -> str:
        """What was counted last."""
        return self._wish_at(self.position) or "the end of shard"

    def scheduled(self, wish: str) -> None:
        """Count a use that all ranks are known to make."""
        self.position += 1
        self._wishes.append(wish)

    def agree(self, wish: str) -> None:
        """Count a use, and return when all ranks have wished the same.

        Raises:
            DivergenceError: a rank wishes something else, or did not come in time.
            CommunicationError: a rank was killed, or has ended with an error.
        """
        self.scheduled(wish)
        if self._store is None:
            return
        self._is_voting = True
        try:
            with Wait("agree", self._group.ranks, events=self._events):
                self._vote(self.position)
                self._await_all(self.position)
        finally:
            self._is_voting = False

    def exchange(self, topic: str, value: str) -> list[str]:
        """The `value` of every rank, in rank order; all ranks must ask for the same `topic`."""
        if self._store is None:
            self.scheduled(topic)
            return [value] * self._group.size
        key = f"value/{self.position + 1}"
        self._store.set(f"{key}/{self._group.rank}", value)
        self.agree(topic)
        keys = [f"{key}/{rank}" for rank in range(self._group.size)]
        return [item.decode() for item in self._store.multi_get(keys)]

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Around a blocking wait for a transfer: turns its failure into the ranks' verdict.

        Raises:
            DivergenceError: the wait failed because ranks had diverged.
            CommunicationError: it failed because a rank was killed, or ended with an error.
        """
        self.is_blocked = True
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self.is_blocked = False

    def explain(self, error: RuntimeError) -> None:
        """A transfer has failed.

        Raises:
            DivergenceError, CommunicationError: where that is the verdict, or is about to be.
        """
        self._explain_failure()
        self._raise_verdict(error)

    def close(self, failure: BaseException | None = None) -> None:
        """Tell the others that this rank takes part no longer, and what has ended it."""
        if self._store is not None:
            try:
                if failure is not None:
                    text = f"{type(failure).__name__}: {failure}"[:LONGEST_FAILURE]
                    self._store.set(f"failure/{self._group.rank}", text)
                self._store.set(f"at/{self._group.rank}", f"-1|{self.position}")
            except RuntimeError:
                # The store lives on another rank that has already ended: nobody is left to tell.
                pass
            self._store = None

    @property
    def _open_store(self) -> dist.Store:
        """For those who look in a thread of their own, while `close` may come.

        Raises:
            RuntimeError: it has come; as where the store is gone with its rank.
        """
        store = self._store
        if store is None:
            raise RuntimeError("this rank takes part no longer")
        return store

    # Votes ------------------------------------------------------------------------------------

    def _wish_at(self, position: int) -> str | None:
        back = self.position - position
        return self._wishes[-1 - back] if 0 <= back < len(self._wishes) else None

    def _vote(self, position: int) -> None:
        """Cast this rank's vote for a position, once; the first vote there is the yardstick."""
        store, wish = self._store, self._wish_at(position)
        with self._lock:
            if store is None or wish is None or position in self._voted:
                return
            self._voted.add(position)
            if len(self._voted) > HISTORY:
                self._voted = {item for item in self._voted if item > position - HISTORY}
        mine = f"{self._group.ranks[self._group.rank]}|{wish}"
        first = store.compare_set(f"first/{position}", "", mine).decode()
        first_rank, first_wish = first.split("|", 1)
        if first_wish != wish:
            self._fail(
                f"ranks have diverged at use {position}: rank {first_rank} wants {first_wish}, "
                f"rank {self._group.ranks[self._group.rank]} wants {wish}. {FOR_ALL}"
            )
        elif store.add(f"count/{position}", 1) == self._group.size:
            store.set(f"agreed/{position}", "1")
            # All ranks are here, so all have left the position before: forget it.
            for old in ("first", "count", "agreed"):
                store.delete_key(f"{old}/{position - 1}")
            for rank in range(self._group.size):
                store.delete_key(f"value/{position - 1}/{rank}")

    def _fail(self, text: str, kind: type[OneCopyError] = DivergenceError) -> None:
        self._take(self._open_store.compare_set("verdict", "", f"{kind.__name__}|{text}"))

    def _take(self, verdict: bytes) -> None:
        name, text = verdict.decode().split("|", 1)
        self._verdict = _KINDS[name], text

    def _read_verdict(self) -> None:
        store = self._store
        if store is None or self._verdict is not None:
            return
        try:
            if store.check(["verdict"]):
                self._take(store.get("verdict"))
        except RuntimeError as error:
            self._verdict = CommunicationError, _STORE_IS_GONE.format(error)

    def _raise_verdict(self, cause: Exception | None = None) -> None:
        if self._verdict is not None:
            kind, text = self._verdict
            raise kind(text) from cause

    def _await_all(self, position: int) -> None:
        store, pause, started = self._store, 2e-5, time.monotonic()
        assert store is not None, "only ranks with a store wait for votes"
        # The stubs of torch lack it. A default store has the process group's timeout.
        timeout = store.timeout.total_seconds()  # type: ignore[attr-defined]
        look_at = started + LOOK_AFTER
        while self._verdict is None and not store.check([f"agreed/{position}"]):
            time.sleep(pause)
            now = time.monotonic()
            if pause < 2e-3:
                pause *= 1.3
            else:
                self._read_verdict()
            if now > look_at:
                look_at = now + LOOK_AFTER
                self._look_for_lost()
            if now - started > timeout:
                self._fail(self._describe_wait(position, now - started) + ". Giving up")
        self._raise_verdict()

    # Watching ---------------------------------------------------------------------------------

    def _positions(self) -> dict[int, tuple[int, str]]:
        """What each other rank last posted: its position (-1: ended) and its wish there."""
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        posts = self._open_store.multi_get([f"at/{rank}" for rank in others])
        found = {}
        for rank, post in zip(others, posts, strict=True):
            position, wish = post.decode().split("|", 1)
            found[rank] = (int(position), wish)
        return found

    def _describe_wait(self, position: int, seconds: float) -> str:
        wish = self._wish_at(position)
        late = [
            f"rank {self._group.ranks[rank]} "
            + (f"is still at use {at}, {theirs}" if at >= 0 else "has ended")
            for rank, (at, theirs) in self._positions().items()
            if at < position
        ]
        return (
            f"rank {self._group.ranks[self._group.rank]} has waited {seconds:.0f} s for the others "
            f"at use {position}, {wish}: {'; '.join(late) or 'the transfer itself is slow'}"
        )

    @property
    def _is_waiting(self) -> bool:
        return self._is_voting or self.is_blocked

    def look(self) -> None:
        """Post this rank's position, vote where others wait, and hear of a verdict."""
        store, position = self._store, self.position
        if store is None:
            return
        if position:
            store.set(f"at/{self._group.rank}", f"{position}|{self._wish_at(position)}")
            self._vote(position)
        for rank, (at, wish) in self._positions().items():
            if at > 0:
                self._vote(at)
            elif at < 0 and int(wish) < position and self._is_waiting:
                # The first verdict counts.
                self._fail_for_error(rank)
                self._fail(
                    f"rank {self._group.ranks[rank]} has ended after {wish} uses of units, but "
                    f"rank {self._group.ranks[self._group.rank]} is at use {position}, "
                    f"{self._wish_at(position)}: give every rank the same number of batches, and "
                    "call on every rank what all do together"
                )
        self._look_for_lost()
        self._read_verdict()

    def _look_for_lost(self) -> None:
        """Fail for a rank that an error has ended, or one of this machine that was killed."""
        if self._store is None or self._verdict is not None:
            return
        try:
            for rank, (at, _) in self._positions().items():
                if rank not in self._processes:
                    process = self._open_store.get(f"process/{rank}")
                    self._processes[rank] = process.decode()
                if at < 0:
                    self._fail_for_error(rank)
                    continue
                if not has_ended(self._processes[rank]):
                    continue
                # It may have said so just now.
                if self._positions()[rank][0] >= 0:
                    self._fail(
                        f"the process of rank {self._group.ranks[rank]} has ended without a word: "
                        "it has crashed, or was killed (for want of memory?). Its own output and "
                        "the system's log say why",
                        CommunicationError,
                    )
        except RuntimeError:
            self._read_verdict()

    def _fail_for_error(self, rank: int) -> None:
        """Fail for a rank that has ended, if it was by an error."""
        store, key = self._open_store, f"failure/{rank}"
        if store.check([key]):
            failure = store.get(key).decode()
            self._fail(
                f"rank {self._group.ranks[rank]} has ended with an error: {failure}",
                CommunicationError,
            )

    def _explain_failure(self) -> None:
        """A transfer has failed: is there a verdict, or is one due?

        The connections of a process go a moment before itself.
        """
        self._read_verdict()
        # So many looks, and not so many seconds: where the machine stands still, nobody ends.
        for _ in range(LOOKS_FOR_GONE):
            if self._store is None or self._verdict is not None:
                return
            self._look_for_lost()
            time.sleep(GONE_WITHIN / LOOKS_FOR_GONE)

    def _start_watching(self) -> None:
        stop = threading.Event()
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), stop), name="onecopy-agreement", daemon=True
        )
        finalizer = weakref.finalize(self, stop.set)
        finalizer.atexit = False
        atexit.register(_close_at_exit, weakref.ref(self), stop, thread)
        thread.start()

    def interrupt_if_blocked(self) -> None:
        """Free a blocked main thread once there is a verdict."""
        if self.is_blocked and self._verdict is not None:
            self._interrupt()


def _watch(reference: weakref.ref[Agreement], stop: threading.Event) -> None:
    """Body of the watching thread: looks only while the position stands still."""
    seen, pause = -1, LOOK_AFTER
    while not stop.wait(pause):
        agreement = reference()
        if agreement is None:
            return
        moved, seen = agreement.position != seen, agreement.position
        pause = LOOK_AFTER if moved else min(pause * 1.2, LOOK_AT_MOST_EVERY)
        try:
            if not moved:
                agreement.look()
                agreement.interrupt_if_blocked()
        except RuntimeError:
            # The store has gone away with its rank; the main thread hears of it where it waits.
            return
        # Held while it waits, this thread would keep a deleted model's agreement alive.
        del agreement


def _close_at_exit(
    reference: weakref.ref[Agreement], stop: threading.Event, thread: threading.Thread
) -> None:
    """Stop the thread before the interpreter goes, and tell the other ranks."""
    stop.set()
    thread.join(timeout=1.0)
    agreement = reference()
    if agreement is not None:
        # Set where nobody has caught an error of the main thread.
        agreement.close(getattr(sys, "last_value", None))
