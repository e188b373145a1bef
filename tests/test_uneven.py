"""Ranks with different numbers of batches, and with batches of different sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from tests import models, reference
from tests.pool import Pool
from tests.runs import full_values

COUNTS = (3, 5, 2, 4)  # batches by rank


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Shows wrong scales."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_joined(
    name: str, stage: int, how: str, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], list[bool]]:
    """A loop with clipping, or with local accumulation, over this rank's own number of batches."""
    model = models.build(name)
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage, **settings)
    rank = dist.get_rank()
    loader = onecopy.join(model, [models.batch(name, step, rank) for step in range(COUNTS[rank])])
    was_active = []
    for number, batch in enumerate(loader):
        was_active.append(loader.is_active)
        if how == "no_sync" and number % 2 == 0:
            with onecopy.no_sync(model):
                models.loss(model, batch).backward()
            continue
        models.loss(model, batch).backward()
        if how == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    # Afterwards all ranks count again.
    models.loss(model, models.batch(name, 9, rank)).backward()
    optimizer.step()
    return full_values(model), was_active


@pytest.mark.sampled(
    "name, world, stage, how",
    list(itertools.product(("gpt", "unused"), (1, 2, 3, 4), (0, 1, 2, 3), ("plain", "clip"))),
    7,
    always=[("gpt", 2, 3, "clip"), ("unused", 3, 3, "plain"), ("gpt", 4, 2, "plain")],
)
def test_join_equals_one_process(pool: Pool, name: str, world: int, stage: int, how: str) -> None:
    """Each step is the mean over the ranks that still have a batch."""
    counts = COUNTS[:world]
    batches = [
        [[models.batch(name, step, rank)] for rank in range(world) if step < counts[rank]]
        for step in range(max(counts))
    ]
    batches.append([[models.batch(name, 9, rank)] for rank in range(world)])
    limit = 0.05 if how == "clip" else None
    model = models.build(name)
    optimizer = sgd(model)
    for number, step in enumerate(batches):
        reference.set_gradients(model, step)
        if limit is not None and number < len(batches) - 1:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    for rank, (values, was_active) in enumerate(
        pool.run(world, train_joined, name, stage, how, {})
    ):
        assert was_active == [step < counts[rank] for step in range(max(counts))]
        for key, value in model.named_parameters():
            torch.testing.assert_close(values[key], value.detach(), rtol=1e-5, atol=1e-6, msg=key)


def test_join_with_local_accumulation(pool: Pool) -> None:
    """no_sync inside: a repeated batch counts as nothing in a sum of several, too."""
    found = pool.run(2, train_joined, "gpt", 3, "no_sync", {})
    model = models.build("gpt")
    optimizer = sgd(model)
    # Pairs of batches of ranks with three and five: the third and later ones are rank 1's alone.
    for pair in ((0, 1), (2, 3)):
        for number in pair:
            ranks = [rank for rank in range(2) if number < COUNTS[rank]]
            for rank in ranks:
                (models.loss(model, models.batch("gpt", number, rank)) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # The fifth was kept locally, and is reduced together with what follows the loop.
    models.loss(model, models.batch("gpt", 4, 1)).backward()
    for rank in range(2):
        (models.loss(model, models.batch("gpt", 9, rank)) / 2).backward()
    optimizer.step()
    for values, _ in found:
        for key, value in model.named_parameters():
            torch.testing.assert_close(values[key], value.detach(), rtol=1e-5, atol=1e-6, msg=key)


def join_without_batches() -> None:
    """Rank 1 has nothing at all."""
    model = models.build("mlp")
    onecopy.shard(model, sgd(model), stage=3)
    for batch in onecopy.join(model, [models.batch("mlp", 0, 0)][: 1 - dist.get_rank()]):
        models.loss(model, batch).backward()


def test_a_rank_without_batches_is_named_on_all(pool: Pool) -> None:
    for error in pool.run(2, join_without_batches, expect_failures=True):
        assert error.type_name == "ShardingError"
        assert "ranks [1] have no batch at all" in error.message


def leave_early() -> None:
    """Rank 0 breaks out of the loop."""
    model = models.build("mlp")
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=3)
    for batch in onecopy.join(model, [models.batch("mlp", step, 0) for step in range(3)]):
        models.loss(model, batch).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            break
    models.loss(model, models.batch("mlp", 4, 0)).backward()


def test_leaving_early_on_one_rank_is_named(pool: Pool) -> None:
    errors = pool.run(2, leave_early, expect_failures=True)
    assert any("the next batch of join" in str(error) for error in errors), errors


# Weights --------------------------------------------------------------------------------------


def tokens_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A batch with a number of rows that depends on step and rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = 1 + (3 * step + 2 * rank) % 5
    inputs = torch.randn(rows, 6, generator=generator)
    return inputs, torch.randint(0, 4, (rows,), generator=generator)


def head() -> nn.Module:
    """A small classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def train_weighted(stage: int) -> dict[str, Tensor]:
    """Means over different numbers of rows."""
    model = head()
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage)
    for step in range(3):
        inputs, targets = tokens_of(step, dist.get_rank())
        loss = F.cross_entropy(model(inputs), targets)
        (loss * onecopy.loss_weight(model, len(targets))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (3, 0), (4, 2)])
def test_weighted_means_are_the_mean_over_all_tokens(pool: Pool, world: int, stage: int) -> None:
    """As one process computes it on all rows together."""
    model = head()
    optimizer = sgd(model)
    for step in range(3):
        parts = [tokens_of(step, rank) for rank in range(world)]
        inputs, targets = (torch.cat(one) for one in zip(*parts, strict=True))
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in pool.run(world, train_weighted, stage):
        for key, value in model.named_parameters():
            torch.testing.assert_close(values[key], value.detach(), rtol=1e-5, atol=1e-6, msg=key)
