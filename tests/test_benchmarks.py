"""Benchmarks run from end to end, small; what they measure is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.guard import fallen, grown
from onecopy.memory import direct_io

ROOT = Path(__file__).resolve().parent.parent
NUM_PARAMETERS = 928_512  # of the smallest model with 32 tokens


def end_of(benchmark: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
def test_compare(tmp_path: Path) -> None:
    """The same training for all, bytes of the formulas, floors that send as much as the stages."""
    stages = {0: "floor-0", 1: "floor-1", 2: "floor-1", 3: "floor-3"}
    names = ["compute", "floor-0", "floor-1", "floor-3", "ddp", "fsdp2", "fsdp2-keep"]
    names += [f"onecopy-{stage}" for stage in stages]
    sizes = "--size 1m --context 32 --rounds 1 --steps 1".split()
    ended = end_of("compare", *sizes, "--output", str(tmp_path), "--contenders", *names)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,) = json.loads((tmp_path / "compare.json").read_text())
    rows = {row["name"]: row for row in run["rows"]}
    assert list(rows) == names
    assert rows["fsdp2"]["live_of_formula"] == pytest.approx(1, abs=0.05)
    for stage, floor in stages.items():
        # The same formula: it knows nothing of what was sent.
        assert rows[f"onecopy-{stage}"]["least_sent"] == rows[floor]["least_sent"]
        if "bytes sent contain" not in ended.stdout:
            assert rows[floor]["sent_of_least"] == pytest.approx(1, abs=0.05)
    assert {aim["name"] for aim in run["aims"]} == {f"onecopy-{stage}" for stage in stages}
    assert "onecopy-3" in (tmp_path / "compare.md").read_text()
    ElementTree.parse(tmp_path / "compare.svg")


@pytest.mark.slow
def test_accelerator(tmp_path: Path) -> None:
    """Without one: the same losses as plain PyTorch, and bytes of states that came and went."""
    sizes = "--device cpu --size 1m --context 32 --micro-batch 1 --rounds 1 --steps 1".split()
    ended = end_of("accelerator", *sizes, "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = json.loads((tmp_path / "accelerator.json").read_text())
    rows = {row["name"]: row for row in run["rows"]}
    # Gradients go down, new values come up.
    assert rows["onecopy-3-cpu"]["up"] == pytest.approx(4 * NUM_PARAMETERS / 1e6, rel=0.05)
    assert rows["onecopy-3-cpu"]["down"] == pytest.approx(4 * NUM_PARAMETERS / 1e6, rel=0.05)
    assert all(row["of_plain"] > 0 for row in rows.values())
    assert "onecopy-3-cpu" in (tmp_path / "accelerator.md").read_text()


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    """Everybody goes on from what was loaded as from what was saved; nothing stays behind."""
    names = ["disk", "disk-early", "ddp", "fsdp2", "onecopy-3"]
    record = tmp_path / "record.json"
    sizes = ["--size", "1m", "--context", "32", "--rounds", "1"]
    options = ["--directory", str(tmp_path), "--json", str(record), "--contenders", *names]
    ended = end_of("checkpoints", *sizes, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["name"]: row for row in json.loads(record.read_text())["rows"]}
    assert list(rows) == names
    states = 3 * 4 * NUM_PARAMETERS / 2**20  # MiB of parameters and moments
    assert all(row["written"] >= states for row in rows.values())
    assert {"save_of_disk", "stall_per_fsdp2", "load_per_ddp"} <= rows["onecopy-3"].keys()
    assert list(tmp_path.iterdir()) == [record]


@pytest.mark.slow
def test_swap_speed(tmp_path: Path) -> None:
    if not direct_io.can_be_direct(tmp_path):
        pytest.skip("no direct I/O here")
    options = "--size 4MiB --segment 1MiB --request 1MiB --rounds 2 --threads 3"
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.swap_speed", str(tmp_path), *options.split()],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for words in ("3 threads", "layer / disk", "write", "read", "both"):
        assert words in shown
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_slow_network(tmp_path: Path) -> None:
    """Every contender sends what its events say, and all learn the same."""
    record = tmp_path / "record.json"
    names = ["onecopy-3", "fsdp2", "hsdp", "mics", "hpz", "zero++"]
    sizes = "--size 1m --context 32 --rounds 1 --steps 1 --speeds 400 0".split()
    ended = end_of("slow_network", *sizes, "--json", str(record), "--contenders", *names)
    if "there can be no network of namespaces" in ended.stdout:
        pytest.skip(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    speeds = json.loads(record.read_text())["speeds"]
    assert list(speeds) == ["400", "0"]
    for speed in speeds.values():
        assert [row["name"] for row in speed["rows"]] == names
        for row in speed["rows"]:
            counted = row.get("counted", row["sent"])
            assert counted <= row["sent"] <= 1.2 * counted, row


def test_the_guard_names_what_grew() -> None:
    def counts(**calls: float) -> dict[str, Any]:
        others = {"operations": {"aten.add": 4.0}, "messages": {"send": 2.0}}
        return {"stage 3": {"unit": {"calls": {**calls}, **others}}}

    stored = counts(gather=90.0, release=20.0)
    # One more in 110 is within the tolerance of 1 %; fewer never fail.
    for now in (stored, counts(gather=91.0, release=20.0), counts(gather=80.0, release=20.0)):
        assert grown(stored, now) == []
    assert fallen(stored, counts(gather=80.0, release=20.0))
    assert not fallen(stored, stored)
    lines = grown(stored, counts(gather=90.0, release=23.0, copy=1.0))
    assert lines == [
        "stage 3: 114 calls of our functions per unit, stored are 110",
        "    +3 release",
        "    +1 copy",
    ]
    more = counts(gather=90.0, release=20.0)
    more["stage 3"]["unit"]["messages"] = {"send": 3.0}
    assert grown(stored, more)[0] == "stage 3: 3 messages per unit, stored are 2"
    assert grown({}, stored), "what was never stored has grown"


@pytest.mark.slow
def test_a_step_does_no_more_than_is_stored() -> None:
    """In numbers of calls, operations and messages."""
    command = [sys.executable, "-m", "benchmarks.guard"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
