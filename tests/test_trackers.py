"""Trackers are told each step's numbers, whichever way their `log` is called."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.errors import ConfigError
from onecopy.report.run_folder import SPLIT, read_run
from onecopy.report.tensorboard import TensorBoard
from onecopy.report.trackers import Trackers, log_of
from tests.pool import Pool

Told = list[tuple[int, dict[str, float]]]


class StepFirst:
    """Our own way."""

    def __init__(self) -> None:
        self.told: Told = []

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """As documented."""
        self.told.append((step, numbers))


class OtherNames(StepFirst):
    """Names of its own; two in their places."""

    def log(self, number: int, values: Mapping[str, float], /, more: bool = False) -> None:  # type: ignore[override]
        """Neither is called step."""
        self.told.append((number, dict(values)))


class LikeWandb(StepFirst):
    """The signature of wandb's run, behind a decorator, as there."""

    def __init__(self) -> None:
        super().__init__()

        def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            assert step is not None
            self.told.append((step, data))

        @functools.wraps(log)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            log(*args, **kwargs)

        self.log = wrapped  # type: ignore[assignment]


class LikeTrackio(StepFirst):
    """The signature of trackio's module function."""

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        """The step may be left out there."""
        assert step is not None
        self.told.append((step, metrics))


class AnyKeyword(StepFirst):
    """Hands on whatever it gets."""

    def log(self, data: dict[str, float], **more: Any) -> None:  # type: ignore[override]
        """Takes the step by name."""
        self.told.append((more["step"], data))


@pytest.mark.parametrize("kind", [StepFirst, OtherNames, LikeWandb, LikeTrackio, AnyKeyword])
def test_each_way_to_log_is_found(kind: type[StepFirst]) -> None:
    """By the names of the parameters, before anything is called."""
    tracker = kind()
    Trackers([tracker]).log(7, {"loss": 1.5})
    assert tracker.told == [(7, {"loss": 1.5})]


def _with(log: Callable[..., Any]) -> Any:
    return type("Odd", (), {"log": staticmethod(log)})()


@pytest.mark.parametrize(
    "log",
    [
        lambda: None,
        lambda numbers: None,
        lambda name, value, step: None,  # Lightning's Fabric: one value at a time
        lambda *, step: None,
    ],
)
def test_a_log_that_fits_neither_is_refused(log: Callable[..., Any]) -> None:
    """When the recording is made, not at the first step."""
    with pytest.raises(ConfigError, match="takes neither"):
        log_of(_with(log))


def train(folder: str, make: Callable[[str], Any]) -> tuple[Any, list[float]]:
    """Three recorded steps; the tracker of this rank, and its losses."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=2)
    tracker, losses = make(f"{folder}/board"), []
    with onecopy.record(f"{folder}/run", model, optimizer, trackers=[tracker]) as run:
        for step in range(3):
            loss = model(torch.full((2, 8), float(dist.get_rank() + 1))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(math.nan if step == 2 else loss.item())
            run.log(loss=losses[-1], tokens=100)
    return getattr(tracker, "told", None), losses


def make_duck(_: str) -> StepFirst:
    """On every rank."""
    return LikeWandb()


def test_the_first_rank_tells_what_its_folder_has(pool: Pool, tmp_path: Path) -> None:
    """Its own numbers and the runtime's, one dict for each step."""
    (told, losses), (other, _) = pool.run(2, train, str(tmp_path), make_duck)
    assert other == []
    steps = read_run(tmp_path / "run").ranks[0].steps
    assert [step for step, _ in told] == [one.step for one in steps] == [1, 2, 3]
    assert [numbers["loss"] for _, numbers in told][:2] == losses[:2]
    assert math.isnan(told[2][1]["loss"])
    for (_, numbers), line in zip(told, steps, strict=True):
        assert numbers["time/step"] == line.seconds
        assert {name: numbers[f"time/{name}"] for name in SPLIT} == line.split
        assert {name: numbers[f"sent/{name}"] for name in line.sent} == line.sent
        assert {name: numbers[f"memory/{name}"] for name in line.memory} == line.memory
        assert numbers["rate/tokens"] == pytest.approx(100 / line.seconds)


def test_tensorboard_reads_what_was_logged(pool: Pool, tmp_path: Path) -> None:
    """By TensorBoard's own reader; only the first rank has written."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (_, losses), _ = pool.run(2, train, str(tmp_path), TensorBoard)
    (file,) = (tmp_path / "board").iterdir()
    found = EventAccumulator(str(file)).Reload()
    loss = found.Scalars("loss")
    assert [one.step for one in loss] == [1, 2, 3]
    assert [one.value for one in loss][:2] == pytest.approx(losses[:2])
    steps = read_run(tmp_path / "run").ranks[0].steps
    seconds = [one.value for one in found.Scalars("time/step")]
    assert seconds == pytest.approx([one.seconds for one in steps])
    assert "memory/peak" in found.Tags()["scalars"]


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any training."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("onecopy.report.tensorboard.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onecopy\[track\]"):
        TensorBoard("runs")


def test_one_that_breaks_while_it_writes_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Also at the end of the run."""

    class Breaks(StepFirst):
        def flush(self) -> None:
            raise OSError("the disk is full")

    good = StepFirst()
    trackers = Trackers([Breaks(), good])
    trackers.flush()
    trackers.log(1, {})
    assert "the disk is full" in caplog.text
    assert good.told == [(1, {})]
