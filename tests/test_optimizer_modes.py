"""Optimizers whose `eval()` and `train()` change the parameters: models compute with the new."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from tests import models
from tests.pool import Pool

STAGES = (0, 1, 2, 3)


class Averaging(torch.optim.SGD):
    """SGD that is evaluated at the mean of all its points, as those of Schedule-Free are."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["is_training"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["n"] = state.get("n", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter, 1 / state["n"])
        return loss

    def train(self) -> None:
        self._change(True)

    def eval(self) -> None:
        self._change(False)

    @torch.no_grad()
    def _change(self, is_training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] is is_training:
                continue
            group["is_training"] = is_training
            for parameter in group["params"]:
                mean = self.state[parameter]["mean"]
                value = parameter.clone()
                parameter.copy_(mean)
                mean.copy_(value)


def train(stage: int | None) -> list[float]:
    """Losses in training and, in between, of the means."""
    model: nn.Module = models.build("mlp")
    optimizer = Averaging(model.parameters(), lr=0.1)
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage)
    losses: list[Tensor] = []
    for step in range(4):
        batch = models.batch("mlp", step, 0)
        optimizer.train()
        losses.append(models.loss(model, batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            losses.append(models.loss(model, batch))
    return [loss.item() for loss in losses]


def switch_while_held() -> None:
    model: nn.Module = models.build("mlp")
    optimizer = Averaging(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3)
    models.loss(model, models.batch("mlp", 0, 0)).backward()
    optimizer.step()
    with onecopy.full_parameters(model):
        optimizer.train()  # it is in this mode
        optimizer.eval()


@pytest.mark.parametrize("stage", STAGES)
def test_both_modes_are_those_of_one_process(pool: Pool, stage: int) -> None:
    for losses in pool.run(2, train, stage):
        assert losses == train(None)


def test_a_change_of_what_is_held_is_refused(pool: Pool) -> None:
    for error in pool.run(2, switch_while_held, expect_failures=True):
        assert error.is_a("ShardingError")
        assert "call it before the block" in error.message
