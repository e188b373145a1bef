"""What `onecopy.record` writes is what happened, and nothing of it stops the training."""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
import onecopy.events
import onecopy.handle
from onecopy.errors import ConfigError, OneCopyError, RunError, ShardingError
from onecopy.report import memory
from onecopy.report.run_files import write_whole
from onecopy.report.run_folder import SPLIT, Run, StepRecord, events_file, read_run
from onecopy.report.step_meter import StepMeter
from tests import models
from tests.pool import Pool, RankError
from tests.run_folders import Recorded
from tests.runs import OPTIMIZERS

Trained = tuple[nn.Module, torch.optim.Optimizer]


def sharded(stage: int = 3, **settings: Any) -> Trained:
    """A small model with its optimizer."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage, **settings)
    return model, optimizer


def steps(trained: Trained, num_steps: int, backwards: int = 1) -> list[float]:
    """Train on; the last loss of each step, which only a recording keeps."""
    model, optimizer = trained
    losses = []
    for step in range(num_steps):
        for _ in range(backwards):
            loss = models.loss(model, models.batch("gpt", step, _rank()))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def recorded(
    folder: Path, stage: int, precision: str, backwards: int, offload: str | None = None
) -> dict[str, Any]:
    """A recorded run, and what this rank knows of it otherwise."""
    settings = {"precision": precision, "max_grad_norm": 1.0, "offload": offload}
    model, optimizer = trained = sharded(stage, **settings)
    held: list[memory.StateBytes] = []
    optimizer.register_step_post_hook(lambda *_: held.append(memory.measure(model, optimizer)))
    losses = []
    with onecopy.record(folder, model, optimizer) as run:
        for _ in range(4):
            losses += steps(trained, 1, backwards)
            run.log(loss=losses[-1], rank=torch.tensor(float(_rank())))
    units = onecopy.handle.of(model).engine.units
    return {
        "losses": losses,
        "held": held,
        "flat": sum(one.layout.padded_numel for one in units),
        "gradient": sum(one.layout.gradient_numel for one in units),
    }


@pytest.mark.sampled(
    "stage, precision, backwards",
    list(itertools.product((0, 1, 2, 3), ("fp32", "bf16"), (1, 2))),
    4,
    always=[(3, "bf16", 2), (2, "fp32", 1)],
)
def test_lines_say_what_happened(
    pool: Pool, tmp_path: Path, stage: int, precision: str, backwards: int
) -> None:
    """Seconds add up, bytes are those of the formulas, memory is what is held."""
    known = pool.run(2, recorded, tmp_path / "run", stage, precision, backwards)
    run = read_run(tmp_path / "run")
    assert (run.status, run.world_size, len(run.ranks)) == ("finished", 2, 2)
    for rank, seen in zip(run.ranks, known, strict=True):
        assert [one.step for one in rank.steps] == [1, 2, 3, 4]
        assert [one.metrics["loss"] for one in rank.steps] == seen["losses"]
        assert {one.metrics["rank"] for one in rank.steps} == {float(rank.rank)}
        for step in rank.steps:
            assert tuple(step.split) == SPLIT
            assert sum(step.split.values()) == pytest.approx(step.seconds, abs=1e-6)
            assert min(step.split.values()) >= -1e-6
        for earlier, step in itertools.pairwise(rank.steps):
            assert step.time - earlier.time == pytest.approx(step.seconds, abs=1e-5)
        _check_bytes(rank.steps, seen, stage, precision, backwards)
        for step, held in zip(rank.steps[:3], seen["held"], strict=False):
            now = {name: step.memory[name] for name in ("parameters", "gradients", "optimizer")}
            assert now == {name: getattr(held, name) for name in now}
            assert step.memory["peak"] >= step.memory["process"] > 0
    _check_estimate(run, backwards)


def _check_bytes(
    found: tuple[StepRecord, ...], seen: dict[str, Any], stage: int, precision: str, k: int
) -> None:
    """By DESIGN's table of stages, on two ranks, as tests/test_volume.py has it."""
    half = {"fp32": 4, "bf16": 2}[precision] // 2
    expected = {
        "gather": 2 * k * seen["flat"] * half if stage == 3 else 0,
        "reduce": k * (2 if stage == 0 else 1) * seen["gradient"] * half,
        "refresh": seen["flat"] * half if stage in (1, 2) else 0,
    }
    expected = {kind: num_bytes for kind, num_bytes in expected.items() if num_bytes}
    for step in found:
        assert step.sent == expected
        assert step.expected == expected


