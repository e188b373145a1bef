"""The progress line: live on a terminal, now and then elsewhere, silent when asked to be."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from onecopy.report.progress import ProgressLine, Status, Transfer, count, duration, size


def status(step: int) -> Status:
    return Status(
        step=step,
        num_steps=40,
        loss=1.3863,
        bits_per_byte=2.0,
        tokens_per_second=1234.0,
        seconds_left=65.0,
    )


def shown(*, terminal: bool, quiet: bool = False, seconds_per_step: float = 4.0) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    now = 0.0
    progress = ProgressLine(console, quiet=quiet, clock=lambda: now)
    with progress:
        progress.note("begin")
        for step in range(1, 11):
            now += seconds_per_step
            progress.show(status(step))
    assert isinstance(console.file, io.StringIO), "made above"
    return console.file.getvalue()


def test_a_plain_line_every_ten_seconds_without_a_terminal() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[:2] == [
        "begin",
        "step 3/40  loss 1.386  2.00 bits/byte  1.2k tokens/s  1 min 05 s left",
    ]
    assert [line.split()[1] for line in lines[1:]] == ["3/40", "6/40", "9/40"]


def test_one_line_redrawn_on_a_terminal() -> None:
    text = shown(terminal=True)
    assert text.count("step 10/40") >= 1
    assert "[####............]" in text
    assert "\x1b[2K" in text  # the line before was erased
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(terminal: bool) -> None:
    assert shown(terminal=terminal, quiet=True) == ""


def test_numbers_for_reading() -> None:
    assert [count(n) for n in (7, 940, 1234, 2_400_000)] == ["7", "940", "1.2k", "2.4M"]
    times = (-1, 42.4, 185, 7620)
    assert [duration(t) for t in times] == ["0 s", "42 s", "3 min 05 s", "2 h 07 min"]
    sizes = (0, 999, 1234, 35_100_000, 2.4e9, 7e12)
    assert [size(n) for n in sizes] == ["0 B", "999 B", "1.2 kB", "35.1 MB", "2.4 GB", "7.0 TB"]


def test_transfers() -> None:
    """Bytes, their rate, and what they are of; nothing is divided by nothing."""
    begun = Transfer(verb="read", num_bytes=0, total_bytes=0, name="", seconds=0.0)
    assert (begun.fraction, begun.parts) == (1.0, ["0 B of 0 B read"])
    later = Transfer(verb="read", num_bytes=3000, total_bytes=4000, name="a.weight", seconds=2.0)
    assert (later.fraction, later.parts) == (
        0.75,
        ["3.0 kB of 4.0 kB read", "1.5 kB/s", "a.weight"],
    )
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with ProgressLine(console) as line:
        line.show(later)
    assert isinstance(console.file, io.StringIO), "made above"
    assert (
        "3.0 kB of 4.0 kB read  [############....]  1.5 kB/s  a.weight" in console.file.getvalue()
    )
