"""Scripts of Accelerate: prepared by onecopy, they compute what they compute without."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.accelerate_scripts import REFUSED, Script, prepare_after_shard, refusals, train, uneven
from tests.host_pins import accelerate_has_moved
from tests.pool import Pool

# Looked for, not imported: that takes seconds.
pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed"
)

LOWER = {"bf16": 0, "clip norm": 1, "accumulation": 2}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd": {"optimizer": "momentum"},
    "accumulation": {"accumulation": 3},
    "clip norm": {"clip": "norm"},
    "clip value": {"clip": "value", "accumulation": 2},
    "bf16": {"accelerator": {"mixed_precision": "bf16"}},
    "split batches": {"batch_size": 8, "split_batches": True},
    # The first step overflows, and is skipped by all ranks and by the scheduler.
    "grad scaler": {"loss_scale": 2.0**127, "weight": 64.0},
}


def run_all(scripts: list[Script]) -> list[dict[str, Any]]:
    """One after another, in one call: importing accelerate takes seconds."""
    return [train(script) for script in scripts]


def test_scripts_equal_their_run_with_ddp(pool: Pool) -> None:
    """To the last bit, and in everything that the script sees."""
    twins = [Script(stage=None, **mode) for mode in MODES.values()]
    ours = [Script(stage=3, **mode) for mode in MODES.values()]
    lower = [Script(stage=stage, **MODES[mode]) for mode, stage in LOWER.items()]
    for found in pool.run(2, run_all, [*twins, *ours, *lower], timeout=240):
        of_twins = dict(zip(MODES, found, strict=False))
        for mode, one in zip([*MODES, *LOWER], found[len(MODES) :], strict=True):
            _assert_same(mode, one, of_twins[mode])
        different = {tuple(one["losses"]) for one in of_twins.values()}
        assert len(different) == len(MODES), "two modes compute the same: one of them does nothing"
        assert True in of_twins["grad scaler"]["skipped"]
        assert False in of_twins["grad scaler"]["skipped"]
        assert min(of_twins["clip norm"]["norms"]) > 0.3


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_ranks_equal_one_process_on_the_same_batches(pool: Pool, optimizer: str) -> None:
    """The one process takes what the ranks take at once as two micro-batches of a step."""
    alone = Script(stage=None, optimizer=optimizer, accumulation=2)
    ours = [Script(stage=stage, optimizer=optimizer, **MODES["split batches"]) for stage in (3, 1)]
    (expected,) = pool.run(1, run_all, [alone])[0]
    for found in pool.run(2, run_all, ours):
        for one in found:
            assert all(map(torch.equal, one["values"], expected["values"]))
            assert one["rates"] == expected["rates"][1::2]


def test_steps_that_fp16_skips_keep_the_scheduler_waiting(pool: Pool) -> None:
    """Of onecopy's own fp16, of which Accelerate has no GradScaler that could tell."""
    precision = {"precision": "fp16"}
    for (one,) in pool.run(2, run_all, [Script(stage=3, optimizer="sgd", settings=precision)]):
        num_skipped = one["skipped"].count(True)
        assert 0 < num_skipped < len(one["skipped"]), one["skipped"]
        plain_rates = [0.1 * 0.7 ** (2 * made // 3) for made in range(1, len(one["rates"]) + 1)]
        num_made = 0
        for rate, was_skipped in zip(one["rates"], one["skipped"], strict=True):
            num_made += not was_skipped
            assert rate == pytest.approx(plain_rates[num_made - 1] if num_made else 0.1)


def _assert_same(mode: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("losses", "norms", "rates", "skipped"):
        assert one[key] == other[key], f"{mode}: {key}"
    assert all(map(torch.equal, one["values"], other["values"])), mode


def test_what_onecopy_leans_on_is_where_it_was(pool: Pool) -> None:
    assert pool.run(2, accelerate_has_moved) == [[], []]


def test_accelerators_that_shard_themselves_are_refused(pool: Pool) -> None:
    for messages in pool.run(2, refusals):
        for message, expected in zip(messages, REFUSED.values(), strict=True):
            assert re.search(expected, message), message


def test_a_model_that_is_sharded_already(pool: Pool) -> None:
    """Accelerate's prepare would put DDP around it, which is refused; onecopy's takes it."""
    for message, one, other in pool.run(2, prepare_after_shard):
        assert re.search(r"given to DistributedDataParallel.*docs/accelerate\.md", message)
        assert all(map(torch.equal, one, other))


def test_ranks_with_different_numbers_of_batches(pool: Pool) -> None:
    """Through onecopy.join, as one process would train on all batches."""
    (expected,) = pool.run(1, uneven, None)
    for values in pool.run(2, uneven, 3):
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
