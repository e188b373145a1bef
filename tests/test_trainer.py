"""Hugging Face's Trainer with onecopy: the same losses, norms and weights as without."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
pytest.importorskip("accelerate", reason="accelerate is not installed: the test extra")

from onecopy.memory.live_tensors import LiveTensors
from tests import models
from tests.pool import Pool
from tests.trainers import SCRIPTS, Seen, launched, quiet, run_all, trainer_of

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


@pytest.mark.sampled("world", [2, 4], 1, always=[2])
def test_scripts_equal_ddp_and_one_process(pool: Pool, tmp_path: Path, world: int) -> None:
    """DDP's numbers but for the last bits of norms; one process adds up in another order."""
    plain = [(name, None) for name in SCRIPTS]
    ours = [(name, 3) for name in SCRIPTS]
    ours += [(name, STAGES[number % 3]) for number, name in enumerate(SCRIPTS) if name in ALONE]
    (alone,) = pool.run(1, run_all, [(name, None) for name in ALONE], tmp_path)
    for found in pool.run(world, run_all, [*plain, *ours], tmp_path, timeout=240):
        of_ddp = dict(zip(SCRIPTS, found, strict=False))
        of_one = dict(zip(ALONE, alone, strict=True))
        for (name, stage), one in zip(ours, found[len(plain) :], strict=True):
            if name not in NOT_WITH_DDP:
                check(f"{name} at stage {stage}", one, of_ddp[name], 1e-6)
            if name in ALONE:
                check(f"{name} at stage {stage}", one, of_one[name], 2e-4)


def bytes_held(stage: int, folder: Path) -> tuple[float, str]:
    """Bytes per parameter before a step of AdamW, the second of two; and what was printed."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM
    from transformers.trainer_callback import TrainerCallback

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gc.collect()
            held.append(live.num_bytes())

    held: list[int] = []
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=101, num_hidden_layers=6, **sizes))
    num_parameters = sum(one.numel() for one in model.parameters())
    with LiveTensors() as live, launched(), quiet() as printed:
        live.watch(model.parameters())
        accumulated = {"max_steps": 2, "gradient_accumulation_steps": 2}
        trainer_of(stage, model, folder, callbacks=[Watch()], **accumulated).train()
    return held[-1] / num_parameters, printed.getvalue()


def all_bytes_held(folder: Path) -> list[tuple[float, str]]:
    return [bytes_held(stage, folder) for stage in STAGES]


def test_each_rank_holds_its_part_and_one_of_them_prints(pool: Pool, tmp_path: Path) -> None:
    """The README's table, with accumulation; the Trainer and Accelerate keep nothing beside."""
    for rank, found in enumerate(pool.run(2, all_bytes_held, tmp_path)):
        expected = [16, 8 + 8 / 2, 4 + 12 / 2, 16 / 2]
        assert [held for held, _ in found] == pytest.approx(expected, abs=0.1)
        assert ["'loss'" in printed for _, printed in found] == [rank == 0] * len(STAGES)


def train_unlaunched(folder: Path) -> None:
    """A process group of which the Trainer does not know."""
    with quiet():
        trainer_of(3, models.build("hf_llama"), folder)


def test_a_trainer_that_sees_one_rank_of_many(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run(2, train_unlaunched, tmp_path, expect_failures=True):
        assert error.is_a("ConfigError")
        assert "the process group has 2 ranks, and the Trainer knows of 1" in error.message
