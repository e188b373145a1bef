"""Being asked to end: a scheduler takes the machines away, or somebody presses Ctrl-C.

The first signal is only noted. The loop then ends all ranks together after a step, with a
checkpoint. A later signal does what it does everywhere.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

__all__ = ["StopRequest", "noticed", "passed_on"]

# Slurm, Kubernetes and torchrun send SIGTERM; --signal=USR1 is a habit of Slurm's users.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)
# Within so many seconds the same request may arrive twice: from the terminal and from a launcher.
SAME = 2.0


class StopRequest:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._when = 0.0

    def take(self, number: int, _frame: FrameType | None) -> None:
        """The handler of signals."""
        if self.signal is None:
            self.signal, self._when = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._when > SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def noticed(wanted: bool) -> Iterator[StopRequest]:
    """Inside, signals that ask this process to end are noted instead, where that is wanted."""
    request = StopRequest()
    with _handled_by(request.take) if wanted else nullcontext():
        yield request


@contextmanager
def passed_on() -> Iterator[None]:
    """Inside, signals that ask this process to end go to the ranks that it has started."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, number)

    with _handled_by(pass_on):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # Only the main thread may say what signals do.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler that is not Python's (faulthandler's) could not be put back: that signal is left.
    ours = [number for number in SIGNALS if signal.getsignal(number) is not None]
    before = {number: signal.signal(number, handler) for number in ours}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)
