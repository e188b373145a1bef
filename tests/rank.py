"""What a rank process of the pool does, and what it says to the pool.

It must not import torch at its top: a rank sets itself up first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, TextIO

RANK_SEED = 1234
RELEASE = b"release"


class RankError(Exception):
    """What went wrong on one rank: the exception there, by name, or the rank's death or hang."""

    def __init__(self, rank: int, names: Sequence[str], message: str, trace: str = "") -> None:
        super().__init__(rank, names, message, trace)
        self.rank = rank
        self.names = tuple(names)  # the exception's class and its bases, most derived first
        self.message = message
        self.trace = trace

    @property
    def type_name(self) -> str:
        """The name of the exception's class, or "RankDied" or "RankHung"."""
        return self.names[0]

    def is_a(self, exception: type[BaseException] | str) -> bool:
        """Whether the exception's class is or derives from this one."""
        name = exception if isinstance(exception, str) else exception.__name__
        return name in self.names

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type_name}: {self.message}\n{self.trace}".rstrip()


@dataclass(frozen=True)
class RankWarning:
    """A warning as it was raised on a rank."""

    category: str
    message: str
    where: str

    def __str__(self) -> str:
        return f"{self.category}: {self.message} ({self.where})"


@dataclass(frozen=True)
class Task:
    """One call on one rank, and how the rank finds its group."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    world_size: int
    number: int
    port: int
    group_timeout: float


def _tell_stacks(file: TextIO) -> None:
    """In a crash, and when asked; again before each task, whatever the last one did to signals."""
    faulthandler.disable()
    faulthandler.enable(file=file)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def serve(connection: Connection, stacks: str) -> None:
    """A rank's life: take a task, answer, destroy the group, be idle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then kills us
    die_with_parent()
    # Kept open for as long as the process lives: faulthandler writes to its descriptor.
    file = open(stacks, "w")
    _tell_stacks(file)

    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.set_warn_always(True)  # else a warning is seen by the first test only
    _keep_modules()
    connection.send_bytes(pickle.dumps("ready"))
    modules = len(sys.modules)
    while True:
        _tell_stacks(file)
        try:
            task = connection.recv_bytes()
            answer = _answer(task)
            connection.send_bytes(answer)
            released = connection.recv_bytes()
            assert released == RELEASE, f"expected the word to release, got {released!r}"
            _clean_up()
            # What a thread of the task still holds is not to stay.
            is_over = not any(one.name.startswith("onecopy") for one in threading.enumerate())
            if not is_over:
                _store.cache_clear()  # it may wait on this connection
            if is_over and len(sys.modules) != modules:
                modules = len(sys.modules)
                _keep_modules()
            connection.send_bytes(pickle.dumps("idle"))
        except (EOFError, OSError):
            return  # the parent is gone


def _keep_modules() -> None:
    """Take what has been imported out of later collections: it is large, and stays."""
    gc.collect()
    gc.freeze()


def die_with_parent() -> None:
    """Not even a rank that hangs may outlive a parent that was killed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        parent = multiprocessing.parent_process()  # None in a process that was merely forked
        if os.getppid() == 1 or (parent is not None and not parent.is_alive()):
            os._exit(1)


def _answer(message: bytes) -> bytes:
    """Run a task; return the pickled pair of result or RankError, and the warnings."""
    recorded: list[warnings.WarningMessage] = []
    rank = -1
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            task: Task = pickle.loads(message)
            rank = task.rank
            result = _call(task)
        return pickle.dumps((result, _plain(recorded)))
    except BaseException as error:  # also SystemExit: the rank must go on serving
        names = [c.__name__ for c in type(error).__mro__ if c is not object]
        failure = RankError(rank, names, str(error), traceback.format_exc())
        _store.cache_clear()  # something may still wait on this connection
        traceback.clear_frames(error.__traceback__)
        return pickle.dumps((failure, _plain(recorded)))


def _call(task: Task) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    random.seed(RANK_SEED)
    torch.manual_seed(RANK_SEED)
    limit = timedelta(seconds=task.group_timeout)
    store = _store(task.port)
    store.set_timeout(limit)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"task {task.number}", store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=limit,
    )
    return task.function(*task.arguments)


@cache
def _store(port: int) -> Any:
    """The connection to the pool's store: kept, as making one asks the resolver for names."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _plain(recorded: list[warnings.WarningMessage]) -> list[RankWarning]:
    return [
        RankWarning(w.category.__name__, str(w.message), f"{w.filename}:{w.lineno}")
        for w in recorded
    ]


def _clean_up() -> None:
    """Leave nothing of a task to the next one."""
    import torch
    import torch.distributed as dist

    gc.collect()  # models hold groups in cycles; let go of them before the groups go
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # its connections may be broken already
            dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # What DTensor remembers names meshes, and with them groups that are gone now.
        _clear_sharding_prop_cache()
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
