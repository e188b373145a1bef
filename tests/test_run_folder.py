"""What a run's folder holds is read as it was written, also after a process was killed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onecopy.errors import RunError
from onecopy.report.run_folder import FORMAT, RUN_FILE, SPLIT, events_file, read_run, steps_file

BEGIN = {"begin": {"rank": 0, "host": "a", "device": "cpu", "pid": 1, "time": 0.0}}
END = {"end": {"status": "finished", "error": None, "time": 3.0}}


def step(number: int, **fields: Any) -> dict[str, Any]:
    """A line of a step of one second."""
    split = dict.fromkeys(SPLIT, 0.0) | {"compute": 1.0}
    line = {"step": number, "time": float(number), "seconds": 1.0, "split": split, "sent": {}}
    return line | fields


def write_run(folder: Path, lines: list[dict[str, Any]], **fields: Any) -> Path:
    """A run of one rank with these lines."""
    unit = {"name": "root", "num_parameters": 4, "num_bytes": 16, "trainable": True}
    model = {
        "name": "",
        "kind": "GPT",
        "num_parameters": 4,
        "units": [unit],
        "settings": {"stage": {"value": 3, "origin": "argument of shard"}},
        "estimate": {"memory": {"parameters": 16}, "sent": {"gather": 8}},
    }
    run = {
        "format": FORMAT,
        "status": "finished",
        "error": None,
        "started": 1e9,
        "seconds": 3.0,
        "command": ["train.py"],
        "world_size": 1,
        "hosts": ["a"],
        "versions": {"torch": "2"},
        "environment": {},
        "settings": {},
        "models": [model],
    }
    folder.mkdir(exist_ok=True)
    (folder / RUN_FILE).write_text(json.dumps(run | fields))
    (folder / steps_file(0)).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every number comes back, those that JSON does not know too."""
    metrics = {"loss": 0.5, "bad": "nan", "worse": "-inf"}
    lines = [BEGIN, step(1, metrics=metrics), step(2, skipped=True, memory={"peak": 7}), END]
    run = read_run(write_run(tmp_path / "run", lines))
    assert (run.status, run.seconds, run.models[0].settings["stage"].value) == ("finished", 3.0, 3)
    first, second = run.ranks[0].steps
    assert first.metrics["loss"] == 0.5
    assert math.isnan(first.metrics["bad"])
    assert first.metrics["worse"] == -math.inf
    assert second.skipped
    assert second.memory == {"peak": 7}


def test_a_killed_run_is_read(tmp_path: Path) -> None:
    """A line that was cut is left out; the run is one that has not ended."""
    folder = write_run(tmp_path / "run", [BEGIN, step(1)], status="running", seconds=None)
    with (folder / steps_file(0)).open("a") as file:
        file.write('{"step": 2, "ti')
    run = read_run(folder)
    assert (run.status, run.seconds) == ("running", 1.0)
    assert [one.step for one in run.ranks[0].steps] == [1]


def test_steps_made_again_replace_the_lost_ones(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint, after a kill in the middle of a line."""
    folder = write_run(tmp_path / "run", [BEGIN, step(1), step(2, seconds=5.0), step(3)])
    with (folder / steps_file(0)).open("a") as file:
        file.write('{"step": 4, "ti\n')
        file.writelines(json.dumps(line) + "\n" for line in (BEGIN, step(2), END))
    event = {"step": 2, "time": 2.0, "kind": "gather"}
    lines = [BEGIN, event | {"step": 1}, event, event | {"step": 3}, BEGIN, event]
    (folder / events_file(0)).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (rank,) = read_run(folder).ranks
    assert [(one.step, one.seconds) for one in rank.steps] == [(1, 1.0), (2, 1.0)]
    assert [one.step for one in rank.events] == [1, 2]
    assert (rank.num_begins, rank.status) == (2, "finished")


def test_damage_is_named(tmp_path: Path) -> None:
    """With file and line."""
    with pytest.raises(RunError, match="is no run's folder"):
        read_run(tmp_path)
    folder = write_run(tmp_path / "run", [BEGIN, step(1), step(2)])
    file = folder / steps_file(0)
    whole = file.read_text()
    file.write_text(whole.replace('"step": 1, "time"', '"step" 1, "time"'))
    with pytest.raises(RunError, match=r"rank-00000\.jsonl, line 2 is damaged"):
        read_run(folder)
    file.write_text(whole.replace('1, "time"', '1, "thyme"'))
    with pytest.raises(RunError, match=r"rank-00000\.jsonl, line 2 is damaged.*thyme"):
        read_run(folder)
    file.write_bytes(whole.encode().replace(b'{"step": 1', b"\0" * 10))
    with pytest.raises(RunError, match=r"rank-00000\.jsonl, line 2 is damaged: Expecting value"):
        read_run(folder)
    write_run(folder, [], format=99)
    with pytest.raises(RunError, match="format 99"):
        read_run(folder)


def test_reading_needs_no_torch() -> None:
    """So that pages and traces are made at once."""
    check = "import sys, onecopy.report.run_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
