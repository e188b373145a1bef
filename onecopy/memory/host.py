"""How much host memory, and how much of a drive, this process and its like can still get."""

from __future__ import annotations

import shutil
from pathlib import Path

from onecopy.memory.cgroup import read_room
from onecopy.memory.system_files import ROOT, read_text

__all__ = ["free_host_memory", "free_space"]


def free_host_memory(root: Path = ROOT) -> int | None:
    """Bytes that all processes of this machine, or of this container, can still get together.

    Without swap. None where the system does not say it.
    """
    found = [room for room in (_available(root), read_room(root)) if room is not None]
    return min(found, default=None)


def _available(root: Path) -> int | None:
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemAvailable" and words and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def free_space(path: Path) -> tuple[int, int] | None:
    """Which drive a folder lies on, and bytes that are free there; it need not exist yet.

    None where it cannot be looked at: who uses it will say why.
    """
    try:
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
        return there.stat().st_dev, shutil.disk_usage(there).free
    except (OSError, StopIteration):
        return None
