"""The progress line: one live line on a terminal, a plain line every ten seconds elsewhere.

This file owns how progress looks and when it is shown. It is fed numbers and knows neither
models nor ranks; rank 0 makes the only one that shows anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_SECONDS = 10.0
BAR_WIDTH = 16


class Shown(Protocol):
    """What a progress line can show."""

    @property
    def fraction(self) -> float:
        """How much is done, from 0 to 1."""

    @property
    def parts(self) -> list[str]:
        """The parts of the line; a bar may come after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where the run stands. `loss` is in nats per token, already averaged over ranks."""

    step: int  # steps done
    num_steps: int  # of the whole run
    loss: float
    bits_per_byte: float
    tokens_per_second: float  # of all ranks together
    seconds_left: float

    @property
    def fraction(self) -> float:
        """See Shown."""
        return self.step / self.num_steps

    @property
    def parts(self) -> list[str]:
        """See Shown."""
        return [
            f"step {self.step}/{self.num_steps}",
            f"loss {self.loss:.3f}",
            f"{self.bits_per_byte:.2f} bits/byte",
            f"{count(self.tokens_per_second)} tokens/s",
            f"{duration(self.seconds_left)} left",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes that are read or written, as `verb` says; `seconds` since the first of them."""

    verb: str
    num_bytes: int
    total_bytes: int
    name: str  # of what comes next, or was the last
    seconds: float

    @property
    def fraction(self) -> float:
        """See Shown."""
        return self.num_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def parts(self) -> list[str]:
        """See Shown."""
        rate = f"{size(self.num_bytes / self.seconds)}/s" if self.seconds > 0 else ""
        return [
            f"{size(self.num_bytes)} of {size(self.total_bytes)} {self.verb}",
            *filter(None, (rate, self.name)),
        ]


class ProgressLine:
    """Shows the latest status, and lines that stay, until the `with` block ends.

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

    def show(self, status: Shown) -> None:
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

    def _line(self, status: Shown, *, bar: bool) -> Text:
        parts = status.parts
        if bar:
            done = round(BAR_WIDTH * status.fraction)
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


def size(num_bytes: float) -> str:
    """`num_bytes` with three digits and a unit: 940 B, 1.2 kB, 35.1 MB, 2.4 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def plural(number: int, one: str, many: str = "") -> str:
    """`number` with its word: 1 rank, 2 ranks; `many` where it is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """`seconds` for reading: 42 s, 3 min 05 s, 2 h 07 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
