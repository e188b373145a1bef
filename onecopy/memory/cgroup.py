"""Limits of the control group that this process is in: what a container may really use.

A process may be in groups of version 1 (one tree for each controller), of version 2 (one tree), or
of both. A limit holds for all that is below, so the least on the way to the top counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onecopy.memory.system_files import ROOT, read_int, read_text

__all__ = ["GroupLimits", "read_limits", "read_room"]

# Version 1 writes "no limit" as the largest multiple of a page below 2^63.
NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """memory, memory_used: bytes. cpus: cores' worth of time. None where nothing is limited."""

    memory: int | None = None
    memory_used: int | None = None
    cpus: float | None = None


def read_limits(root: Path = ROOT) -> GroupLimits:
    """The limits that hold for this process."""
    memory: list[tuple[int, int | None]] = []
    cpus: list[float] = []
    for folder in _folders(root, "memory"):
        limit = read_int(folder / "memory.limit_in_bytes")
        memory += _limit(limit, read_int(folder / "memory.usage_in_bytes"))
    for folder in _folders(root, "cpu"):
        cpus += _share(
            read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
        )
    for folder in _folders(root, ""):
        limit = read_int(folder / "memory.max")
        memory += _limit(limit, read_int(folder / "memory.current"))
        words = (read_text(folder / "cpu.max") or "max").split()
        if words[0].isdigit() and len(words) == 2:
            cpus += _share(int(words[0]), int(words[1]))
    least = min(memory, key=lambda one: one[0], default=(None, None))
    return GroupLimits(memory=least[0], memory_used=least[1], cpus=min(cpus, default=None))


def read_room(root: Path = ROOT) -> int | None:
    """Bytes that the groups still let this process have; None where nothing is limited.

    Pages of files that the kernel can drop count as free.
    """
    rooms = [
        limit - (read_int(folder / used) or 0) + _file_pages(folder)
        for controller, maximum, used in _FILES
        for folder in _folders(root, controller)
        if (limit := read_int(folder / maximum)) is not None and limit < NO_LIMIT
    ]
    return max(min(rooms), 0) if rooms else None


# By the controller ("" is version 2): the limit, and what is used of it.
_FILES = (
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("", "memory.max", "memory.current"),
)
_PAGES = ("inactive_file", "active_file")


def _file_pages(folder: Path) -> int:
    """Version 1 has them with and without those of groups below."""
    found: dict[str, int] = {}
    for line in (read_text(folder / "memory.stat") or "").splitlines():
        name, _, number = line.partition(" ")
        if number.isdigit():
            found[name] = int(number)
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in _PAGES)


def _limit(limit: int | None, used: int | None) -> list[tuple[int, int | None]]:
    return [] if limit is None or limit >= NO_LIMIT else [(limit, used)]


def _share(quota: int | None, period: int | None) -> list[float]:
    return [quota / period] if quota is not None and quota > 0 and period else []


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's group and those above it; "" means version 2."""
    group = _group(root, controller)
    for top, mounted in _mounts(root, controller):
        if group is None or not PurePosixPath(group).is_relative_to(mounted):
            # A container often sees its own group as the whole tree.
            yield top
            continue
        below = PurePosixPath(group).relative_to(mounted)
        for part in (below, *below.parents):
            yield top / part


def _group(root: Path, controller: str) -> str | None:
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(","):
            return path
    return None


def _mounts(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """Where a controller's tree can be seen, and which group is at its top."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_second = kind[0] == "cgroup2" and not controller
        is_first = kind[0] == "cgroup" and bool(controller) and controller in kind[2].split(",")
        if is_first or is_second:
            yield root / fields[4].lstrip("/"), fields[3]
