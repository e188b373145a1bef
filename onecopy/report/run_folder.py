"""A run's folder: what lies in it, as records, and how it is read. Free of torch.

    RUN/run.json                 by the first rank: what ran, where, with which settings
    RUN/rank-00000.jsonl         by each rank: one line for each step
    RUN/rank-00000.events.jsonl  by each rank: one line for each event of a few detailed steps
    RUN/trace.json               by the first rank, with trace=N: see `trace.py`

Lines of a rank file are objects with one of these keys:

    {"begin": {...}}   a process begins to record: rank, host, device, pid, time, clocks
    {"step": n, ...}   a step, see `StepRecord`
    {"end": {...}}     it has ended: status ("finished" or "failed"), error, time

A run that goes on in its folder adds another "begin"; steps that it makes again take the place of
those that were lost. A process that was killed leaves no "end", and perhaps a line that is cut.

Every `time` is in seconds since the run has begun (the wall clock of the rank's machine against
`Run.started`), every size in bytes, every duration in seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from onecopy.errors import RunError

__all__ = [
    "FORMAT",
    "RUN_FILE",
    "SPLIT",
    "Estimate",
    "EventRecord",
    "ModelRecord",
    "RankRun",
    "Run",
    "Setting",
    "StepRecord",
    "UnitRecord",
    "events_file",
    "read_run",
    "steps_file",
]

FORMAT = 1
RUN_FILE = "run.json"
# Where a step's seconds go: the names in `StepRecord.split`, in the order in which to show them.
SPLIT = ("compute", "gather", "reduce", "refresh", "agree", "optimizer", "io")

Record = TypeVar("Record", "StepRecord", "EventRecord")


def steps_file(rank: int) -> str:
    """Name of the file with the steps of a rank."""
    return f"rank-{rank:05d}.jsonl"


def events_file(rank: int) -> str:
    """Name of the file with the events of a rank."""
    return f"rank-{rank:05d}.events.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting's value (as JSON has it) and where it came from.

    origin: "default", "argument of shard", "config object", "command line", the name of a TOML
        file, "argument of record"; where the planner has chosen, what it says of that.
    is_default: the value is that of the default, whether somebody has said so or nobody.
    """

    value: Any
    origin: str
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRecord:
    """A unit of a model.

    name: as events have it. num_parameters: elements without padding. num_bytes: its gathered
    values. trainable: it has gradients.
    """

    name: str
    num_parameters: int
    num_bytes: int
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The planner's closed formulas for a model with these settings on this world.

    memory: bytes on a rank at the peak of a step by kind: parameters, gradients, optimizer (model
        states after a backward, of the rank that holds most), gathered (whole units while they are
        used), buffers (gradients on their way); host (the part of the model states that lies in
        host memory, if any does); activations are not estimated.
    sent: bytes that the first rank sends in a step of one forward and one backward, by kind:
        gather, reduce, refresh. What a step in particular should have sent is in
        `StepRecord.expected`.
    """

    memory: Mapping[str, int]
    sent: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A sharded model of the run.

    name: as events have it where there are several models, else empty. kind: its class.
    num_parameters: elements without padding. settings: what `shard` was told.
    """

    name: str
    kind: str
    num_parameters: int
    units: tuple[UnitRecord, ...]
    settings: Mapping[str, Setting]
    estimate: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step of one rank: from the end of the step before to the end of this one.

    step: its number, from 1. time: of its end. seconds: how long it took. skipped: gradients had
        overflowed, no parameter was changed.
    split: where the seconds went; one number for each name in `SPLIT`, which sum to `seconds`.
        gather, reduce, refresh, agree: this rank was blocked until such a transfer (or an agreement
        of the ranks) ended. optimizer: within `optimizer.step()`. io: saving and reading files,
        copies between device and host. compute: all the rest: forward, backward, data, and the
        loop's own code. On an accelerator these are seconds of the host, which waits for the device
        only where it must.
    sent: bytes that this rank has sent, by kind of event: gather, reduce, refresh.
    expected: the same by the closed formulas, for the forwards and backwards that this step made.
    memory: bytes by kind: parameters (with masters), gradients, optimizer (model states at the end
        of the step, where they were measured), gathered (whole units at their peak in the step),
        process (allocated on the accelerator, on CPU the resident size), peak (the most of that so
        far), host and nvme (the parts of the model states that lie there). Kinds that were not
        measured in this step are missing.
    metrics: what was logged; numbers may be nan and infinite.
    """

    step: int
    time: float
    seconds: float
    split: Mapping[str, float]
    sent: Mapping[str, int]
    expected: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something the runtime did, see `onecopy.events.Event`, in step number `step`.

    time: when it was reported; what took `seconds` has begun so much earlier.
    model: its name, empty where the run has only one.
    memory: bytes on this rank just after it, by kind: parameters (with masters), gradients,
        optimizer, gathered.
    """

    step: int
    time: float
    kind: str
    unit: str = ""
    phase: str = "api"
    num_bytes: int = 0
    group: str = ""
    seconds: float = 0.0
    value: float = 0.0
    what: str = ""
    across_bytes: int = 0
    model: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What one rank has recorded.

    device: "cpu", or the accelerator's name. num_begins: processes that have recorded as this
    rank. status: "running" where nothing tells that it has ended (it runs, or was killed).
    clocks: what this rank's clock showed, as seconds of the run, at some moments that all ranks
    have left together when the last process began to record.
    """

    rank: int
    host: str
    device: str
    num_begins: int
    status: str
    error: str | None
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    clocks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run.

    status: "failed" if any rank has failed (error says how), "finished" if all of those found have
        ended well, else "running": it runs, or was killed.
    started: seconds since 1970. seconds: from there to the last thing recorded.
    command: the command line. hosts: machine of each rank. versions: of software by name.
    environment: chosen variables. settings: the program's own options; those of `shard` are with
        the models. models: the first is the one whose optimizer's steps are counted.
    ranks: those whose files are in this folder, in order; where ranks do not share storage, not all
        of `world_size`.
    """

    path: Path
    status: str
    error: str | None
    started: float
    seconds: float
    command: tuple[str, ...]
    world_size: int
    hosts: tuple[str, ...]
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    settings: Mapping[str, Setting]
    models: tuple[ModelRecord, ...]
    ranks: tuple[RankRun, ...]


