"""The detailed steps of a run, of all ranks, as one trace for Perfetto or Chrome. Free of torch.

Each rank is a process of the trace, with these threads:

    steps       each step, and in it forward, backward and what follows until the optimizer is done
    compute     units in forward and backward, from their entry to where they are left
    waiting     where the rank was blocked, and for what
    gather, reduce, refresh     transfers, from their start until the rank has taken their result
    optimizer   optimizer.step(), and updates of single units within backward
    disk        reads and writes of states on disk, while the rank goes on
    I/O         files, and copies for checkpoints; moves between device and host, as moments

Spans of a thread nest or do not overlap; where they would, there is another thread of that name.
Counters hold the bytes of memory by kind.

Times are those of the first rank's clock since the run began. Ranks of its machine have the same
clock. Those of other machines are set by moments that all ranks leave together when the recording
begins (`RankRun.clocks`): right to about a millisecond then, and for as long as the clocks go
alike.

Source: the Trace Event Format (JSON Object Format; events M, X and C), as Perfetto and
chrome://tracing read it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onecopy.errors import RunError
from onecopy.events import SENT
from onecopy.report.run_folder import EventRecord, RankRun, Run, StepRecord, read_run

__all__ = ["TRACE_FILE", "Span", "spans_of", "trace_events", "write_trace"]

TRACE_FILE = "trace.json"
OPTIMIZER = ("step", "skip", "update")
# In this order on the page; a thread without spans is not there.
THREADS = (
    "steps",
    "compute",
    "waiting",
    *SENT,
    "optimizer",
    "disk",
    "I/O",
    "I/O in the background",
)
# Seconds by which what follows may seem to begin too early: times and durations in a run's folder
# have seven digits.
ROUNDING = 2e-7


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    begin, end: seconds of the run, by the rank's own clock.
    """

    thread: str
    name: str
    begin: float
    end: float
    details: Mapping[str, Any] = field(default_factory=dict)


