"""`onecopy train --checkpoint` goes on by itself: after a killed rank, on other ranks, past damage.

Runs under torchrun are real ones. A rank that is to be killed writes its events into a pipe that
nobody reads, so it cannot reach the end before it is: no test depends on being quick.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy.checkpoint.folder import latest, step_of, steps_in
from onecopy.checkpoint.source import open_source
from onecopy.checkpoint.values import read_tensor
from onecopy.comm.compare import number_of_model
from onecopy.comm.meshes import world_group
from onecopy.errors import CheckpointError, ConfigError
from onecopy.training.checkpoints import RUN_FILE, split
from onecopy.training.options import OF_A_RUN, TrainOptions
from onecopy.training.trainer import TrainResult, train
from tests.pool import Pool, RankFailed
from tests.watched_train import PIPE

TINY = TrainOptions(
    steps=24,
    batch=6,
    context=16,
    layers=2,
    width=16,
    heads=2,
    evals=3,
    sample=8,
    quiet=True,
    save_every=2,
    keep=100,
)
BATCHES = {1: (6, 2), 2: (6, 1), 3: (4, 1)}  # (batch, accumulate): 12 sequences per step
PATIENCE = 200.0  # seconds, for a busy machine


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Something to learn, of which 61 sequences of 16 bytes are held out: no number of ranks
    among 2, 3 and 4 divides that."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = "all work and no play makes jack a dull boy; or so they say. "
    file.write_text((words * 400)[:19700])
    return file


@pytest.fixture(scope="module")
def whole(
    pool: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainOptions, TrainResult]:
    """A run on two ranks that nothing has disturbed; it has kept all checkpoints."""
    root = tmp_path_factory.mktemp("whole") / "run"
    options = dataclasses.replace(TINY, data=(text,), checkpoint=root)
    return options, run(pool, 2, options)


def run(pool: Pool, world_size: int, options: TrainOptions) -> TrainResult:
    """What the first rank says; the others say the same, but for when they looked at the clock."""
    results: list[TrainResult] = pool.run(world_size, train, options, record_warnings=True)
    assert len({str(untimed(result)) for result in results}) == 1
    return results[0]


def untimed(result: TrainResult) -> TrainResult:
    return dataclasses.replace(result, seconds=0.0, tokens_per_second=0.0)


def until(options: TrainOptions, step: int, folder: Path) -> TrainOptions:
    """The same run as it was when a process died after `step` and before the next checkpoint."""
    assert options.checkpoint is not None
    root = folder / "run"
    shutil.copytree(options.checkpoint, root)
    for saved in steps_in(root):
        if (step_of(saved) or 0) > step:
            shutil.rmtree(saved)
    (root / "latest").write_text(f"step-{step:08d}\n")
    return dataclasses.replace(options, checkpoint=root)


def values(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor that is stored, of the model and of the optimizer."""
    source = open_source(checkpoint)
    return {
        key: read_tensor(source, key)
        for key, entry in source.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def assert_same_values(one: Path, other: Path) -> None:
    left, right = values(one), values(other)
    assert left.keys() == right.keys()
    assert any(key.startswith("optimizer.state.") for key in left)
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


# A killed rank -------------------------------------------------------------------------------


class Elastic:
    """A run under `torchrun --max-restarts`, whose ranks are found by a mark in their environment.

    Rank 1 writes its events into a pipe; unless that is read, it soon waits for ever.
    """

    def __init__(self, folder: Path, options: TrainOptions) -> None:
        assert options.checkpoint is not None
        self.root = options.checkpoint
        self.output = folder / "output"
        self._mark = f"ONECOPY_TEST_RUN={folder}".encode()
        pipe = folder / "events"
        os.mkfifo(pipe)
        # Opened for writing too, so that it never ends and nobody waits for a reader.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        name, value = self._mark.decode().split("=", 1)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*TORCHRUN, *arguments(options)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    name: value,
                    PIPE: str(pipe),
                    "OMP_NUM_THREADS": "1",
                    "COLUMNS": "200",
                },
            )

    def kill_rank(self, rank: int) -> None:
        """End a rank as the system does when memory runs out, and let the next ones start."""
        pids = self._pids(f"RANK={rank}".encode())
        assert len(pids) == 1, "a rank is one process"
        os.kill(pids[0], signal.SIGKILL)
        self.wait(lambda: pids[0] not in self._pids(b""))
        self.read_events()

    def read_events(self) -> None:
        """Make room in the pipe."""
        try:
            while os.read(self._pipe, 1 << 20):
                pass
        except BlockingIOError:
            return

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.output.read_text(errors="replace")
            assert self.process.poll() is None, self.output.read_text(errors="replace")
            time.sleep(0.02)

    def finish(self) -> str:
        """Let it run to its end; returns what it has printed."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read_events()
            time.sleep(0.02)
        printed = self.output.read_text(errors="replace")
        assert self.process.returncode == 0, printed
        return printed

    def close(self) -> None:
        """Leave no process behind: torchrun first, which would start others."""
        self.process.kill()
        self.process.wait()
        for pid in self._pids(b""):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self._pipe)

    def _pids(self, variable: bytes) -> list[int]:
        """Ranks of this run that live and have this in their environment."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # no process, another user's, or gone
            is_rank = any(one.startswith(b"LOCAL_RANK=") for one in environment)
            if is_rank and self._mark in environment and (not variable or variable in environment):
                found.append(int(folder.name))
        return found


TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
    *("-m", "tests.watched_train"),
]


def arguments(options: TrainOptions) -> list[str]:
    """As typed on the command line: what is not the default."""
    typed = []
    for _, field in options.settings():
        value = getattr(options, field.name)
        if value != field.default and field.type != "bool":
            typed += [f"--{field.name.replace('_', '-')}"]
            typed += map(str, value if isinstance(value, tuple) else (value,))
    return typed


@contextmanager
def elastic(folder: Path, options: TrainOptions) -> Iterator[Elastic]:
    started = Elastic(folder, options)
    try:
        yield started
    finally:
        started.close()


def has_saved(root: Path, after: int = 0) -> int:
    """The step that `latest` names, if it is beyond."""
    found = latest(root)
    return step if found is not None and (step := step_of(found) or 0) > after else 0


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.timeout(500)
def test_a_killed_rank_changes_nothing(
    pool: Pool, whole: tuple[TrainOptions, TrainResult], tmp_path: Path
) -> None:
    """torchrun starts the ranks again, twice, and all comes out as if nothing had happened."""
    options, expected = whole
    options = dataclasses.replace(options, checkpoint=tmp_path / "run")
    assert options.checkpoint is not None
    with elastic(tmp_path, options) as started:
        started.wait(lambda: has_saved(started.root))
        started.kill_rank(1)
        before = has_saved(started.root)
        started.wait(lambda: has_saved(started.root, after=before))
        started.kill_rank(0)
        printed = started.finish()
    lines = [line for line in printed.splitlines() if line.startswith("resumed from step")]
    assert len(lines) == 2, printed
    for line in lines:
        assert f"of {options.steps} (checkpoint {started.root}" in line
        assert line.endswith("saved by 2 ranks)")
    assert untimed(run(pool, 2, options)) == untimed(expected)
    last = f"step-{options.steps:08d}"
    assert whole[0].checkpoint is not None
    assert_same_values(options.checkpoint / last, whole[0].checkpoint / last)


# Stopped and started again ------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 8, 22])
def test_resumed_on_as_many_ranks_it_is_the_same_run(
    pool: Pool, whole: tuple[TrainOptions, TrainResult], tmp_path: Path, step: int
) -> None:
    """Bit for bit, before the first evaluation, at one, and with one step of two left to go."""
    options, expected = whole
    again = until(options, step, tmp_path)
    assert untimed(run(pool, 2, again)) == untimed(expected)
    assert again.checkpoint is not None and options.checkpoint is not None
    last = f"step-{options.steps:08d}"
    assert_same_values(again.checkpoint / last, options.checkpoint / last)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (3, 3), (3, 1)])
def test_resumed_on_other_ranks_it_has_the_same_losses(
    pool: Pool,
    whole: tuple[TrainOptions, TrainResult],
    tmp_path: Path,
    world_size: int,
    stage: int,
) -> None:
    """The same sequences in each step, and the memory and traffic of the ranks it ends on."""
    options, expected = whole
    again = dataclasses.replace(until(options, 8, tmp_path), stage=stage)
    result = run(pool, world_size, again)
    assert result.held_out_bits == pytest.approx(expected.held_out_bits, rel=1e-5)
    assert result.held_out_bits[8] == expected.held_out_bits[8]
    batch, accumulate = BATCHES[world_size]
    alone = dataclasses.replace(
        options, checkpoint=None, batch=batch, accumulate=accumulate, stage=stage
    )
    undisturbed = run(pool, world_size, alone)
    assert result.memory == undisturbed.memory
    assert result.bytes_per_step == undisturbed.bytes_per_step
    assert result.held_out_bits == pytest.approx(undisturbed.held_out_bits, rel=1e-5)


