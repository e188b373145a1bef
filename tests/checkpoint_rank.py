"""Ranks that save in a loop until they are killed, for tests/test_checkpoint_crash.py.

Run as `python -m tests.checkpoint_rank`: it imports torch once, and then forks the ranks of each
trial, a JSON of `Trial` on a line of its input, and answers with a JSON of `Outcome`. Its children
die with it, and it dies with its parent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onecopy
from tests.rank import die_with_parent

WORLD = 2
WIDTH = 8
KEEP = 2
# Every third step is saved twice.
AGAIN = 3
# A rank that lives longer than this after the other one has died is a rank that hangs.
HANGS_AFTER = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How often two ranks save, and when one of them dies.

    root: where they save. port: of the store. num_saves: after which they end; 0 for never.
    victim: the rank that is killed, -1 for none.
    by: the rank that kills it, before an operation of its own on files in the `num_saves`-th save.
    point: which operation.
    delay: without a point it is killed so many seconds after the first save.
    in_background: whether ranks use async_save.
    """

    root: str
    port: int
    num_saves: int = 0
    victim: int = -1
    by: int = -1
    point: int = -1
    delay: float = 0.0
    in_background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the ranks.

    has_ended: whether each rank has, by itself or by the kill; False for one that hung.
    said: of each rank the lines that it wrote: what it was at, one JSON list each.
    """

    has_ended: list[bool]
    said: list[list[Any]]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and optimizer of the trials, the same everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step, on the same batch on all ranks, so that one process does exactly the same."""
    model(torch.linspace(-1, 1, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step_of_save(number: int) -> int:
    """The step that the number-th save is made at; numbers start at 1."""
    # Of AGAIN + 1 saves the last two are of the same step.
    rounds, rest = divmod(number - 1, AGAIN + 1)
    return rounds * AGAIN + min(rest, AGAIN - 1) + 1


class _Watch:
    """Sees operations on files while it is on, and kills a process before one of them."""

    def __init__(self, point: int, victim: int) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.is_on = False
        self._point = point
        self._victim = victim
        self._fsync = os.fsync
        os.fsync = self._watched_fsync  # type: ignore[assignment]
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if writes and os.fspath(arguments[0]) != os.devnull:
                self._note("open", os.fspath(arguments[0]))
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            # Of a rename the name that it gives.
            self._note(event, os.fspath(arguments[event == "os.rename"]))

    def _watched_fsync(self, handle: int) -> None:
        if self.is_on:
            path = os.readlink(f"/proc/self/fd/{handle}")
            self._note("fsync", path)
            self._fsync(handle)
            self._note("flushed", path)
        else:
            self._fsync(handle)

    def _note(self, event: str, path: str) -> None:
        if len(self.events) == self._point:
            os.kill(self._victim, signal.SIGKILL)
        # The clock is that of the machine: events of several ranks can be ordered.
        self.events.append((event, path, time.monotonic_ns()))


def _rank(trial: Trial, rank: int, output: int) -> None:
    """Train and save; say when each save begins and ends."""

    def say(*words: Any) -> None:
        os.write(output, json.dumps(words).encode() + b"\n")

    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", trial.port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    pids: list[int] = [0] * WORLD
    dist.all_gather_object(pids, os.getpid())
    watch = _Watch(trial.point if rank == trial.by else -1, pids[trial.victim])
    model, optimizer = build()
    onecopy.shard(model, optimizer, stage=3)
    step = number = 0
    while not trial.num_saves or number < trial.num_saves:
        number += 1
        while step < step_of_save(number):
            step += 1
            train(model, optimizer)
        say("begin", number)
        watch.is_on = number == trial.num_saves
        save = onecopy.async_save if trial.in_background else onecopy.save
        save(trial.root, model, optimizer, extra={"number": number}, keep=KEEP)
        watch.is_on = False
        # A save in the background begins when the one before it is complete.
        if number > trial.in_background:
            say("end", number - trial.in_background)
    say("events", watch.events)


def _run_rank(trial: Trial, rank: int, output: int) -> None:
    """A forked rank's life."""
    code = 0
    try:
        _rank(trial, rank, output)
    except BaseException as error:
        os.write(output, json.dumps(["error", type(error).__name__, str(error)]).encode() + b"\n")
        code = 1
    os._exit(code)


class _Forked:
    """A rank as its parent sees it."""

    def __init__(self, trial: Trial, rank: int) -> None:
        self.said = b""
        self.has_ended = False
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            die_with_parent()
            _run_rank(trial, rank, write)
        os.close(write)

    def listen(self) -> None:
        """Take what it says until now."""
        while select.select([self.pipe], [], [], 0)[0] and (block := os.read(self.pipe, 1 << 16)):
            self.said += block
        self.has_ended = self.has_ended or bool(os.waitpid(self.pid, os.WNOHANG)[0])

    def kill(self) -> None:
        """Nothing happens where it has ended."""
        if not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> list[Any]:
        """Let nothing of it stay; what it has said."""
        if not self.has_ended:
            self.kill()
            os.waitpid(self.pid, 0)
            self.has_ended = True
        self.listen()
        os.close(self.pipe)
        return [json.loads(line) for line in self.said.splitlines()]


def _try(trial: Trial) -> Outcome:
    """Fork the ranks, kill one when it is time, and wait for the other."""
    ranks = [_Forked(trial, rank) for rank in range(WORLD)]
    is_timed = trial.victim >= 0 and trial.point < 0
    kill_at: float | None = None
    deadline = time.monotonic() + 2 * HANGS_AFTER
    while not all(rank.has_ended for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.001)
        for rank in ranks:
            rank.listen()
        if any(rank.has_ended for rank in ranks):
            deadline = min(deadline, time.monotonic() + HANGS_AFTER)
        elif is_timed and kill_at is None and b'"end"' in ranks[0].said:
            kill_at = time.monotonic() + trial.delay
        elif kill_at is not None and time.monotonic() >= kill_at:
            ranks[trial.victim].kill()
    has_ended = [rank.has_ended for rank in ranks]
    return Outcome(has_ended=has_ended, said=[rank.close() for rank in ranks])


def _import_what_is_needed() -> None:
    """Import here what a rank imports while it trains and saves, so that no rank has to again.

    A process that has trained has threads, and should not fork: another one finds out.
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        model, optimizer = build()
        onecopy.shard(model, optimizer, stage=3)
        train(model, optimizer)
        with tempfile.TemporaryDirectory() as root:
            onecopy.save(root, model, optimizer)
        os.write(write, json.dumps(sorted(sys.modules)).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        names = json.loads(file.read())
    os.waitpid(pid, 0)
    for name in names:
        # Some are not modules of their own.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main() -> None:
    """Serve until the input ends."""
    die_with_parent()
    torch.set_num_threads(1)
    _import_what_is_needed()
    for line in sys.stdin:
        outcome = _try(Trial(**json.loads(line)))
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
