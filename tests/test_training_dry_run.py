"""`onecopy train --dry-run`: what it says is what a run then does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from onecopy.report.amounts import UNITS
from onecopy.training.dry_run import dry_run
from onecopy.training.options import TrainOptions
from onecopy.training.trainer import TrainResult, train
from tests.pool import Pool


@pytest.mark.parametrize("change", [{}, {"stage": 2, "accumulate": 2}], ids=["3", "2"])
def test_it_sends_what_a_run_sends(
    change: dict[str, int], pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes a dull text. " * 50)
    options = TrainOptions(
        data=(text,), steps=6, batch=2, context=16, layers=2, width=32, heads=2, evals=1, sample=0,
        quiet=True, nproc=2, **change,
    )  # fmt: skip
    results: list[TrainResult] = pool.run(2, train, options)
    capsys.readouterr()
    dry_run(options)
    shown = capsys.readouterr().out
    for kind, num_bytes in results[0].bytes_per_step.items():
        lines = re.findall(rf"^(?:\S+) +{kind} +\d+ x +([\d.,]+) (\w+) ", shown, re.M)
        sent = sum(float(amount.replace(",", "")) * UNITS[unit] for amount, unit in lines)
        assert sent == pytest.approx(num_bytes, rel=0.05), kind
    # Every unit, and every element once.
    elements = re.findall(r"^(?:root|blocks\.\d) +\d+ +([\d,]+) +\d+ +[\d,]+$", shown, re.M)
    assert sum(int(one.replace(",", "")) for one in elements) == results[0].num_parameters
    assert "width = 32  # program" in shown
    assert "all of it, at most" in shown


def test_it_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = TrainOptions(
        steps=5, batch=2, context=16, layers=1, width=16, heads=2, offload="cpu", nproc=8,
        checkpoint=tmp_path / "run", save_model=tmp_path / "model", record=tmp_path / "record",
        epochs=0.1,
    )  # fmt: skip
    dry_run(options)
    shown = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert re.search(r"an epoch [\d,.]+ steps, and the run [\d,]+: ", shown)
    assert dataclasses.replace(options) == options
