"""The progress line: one live line on a terminal, a plain line every ten seconds elsewhere.

This file owns how progress looks and when it is shown. It is fed numbers and knows neither
models nor ranks; rank 0 makes the only one that shows anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_SECONDS = 10.0
BAR_WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where the run stands. `loss` is in nats per byte, already averaged over ranks."""

    step: int  # steps done
    num_steps: int  # of the whole run
    loss: float
    tokens_per_second: float  # of all ranks together
    seconds_left: float


class ProgressLine:
    """Shows the latest `Status`, and lines that stay, until the `with` block ends.

    On a terminal the line is redrawn in place and disappears at the end. Elsewhere (a pipe, a
    log file, a batch job) a plain line is written at most every ten seconds. With `quiet`
    nothing is shown.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._clock = clock
        self._last_plain = clock()
        live = console.is_terminal and not quiet
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, status: Status) -> None:
        """Replace the live line, or write a plain one if ten seconds have passed."""
        if self._quiet:
            return
        if self._live:
            self._live.update(self._line(status, bar=True), refresh=True)
        elif self._clock() - self._last_plain >= PLAIN_SECONDS:
            self._last_plain = self._clock()
            self._console.print(self._line(status, bar=False), soft_wrap=True)

    def note(self, text: str) -> None:
        """Write a line that stays, above the live one."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def _line(self, status: Status, *, bar: bool) -> Text:
        parts = [
            f"step {status.step}/{status.num_steps}",
            f"loss {status.loss:.3f}",
            f"{status.loss / math.log(2):.2f} bits/byte",
            f"{count(status.tokens_per_second)} tokens/s",
            f"{duration(status.seconds_left)} left",
        ]
        if bar:
            done = round(BAR_WIDTH * status.step / status.num_steps)
            # ASCII keeps the line right in every terminal and encoding.
            parts.insert(1, "[" + "#" * done + "." * (BAR_WIDTH - done) + "]")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")


def leave_live_line() -> None:
    """Repair the terminal after a process was ended with a live line on it: cursor and new line."""
    console = Console()
    if console.is_terminal:
        console.show_cursor(True)
        console.print()


def count(number: float) -> str:
    """`number` with three digits and a unit: 940, 1.2k, 35.1k, 2.4M."""
    if number < 1000:
        return f"{number:.0f}"
    if number < 1e6:
        return f"{number / 1e3:.1f}k"
    return f"{number / 1e6:.1f}M"


def duration(seconds: float) -> str:
    """`seconds` for reading: 42 s, 3 min 05 s, 2 h 07 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
