"""Hugging Face's Trainer with onecopy: the same losses, norms and weights as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
pytest.importorskip("accelerate", reason="accelerate is not installed: the test extra")

from tests.pool import Pool
from tests.trainers import Run, train_all

MODES: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd", "max_grad_norm": 0.0},
    "clipped": {"optim": "sgd", "max_grad_norm": 0.1},
    "adamw": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "no_sync": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}},
    },
}
STAGES = (0, 1, 2, 3)


def test_training_equals_ddp_and_one_process(pool: Pool, tmp_path: Path) -> None:
    """Bit for bit DDP's; one process adds samples up in another order."""
    modes = [Run(stage=None, settings=mode) for mode in MODES.values()]
    ours = [
        Run(stage=stage, settings=mode)
        for number, mode in enumerate(MODES.values())
        for stage in (3, STAGES[number % 3])
    ]
    (alone,) = pool.run(1, train_all, modes, tmp_path)
    both = pool.run(2, train_all, [*modes, *ours], tmp_path)
    for found in both:
        for run, one in zip(ours, found[len(modes) :], strict=True):
            number = modes.index(Run(stage=None, settings=run.settings))
            ddp, plain = found[number], alone[number]
            assert one.logs == pytest.approx(plain.logs, rel=1e-5)
            torch.testing.assert_close(one.values, plain.values, rtol=1e-4, atol=1e-5)
            # A sum over micro-batches that is reduced each time has another order.
            is_accumulated = "gradient_accumulation_steps" in run.settings
            tolerance = 1e-5 if is_accumulated else 0.0
            assert one.logs == pytest.approx(ddp.logs, rel=tolerance, abs=0)
            torch.testing.assert_close(one.values, ddp.values, rtol=0, atol=tolerance)
