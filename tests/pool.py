"""A pool of rank processes that live as long as the test session.

Importing torch costs seconds and a test must not pay it once per rank: processes are started when
first needed and then sent functions. Each call gets a process group of its own, with keys of its
own in the store that this process serves, so a test that breaks its group harms no other. A rank
that hangs or dies is replaced.
What runs in the ranks is in `rank.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.rank import RELEASE, RankError, RankWarning, Task, serve

MAX_RANKS = 8
START_TIMEOUT = 180.0  # seconds: a first import of torch on a busy machine
SETTLE_TIMEOUT = 30.0  # seconds: to destroy a group, on a busy machine
REPOSITORY = Path(__file__).resolve().parent.parent
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # Without Gloo's notes on broken connections: tests break some on purpose.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
if sys.platform == "linux":
    RANK_ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"  # host names need not resolve where tests run


class RankFailed(Exception):
    """At least one rank failed; `failures` holds one RankError for each that did."""

    def __init__(self, failures: Sequence[RankError]) -> None:
        super().__init__(failures)
        self.failures = list(failures)

    def __str__(self) -> str:
        return "\n\n".join(str(failure) for failure in self.failures)


class UnexpectedWarning(Exception):
    """Ranks warned in a call that did not ask for `record_warnings=True`."""


@dataclass
class _Rank:
    """One process as seen from here."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    stacks: Path  # where the process writes its stacks when it is signalled or crashes

    def receive(self) -> Any:
        # Plain pickle: multiprocessing's own would pass tensors through shared memory.
        return pickle.loads(self.connection.recv_bytes())

    def read_stacks(self) -> str:
        try:
            return self.stacks.read_text(errors="replace").strip()
        except OSError:
            return ""

    def dump_stacks(self) -> str:
        """Ask the process for the stacks of its threads, wherever they are."""
        before = self.read_stacks()
        if hasattr(signal, "SIGUSR1") and self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline and self.read_stacks() == before:
                time.sleep(0.02)
            time.sleep(0.05)
        return self.read_stacks()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()
        self.stacks.unlink(missing_ok=True)


