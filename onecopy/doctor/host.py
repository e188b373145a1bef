"""Processors, memory and limits of this process."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

from onecopy.doctor.facts import UNLIMITED, Limit, Limits, Memory, Processors
from onecopy.memory.cgroup import GroupLimits
from onecopy.memory.system_files import ROOT, read_text

__all__ = ["look_at_limits", "look_at_memory", "look_at_processors"]


def look_at_processors(group: GroupLimits, root: Path = ROOT) -> Processors:
    """The cores, and which of them this process can use."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    return Processors(
        model=_model(root) or platform.processor() or platform.machine() or None,
        logical=os.cpu_count(),
        affinity=affinity,
        quota=group.cpus,
        numa_nodes=len(nodes) or None,
        load=_load(),
    )


def _model(root: Path) -> str | None:
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def look_at_memory(group: GroupLimits, root: Path = ROOT) -> Memory:
    """Host memory, as the kernel and the control group say."""
    found = _meminfo(root)
    shm = _shared_memory(root)
    pages = found.get("HugePages_Total")
    return Memory(
        total=found.get("MemTotal", _total_by_sysconf()),
        available=found.get("MemAvailable"),
        swap_total=found.get("SwapTotal"),
        swap_free=found.get("SwapFree"),
        group_limit=group.memory,
        group_used=group.memory_used,
        shm_total=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free=None if shm is None else shm.f_bavail * shm.f_frsize,
        huge_pages=None if pages is None else pages * found.get("Hugepagesize", 0),
        transparent_huge_pages=_chosen(
            read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
        ),
    )


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes, or numbers where no unit is given."""
    found = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _total_by_sysconf() -> int | None:
    """macOS has no /proc."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _shared_memory(root: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(root / "dev/shm")
    except (AttributeError, OSError):
        return None


def _chosen(text: str | None) -> str | None:
    """`always [madvise] never` means madvise."""
    if text is None:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def look_at_limits(root: Path = ROOT) -> Limits:
    """Resource limits of this process, which its ranks inherit."""
    return Limits(
        open_files=_limit("RLIMIT_NOFILE"),
        processes=_limit("RLIMIT_NPROC"),
        locked_memory=_limit("RLIMIT_MEMLOCK"),
        core_size=_limit("RLIMIT_CORE"),
        core_pattern=read_text(root / "proc/sys/kernel/core_pattern"),
    )


def _limit(name: str) -> Limit | None:
    try:
        import resource
    except ImportError:
        # Not on Windows.
        return None
    number = getattr(resource, name, None)
    if number is not None:
        with suppress(OSError, ValueError):
            soft, hard = resource.getrlimit(number)
            return Limit(soft=_number(soft), hard=_number(hard))
    return None


def _number(value: int) -> int:
    # Infinity is the largest number on macOS, and -1 on Linux.
    import resource

    return UNLIMITED if value in (resource.RLIM_INFINITY, UNLIMITED) else value