def test_resumed_in_other_nodes_and_codes_it_is_measured_anew(
    pool: Pool, whole: tuple[TrainOptions, TrainResult], tmp_path: Path
) -> None:
    """What crosses nodes, too: of one rank a node everything, of one node for all nothing."""
    options, expected = whole
    assert expected.across_per_step == 0
    again = dataclasses.replace(until(options, 8, tmp_path), node_size=1, quantize="zero++")
    result = run(pool, 2, again)
    undisturbed = run(pool, 2, dataclasses.replace(again, checkpoint=None))
    assert result.bytes_per_step == undisturbed.bytes_per_step != expected.bytes_per_step
    assert result.across_per_step == undisturbed.across_per_step
    assert result.across_per_step == sum(result.bytes_per_step.values())


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp16")])
def test_resumed_in_another_precision(
    pool: Pool,
    whole: tuple[TrainOptions, TrainResult],
    tmp_path: Path,
    stage: int,
    precision: str,
) -> None:
    """The masters are fp32 all the same, so it is the same run but for the rounding."""
    options, expected = whole
    again = until(options, 8, tmp_path)
    result = run(pool, 2, dataclasses.replace(again, stage=stage, precision=precision))
    assert result.held_out_bits[8] == expected.held_out_bits[8]
    assert result.final_bits == pytest.approx(expected.final_bits, abs=0.02)
    assert result.memory != expected.memory


def test_past_a_damaged_checkpoint(
    pool: Pool, whole: tuple[TrainOptions, TrainResult], tmp_path: Path
) -> None:
    """A bit has flipped on the disk: the checkpoint before it is taken, and a warning says so."""
    options, expected = whole
    again = until(options, 8, tmp_path)
    assert again.checkpoint is not None
    file = again.checkpoint / "step-00000008/__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert untimed(run(pool, 2, again)) == untimed(expected)
    first, second = pool.warnings
    assert not second
    (warned,) = first
    assert "step-00000008/__1_0.distcp is damaged" in str(warned)
    assert "step-00000006" in str(warned)


def test_without_a_good_checkpoint_nothing_begins_anew(
    pool: Pool, whole: tuple[TrainOptions, TrainResult], tmp_path: Path
) -> None:
    """Weeks of work are not written over because one file is unreadable."""
    again = until(whole[0], 2, tmp_path)
    assert again.checkpoint is not None
    (again.checkpoint / "step-00000002/onecopy.json").write_bytes(b"{}")
    with pytest.raises(RankFailed) as failed:
        pool.run(2, train, again)
    assert all(one.is_a(CheckpointError) for one in failed.value.failures)


def test_a_complete_run_shows_its_results(
    pool: Pool, whole: tuple[TrainOptions, TrainResult]
) -> None:
    """Nothing is trained or saved; what depends on the ranks is shown for the same ones only."""
    options, expected = whole
    assert options.checkpoint is not None
    before = {path: path.stat().st_mtime_ns for path in options.checkpoint.rglob("*")}
    again = run(pool, 2, options)
    assert untimed(again) == untimed(expected)
    assert again.tokens_per_second, "no step was made: it is that of the run"
    elsewhere = run(pool, 3, options)
    assert elsewhere.held_out_bits == expected.held_out_bits
    assert elsewhere.memory is None
    assert not elsewhere.bytes_per_step and not elsewhere.tokens_per_second
    assert {path: path.stat().st_mtime_ns for path in options.checkpoint.rglob("*")} == before