def read_run(path: str | os.PathLike[str]) -> Run:
    """A run from its folder, at any time: while it runs, after it has ended or was killed.

    Raises:
        RunError: it is no run's folder, is of a later format, or a file is damaged; names the file
            and the line.
    """
    folder = Path(path)
    found = _read_json(folder / RUN_FILE)
    if found.get("format") != FORMAT:
        raise RunError(
            f"{folder / RUN_FILE} has format {found.get('format')!r}, this onecopy reads {FORMAT}: "
            "read it with the onecopy that has written it, or a later one"
        )
    try:
        ranks = tuple(_read_rank(folder, rank) for rank in _ranks_in(folder))
        return _run_of(folder, found, ranks)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder / RUN_FILE} is damaged: {_reason(error)}") from error


def _run_of(folder: Path, found: Mapping[str, Any], ranks: tuple[RankRun, ...]) -> Run:
    errors = [found["error"]] if found["status"] == "failed" else []
    errors += [
        f"rank {one.rank}: {one.error}" if found["world_size"] > 1 else one.error
        for one in ranks
        if one.status == "failed"
    ]
    statuses = {found["status"], *(one.status for one in ranks)}
    status = "finished" if statuses == {"finished"} else "running"
    last = [one.steps[-1].time for one in ranks if one.steps]
    return Run(
        path=folder,
        status="failed" if errors else status,
        error=errors[-1] if errors else None,
        started=float(found["started"]),
        seconds=max([float(found["seconds"] or 0.0), *last]),
        command=tuple(found["command"]),
        world_size=int(found["world_size"]),
        hosts=tuple(found["hosts"]),
        versions=found["versions"],
        environment=found["environment"],
        settings=_settings(found["settings"]),
        models=tuple(map(_model, found["models"])),
        ranks=ranks,
    )