class Pool:
    """Runs functions on ranks. One per test session; `close` leaves no process behind."""

    def __init__(self) -> None:
        self.warnings: list[list[RankWarning]] = []  # of the last run, one list per rank
        self._ranks: list[_Rank | None] = [None] * MAX_RANKS
        self._num_calls = 0
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="onecopy-ranks-")

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 120.0,
        group_timeout: float | None = None,
        expect_failures: bool = False,
        record_warnings: bool = False,
    ) -> list[Any]:
        """Call `function(*arguments)` on ranks 0 to world_size - 1; return what each returned.

        `function` must be at module level. On each rank a fresh default process group is
        initialised, whose own timeout (`group_timeout`) is three quarters of `timeout` unless
        given, and torch's random state is the same on every rank and in every call. A failure
        raises `RankFailed`; with `expect_failures` the failing ranks' entries are `RankError`s
        instead. A rank that has not returned within `timeout` seconds is killed after its stacks
        went to stderr. What ranks warn raises `UnexpectedWarning` unless `record_warnings`.
        """
        assert 1 <= world_size <= MAX_RANKS, f"world_size is {world_size}, at most {MAX_RANKS}"
        self.warnings = []
        self._num_calls += 1
        port = self._store.port
        limit = group_timeout if group_timeout is not None else 0.75 * timeout
        tasks = [
            pickle.dumps(Task(function, arguments, rank, world_size, self._num_calls, port, limit))
            for rank in range(world_size)
        ]
        try:
            ranks = self._start(world_size)
            for rank, task in zip(ranks, tasks, strict=True):
                rank.connection.send_bytes(task)
            outcomes = self._collect(ranks, timeout)
        except BaseException:
            self._kill_all()  # interrupted in between: nobody knows what the ranks are at
            raise
        self.warnings = [warned for _, warned in outcomes]
        results = [result for result, _ in outcomes]
        failures = [result for result in results if isinstance(result, RankError)]
        if failures and not expect_failures:
            raise RankFailed(failures)
        if any(self.warnings) and not record_warnings:
            said = Counter(f"rank {r}: {w}" for r, ws in enumerate(self.warnings) for w in ws)
            raise UnexpectedWarning("\n".join(f"{n} times {line}" for line, n in said.items()))
        return results

    def run_in_subprocess(
        self, code: str, *, timeout: float = 120.0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -c code` in a process of its own; a crash shows as a negative return code."""
        environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
        environment.update(env or {})
        command = [sys.executable, "-X", "faulthandler", "-c", code]
        return subprocess.run(
            command,
            env=environment,
            cwd=REPOSITORY,
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    def close(self) -> None:
        """Kill the ranks and remove what they wrote."""
        self._kill_all()
        self._folder.cleanup()

    @cached_property
    def _store(self) -> Any:
        """Served from here: it outlives any rank, as torchrun's does."""
        from torch.distributed import TCPStore

        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _start(self, world_size: int) -> list[_Rank]:
        missing = [r for r in range(world_size) if self._ranks[r] is None]
        with _environment(RANK_ENVIRONMENT):
            for index in missing:
                self._ranks[index] = self._spawn(index)
        ranks = [rank for rank in self._ranks[:world_size] if rank is not None]
        for index in missing:
            started = ranks[index]
            assert started.connection.poll(START_TIMEOUT), f"rank {index} did not start"
            started.receive()
        return ranks

    def _spawn(self, index: int) -> _Rank:
        handle, name = tempfile.mkstemp(prefix=f"rank{index}-", dir=self._folder.name)
        os.close(handle)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, name), name=f"rank {index}", daemon=True
        )
        process.start()
        theirs.close()
        return _Rank(process, ours, Path(name))

    def _collect(self, ranks: list[_Rank], timeout: float) -> list[tuple[Any, list[RankWarning]]]:
        """Wait for every rank's outcome, then see that each is ready for the next call."""
        outcomes: dict[int, tuple[Any, list[RankWarning]]] = {}
        released: set[int] = set()
        deadline = time.monotonic() + timeout
        while pending := [r for r in range(len(ranks)) if r not in outcomes]:
            ready = wait(
                [ranks[r].connection for r in pending], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                outcomes.update(self._give_up(ranks, pending, timeout))
            for r in pending:
                if r not in outcomes and ranks[r].connection in ready:
                    outcomes[r] = self._outcome(ranks[r], r)
            if any(isinstance(outcomes[r][0], RankError) for r in outcomes):
                # As in a real job a failed rank takes its connections with it, and so may those
                # that have finished: what waits for them hears of it and need not time out.
                self._release(ranks, outcomes, released)
        self._release(ranks, outcomes, released)
        self._settle(len(ranks))
        return [outcomes[r] for r in range(len(ranks))]

    def _outcome(self, rank: _Rank, index: int) -> tuple[Any, list[RankWarning]]:
        try:
            return rank.receive()
        except (EOFError, OSError):
            rank.process.join()
            message = f"the process ended with exit code {rank.process.exitcode}"
            error = RankError(index, ["RankDied"], message, rank.read_stacks())
            self._drop(index)
            return error, []

    def _give_up(
        self, ranks: list[_Rank], pending: list[int], timeout: float
    ) -> dict[int, tuple[Any, list[RankWarning]]]:
        hung: dict[int, tuple[Any, list[RankWarning]]] = {}
        for r in pending:
            stacks = ranks[r].dump_stacks()
            print(f"rank {r} did not return within {timeout} s:\n{stacks}", file=sys.stderr)
            message = f"did not return within {timeout} s and was killed"
            hung[r] = RankError(r, ["RankHung"], message, stacks), []
        for r in pending:
            self._drop(r)
        return hung

    def _release(self, ranks: list[_Rank], outcomes: Iterable[int], released: set[int]) -> None:
        """Let the ranks that have reported destroy their groups, each once."""
        for r in outcomes:
            if r not in released and self._ranks[r] is not None:
                released.add(r)
                with contextlib.suppress(OSError):
                    ranks[r].connection.send_bytes(RELEASE)

    def _settle(self, world_size: int) -> None:
        """Wait until the ranks have destroyed their groups; replace those that cannot."""
        for index, rank in enumerate(self._ranks[:world_size]):
            if rank is None:
                continue
            try:
                idle = rank.connection.poll(SETTLE_TIMEOUT) and rank.receive() == "idle"
            except (EOFError, OSError):
                idle = False
            if not idle:
                self._drop(index)

    def _drop(self, index: int) -> None:
        rank, self._ranks[index] = self._ranks[index], None
        if rank is not None:
            rank.kill()

    def _kill_all(self) -> None:
        for index in range(MAX_RANKS):
            self._drop(index)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
