"""What is said about what was seen: a level, the facts, why they matter, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["FINE", "LEVELS", "NOTE", "PROBLEM", "WARNING", "Finding", "by_level", "merged"]

FINE, NOTE, WARNING, PROBLEM = "fine", "note", "warning", "problem"
LEVELS = (PROBLEM, WARNING, NOTE, FINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One piece of advice.

    level: fine; note (worth knowing); warning (works, but slower or with a risk); problem
        (something will not work).
    remedy: a command or a setting, exactly. host: the machine, where there are several.
    """

    level: str
    topic: str
    seen: str
    why: str = ""
    remedy: str = ""
    host: str = ""


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, else in the given order."""
    return sorted(findings, key=lambda one: LEVELS.index(one.level))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """What is the same on several machines, once, with the names of all of them."""
    hosts: dict[Finding, list[str]] = {}
    for one in findings:
        hosts.setdefault(replace(one, host=""), []).append(one.host)
    return [replace(one, host=", ".join(names)) for one, names in hosts.items()]
