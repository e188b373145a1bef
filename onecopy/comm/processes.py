"""Whether another rank's process on this machine still lives: the kernel knows, also after a kill.

A process that is killed says nothing to anybody. Whoever waits for it through a connection hears
that the connection broke; whoever waits for its vote would wait until the process group's timeout.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["has_ended", "own_process", "state_of"]

PROC = Path("/proc")
# Of /proc/PID/stat, counted from behind the name, which may hold anything: state and start time.
STATE, START_TIME = 0, 19


def own_process() -> str:
    """This process, told from every other one there has been; empty where the kernel says nothing.

    The boot and the namespace in which its number counts, the number, and when it began, since
    numbers are used again.
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (PROC / "self/ns/pid").readlink()
        started = _stat(os.getpid())[START_TIME]
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {os.getpid()} {started}"


def has_ended(process: str) -> bool:
    """Whether what `own_process` said there has ended; False where this machine cannot tell."""
    return state_of(process) == "ended"


def state_of(process: str) -> str:
    """What has become of it: "ended", "stopped" (by a signal), or empty: it runs, or who knows."""
    own = own_process()
    if not process or process.split()[:2] != own.split()[:2]:
        return ""
    *_, number, started = process.split()
    try:
        stat = _stat(int(number))
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    except OSError:
        return ""
    if stat[START_TIME] != started or stat[STATE] in "ZX":
        return "ended"
    return "stopped" if stat[STATE] in "Tt" else ""


def _stat(number: int) -> list[str]:
    return (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