def write_trace(folder: str | os.PathLike[str]) -> Path:
    """Write FOLDER/trace.json from the detailed steps in a run's folder; returns its path.

    Raises:
        RunError: it is no run's folder, has no detailed steps, or the file cannot be written.
    """
    run = read_run(folder)
    path = run.path / TRACE_FILE
    if not any(rank.events for rank in run.ranks):
        raise RunError(
            f"{run.path} has no detailed steps to make a trace of: a run has some after its second "
            "step, and as many as you like with trace=N of onecopy.record"
        )
    new = path.with_name(f"{TRACE_FILE}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","otherData":')
            file.write(json.dumps({"run": str(run.path.name), "command": " ".join(run.command)}))
            # One event in a line, one after another: there may be millions.
            file.write(',"traceEvents":[\n')
            for number, event in enumerate(trace_events(run)):
                file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        new.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path


def trace_events(run: Run) -> Iterator[dict[str, Any]]:
    """The events of the trace; times in microseconds, as the format wants them."""
    for rank in run.ranks:
        if rank.events:
            yield from _process(rank, _shift(run, rank))


def _shift(run: Run, rank: RankRun) -> float:
    """What is added to a rank's times."""
    first = run.ranks[0]
    apart = [one - other for one, other in zip(first.clocks, rank.clocks, strict=False)]
    return statistics.median(apart) if apart and rank.host != first.host else 0.0


def _process(rank: RankRun, shift: float) -> Iterator[dict[str, Any]]:
    # Number 0 means something else to viewers, and threads should differ across processes, too.
    pid = rank.rank + 1
    name = f"rank {rank.rank} ({rank.host}, {rank.device})"
    yield _name("process_name", pid, 0, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    by_thread: dict[str, list[Span]] = {}
    for span in spans_of(rank):
        by_thread.setdefault(span.thread, []).append(span)
    tid = pid * 1000
    for thread in THREADS:
        lanes = _lanes(by_thread.get(thread, []), nests=thread in ("steps", "compute"))
        for number, lane in enumerate(lanes, 1):
            tid += 1
            yield _name("thread_name", pid, tid, thread if number == 1 else f"{thread} {number}")
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": tid},
            }
            for span in lane:
                begin, end = _microseconds(span.begin + shift), _microseconds(span.end + shift)
                yield {
                    "ph": "X",
                    "name": span.name,
                    "cat": thread,
                    "pid": pid,
                    "tid": tid,
                    "ts": begin,
                    "dur": round(end - begin, 1),
                    "args": dict(span.details),
                }
    yield from _counters(rank, pid, shift)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    """To a tenth, as exactly as the folder has it."""
    return round(seconds * 1e6, 1)


def _counters(rank: RankRun, pid: int, shift: float) -> Iterator[dict[str, Any]]:
    for one in rank.events:
        of = f" of {one.model}" if one.model else ""
        ts = _microseconds(one.time + shift)
        held = {kind: num_bytes for kind, num_bytes in one.memory.items() if kind != "gathered"}
        if held:
            yield {"ph": "C", "name": f"memory{of}", "pid": pid, "ts": ts, "args": held}
        if "gathered" in one.memory:
            args = {"bytes": one.memory["gathered"]}
            yield {"ph": "C", "name": f"gathered{of}", "pid": pid, "ts": ts, "args": args}


def _lanes(spans: Sequence[Span], *, nests: bool) -> list[list[Span]]:
    """The spans in as few lanes as hold them; what lies within another one may share its lane.

    What begins where another one ends follows it, although both were rounded.
    """
    lanes: list[list[Span]] = []
    # Of each lane the ends of those spans that are still open, outermost first.
    ends: list[list[float]] = []
    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        for lane, open_ends in zip(lanes, ends, strict=True):
            begin = span.begin
            while open_ends and open_ends[-1] <= span.begin + ROUNDING:
                begin = max(begin, open_ends.pop())
            if not open_ends or (nests and span.end <= open_ends[-1]):
                lane.append(replace(span, begin=begin, end=max(begin, span.end)))
                open_ends.append(span.end)
                break
        else:
            lanes.append([span])
            ends.append([span.end])
    return lanes


# Spans of a rank ------------------------------------------------------------------------------


def spans_of(rank: RankRun) -> Iterator[Span]:
    """All spans of a rank's detailed steps."""
    steps = {one.step: one for one in rank.steps}
    events = sorted(rank.events, key=lambda one: one.time)
    for stretch in _stretches(events):
        numbers = sorted({one.step for one in stretch} & steps.keys())
        yield from (_step(steps[number]) for number in numbers)
        models: dict[str, list[EventRecord]] = {}
        for one in stretch:
            models.setdefault(one.model, []).append(one)
        for of_model in models.values():
            yield from _phases(of_model)
            yield from _computed(of_model)
            yield from _transfers(of_model)
        yield from (span for one in stretch if (span := _of_duration(one)) is not None)


def _stretches(events: Sequence[EventRecord]) -> Iterator[list[EventRecord]]:
    """Steps that follow one another: what begins in one may end in the next."""
    found: list[EventRecord] = []
    for one in events:
        if found and one.step > found[-1].step + 1:
            yield found
            found = []
        found.append(one)
    if found:
        yield found


def _step(record: StepRecord) -> Span:
    split = {f"{name} (ms)": round(value * 1e3, 3) for name, value in record.split.items()}
    return Span(
        "steps",
        f"step {record.step}",
        record.time - record.seconds,
        record.time,
        {**split, "skipped": record.skipped, **record.metrics},
    )


def _of_duration(event: EventRecord) -> Span | None:
    """What says itself how long it took."""
    begin, name = event.time - event.seconds, _named(event.kind, event)
    if event.kind == "wait":
        return Span("waiting", _named(f"wait {event.what}", event), begin, event.time, _of(event))
    if event.kind in OPTIMIZER:
        return Span("optimizer", name, begin, event.time, {**_of(event), "optimizer": event.what})
    if event.kind == "swap":
        name = _named(f"swap {event.what}", event)
        if event.seconds:
            end = event.time - event.value
            return Span("disk", name, end - event.seconds, end, _of(event))
    if event.seconds or event.kind == "swap":
        thread = "I/O in the background" if event.what == "background" else "I/O"
        return Span(thread, name, begin, event.time, _of(event))
    return None


def _named(verb: str, event: EventRecord) -> str:
    unit = f"{event.model}: {event.unit}" if event.model and event.unit else event.unit
    return f"{verb} {unit}".rstrip()


def _of(event: EventRecord) -> dict[str, Any]:
    found: dict[str, Any] = {"step": event.step, "phase": event.phase}
    if event.num_bytes:
        found["bytes"] = event.num_bytes
    if event.across_bytes:
        found["bytes across nodes"] = event.across_bytes
    return found


def _phases(events: Sequence[EventRecord]) -> Iterator[Span]:
    """Forward and backward from their begin, and the optimizer's part, to the last of each."""
    begun: EventRecord | None = None
    begin = end = 0.0
    for one in events:
        is_other = begun is not None and (one.phase, one.step) != (begun.phase, begun.step)
        if begun is not None and (is_other or one.kind == "pass"):
            yield _phase(begun, begin, end)
            begun = None
        if begun is None and one.phase != "api":
            begun, begin = one, one.time
        # The optimizer's step is told of at its end.
        begin, end = min(begin, one.time - one.seconds), one.time
    if begun is not None:
        yield _phase(begun, begin, end)


def _phase(begun: EventRecord, begin: float, end: float) -> Span:
    name = begun.phase if begun.phase != "step" else "optimizer"
    return Span("steps", name, begin, end, {"step": begun.step})


def _computed(events: Sequence[EventRecord]) -> Iterator[Span]:
    """Units from entry to exit; one whose exit nobody saw is left when it is released, or at the
    end of its phase."""
    entered: dict[str, EventRecord] = {}
    last = 0.0

    def left(unit: str, end: float) -> Iterator[Span]:
        begin = entered.pop(unit, None)
        if begin is not None:
            yield Span("compute", _named(begin.phase, begin), begin.time, end, _of(begin))

    for one in events:
        if one.kind in ("pass", *OPTIMIZER):
            yield from itertools.chain.from_iterable(left(unit, last) for unit in list(entered))
        elif one.kind in ("enter", "leave", "release"):
            yield from left(one.unit, one.time)
        if one.kind == "enter":
            entered[one.unit] = one
        last = one.time
    yield from itertools.chain.from_iterable(left(unit, last) for unit in list(entered))


def _transfers(events: Sequence[EventRecord]) -> Iterator[Span]:
    """From the start until the last wait for it; to the end of the stretch where nobody waited."""
    started: dict[tuple[str, str], EventRecord] = {}
    taken: dict[tuple[str, str], float] = {}

    def ended(key: tuple[str, str], latest: float) -> Iterator[Span]:
        begin = started.pop(key, None)
        if begin is None:
            return
        details = _of(begin)
        end = taken.pop(key, None)
        if end is None:
            # Nothing travels where a rank is alone.
            end = latest if begin.num_bytes else begin.time
            details["unfinished"] = bool(begin.num_bytes)
        yield Span(key[0], _named(begin.kind, begin), begin.time, end, details)

    for one in events:
        key = (one.kind, one.unit)
        if one.kind in SENT:
            yield from ended(key, one.time)
            started[key] = one
        elif one.kind == "wait" and (one.what, one.unit) in started:
            taken[one.what, one.unit] = one.time
    for key in list(started):
        yield from ended(key, events[-1].time)
