"""Small readings of what the system offers as files and calls: an answer, or None for unknown.

Nothing here raises because of what a machine lacks, and nothing waits long. `root` is where the
system's files are looked for; tests give it others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["ROOT", "read_int", "read_text", "within"]

ROOT = Path("/")
T = TypeVar("T")


def read_text(path: Path) -> str | None:
    """What a file of the system says, without the line's end."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The number that a file of the system holds; other words mean unknown."""
    text = read_text(path)
    try:
        return int(text) if text else None
    except ValueError:
        return None


def within(seconds: float, question: Callable[[], T]) -> T:
    """The answer to a question to the system that may never be answered.

    Names are resolved over the network, and a folder may lie on a server that has gone.

    Raises:
        TimeoutError: no answer in time. The thread that waits for it ends with the process.
        Exception: whatever `question` raises.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="onecopy-doctor")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return answers[0]
