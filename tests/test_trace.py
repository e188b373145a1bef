"""A trace has every span of the detailed steps of all ranks, as the folder has it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecopy
from onecopy.errors import ConfigError, RunError
from onecopy.report.run_folder import EventRecord, RankRun, Run, StepRecord, read_run
from onecopy.report.trace import THREADS, spans_of, trace_events, write_trace
from onecopy.training.options import TrainOptions
from tests import models
from tests.pool import Pool

Event = dict[str, Any]


def train(folder: str, stage: int, num_steps: int, trace: int, offload: Any = None) -> None:
    """A small model, recorded."""
    torch.manual_seed(0)
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    onecopy.shard(model, optimizer, stage=stage, offload=offload)
    with onecopy.record(folder, model, optimizer, trace=trace) as run:
        for step in range(num_steps):
            loss = models.loss(model, models.batch("gpt", step, dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)


def check_format(events: list[Event]) -> None:
    """The Trace Event Format, as far as it is used here."""
    threads: set[tuple[int, int]] = set()
    for one in events:
        assert isinstance(one["pid"], int)
        assert isinstance(one["name"], str)
        assert one["name"]
        if one["ph"] == "M":
            assert one["name"] in {
                *("process_name", "process_sort_index", "thread_name", "thread_sort_index"),
            }
            (value,) = one["args"].values()
            assert isinstance(value, int if one["name"].endswith("sort_index") else str)
            if one["name"] == "thread_name":
                threads.add((one["pid"], one["tid"]))
        elif one["ph"] == "X":
            assert (one["pid"], one["tid"]) in threads, "threads are named first"
            assert isinstance(one["ts"], float)
            assert isinstance(one["dur"], float)
            assert one["dur"] >= 0
            assert isinstance(one["args"], dict)
        else:
            assert one["ph"] == "C", one
            assert isinstance(one["ts"], float)
            assert one["args"]
            assert all(isinstance(value, int) for value in one["args"].values())
    numbers = [number for _, number in threads]
    assert len(numbers) == len(set(numbers)), "a thread's number is of one process"


def check_nesting(events: list[Event]) -> None:
    """Within a thread spans nest or do not overlap; transfers and waits do not even nest."""
    by_thread: dict[int, list[Event]] = {}
    for one in events:
        if one["ph"] == "X":
            by_thread.setdefault(one["tid"], []).append(one)
    for spans in by_thread.values():
        open_until: list[float] = []
        for one in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
            end = round(one["ts"] + one["dur"], 1)
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], one
            assert not open_until or one["cat"] in ("steps", "compute"), one
            open_until.append(end)


def _spans(events: list[Event], rank: int, thread: str) -> list[Event]:
    return [
        one
        for one in events
        if one["ph"] == "X" and one["pid"] == rank + 1 and one["cat"] == thread
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trace_has_all_steps_of_all_ranks(pool: Pool, tmp_path: Path, stage: int) -> None:
    """Written by the first rank while training goes on; times are those of the events."""
    pool.run(2, train, str(tmp_path), stage, 7, 3)
    found = json.loads((tmp_path / "trace.json").read_text())
    events = found["traceEvents"]
    check_format(events)
    check_nesting(events)
    run = read_run(tmp_path)
    assert write_trace(tmp_path) == tmp_path / "trace.json"
    assert json.loads((tmp_path / "trace.json").read_text()) == found, "it was all there"
    for rank in run.ranks:
        _check_rank(events, rank, stage)


def _check_rank(events: list[Event], rank: RankRun, stage: int) -> None:
    assert {one.step for one in rank.events} == {2, 3, 4}
    steps = _spans(events, rank.rank, "steps")
    for number in (2, 3, 4):
        (record,) = (one for one in rank.steps if one.step == number)
        (step,) = (one for one in steps if one["name"] == f"step {number}")
        assert step["ts"] + step["dur"] == pytest.approx(record.time * 1e6, abs=0.2)
        assert step["dur"] == pytest.approx(record.seconds * 1e6, abs=0.2)
        assert step["args"]["loss"] == record.metrics["loss"]
        parts = [one for one in steps if one["args"].get("step") == number]
        assert [one["name"] for one in parts] == ["forward", "backward", "optimizer"]
    waits = [one for one in rank.events if one.kind == "wait"]
    assert _told(_spans(events, rank.rank, "waiting")) == [
        (f"wait {one.what} {one.unit}".rstrip(), one.time, one.seconds) for one in waits
    ]
    for verb in ("gather", "reduce", "refresh"):
        begun = [one for one in rank.events if one.kind == verb]
        spans = sorted(_spans(events, rank.rank, verb), key=lambda one: one["ts"])
        assert [one["name"] for one in spans] == [f"{verb} {one.unit}" for one in begun]
        assert [one["ts"] for one in spans] == [round(one.time * 1e6, 1) for one in begun]
        assert [one["args"]["bytes"] for one in spans] == [one.num_bytes for one in begun]
        ends = {
            round((one["ts"] + one["dur"]) / 1e6, 6)
            for one in spans
            if not one["args"].get("unfinished")
        }
        assert ends <= {round(one.time, 6) for one in waits if one.what == verb}
    assert bool(_spans(events, rank.rank, "gather")) == (stage == 3)
    assert bool(_spans(events, rank.rank, "refresh")) == (stage == 1)
    computed = Counter(one["name"] for one in _spans(events, rank.rank, "compute"))
    units = {one.unit for one in rank.events if one.kind == "enter"}
    assert computed == Counter(
        3 * [f"{way} {unit}" for way in ("forward", "backward") for unit in units]
    )
    assert [name for name, *_ in _told(_spans(events, rank.rank, "optimizer"))] == ["step"] * 3
    held = [one for one in rank.events if one.memory]
    counters = [one for one in events if one["ph"] == "C" and one["pid"] == rank.rank + 1]
    gathered = [one["args"]["bytes"] for one in counters if one["name"] == "gathered"]
    assert gathered == [one.memory["gathered"] for one in held]


def _told(spans: list[Event]) -> list[tuple[str, float, float]]:
    return [
        (one["name"], round((one["ts"] + one["dur"]) / 1e6, 7), round(one["dur"] / 1e6, 7))
        for one in sorted(spans, key=lambda one: round(one["ts"] + one["dur"], 1))
    ]


def test_the_disk_works_while_ranks_go_on(pool: Pool, tmp_path: Path) -> None:
    """Each read and write is a span; a step's split has what ranks waited for it, and no more."""
    (tmp_path / "swap").mkdir()
    pool.run(2, train, str(tmp_path / "run"), 3, 4, 2, f"nvme:{tmp_path / 'swap'}")
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    check_nesting(events)
    for rank in read_run(tmp_path / "run").ranks:
        moved = [one for one in rank.events if one.kind == "swap" and one.what in ("read", "write")]
        spans = _spans(events, rank.rank, "disk")
        told = sorted((f"swap {one.what} {one.unit}", one.num_bytes) for one in moved)
        assert sorted((one["name"], one["args"]["bytes"]) for one in spans) == told
        waited = sum(one.seconds for one in rank.events if (one.kind, one.what) == ("wait", "swap"))
        split = sum(one.split["io"] for one in rank.steps if one.step in {2, 3})
        assert split <= waited + 1e-3 * len(moved)


