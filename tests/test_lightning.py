"""Lightning's trainer with onecopy: it computes what it computes without."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from onecopy.policies import Precision
from tests.host_pins import lightning_has_moved
from tests.lightning_runs import REFUSED, Run, fit, refusals
from tests.pool import Pool

# Looked for, not imported: that takes seconds.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

LOWER = {"two optimizers": 0, "clip norm": 1, "accumulation": 2}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd": {"optimizer": "momentum"},
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}},
    "clip norm": {"trainer": {"gradient_clip_val": 0.3}},
    "clip value": {"trainer": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed", "gradient_clip_val": 0.3}},
    "16-mixed": {"loss_scale": 2.0**125, "trainer": {"gradient_clip_val": 0.3}},
    # Without masters, as Lightning has it; else onecopy keeps some in fp32.
    "bf16-true": {
        "trainer": {"precision": "bf16-true"},
        "settings": {"precision": Precision(master="bf16")},
    },
    "built late": {"is_built_late": True, "optimizer": "adamw_fused"},
    "two optimizers": {"module": "Adversarial"},
    "offload": {"optimizer": "sgd", "settings": {"offload": "cpu"}},
}


# DDP sums bf16 gradients in bf16, onecopy in fp32.
TOLERANCES = {"bf16-true": 2e-2}


def fit_all(runs: list[Run]) -> list[dict[str, Any]]:
    """One after another, in one call: importing lightning takes seconds."""
    return [fit(run) for run in runs]


def test_trainers_equal_their_run_with_ddp(pool: Pool) -> None:
    """To the last bit, and in everything that a module sees."""
    twins = [Run(stage=None, **mode) for mode in MODES.values()]
    ours = [Run(stage=3, **mode) for mode in MODES.values()]
    lower = [Run(stage=stage, **MODES[mode]) for mode, stage in LOWER.items()]
    for found in pool.run(2, fit_all, [*twins, *ours, *lower], timeout=240):
        of_twins = dict(zip(MODES, found, strict=False))
        for mode, one in zip([*MODES, *LOWER], found[len(MODES) :], strict=True):
            _assert_same(mode, one, of_twins[mode])
        norms = torch.tensor(of_twins["16-mixed"]["norms"])
        assert 0 < norms.isfinite().sum() < len(norms), "some steps overflow"
        different = {tuple(one["losses"]) for one in of_twins.values()}
        assert len(different) == len(MODES), "two modes compute the same: one of them does nothing"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_ranks_equal_one_process_on_the_same_batches(pool: Pool, optimizer: str) -> None:
    """The one process takes what the ranks take at once as two micro-batches of a step."""
    alone = Run(stage=None, optimizer=optimizer, trainer={"accumulate_grad_batches": 2})
    ours = [Run(stage=stage, optimizer=optimizer) for stage in (3, 1)]
    (expected,) = pool.run(1, fit_all, [alone])[0]
    for found in pool.run(2, fit_all, ours):
        for one in found:
            torch.testing.assert_close(one["values"], expected["values"], rtol=0, atol=0)


def test_what_cannot_be_meant_is_refused(pool: Pool) -> None:
    for messages in pool.run(2, refusals):
        for message, expected in zip(messages, REFUSED.values(), strict=True):
            assert re.search(expected, message), message


def test_what_onecopy_leans_on_is_where_it_was(pool: Pool) -> None:
    assert pool.run(1, lightning_has_moved) == [[]]


def _assert_same(mode: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert all(value.isfinite().all() for value in one["values"].values()), mode
    tolerance = TOLERANCES.get(mode, 0.0)
    for key in other:
        torch.testing.assert_close(
            one[key],
            other[key],
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,  # the norm of a step that overflows
            msg=lambda text, key=key: f"{mode} {key}: {text}",
        )
