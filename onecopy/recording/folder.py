"""Claims a run's folder for all ranks together, and opens each rank's files in it.

The ranks tell one another through the process group's store, as when they agree on transfers: a
rank that does not call it is named after seconds, instead of waited for.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onecopy.errors import OneCopyError, RunError
from onecopy.report.run_files import LineFile, warn_of, write_whole
from onecopy.report.run_folder import FORMAT, RUN_FILE, events_file, steps_file

if TYPE_CHECKING:
    from onecopy.comm.agreement import Agreement
    from onecopy.comm.groups import Group

__all__ = ["RunFiles", "claim"]

T = TypeVar("T")
TOPIC = "onecopy.record"
ROUNDS = 9


@dataclass
class RunFiles:
    """What one rank writes.

    steps, events: its lines. found: the contents of run.json, on the first rank; None on others.
    started: seconds since 1970, the same on all ranks. clocks: see `RankRun.clocks`.
    """

    folder: Path
    started: float
    steps: LineFile
    events: LineFile
    found: dict[str, Any] | None
    clocks: Sequence[float] = ()

    def finish(self, status: str, error: str | None, seconds: float) -> None:
        """The last that is written."""
        self.steps.write({"end": {"status": status, "error": error, "time": seconds}})
        self.steps.close()
        self.events.close()
        if self.found is not None:
            ended = {"status": status, "error": error, "seconds": seconds}
            path = self.folder / RUN_FILE
            try:
                write_whole(path, {**self.found, **ended})
            except OSError as reason:
                warn_of(path, reason)


def claim(
    folder: Path,
    resume: bool,
    group: Group,
    agreement: Agreement,
    describe: Callable[[list[str], float], dict[str, Any]],
) -> RunFiles:
    """Make the folder, or go on in it; all ranks together.

    Args:
        describe: makes the contents of run.json from the host of each rank and the time of the
            run's begin.

    Raises:
        RunError: on all ranks: it holds another run, cannot be written, or ranks name different
            folders.
        DivergenceError: a rank does something else.
    """
    mine = json.dumps([socket.gethostname(), os.fspath(folder), time.time()])
    told = [json.loads(one) for one in agreement.exchange(TOPIC, mine)]
    hosts, folders = [one[0] for one in told], [one[1] for one in told]
    for rank, other in enumerate(folders):
        if other != folders[0]:
            raise RunError(
                f"ranks record into different folders: rank {group.ranks[0]} into {folders[0]}, "
                f"rank {group.ranks[rank]} into {other}. Make its name from what all ranks know, "
                "not from the time or the rank"
            )
    first = group.rank == 0
    started = told[0][2]

    def begin() -> tuple[float, dict[str, Any] | None]:
        return _write_run_file(folder, resume, describe, hosts, started) if first else (0.0, None)

    (began, found), news = _together(group, agreement, begin)
    began = began if first else float(news[0])

    def open_files() -> tuple[float, RunFiles]:
        folder.mkdir(parents=True, exist_ok=True)
        steps, events = (
            LineFile(folder / name(group.ranks[group.rank]), fresh=not resume)
            for name in (steps_file, events_file)
        )
        return began, RunFiles(folder, began, steps, events, found)

    try:
        (_, files), _ = _together(group, agreement, open_files)
        files.clocks = [moment - began for moment in _common_moments(agreement)]
    except RunError:
        if found is not None and not resume:
            # Nothing was recorded: the next try finds it free.
            (folder / RUN_FILE).unlink(missing_ok=True)
        raise
    return files


def _common_moments(agreement: Agreement) -> list[float]:
    """What this rank's clock shows, in seconds since 1970, each time that all ranks have come.

    They leave together but for the moment in which each looks again, or is given the processor:
    the median over several times is right to well below a millisecond.
    """
    moments = []
    for _ in range(ROUNDS):
        agreement.agree(TOPIC)
        moments.append(time.time())
    return moments


def _write_run_file(
    folder: Path,
    resume: bool,
    describe: Callable[[list[str], float], dict[str, Any]],
    hosts: list[str],
    started: float,
) -> tuple[float, dict[str, Any]]:
    path = folder / RUN_FILE
    folder.mkdir(parents=True, exist_ok=True)
    older = _older(path)
    if older is not None:
        if not resume:
            when = datetime.fromtimestamp(older["started"]).strftime("%Y-%m-%d %H:%M")
            # What was killed could not say so.
            status = "running, or killed" if older["status"] == "running" else older["status"]
            raise RunError(
                f"{folder} holds a run already (begun {when}, {status}): give another "
                "folder, or say resume=True to go on in it"
            )
        started = older["started"]
    found = describe(hosts, started)
    write_whole(path, found)
    return started, found


def _older(path: Path) -> dict[str, Any] | None:
    """The run that lies there already."""
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        float(found["started"])
        is_known = found["format"] == FORMAT
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}): give another folder") from error
    if not is_known:
        raise RunError(f"{path} was written by another version of onecopy: give another folder")
    return found


def _together(
    group: Group, agreement: Agreement, action: Callable[[], tuple[float, T]]
) -> tuple[tuple[float, T], list[str]]:
    """Do something on every rank; its number reaches all. A failure is raised on all of them."""
    result, failure, text = None, None, ""
    try:
        result = action()
    except (OneCopyError, OSError) as error:
        failure = error
        text = str(error) if isinstance(error, OneCopyError) else _said(error)
    told = f"{text}|{result[0] if result else 0.0}"
    everyone = [one.rpartition("|") for one in agreement.exchange(TOPIC, told)]
    for rank, (message, _, _) in enumerate(everyone):
        if message:
            where = f"on rank {group.ranks[rank]}: " if group.size > 1 else ""
            # An error of ours has said all of it.
            raise RunError(where + message) from failure if isinstance(failure, OSError) else None
    assert result is not None, "what has not failed has a result"
    return result, [number for _, _, number in everyone]


def _said(error: OSError) -> str:
    if isinstance(error, FileExistsError) and str(error.filename).endswith(".jsonl"):
        return (
            f"{error.filename} is there already, of another run: give another folder, or say "
            "resume=True to go on in it"
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{error.filename} cannot be written: a file is where a folder should be"
    return f"{error.filename} cannot be written: {error.strerror}"