def test_a_run_that_ends_early_has_a_trace_of_what_it_made(pool: Pool, tmp_path: Path) -> None:
    """The first rank waits for the others' last words."""
    pool.run(2, train, str(tmp_path), 2, 3, 100)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_format(events)
    for rank in (0, 1):
        steps = [one["name"] for one in _spans(events, rank, "steps")]
        assert [name for name in steps if name.startswith("step ")] == ["step 2", "step 3"]


# Made up --------------------------------------------------------------------------------------


def _rank(number: int, *events: EventRecord, **more: Any) -> RankRun:
    steps = tuple(
        StepRecord(step=step, time=float(step), seconds=1.0, split={}, sent={})
        for step in sorted({one.step for one in events})
    )
    record = {"rank": number, "host": "one", "device": "cpu", "num_begins": 1, "status": "running"}
    return RankRun(**{**record, "error": None, "steps": steps, "events": events, **more})


def _run(*ranks: RankRun) -> Run:
    folder = {"path": Path(), "status": "running", "error": None, "started": 0.0, "seconds": 1.0}
    facts = {"command": (), "world_size": 3, "hosts": (), "versions": {}, "environment": {}}
    return Run(**folder, **facts, settings={}, models=(), ranks=ranks)


def _event(time: float, kind: str, unit: str = "a", **more: Any) -> EventRecord:
    return EventRecord(**{"step": int(time) + 1, "time": time, "kind": kind, "unit": unit, **more})


def _spans_in(rank: RankRun, thread: str) -> list[tuple[str, float, float]]:
    return [(one.name, one.begin, one.end) for one in spans_of(rank) if one.thread == thread]