def _settings(found: Mapping[str, Any]) -> dict[str, Setting]:
    return {name: Setting(**one) for name, one in found.items()}


def _model(found: Mapping[str, Any]) -> ModelRecord:
    estimate = found["estimate"]
    return ModelRecord(
        name=found["name"],
        kind=found["kind"],
        num_parameters=found["num_parameters"],
        units=tuple(UnitRecord(**one) for one in found["units"]),
        settings=_settings(found["settings"]),
        estimate=None if estimate is None else Estimate(**estimate),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except NotADirectoryError:
        raise RunError(f"{file.parent} is a file: give the folder of a run") from None
    except FileNotFoundError:
        inside = sorted(one.parent for one in file.parent.glob(f"*/{file.name}"))
        remedy = (
            f"There are runs in it, {', '.join(map(str, inside[:3]))}: give one or more of them"
            if inside
            else "Give the folder that onecopy.record or onecopy train --record was given"
        )
        raise RunError(
            f"{file.parent} is no run's folder: it has no {file.name}. {remedy}"
        ) from None
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise RunError(f"{file} is damaged: it holds no object")
    return found


def _ranks_in(folder: Path) -> list[int]:
    names = (one.name for one in folder.glob("rank-*.jsonl"))
    numbers = (name.removeprefix("rank-").removesuffix(".jsonl") for name in names)
    return sorted(int(number) for number in numbers if number.isdecimal())


def _read_rank(folder: Path, rank: int) -> RankRun:
    begins: list[Mapping[str, Any]] = []
    ends: list[Mapping[str, Any]] = []
    steps: list[StepRecord] = []
    for place, line in _lines(folder / steps_file(rank)):
        if "begin" in line:
            begins.append(line["begin"])
            # What a process before this one has recorded as its end is not the end any more.
            ends.clear()
        elif "end" in line:
            ends.append(line["end"])
        else:
            _append(steps, _record(StepRecord, place, {**line, "metrics": _numbers(line, place)}))
    events = _read_events(folder / events_file(rank))
    begin = begins[-1] if begins else {}
    return RankRun(
        rank=rank,
        host=begin.get("host", ""),
        device=begin.get("device", ""),
        num_begins=len(begins),
        status=ends[-1]["status"] if ends else "running",
        error=ends[-1]["error"] if ends else None,
        steps=tuple(steps),
        events=tuple(events),
        clocks=tuple(begin.get("clocks", ())),
    )


def _read_events(file: Path) -> list[EventRecord]:
    events: list[EventRecord] = []
    goes_on = False
    for place, line in _lines(file) if file.exists() else ():
        if "begin" in line:
            goes_on = True
            continue
        event = _record(EventRecord, place, line)
        if goes_on:
            # It has begun at a step before the last ones of the process that was lost.
            events = [one for one in events if one.step < event.step]
            goes_on = False
        events.append(event)
    return events


def _append(steps: list[StepRecord], step: StepRecord) -> None:
    """A step that was made again takes the place of the lost one and of those after it."""
    while steps and steps[-1].step >= step.step:
        steps.pop()
    steps.append(step)


def _record(kind: type[Record], place: str, line: Mapping[str, Any]) -> Record:
    try:
        return kind(**line)
    except TypeError as error:
        raise RunError(f"{place} is damaged: {_reason(error)}") from error


def _numbers(line: Mapping[str, Any], place: str) -> dict[str, float]:
    """JSON has no word for nan and infinity: they are strings."""
    try:
        return {name: float(value) for name, value in line.get("metrics", {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RunError(f"{place} is damaged: {error}") from error


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every line with its place, without those that a killed process has left half-written."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            found = json.loads(text.decode("utf-8"))
            if not isinstance(found, dict):
                raise TypeError("it is no object")
        except (TypeError, ValueError) as error:
            following = lines[number] if number < len(lines) else b""
            if number == len(lines) or following.startswith(b'{"begin"'):
                continue
            raise RunError(f"{file}, line {number} is damaged: {error}") from error
        yield f"{file}, line {number}", found


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return str(error)
