"""Checkpoints of a Trainer with onecopy: for any number of ranks, and for from_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
pytest.importorskip("accelerate", reason="accelerate is not installed: the test extra")

from tests import models
from tests.pool import Pool
from tests.trainers import Seen, launched, quiet, seen_of, trainer_of

SETTINGS: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}


def train(
    stage: int | None,
    folder: Path,
    *,
    resume: Path | None = None,
    dropout: float = 0.1,
    **settings: Any,
) -> Seen:
    """Train to the sixth step, saving each second one; dropout shows where random states are."""
    model: nn.Module = models.build("hf_gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    with launched(), quiet():
        trainer = trainer_of(stage, model, folder, **{**SETTINGS, **settings})
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return seen_of(trainer)


def train_all(runs: list[tuple[int | None, Path, dict[str, Any]]]) -> list[Seen]:
    return [train(stage, folder, **settings) for stage, folder, settings in runs]


def pretrained(folder: Path) -> dict[str, Tensor]:
    """What one process reads."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    return {name: value.detach() for name, value in model.named_parameters()}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the first one has the largest
    "save_total_limit": 1,
}


def test_checkpoints_go_on_where_they_were_made(pool: Pool, tmp_path: Path) -> None:
    ddp, ours, best, weights = (tmp_path / name for name in ("ddp", "ours", "best", "weights"))
    runs = [
        (None, ddp, {}),
        (3, ours, {}),
        (2, best, BEST),
        (3, weights, {"save_only_model": True, "load_best_model_at_end": False}),
    ]
    of_ddp, whole, of_best, of_weights = pool.run(2, train_all, runs)[0]
    equal(whole.values, of_ddp.values)
    equal(of_weights.values, of_ddp.values)

    # On as many ranks to the last bit, dropout included; from DDP's own checkpoints, too.
    other = tmp_path / "other"
    runs = [
        (3, ours, {"resume": ours / "checkpoint-4"}),
        (1, other, {"resume": ours / "checkpoint-2"}),
        (2, other, {"resume": ddp / "checkpoint-4"}),
    ]
    for found in pool.run(2, train_all, runs):
        for one in found:
            equal(one.values, whole.values)

    # Plain safetensors, with what from_pretrained wants beside them.
    equal(pretrained(ours / "checkpoint-6"), whole.values)
    equal(pretrained(weights / "checkpoint-6"), whole.values)
    assert not (weights / "checkpoint-6" / "onecopy").exists()

    # The best one was kept, and is what the model is in the end.
    assert [one.name for one in best.glob("checkpoint-*")] == ["checkpoint-2"]
    equal(pretrained(best / "checkpoint-2"), of_best.values)
    state = json.loads((best / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


@pytest.mark.sampled("saved, resumed", [(2, 1), (1, 2), (4, 2), (2, 4)], 1, always=[(2, 1)])
def test_another_number_of_ranks_goes_on(
    pool: Pool, tmp_path: Path, saved: int, resumed: int
) -> None:
    """Without dropout it is the same run, but for the order of sums."""
    plain: dict[str, Any] = {"dropout": 0.0}
    expected = pool.run(saved, train_all, [(3, tmp_path, plain)])[0][0]
    runs = [
        (stage, tmp_path / "other", {**plain, "resume": tmp_path / "checkpoint-4"})
        for stage in (1, 3)
    ]
    for found in pool.run(resumed, train_all, runs):
        for one in found:
            equal(one.values, expected.values, tolerance=1e-4)


def save_into_a_file(folder: Path) -> None:
    """The rank that writes cannot."""
    with launched(), quiet():
        trainer = trainer_of(3, models.build("hf_gpt2"), folder, max_steps=1)
        trainer.train()
        (folder / "file").touch(exist_ok=True)
        trainer.save_model(str(folder / "file" / "model"))


def test_a_model_that_cannot_be_written_is_told_to_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run(2, save_into_a_file, tmp_path, expect_failures=True):
        assert error.is_a("CheckpointError")
        assert "on rank 0: NotADirectoryError" in error.message