def test_what_is_said(
    whole: tuple[TrainOptions, TrainResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it goes on, how the sequences are dealt out, and when nothing is left to do."""
    options = dataclasses.replace(until(whole[0], 22, tmp_path), quiet=False)
    train(options)
    said = capsys.readouterr().out.splitlines()
    where = f"(checkpoint {options.checkpoint}/step-00000022, saved by 2 ranks)"
    assert f"resumed from step 22 of 24 {where}" in said
    assert "12 sequences per step, as before: 1 rank x 2 backwards x 6" in said
    train(options)
    said = capsys.readouterr().out.splitlines()
    where = f"(checkpoint {options.checkpoint}/step-00000024, saved by 1 rank)"
    assert f"resumed from step 24 of 24 {where}" in said
    assert "all steps are done: nothing is trained, these are the run's results" in said
    assert not any("as before" in line for line in said)


def test_checkpoints_disturb_nothing(pool: Pool, whole: tuple[TrainOptions, TrainResult]) -> None:
    """A run that saves in every second step measures what one that never saves does."""
    options, expected = whole
    assert untimed(run(pool, 2, dataclasses.replace(options, checkpoint=None))) == untimed(expected)


def test_old_checkpoints_are_removed(pool: Pool, text: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(
        TINY, data=(text,), steps=7, keep=2, save_every=2, checkpoint=tmp_path / "run"
    )
    run(pool, 1, options)
    assert [step_of(one) for one in steps_in(tmp_path / "run")] == [6, 7]


def count_models(died: int) -> tuple[int, int]:
    """Before and after rank 0 has counted models that rank 1 has not."""
    world = world_group()
    before, key = number_of_model(world)
    if world.rank == 0:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.add(f"onecopy/models/{key.split('/')[0]}/0", died)
    return before, number_of_model(world)[0]


def test_models_of_a_run_that_died_do_not_count(pool: Pool) -> None:
    """torchrun may keep the store: ranks that were killed at different places have counted
    differently, and what they left under these numbers is nobody's."""
    assert pool.run(2, count_models, 3) == [(0, 4), (0, 4)]
    assert pool.run(2, count_models, 0) == [(0, 1), (0, 1)]


# What must stay the same ---------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "model": "other",
    "random_weights": True,
    "layers": 3,
    "width": 32,
    "heads": 1,
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "lora_dropout": 0.1,
    "lora_targets": ("q_proj", "v_proj"),
    "train_tokenizer": 300,
    "context": 17,
    "packing": "documents",
    "steps": 25,
    "epochs": 1.5,
    "optimizer": "sgd",
    "schedule": "linear",
    "min_lr": 1e-4,
    "lr": 0.1,
    "warmup": 0.2,
    "weight_decay": 0.2,
    "max_grad_norm": 2.0,
    "seed": 1,
}


def refusal(options: TrainOptions) -> str:
    """In this process alone: it is refused before any model is made."""
    with pytest.raises(ConfigError) as refused:
        train(options)
    return str(refused.value)


def test_options_of_the_run_are_kept(
    whole: tuple[TrainOptions, TrainResult], tmp_path: Path
) -> None:
    options, _ = whole
    assert set(OTHER) == set(OF_A_RUN)
    for name, value in OTHER.items():
        said = refusal(dataclasses.replace(options, **{name: value}))
        flag = "--" + name.replace("_", "-")
        assert re.search(rf"began with {flag}\b.*, and cannot go on with {flag}\b", said)
        assert " ".join(value if isinstance(value, tuple) else (str(value),)) in said
    other = tmp_path / "other.txt"
    other.write_text(options.data[0].read_text().replace("jack", "jill"))
    assert "began with another text" in refusal(dataclasses.replace(options, data=(other,)))


def test_folders_of_others_are_left_alone(
    whole: tuple[TrainOptions, TrainResult], tmp_path: Path
) -> None:
    options = until(whole[0], 2, tmp_path)
    assert options.checkpoint is not None
    file = options.checkpoint / RUN_FILE
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content)[:-5])
    assert "is damaged" in refusal(options)
    file.unlink()
    assert f"no {RUN_FILE}" in refusal(options)
    assert "is a file" in refusal(dataclasses.replace(options, checkpoint=options.data[0]))


def test_a_run_that_has_saved_nothing_begins_anew(pool: Pool, text: Path, tmp_path: Path) -> None:
    """With other options, if need be."""
    root = tmp_path / "run"
    options = dataclasses.replace(TINY, data=(text,), steps=2, checkpoint=root)
    run(pool, 1, options)
    shutil.rmtree(root / "step-00000002")
    (root / "latest").unlink()
    run(pool, 1, dataclasses.replace(options, seed=1))
    assert json.loads((root / RUN_FILE).read_text())["options"]["seed"] == 1


def test_sequences_are_dealt_out_anew() -> None:
    """With as few backwards as the memory that --batch stands for allows."""
    assert split(24, 2, most=12) == (12, 1)
    assert split(24, 1, most=12) == (12, 2)
    assert split(24, 3, most=12) == (8, 1)
    assert split(24, 1, most=7) == (6, 4)
    assert split(24, 24, most=12) == (1, 1)
    assert split(26, 2, most=12) == (1, 13)
    with pytest.raises(ConfigError, match=r"24 sequences, which 5 ranks .* Resume on 4 or 6"):
        split(24, 5, most=12)
    with pytest.raises(ConfigError, match=r"Resume on 24\.$"):
        split(24, 48, most=12)


@pytest.mark.parametrize("missing", [True, False])
def test_latest_says_whether_there_is_something(tmp_path: Path, missing: bool) -> None:
    root = tmp_path / "run"
    if not missing:
        root.mkdir()
    assert latest(root) is None
    root.mkdir(exist_ok=True)
    (root / "latest").write_text("step-00000004\n")
    assert latest(root) == root / "step-00000004", "it is gone, which load() says"