def _check_estimate(run: Run, backwards: int) -> None:
    """The planner's numbers are the measured ones, where there is one backward."""
    estimate = run.models[0].estimate
    assert estimate is not None
    last = run.ranks[0].steps[2]
    if backwards == 1:
        assert {kind: value for kind, value in estimate.sent.items() if value} == last.sent
    kinds = {"parameters", "gradients", "optimizer", "host", "nvme"}
    kinds &= {*last.memory, *estimate.memory}
    for kind in kinds:
        held = max(rank.steps[2].memory[kind] for rank in run.ranks)
        # The formula counts padding, too, which has no optimizer states.
        assert held <= estimate.memory[kind] <= 1.05 * held, kind
    assert last.memory["gathered"] <= estimate.memory["gathered"]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_lies_in_host_memory_is_estimated(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, recorded, tmp_path / "run", stage, "bf16", 1, "cpu")
    run = read_run(tmp_path / "run")
    assert run.ranks[0].steps[2].memory["host"] > 0
    _check_estimate(run, 1)


def test_what_lies_on_disk_is_estimated(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    pool.run(2, recorded, tmp_path / "run", 3, "bf16", 1, f"nvme:{tmp_path / 'swap'}")
    run = read_run(tmp_path / "run")
    memory, estimate = run.ranks[0].steps[2].memory, run.models[0].estimate
    assert estimate is not None
    assert memory["nvme"] > 0
    assert "nvme" in estimate.memory
    _check_estimate(run, 1)


def adapted(folder: Path) -> None:
    """Blocks with a frozen and a trainable part, as with adapters."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(8, 32)) for _ in range(4)
    ]
    for block in blocks:
        block[0].requires_grad_(False)
    model = nn.Sequential(nn.Linear(16, 32), nn.Sequential(*blocks), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    onecopy.shard(model, optimizer, stage=3)
    with onecopy.record(folder, model):
        for _ in range(3):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_both_parts_of_a_partly_frozen_block_are_estimated(pool: Pool, tmp_path: Path) -> None:
    """They are gathered together, beside the next block's first."""
    pool.run(2, adapted, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert len(run.models[0].units) > 5
    _check_estimate(run, 1)
    estimate = run.models[0].estimate
    assert estimate is not None
    assert run.ranks[0].steps[2].memory["gathered"] > 0.9 * estimate.memory["gathered"]


def test_events_of_close_looks(pool: Pool, tmp_path: Path) -> None:
    """Steps 2 and 3, or as many as were asked for: units enter and leave, and memory follows."""
    for trace, close in ((0, {2, 3}), (3, {2, 3, 4})):
        folder = tmp_path / str(trace)
        pool.run(2, recorded_closely, folder, trace)
        for rank in read_run(folder).ranks:
            assert {one.step for one in rank.events} == close
            second = [one for one in rank.events if one.step == 2]
            places = {f"{one.phase} {one.kind} {one.unit}": n for n, one in enumerate(second)}
            for phase, unit in (("forward", "blocks.0"), ("backward", "blocks.1")):
                assert places[f"{phase} enter {unit}"] < places[f"{phase} leave {unit}"]
            assert [one.time for one in second] == sorted(one.time for one in second)
            assert max(one.memory["gathered"] for one in second) == rank.steps[1].memory["gathered"]
            assert sum(one.num_bytes for one in second if one.group) == sum(
                rank.steps[1].sent.values()
            )


def recorded_closely(folder: Path, trace: int) -> None:
    """Five steps."""
    trained = sharded()
    with onecopy.record(folder, trained[0], trace=trace):
        steps(trained, 5)
    assert not onecopy.handle.of(trained[0]).events.close_looks


def two_models(folder: Path) -> None:
    """The first optimizer steps once where the second steps twice."""
    first, second = sharded(2), sharded(3)
    with onecopy.record(folder, {"a": first[0], "b": second[0]}, [first[1], second[1]]):
        for _ in range(3):
            steps(second, 2)
            steps(first, 1)


def test_two_models(pool: Pool, tmp_path: Path) -> None:
    """A step of the run is one of the first optimizer; bytes are those of both."""
    pool.run(2, two_models, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [one.name for one in run.models] == ["a", "b"]
    estimates = [one.estimate for one in run.models]
    assert estimates[0] is not None
    assert estimates[1] is not None
    for rank in run.ranks:
        assert [one.step for one in rank.steps] == [1, 2, 3]
        for step in rank.steps:
            assert step.sent == step.expected
            assert step.sent["gather"] == 2 * estimates[1].sent["gather"]
            assert step.sent["refresh"] == estimates[0].sent["refresh"]
        assert {one.model for one in rank.events} == {"a", "b"}


def overflowing(folder: Path) -> None:
    """fp16: the first scale is far too large."""
    model, optimizer = trained = sharded(3, precision="fp16")
    with onecopy.record(folder, model):
        for _ in range(3):
            loss = models.loss(model, models.batch("gpt", 0, _rank())) * 1e4
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert trained


def test_skipped_steps(pool: Pool, tmp_path: Path) -> None:
    """They are steps, too, and say so."""
    pool.run(2, overflowing, tmp_path / "run")
    for rank in read_run(tmp_path / "run").ranks:
        assert [one.step for one in rank.steps] == [1, 2, 3]
        assert rank.steps[0].skipped


def failing(folder: Path) -> None:
    """Rank 1 breaks in its third step."""
    trained = sharded()
    try:
        with onecopy.record(folder, trained[0]) as run:
            steps(trained, 2)
            run.log(loss=math.nan)
            if _rank() == 1:
                raise ValueError("the data are broken")
            raise KeyboardInterrupt
    except (ValueError, KeyboardInterrupt):
        pass


def test_failed_runs(pool: Pool, tmp_path: Path) -> None:
    """What has ended the loop is there, with what was done before."""
    pool.run(2, failing, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.status == "failed"
    assert run.error is not None
    assert [one.error for one in run.ranks] == [
        "KeyboardInterrupt",
        "ValueError: the data are broken",
    ]
    assert all(math.isnan(one.steps[-1].metrics["loss"]) for one in run.ranks)


def second_run(folder: Path) -> tuple[str, int]:
    """Into the folder of another, then as its continuation."""
    trained = sharded()
    with onecopy.record(folder, trained[0]):
        steps(trained, 3)
    with pytest.raises(RunError) as refused, onecopy.record(folder, trained[0]):
        pass
    with onecopy.record(folder, trained[0], resume=True):
        steps(trained, 2)
    # A run that went back to a checkpoint of step 1 makes steps again.
    onecopy.handle.of(trained[0]).bindings[0].num_steps = 1
    with onecopy.record(folder, trained[0], resume=True):
        steps(trained, 2)
    return str(refused.value), len(onecopy.handle.of(trained[0]).events.sinks)


def test_a_folder_is_of_one_run(pool: Pool, tmp_path: Path) -> None:
    """Another run is refused on all ranks, a continuation goes on counting."""
    for text, num_sinks in pool.run(2, second_run, tmp_path / "run"):
        assert "holds a run already" in text
        assert "resume=True" in text
        assert num_sinks == 0
    for rank in read_run(tmp_path / "run").ranks:
        assert [one.step for one in rank.steps] == [1, 2, 3]
        assert rank.num_begins == 3


def alone(folder: Path) -> str:
    """The first rank records by itself."""
    trained = sharded()
    try:
        if _rank() == 0:
            with onecopy.record(folder, trained[0]):
                pass
        else:
            steps(trained, 1)
    except OneCopyError as error:
        return str(error)
    return ""


def elsewhere(folder: Path) -> None:
    """Each rank names a folder of its own."""
    trained = sharded()
    with onecopy.record(folder / str(_rank()), trained[0]):
        pass


def test_ranks_that_differ_hear_of_it(pool: Pool, tmp_path: Path) -> None:
    """Instead of waiting for each other."""
    for text in pool.run(2, alone, tmp_path / "a"):
        assert "rank 0 wants onecopy.record" in text
    for error in pool.run(2, elsewhere, tmp_path / "b", expect_failures=True):
        assert isinstance(error, RankError)
        assert "ranks record into different folders" in error.message


def test_what_is_inside_counts_for_itself() -> None:
    """A wait within the optimizer's step is no time of the optimizer, and saves block or do not."""
    meter = StepMeter(100.0)

    def happened(kind: onecopy.events.Kind, until: float, seconds: float, what: str = "") -> None:
        event = onecopy.events.Event(kind=kind, unit="", phase="api", seconds=seconds, what=what)
        meter.note(event, until)

    happened("wait", 101.0, 0.5, "gather")
    happened("wait", 103.0, 0.25, "agree")
    happened("wait", 103.5, 0.25, "reduce")
    happened("step", 104.0, 1.5, "AdamW")
    happened("save", 105.0, 3.0, "background")
    happened("wait", 105.5, 0.5, "checkpoint")
    happened("save", 106.0, 1.0)
    assert meter.take(108.0) == (
        8.0,
        {
            "compute": 5.0,
            "gather": 0.5,
            "reduce": 0.25,
            "refresh": 0.0,
            "agree": 0.25,
            "optimizer": 1.0,
            "io": 1.0,
        },
    )
    assert meter.take(109.0)[1]["compute"] == 1.0


def fused(folder: Path) -> None:
    """The optimizer runs within backward."""
    trained = sharded(3, step_in_backward=True)
    with onecopy.record(folder, trained[0]):
        steps(trained, 3)


def test_updates_in_backward(pool: Pool, tmp_path: Path) -> None:
    """They are time of the optimizer, wherever it runs."""
    pool.run(2, fused, tmp_path / "run")
    for rank in read_run(tmp_path / "run").ranks:
        updates = [one for one in rank.events if one.step == 2 and one.kind == "update"]
        assert {one.unit for one in updates} == {"root", "blocks.0", "blocks.1", "blocks.2"}
        assert {one.phase for one in updates} == {"backward"}
        assert rank.steps[1].split["optimizer"] >= sum(one.seconds for one in updates) - 1e-6
        assert rank.steps[1].sent == rank.steps[1].expected


# One process -------------------------------------------------------------------------------------


def full_disk(folder: Path) -> None:
    """Every write fails."""
    folder.mkdir()
    for name in ("rank-00000.jsonl", "rank-00000.events.jsonl"):
        (folder / name).symlink_to("/dev/full")


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for each file, no exception."""
    full_disk(tmp_path / "run")
    trained = sharded()
    with onecopy.record(tmp_path / "run", trained[0], resume=True):
        steps(trained, 4)
    texts = [one.getMessage() for one in caplog.records]
    assert len(texts) == 2
    assert all("No space left on device" in one for one in texts)


def test_a_folder_that_was_removed_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told, although writing into removed files works."""
    trained = sharded()
    with onecopy.record(tmp_path / "run", trained[0]):
        steps(trained, 1)
        shutil.rmtree(tmp_path / "run")
        steps(trained, 3)
    assert {one.levelno for one in caplog.records} == {logging.WARNING}
    assert "it was removed" in caplog.text


def test_the_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the loop goes elsewhere: the end is written into the same folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    trained = sharded()
    with onecopy.record("runs/first", trained[0]):
        steps(trained, 1)
        monkeypatch.chdir(tmp_path / "elsewhere")
        steps(trained, 1)
    assert read_run(tmp_path / "runs/first").status == "finished"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """No half of a file, here where the place of the whole one is taken."""
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "run.json", {"status": "finished"})
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_a_killed_run_is_read(tmp_path: Path) -> None:
    """With all that was written until then, at most a second old."""
    folder = tmp_path / "run"
    code = (
        "import onecopy, os, signal, time\n"
        "from tests.test_recording import sharded, steps\n"
        "trained = sharded()\n"
        f"with onecopy.record({str(folder)!r}, trained[0]):\n"
        "    steps(trained, 3)\n"
        "    time.sleep(1.1)\n"
        "    steps(trained, 1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    run = read_run(folder)
    assert run.status == "running"
    assert [one.step for one in run.ranks[0].steps] == [1, 2, 3]


def test_without_an_optimizer_each_log_is_a_step(tmp_path: Path) -> None:
    """Of a model that is only evaluated."""
    model = models.build("gpt")
    onecopy.shard(model, stage=3)
    with onecopy.record(tmp_path, model) as run:
        for number in range(3):
            with torch.no_grad():
                loss = models.loss(model, models.batch("gpt", number, 0))
            run.log(loss=loss)
        run.log(number=7)
    (rank,) = read_run(tmp_path).ranks
    assert [one.step for one in rank.steps] == [1, 2, 3, 4]
    assert [set(one.metrics) for one in rank.steps] == [{"loss"}] * 3 + [{"number"}]


def test_numbers_before_the_first_step_are_of_the_first(tmp_path: Path) -> None:
    """Later ones are of the step before."""
    trained = sharded()
    with onecopy.record(tmp_path, *trained) as run:
        run.log(first=True)
        for number in range(2):
            steps(trained, 1)
            run.log(number=number, again=1)
            run.log(again=2)
    (rank,) = read_run(tmp_path).ranks
    assert [dict(one.metrics) for one in rank.steps] == [
        {"first": 1.0, "number": 0.0, "again": 2.0},
        {"number": 1.0, "again": 2.0},
    ]


class Tracker:
    """Keeps what it is told; breaks at one step."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.breaks_at = breaks_at

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """As `record` wants it."""
        if step == self.breaks_at:
            raise OSError("no connection")
        self.told.append((step, numbers))


def test_trackers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They hear of each step; one that breaks is left out, and training goes on."""
    trained, good, bad = sharded(), Tracker(), Tracker(breaks_at=2)
    with onecopy.record(tmp_path, *trained, trackers=[bad, good]) as run:
        for loss in (1.5, 2.5, 3.5):
            steps(trained, 1)
            run.log(loss=loss)
    assert [(step, told["loss"]) for step, told in good.told] == [(1, 1.5), (2, 2.5), (3, 3.5)]
    assert all(told["time/step"] > 0 for _, told in good.told)
    assert [step for step, _ in bad.told] == [1]
    assert "no connection" in caplog.text


def test_what_ran_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings with their origins, versions, chosen variables and never others."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("API_TOKEN", "very secret")
    config = onecopy.Config(stage=2)
    model = models.build("gpt")
    onecopy.shard(
        model,
        OPTIMIZERS["adamw"](model),
        config=config,
        max_grad_norm=1.0,
        memory=None,
        precision="bf16",
    )
    with onecopy.record(tmp_path, model, settings={"lr": 0.1}):
        pass
    run = read_run(tmp_path)
    settings = run.models[0].settings
    assert (settings["stage"].value, settings["stage"].origin) == (2, "config object")
    assert settings["max_grad_norm"].origin == "argument of shard"
    assert settings["units"].origin == "default"
    differ = {name for name, one in settings.items() if not one.is_default}
    assert differ == {"stage", "max_grad_norm", "precision"}
    assert settings["precision"].value == {"compute": "bf16"}
    assert (run.settings["lr"].value, run.settings["lr"].origin) == (0.1, "argument of record")
    assert run.versions["torch"] == torch.__version__
    assert run.environment["OMP_NUM_THREADS"] == "1"
    assert "secret" not in (tmp_path / "run.json").read_text()
    assert run.models[0].num_parameters == sum(one.num_parameters for one in run.models[0].units)


Call = Callable[[Path, Trained], Any]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda path, one: onecopy.record(path, nn.Linear(2, 2)), ShardingError, "not sharded"),
        (
            lambda path, one: onecopy.record(path, one[0], OPTIMIZERS["sgd"](nn.Linear(2, 2))),
            ShardingError,
            "this SGD is not attached",
        ),
        (lambda path, one: onecopy.record(path, one[0], trackers=[7]), ConfigError, "tracker 7"),
        (lambda path, one: onecopy.record(path, one[0], trace=-1), ConfigError, "trace=-1"),
        (lambda path, one: onecopy.record(path, []), ConfigError, "no model"),
        (lambda path, one: onecopy.record(path, one[0]).log(a=1), RunError, "outside"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, call: Call, error: type[Exception], text: str) -> None:
    """Before anything is written."""
    with pytest.raises(error, match=text):
        call(tmp_path / "run", sharded())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["a", torch.ones(2), [1.0], None])
def test_only_numbers_are_logged(tmp_path: Path, value: Any) -> None:
    """What is none is refused by name, where it is logged."""
    trained = sharded()
    with pytest.raises(ConfigError, match="loss"), onecopy.record(tmp_path, *trained) as run:
        run.log(loss=value)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """Before work is lost."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        recording = onecopy.record(folder, sharded()[0])
        with pytest.raises(RunError, match="a file is where a folder should be"), recording:
            pass


def test_a_run_that_was_killed_is_no_running_one(tmp_path: Path) -> None:
    """Its folder cannot tell, so it says both; and it says so once."""
    Recorded(status="killed").write(tmp_path / "run")
    recording = onecopy.record(tmp_path / "run", sharded()[0])
    with pytest.raises(RunError, match="running, or killed") as refused, recording:
        pass
    assert refused.value.__cause__ is None


def test_unrecorded_models_build_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sink, looking costs nothing."""

    def refuse(**_: Any) -> None:
        raise AssertionError("an event was built")

    monkeypatch.setattr(onecopy.events, "Event", refuse)
    steps(sharded(), 2)


def test_a_forked_copy_records_nothing(tmp_path: Path) -> None:
    """A worker of the data, for example."""
    trained = sharded()
    with onecopy.record(tmp_path, *trained):
        steps(trained, 1)
        child = os.fork()
        if not child:
            try:
                steps(trained, 1)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        steps(trained, 1)
    (rank,) = read_run(tmp_path).ranks
    assert [one.step for one in rank.steps] == [1, 2]
    assert (tmp_path / events_file(0)).read_bytes().count(b"begin") == 1


def test_an_adapter_does_not_end_the_recording(tmp_path: Path) -> None:
    """A model that is partitioned anew is recorded on."""
    model, optimizer = trained = sharded(2)
    with onecopy.record(tmp_path, *trained):
        steps(trained, 2)
        model.extra = nn.Linear(4, 4)
        optimizer.add_param_group({"params": list(model.extra.parameters())})
        onecopy.shard(model, optimizer)
        steps(trained, 2)
    (rank,) = read_run(tmp_path).ranks
    assert [one.step for one in rank.steps] == [1, 2, 3, 4]
