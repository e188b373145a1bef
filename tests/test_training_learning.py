"""How the trainer's learning rate changes, and what decays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from onecopy.training.learning import make_optimizer, share_of_rate
from onecopy.training.options import TrainOptions
from onecopy.training.trainer import TrainResult, train
from tests.pool import Pool, RankFailed

OPTIONS = TrainOptions(steps=10, lr=2.0, min_lr=0.5, warmup=4)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [0.5, 1.0, 1.5, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5]),
        ("cosine", [0.5, 1.0, 1.5, 2.0, 2.0, 1.8995, 1.625, 1.25, 0.875, 0.6005, 0.5]),
    ],
)
def test_rates_rise_and_fall(schedule: str, rates: list[float]) -> None:
    share = share_of_rate(dataclasses.replace(OPTIONS, schedule=schedule))
    assert [2.0 * share(step) for step in range(11)] == pytest.approx(rates, abs=1e-4)


def test_a_warm_up_is_a_share_or_a_number() -> None:
    by_share = share_of_rate(dataclasses.replace(OPTIONS, warmup=0.4))
    by_number = share_of_rate(OPTIONS)
    assert [by_share(step) for step in range(10)] == [by_number(step) for step in range(10)]
    assert share_of_rate(dataclasses.replace(OPTIONS, warmup=0))(0) == 1.0


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_matrices_decay_and_gains_do_not(name: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    model[2].weight.requires_grad_(False)
    options = dataclasses.replace(OPTIONS, optimizer=name, weight_decay=0.3)
    groups = make_optimizer(model, options).param_groups
    decays = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    named = {key: decays.get(id(one)) for key, one in model.named_parameters()}
    gains = dict.fromkeys(("1.weight", "1.bias", "2.bias"), 0 if name == "adafactor" else 0.0)
    assert named == {"0.weight": 0.3, "2.weight": None, **gains}
    assert {group["lr"] for group in groups} == {2.0}


WAYS = {
    "fp32": {},
    "whole matrices": {"precision": "bf16", "optimizer": "adafactor", "lr": 0.3},
    "host": {"offload": "cpu", "activations": "host", "accumulate": 2, "batch": 2},
    "fused": {"step_in_backward": True, "optimizer": "sgd", "lr": 0.05},
    "coded": {"stage": "hpz", "node_size": 1, "quantize": "zero++", "precision": "bf16"},
    "cuts": {"stage": "whole/node/world", "node_size": 1, "max_grad_norm": 0.0},
}


def every_way(options: TrainOptions) -> dict[str, TrainResult]:
    """One run for each of them."""
    return {
        name: train(dataclasses.replace(options, **change))  # type: ignore[arg-type]
        for name, change in WAYS.items()
    }


def test_settings_of_shard_reach_it(pool: Pool, tmp_path: Path) -> None:
    """Each way to hold and send states learns; those that compute the same, the same."""
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes jack a dull boy; or so they say. " * 40)
    options = TrainOptions(
        data=(text,), steps=12, batch=4, context=16, layers=2, width=16, heads=2, evals=2,
        sample=0, quiet=True,
    )  # fmt: skip
    results = pool.run(2, every_way, options)[0]
    before = results["fp32"].held_out_bits[0]
    for name, result in results.items():
        assert result.held_out_bits[0] == pytest.approx(before, rel=1e-2), name
        assert result.final_bits < before - 0.2, name
    assert results["host"].final_bits == pytest.approx(results["fp32"].final_bits, rel=1e-4)
    assert results["coded"].is_quantized
    assert torch.tensor(results["coded"].held_out_bits[12]).isfinite()


def test_steps_without_a_target_change_nothing(pool: Pool, tmp_path: Path) -> None:
    """Where prompts fill the context, the loss has nothing to count: the run goes on."""
    file, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    long, short = ({"prompt": n * "a", "completion": "b" * 9} for n in (40, 4))
    file.write_text((json.dumps(long) + "\n") * 8)
    held_out.write_text(json.dumps(short) + "\n")
    options = TrainOptions(
        data=(file,), eval_data=(held_out,), loss_on="completions", packing="documents",
        steps=3, batch=1, context=16, layers=1, width=16, heads=2, evals=1, sample=0, quiet=True,
        weight_decay=0.0,
    )  # fmt: skip
    result: TrainResult = pool.run(2, train, options)[0]
    assert result.held_out_bits[3] == result.held_out_bits[0]
    file.write_text(json.dumps(short) + "\n")
    held_out.write_text(json.dumps(long) + "\n")
    with pytest.raises(RankFailed, match="no token of the held-out part counts"):
        pool.run(2, train, options)
