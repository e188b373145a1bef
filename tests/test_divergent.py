"""Ranks that run different modules: where it is allowed, and what it computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from tests import models, reference
from tests.pool import Pool
from tests.runs import full_values

WIDTH = 10


class Towers(nn.Module):
    """A batch goes through one of two towers, then through blocks that all batches share."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.towers = nn.ModuleDict(
            {
                "text": nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))),
                "image": nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))),
            }
        )
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.router = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, tower: str) -> Tensor:
        x = torch.tanh(self.entry(x))
        x = torch.tanh(self.towers[tower](x)) + self.router
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


UNITS = ("towers.text.*", "towers.image.*", "blocks.*")


def build(entry_is_frozen: bool = False) -> nn.Module:
    """Equal on all ranks and in the reference."""
    torch.manual_seed(2)
    model = Towers()
    # Frozen, it is gathered in backward after all gradients have come.
    model.entry.requires_grad_(not entry_is_frozen)
    return model


def which(step: int, rank: int) -> str:
    """Sometimes all ranks the same, sometimes not."""
    return "image" if (step + rank * (step + 1)) % 3 == 1 else "text"


def batches(steps: int, ranks: int) -> list[list[list[models.Batch]]]:
    """batches[step][rank][backward], two backwards."""
    generator = torch.Generator().manual_seed(4)
    return [
        [
            [
                models.Batch(which(step + 2 * turn, rank), step, rank, {"x": draw(generator)})
                for turn in range(2)
            ]
            for rank in range(ranks)
        ]
        for step in range(steps)
    ]


def draw(generator: torch.Generator) -> Tensor:
    """A few rows."""
    return torch.randn(4, WIDTH, generator=generator)


def loss(model: nn.Module, batch: models.Batch) -> Tensor:
    """A batch's name says which tower it takes."""
    value: Tensor = model(batch.tensors["x"], batch.name).square().mean()
    return value


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Shows wrong scales."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train(stage: int, entry_is_frozen: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Six steps."""
    model = build(entry_is_frozen)
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage, units=UNITS, **settings)
    for step in batches(6, dist.get_world_size()):
        for batch in step[dist.get_rank()]:
            loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


@pytest.mark.sampled(
    "stage, world, entry_is_frozen",
    list(itertools.product((0, 1, 2, 3), (1, 2, 3, 4), (False, True))),
    6,
    always=[(3, 2, False), (3, 3, True), (3, 4, False), (2, 3, False)],
)
def test_ranks_may_run_different_modules(
    pool: Pool, stage: int, world: int, entry_is_frozen: bool
) -> None:
    """At stages 0 to 2 any, at stage 3 those that stay gathered: as one process, bit for bit."""
    settings = {"keep_gathered": ("towers", "towers.*")} if stage == 3 else {}
    found = pool.run(world, train, stage, entry_is_frozen, settings)
    expected = reference.train(lambda: build(entry_is_frozen), batches(6, world), sgd, loss=loss)
    for values in found:
        for name, value in expected.parameters.items():
            assert torch.equal(values[name], value), name


def test_without_it_ranks_that_differ_are_named(pool: Pool) -> None:
    """At stage 3, with the setting that would allow it."""
    errors = pool.run(2, train, 3, False, {}, expect_failures=True)
    assert any("DivergenceError" in str(error) for error in errors)
    assert any("keep_gathered" in str(error) for error in errors)


def state_of_units() -> tuple[list[str], int]:
    """Which units hold values between steps, and how many elements the optimizer steps."""
    model = build()
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=3, units=UNITS, keep_gathered=("towers.image",))
    engine = onecopy.handle.of(model).engine
    model(torch.ones(1, WIDTH), "image").sum().backward()
    held = [unit.name for unit in engine.units if unit.flat.untyped_storage().nbytes()]
    return held, sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def test_only_what_is_named_stays(pool: Pool) -> None:
    """With everything inside it; optimizer states and gradients are cut all the same."""
    (held, first), (other, second) = pool.run(2, state_of_units)
    assert held == other == ["towers.image.0", "towers.image.1"]
    assert first + second == sum(parameter.numel() for parameter in build().parameters())


def misspelt() -> None:
    """A name that matches nothing."""
    onecopy.shard(build(), stage=3, keep_gathered=("tower.*",))


def test_a_name_that_matches_nothing(pool: Pool) -> None:
    (error,) = pool.run(1, misspelt, expect_failures=True)
    assert error.type_name == "ConfigError"
    assert "keep_gathered='tower.*' matches no module" in error.message