def test_clocks_of_other_machines_are_set() -> None:
    """By the median of the moments that both have left together."""
    event = _event(10.5, "step", "", phase="step", seconds=0.25)
    far = _rank(1, event, host="two", clocks=(7.0, 8.5, 9.0))
    near = _rank(2, event, clocks=(70.0, 80.0, 90.0))
    ranks = (_rank(0, event, clocks=(2.0, 3.0, 4.0)), far, near)
    events = list(trace_events(_run(*ranks)))
    steps = [one["ts"] for one in events if one["ph"] == "X" and one["cat"] == "optimizer"]
    assert steps == [10.25e6, 5.25e6, 10.25e6]


def test_transfers_end_with_their_last_wait() -> None:
    """In several hops; where nobody waited, at the end; where nothing travels, at once."""
    rank = _rank(
        0,
        _event(0.1, "reduce", num_bytes=8),
        _event(0.2, "wait", what="reduce", seconds=0.05),
        _event(0.3, "wait", what="reduce", seconds=0.05),
        _event(0.4, "wait", what="gather", seconds=0.05),
        _event(0.5, "reduce", num_bytes=8),
        _event(0.6, "reduce", "b"),
        _event(0.9, "release"),
    )
    assert _spans_in(rank, "reduce") == [
        ("reduce a", 0.1, 0.3),
        ("reduce a", 0.5, 0.9),
        ("reduce b", 0.6, 0.6),
    ]


def test_what_goes_on_in_steps_nobody_looked_at_is_not_made_up() -> None:
    """Step 1 is not connected with step 9."""
    rank = _rank(
        0,
        _event(0.5, "refresh", num_bytes=8),
        _event(0.6, "step", "", seconds=0.2),
        _event(8.1, "wait", what="refresh", seconds=0.05),
        _event(8.2, "refresh", num_bytes=8),
        _event(8.3, "step", "", seconds=0.2),
    )
    assert _spans_in(rank, "refresh") == [("refresh a", 0.5, 0.6), ("refresh a", 8.2, 8.3)]


def test_units_are_left_when_nobody_saw_it() -> None:
    """A frozen unit gets no gradient: it is left when it is released, or with its phase."""
    rank = _rank(
        0,
        _event(0.0, "pass", "", phase="backward"),
        _event(0.1, "enter", phase="backward"),
        _event(0.2, "release", phase="backward"),
        _event(0.3, "enter", "b", phase="backward"),
        _event(0.4, "wait", "b", phase="backward", what="reduce", seconds=0.01),
        _event(0.8, "step", "", phase="step", seconds=0.1, what="SGD"),
    )
    assert _spans_in(rank, "compute") == [("backward a", 0.1, 0.2), ("backward b", 0.3, 0.4)]


def test_models_files_and_moves_have_names() -> None:
    """Several models; files, saves beside training, and moves between device and host."""
    rank = _rank(
        0,
        _event(0.2, "read", model="g", seconds=0.1, num_bytes=5),
        _event(0.3, "save", "", seconds=0.2, what="background"),
        _event(0.4, "swap", model="g", what="up", num_bytes=6),
    )
    assert _spans_in(rank, "I/O") == [("read g: a", 0.1, 0.2), ("swap up g: a", 0.4, 0.4)]
    assert _spans_in(rank, "I/O in the background") == [("save", pytest.approx(0.1), 0.3)]
    assert {one.thread for one in spans_of(rank)} <= set(THREADS)


def test_steps_follow_one_another_although_times_are_rounded() -> None:
    """In one thread: a step that seems to begin 0.1 us too early does not lie in the last one."""
    ends = {2: (1.2070508, 0.5981965), 3: (2.3491741, 1.1421233), 4: (2.9411977, 0.5920237)}
    assert ends[4][0] - ends[4][1] < ends[3][0]
    steps = tuple(
        StepRecord(step=step, time=time, seconds=seconds, split={}, sent={})
        for step, (time, seconds) in ends.items()
    )
    rank = _rank(0, *(_event(step - 0.8, "pass") for step in ends), steps=steps)
    events = list(trace_events(_run(rank)))
    check_nesting(events)
    spans = [one for one in events if one["ph"] == "X" and one["name"].startswith("step")]
    assert [one["name"] for one in spans] == ["step 2", "step 3", "step 4"]
    assert len({one["tid"] for one in spans}) == 1


def test_mistakes_are_told(tmp_path: Path) -> None:
    """No run, no details, no place."""
    with pytest.raises(RunError, match="is no run's folder"):
        write_trace(tmp_path)
    with pytest.raises(ConfigError, match="--trace is 3 without --record"):
        TrainOptions(trace=3)
