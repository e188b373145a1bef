"""`param.grad` after a backward: torch's own clipping works, everything else says where it is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.errors import ShardingError
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, full_values

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)


def clip_with_torch(
    name: str, stage: int, how: str, limit: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with the clipping that every loop has."""
    model = models.build(name)
    optimizer = OPTIMIZERS["momentum"](model)
    onecopy.shard(model, optimizer, stage=stage)
    norms = []
    for step in range(3):
        models.loss(model, models.batch(name, step, dist.get_rank())).backward()
        if how == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), limit)
        elif how == "inf":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, float("inf"))
            norms.append(norm.item())
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        # Twice the same for the optimizer's pieces, but model.zero_grad() meets the stand-ins.
        model.zero_grad(set_to_none=step % 2 == 0)
    return norms, full_values(model)


def _expected(name: str, world: int, how: str, limit: float) -> tuple[list[float], Any]:
    model = models.build(name)
    optimizer = OPTIMIZERS["momentum"](model)
    norms = []
    for step in range(3):
        batches = [[models.batch(name, step, rank)] for rank in range(world)]
        once = reference.train(
            lambda: _copy(model), [batches], lambda one: torch.optim.SGD(one.parameters(), lr=0.0)
        )
        for key, parameter in model.named_parameters():
            parameter.grad = once.grads[0][key]
        if how == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), limit)
        else:
            order = float("inf") if how == "inf" else 2.0
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit, order).item())
        optimizer.step()
        model.zero_grad(set_to_none=step % 2 == 0)
    return norms, dict(model.named_parameters())


def _copy(model: nn.Module) -> nn.Module:
    import copy

    one = copy.deepcopy(model)
    one.zero_grad()
    return one


@pytest.mark.sampled(
    "world, stage, how",
    list(itertools.product(WORLDS, STAGES, ("norm", "inf", "value"))),
    10,
    always=[(2, 3, "norm"), (3, 2, "norm"), (2, 3, "value")],
)
@pytest.mark.parametrize("name", ["tied", "odd"])
def test_clipping_by_torch(pool: Pool, name: str, world: int, stage: int, how: str) -> None:
    """The global norm is returned, and used, whatever part of the gradient a rank owns."""
    if name == "odd" and how == "inf":
        pytest.skip("torch itself has no largest element of a zero-size gradient")
    limit = {"norm": 0.05, "inf": 0.01, "value": 1e-3}[how]
    norms, values = _expected(name, world, how, limit)
    for ours, parameters in pool.run(world, clip_with_torch, name, stage, how, limit):
        assert ours == pytest.approx(norms, rel=1e-5)
        for key, value in values.items():
            torch.testing.assert_close(parameters[key], value, rtol=1e-5, atol=1e-6)


def look_at_gradients() -> list[str]:
    """What the stand-ins tell, and what they refuse."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["sgd"](model)
    onecopy.shard(model, optimizer, stage=3)
    events: list[str] = []
    parameter = next(iter(model.parameters()))
    assert parameter.grad is None
    models.loss(model, models.batch("gpt", 0, dist.get_rank())).backward()
    grad = parameter.grad
    assert grad is not None
    assert (grad.shape, grad.dtype, grad.device) == (
        parameter.shape,
        parameter.dtype,
        parameter.device,
    )
    assert "OwnedGradient" in repr(grad)
    assert not grad.requires_grad
    norm = grad.norm()
    assert torch.equal(norm, grad.detach().data.norm(2))
    grad.mul_(0.5)
    torch.testing.assert_close(grad.norm(), norm * 0.5)
    attempts = {
        "sum": lambda: grad.sum(),
        "clone": lambda: grad.clone(),
        "add": lambda: grad + 1,
        "item": lambda: grad[0].item(),
        "numpy": lambda: grad.numpy(),
        "copy": lambda: grad.copy_(torch.zeros(grad.shape)),
        "cat": lambda: torch.cat([grad]),
        "tolist": lambda: grad.tolist(),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except ShardingError as error:
            assert "lies in pieces with its owners" in str(error)
            events.append(name)
    models.loss(model, models.batch("gpt", 1, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert float(grad.norm()) == 0.0
    with torch.no_grad():
        models.loss(model, models.batch("gpt", 2, 0))
    models.loss(model, models.batch("gpt", 2, 0))
    assert parameter.grad is None, "a forward with gradients makes room for autograd"
    return events


def test_stand_ins_tell_what_they_can(pool: Pool) -> None:
    """Metadata, norms and scaling; the rest is a sentence, not a crash or a wrong number."""
    for refused in pool.run(2, look_at_gradients):
        assert refused == ["sum", "clone", "add", "item", "numpy", "copy", "cat", "tolist"]
