"""Small readings of what the system offers as files: an answer, or None for unknown.

Nothing here raises because of what a machine lacks. `root` is where the system's files are looked
for; tests give it others.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT", "read_int", "read_text"]

ROOT = Path("/")


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
