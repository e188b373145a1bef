"""The one-process reference, DDP and the executable specification say the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import models, naive_zero, reference
from tests.naive_zero import NaiveZero
from tests.pool import Pool

STEPS = 3
Trained = tuple[list[list[float]], dict[str, Tensor]]  # losses by step and backward, parameters


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model.parameters())


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    """For comparisons that are not exact: Adam turns a gradient's rounding into whole steps."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def refer(
    name: str, ranks: int, make_optimizer: Any = adamw_of, backwards: int = 1, **options: Any
) -> reference.Result:
    drawn = models.batches(name, STEPS, ranks, backwards)
    return reference.train(functools.partial(models.build, name), drawn, make_optimizer, **options)


def train_naive(name: str, stage: int, backwards: int) -> Trained:
    model = models.build(name)
    zero = NaiveZero(model, stage, adamw)
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(STEPS):
        losses.append([])
        for micro in range(backwards):
            loss = models.loss(model, models.batch(name, step, rank, micro))
            losses[-1].append(loss.item())
            zero.backward(loss)
        zero.optimizer.step()
        zero.optimizer.zero_grad()
    for unit in zero.units:
        unit.gather()
    return losses, {key: p.detach().clone() for key, p in model.named_parameters()}


def train_ddp(name: str, backwards: int, no_sync: bool) -> Trained:
    model = models.build(name)
    ddp = DistributedDataParallel(model, find_unused_parameters=name == "unused")
    optimizer = sgd_of(model)
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(STEPS):
        losses.append([])
        for micro in range(backwards):
            ddp.require_backward_grad_sync = not no_sync or micro == backwards - 1
            loss = models.loss(ddp, models.batch(name, step, rank, micro))
            losses[-1].append(loss.item())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: p.detach().clone() for key, p in model.named_parameters()}


def assert_equal(
    results: list[Trained], expected: reference.Result, *, is_aligned: bool = True
) -> None:
    """To the last bit.

    Args:
        is_aligned: parameters begin where allocators let them begin. Where they do not, some
            processors add in another order.
    """
    allowed = {"rtol": 0.0, "atol": 0.0} if is_aligned else {"rtol": 1e-5, "atol": 1e-6}
    for rank, (losses, parameters) in enumerate(results):
        of_rank = [step[rank] for step in expected.losses]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(of_rank), **allowed)
        assert list(parameters) == list(expected.parameters)
        for value, other in zip(parameters.values(), expected.parameters.values(), strict=True):
            torch.testing.assert_close(value, other, **allowed)


def test_the_specification_fits_on_a_page() -> None:
    assert len(inspect.getsource(naive_zero).splitlines()) < 100


@pytest.mark.sampled(
    "name, stage, world_size, backwards",
    [
        (name, stage, world_size, backwards)
        for name in ("gpt", "mlp", "convbn", "convgn", "tied", "odd", "frozen", "unused")
        for stage in range(4)
        for world_size in (1, 2, 3)
        for backwards in (1, 2)
    ],
    10,
    always=[("gpt", 3, 2, 1), ("tied", 3, 3, 2), ("unused", 2, 2, 1), ("gpt", 0, 3, 2)],
)
def test_naive_zero_equals_one_process(
    pool: Pool, name: str, stage: int, world_size: int, backwards: int
) -> None:
    results = pool.run(world_size, train_naive, name, stage, backwards)
    expected = refer(name, world_size, backwards=backwards)
    # The specification lays parameters of odd sizes one behind the other.
    assert_equal(results, expected, is_aligned=name != "odd")


@pytest.mark.sampled(
    "name, backwards, no_sync",
    [
        (name, backwards, no_sync)
        for name in ("gpt", "mlp", "convgn", "frozen", "unused", "hf_gpt2", "hf_llama")
        for backwards, no_sync in ((1, False), (2, False), (2, True))
    ],
    4,
    always=[("gpt", 2, True), ("unused", 1, False)],
)
def test_ddp_equals_one_process(pool: Pool, name: str, backwards: int, no_sync: bool) -> None:
    """Close to it: DDP divides each rank's gradients before it adds them."""
    expected = refer(name, 2, sgd_of, backwards, no_sync=no_sync)
    for rank, (losses, parameters) in enumerate(pool.run(2, train_ddp, name, backwards, no_sync)):
        torch.testing.assert_close(
            losses, [step[rank] for step in expected.losses], rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(parameters, expected.parameters, rtol=1e-4, atol=1e-5)


def test_one_rank_is_plain_training() -> None:
    model = models.build("gpt")
    optimizer = adamw_of(model)
    for step in range(STEPS):
        models.loss(model, models.batch("gpt", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = refer("gpt", 1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.parameters[name]), name


def test_no_gradient_anywhere_means_none() -> None:
    grads = refer("unused", 2).grads[0]
    assert grads["spare.weight"] is None and grads["blocks.0.never"] is None
    assert grads["blocks.0.even_ranks"] is not None, "rank 0 has one"
    assert grads["blocks.0.odd_steps"] is None, "not in step 0"


def test_running_statistics_belong_to_a_rank() -> None:
    first, second = refer("convbn", 2).buffers
    name = next(name for name in first if name.endswith("running_mean"))
    assert not torch.equal(first[name], second[name])


def test_low_precision_keeps_fp32_masters_and_clips() -> None:
    result = refer("gpt", 2, precision="bf16", max_grad_norm=0.1)
    assert {p.dtype for p in result.parameters.values()} == {torch.float32}
    assert len(result.norms) == STEPS and min(result.norms) > 0.1
    rounded = {n: p.bfloat16().float() for n, p in result.parameters.items()}
    assert any(not torch.equal(rounded[n], p) for n, p in result.parameters.items())
