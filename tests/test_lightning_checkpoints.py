"""Checkpoints of Lightning's trainer, which all ranks write and any number of ranks reads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import lightning_resume as runs
from tests.lightning_runs import Run
from tests.pool import Pool, RankFailed

# Looked for, not imported: that takes seconds.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

OURS = Run(stage=3, dropout=0.2)
# Lightning does not keep random states: without dropout its own runs can be gone on with, too.
PLAIN = Run(stage=3)


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """What a run on two ranks has saved, and seen."""
    path = str(tmp_path_factory.mktemp("run"))
    return path, pool.run(2, runs.fit_and_save, OURS, path)


def test_a_run_goes_on_as_if_it_had_never_ended(pool: Pool, folder: tuple[str, Any]) -> None:
    """From the end of its first epoch, at another stage, random numbers included."""
    path, found = folder
    other = Run(stage=1, dropout=0.2)
    for one, first in zip(
        pool.run(2, runs.resume, other, f"{path}/epoch=0.ckpt"), found, strict=True
    ):
        assert one["step"] == 8
        assert one["losses"] == first["losses"][4:]
        _assert_same(one["values"], first["values"])


def test_what_is_saved_and_removed(folder: tuple[str, Any]) -> None:
    path, found = folder
    assert found[0]["saved"] == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt", "weights.ckpt"]
    assert found[0]["best"] == "epoch=1.ckpt"
    assert {one.name for one in Path(path, "by_hand.ckpt").iterdir()} == {"latest", "step-00000008"}


def test_evaluation_from_a_checkpoint_on_another_number_of_ranks(
    pool: Pool, folder: tuple[str, Any]
) -> None:
    """Of the whole run, and of one that has weights alone."""
    path, found = folder
    for name in ("last", "weights"):
        for one in pool.run(1, runs.evaluate, PLAIN, f"{path}/{name}.ckpt"):
            _assert_same(one["values"], found[0]["values"])
            assert one["tested"][0]["val"] == pytest.approx(found[0]["tested"][0]["val"], rel=1e-6)
    with pytest.raises(RankFailed, match="contains only the model"):
        pool.run(1, runs.resume, PLAIN, f"{path}/weights.ckpt")


def test_evaluation_from_a_checkpoint_leaves_optimizers_alone(pool: Pool, tmp_path: Path) -> None:
    run = Run(stage=3, epochs=1)
    for seen in pool.run(2, runs.evaluate_after_training, run, str(tmp_path)):
        assert seen == {"rate": 0.125}


def test_a_consolidated_file_is_one_of_lightning(pool: Pool, folder: tuple[str, Any]) -> None:
    """It loads without a trainer, and into one that knows nothing of onecopy."""
    from onecopy.integrations.lightning_checkpoints import consolidate

    path, found = folder
    file = f"{path}/whole.ckpt"
    consolidate(f"{path}/last.ckpt", file)
    stored = torch.load(file, weights_only=True)
    _assert_same(dict(stored["state_dict"]), found[0]["values"])
    assert stored["hyper_parameters"] == {"optimizer": "adamw"}
    _assert_same(pool.run(1, runs.load_from_file, PLAIN, file)[0], found[0]["values"])
    for one in pool.run(1, runs.evaluate, Run(stage=None), file):
        _assert_same(one["values"], found[0]["values"])


def test_a_run_goes_on_from_lightnings_own_file(pool: Pool, tmp_path: Path) -> None:
    """Of DDP, states of the optimizer included."""
    found = pool.run(2, runs.fit_and_save, Run(stage=None), str(tmp_path))
    for one in pool.run(2, runs.resume, PLAIN, f"{tmp_path}/epoch=0.ckpt"):
        _assert_same(one["values"], found[0]["values"])


def test_a_checkpoint_gathers_nothing(pool: Pool, tmp_path: Path) -> None:
    """Where this fails, Lightning asks for whole models otherwise than before: see
    leave_out_states in onecopy/integrations/lightning_checkpoints.py.
    """
    for seen in pool.run(2, runs.save_with_events, PLAIN, str(tmp_path)):
        assert "save" in seen
        assert "gather" not in seen


def test_a_module_is_trained_twice(pool: Pool) -> None:
    expected = pool.run(2, runs.fit_twice, Run(stage=None, epochs=1))
    for one, other in zip(
        pool.run(2, runs.fit_twice, Run(stage=3, epochs=1)), expected, strict=True
    ):
        _assert_same(one, other)


def _assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
