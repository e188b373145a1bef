"""Hugging Face's Trainer with onecopy: the same losses, norms and weights as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
pytest.importorskip("accelerate", reason="accelerate is not installed: the test extra")

from tests.pool import Pool
from tests.trainers import SCRIPTS, Seen, run_all

STAGES = (0, 1, 2, 3)
# Compared with one process, too. Others draw or count something for each rank's own samples.
ALONE = {"sgd", "sgd, clipped", "adamw", "accumulated", "evaluate first"}
# A Trainer that has evaluated first does not wrap its model in DDP: each rank trains alone.
NOT_WITH_DDP = {"evaluate first"}


def check(name: str, found: Seen, expected: Seen, tolerance: float) -> None:
    assert found.logs == pytest.approx(expected.logs, rel=tolerance, abs=tolerance), name
    for key, value in expected.values.items():
        message = f"{name}: {key}"
        torch.testing.assert_close(
            found.values[key],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, message=message: f"{message}: {text}",
        )


def test_scripts_equal_ddp_and_one_process(pool: Pool, tmp_path: Path) -> None:
    """DDP's numbers but for the last bits of norms; one process adds up in another order."""
    plain = [(name, None) for name in SCRIPTS]
    ours = [(name, 3) for name in SCRIPTS]
    ours += [(name, STAGES[number % 3]) for number, name in enumerate(SCRIPTS) if name in ALONE]
    (alone,) = pool.run(1, run_all, [(name, None) for name in ALONE], tmp_path)
    for found in pool.run(2, run_all, [*plain, *ours], tmp_path, timeout=240):
        of_ddp = dict(zip(SCRIPTS, found, strict=False))
        of_one = dict(zip(ALONE, alone, strict=True))
        for (name, stage), one in zip(ours, found[len(plain) :], strict=True):
            if name not in NOT_WITH_DDP:
                check(f"{name} at stage {stage}", one, of_ddp[name], 1e-6)
            if name in ALONE:
                check(f"{name} at stage {stage}", one, of_one[name], 2e-4)
