"""`param.grad` after a backward: torch's own clipping works, and so does everything else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
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
        reference.set_gradients(model, batches)
        if how == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), limit)
        else:
            order = float("inf") if how == "inf" else 2.0
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit, order).item())
        optimizer.step()
        model.zero_grad(set_to_none=step % 2 == 0)
    return norms, dict(model.named_parameters())


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


def look_at_gradients() -> None:
    """What the stand-ins tell without gathering anything."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["sgd"](model)
    onecopy.shard(model, optimizer, stage=3)
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
    models.loss(model, models.batch("gpt", 1, dist.get_rank())).backward()
    optimizer.step()
    norm = grad.norm()
    optimizer.zero_grad()
    torch.testing.assert_close(grad.norm(), norm)
    with torch.no_grad():
        models.loss(model, models.batch("gpt", 2, 0))
    models.loss(model, models.batch("gpt", 2, 0))
    assert parameter.grad is None, "a forward with gradients makes room for autograd"


def test_stand_ins_tell_what_they_can(pool: Pool) -> None:
    """Metadata, norms and scaling need no values."""
    pool.run(2, look_at_gradients)


# Whole gradients ------------------------------------------------------------------------------


def _read(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is None or parameter.grad.isfinite().all()


def _add_noise(parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        if parameter.grad is not None:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            assert parameter.grad.add_(noise) is parameter.grad


def _mask(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and parameter.ndim:
            parameter.grad[..., :2] = 0.0
            parameter.grad.mul_(torch.ones_like(parameter) * 2)


def _through_views(parameters: list[nn.Parameter]) -> None:
    views = [one.grad.view(-1) for one in parameters if one.grad is not None]
    for view in views:
        view.clamp_(-1e-3, 1e-3)


def _replace(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters[::2]:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.sign() * 0.01


def _forget(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters[1::2]:
        parameter.grad = None


def _foreach(parameters: list[nn.Parameter]) -> None:
    gradients = [one.grad for one in parameters if one.grad is not None]
    torch._foreach_mul_(gradients, 0.5)
    torch._foreach_add_(gradients, [one.detach() for one in parameters if one.grad is not None])


def _scale_a_held_view(parameters: list[nn.Parameter]) -> None:
    gradients = [one.grad for one in parameters if one.grad is not None]
    held = gradients[0].view(-1)
    torch.nn.utils.clip_grad_norm_(parameters, 0.01)
    held.add_(0.001)


CHANGES = {
    "read": _read,
    "noise": _add_noise,
    "mask": _mask,
    "views": _through_views,
    "replace": _replace,
    "forget": _forget,
    "foreach": _foreach,
    "held view": _scale_a_held_view,
}


def change_gradients(
    name: str, stage: int, how: str, inside: bool, settings: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with a change of `param.grad` before each step."""
    model = models.build(name)
    optimizer = OPTIMIZERS["momentum"](model)
    onecopy.shard(model, optimizer, stage=stage, **settings)
    norms = []
    for step in range(3):
        models.loss(model, models.batch(name, step, dist.get_rank())).backward()
        parameters = list(model.parameters())
        if inside:
            with onecopy.full_parameters(model, grads=True):
                assert not any("Owned" in type(one.grad).__name__ for one in parameters)
                CHANGES[how](parameters)
        else:
            CHANGES[how](parameters)
        norms.append(onecopy.clip_grad_norm_(model, 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model), norms


@pytest.mark.sampled(
    "name, world, stage, how, inside",
    list(itertools.product(("gpt", "unused"), WORLDS, STAGES, CHANGES, (False, True))),
    14,
    always=[("gpt", 2, 3, "views", False), ("unused", 3, 3, "replace", True)],
)
def test_gradients_are_what_one_process_has(
    pool: Pool, name: str, world: int, stage: int, how: str, inside: bool
) -> None:
    """To read, to change in every way, to replace, to remove; then the step uses them."""
    model = models.build(name)
    optimizer = OPTIMIZERS["momentum"](model)
    norms = []
    for step in range(3):
        batches = [[models.batch(name, step, rank)] for rank in range(world)]
        reference.set_gradients(model, batches)
        CHANGES[how](list(model.parameters()))
        norms.append(
            torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            ).item()
        )
        optimizer.step()
        optimizer.zero_grad()
    exact = how != "held view"
    for values, ours in pool.run(world, change_gradients, name, stage, how, inside, {}):
        assert ours == pytest.approx(norms, rel=1e-5)
        for key, value in model.named_parameters():
            tolerance = 0.0 if exact else 1e-6
            torch.testing.assert_close(values[key], value.detach(), rtol=0, atol=tolerance)


def read_low_precision(settings: dict[str, Any]) -> float:
    """How much reading bf16 views of fp32 gradients changes the step."""
    found = []
    for how in ("nothing", "read"):
        model = models.build("gpt")
        optimizer = OPTIMIZERS["momentum"](model)
        onecopy.shard(model, optimizer, stage=2, precision="bf16", **settings)
        models.loss(model, models.batch("gpt", 0, dist.get_rank())).backward()
        if how == "read":
            _read(list(model.parameters()))
            with onecopy.full_parameters(model, grads=True):
                assert next(iter(model.parameters())).grad.dtype == torch.bfloat16
        optimizer.step()
        found.append(full_values(model))
    return max(float((found[0][key] - found[1][key]).abs().max()) for key in found[0])


def test_reading_keeps_the_precision_of_gradients(pool: Pool) -> None:
    assert pool.run(2, read_low_precision, {}) == [0.0, 0.0]


def read_on_first_rank() -> None:
    """Printing values of a gradient on one rank."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["momentum"](model)
    onecopy.shard(model, optimizer, stage=3)
    for step in range(2):
        models.loss(model, models.batch("gpt", step, dist.get_rank())).backward()
        if dist.get_rank() == 0:
            model.get_parameter("blocks.0.norm1.weight").grad.sum()
        optimizer.step()
        optimizer.zero_grad()


def test_a_read_on_one_rank_is_a_named_error(pool: Pool) -> None:
    """As for parameters: ranks and wishes are named, nothing hangs."""
    errors = pool.run(2, read_on_first_rank, expect_failures=True)
    texts = [str(error) for error in errors]
    assert any("the gradient of blocks.0.norm1.weight (sum)" in text for text in texts), texts
