"""Writes a run's trace while the training goes on, when the events of all ranks are there."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from onecopy.errors import RunError
from onecopy.report.run_folder import read_run
from onecopy.report.trace import write_trace

__all__ = ["TraceWriter"]

LOGGER = logging.getLogger("onecopy")
# At the end of a run its ranks write their last within moments.
PATIENCE = 5.0


class TraceWriter:
    """Of the first rank. What goes wrong is told, and stops nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Every rank has written its events: make the trace of them, beside the training."""
        self._thread = threading.Thread(target=self._write, name="onecopy writes the trace")
        self._thread.start()

    def finish(self, *, ended_well: bool) -> None:
        """The run has ended. Waits for the trace; writes it, if nobody has started to.

        Where a run has ended well, the other ranks' last events are waited for.
        """
        if self._thread is not None:
            self._thread.join()
            return
        deadline = time.monotonic() + PATIENCE
        while ended_well and self._is_awaited() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._write()

    def _is_awaited(self) -> bool:
        """Whether a rank that records into this folder has not ended."""
        try:
            return any(one.status == "running" for one in read_run(self._folder).ranks)
        except RunError:
            # Said when the trace is written.
            return False

    def _write(self) -> None:
        try:
            write_trace(self._folder)
        except RunError as error:
            LOGGER.warning("there is no trace of the run: %s", error)
