"""Optimizers that look at whole matrices: each is owned by one rank, and equals one process."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from tests import models, optimizers, reference
from tests.optimizers import MATRIX, Together
from tests.pool import Pool

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
NAMES = ("gpt", "tied", "convgn", "unused", "odd", "frozen")


def run(optimizer: str, name: str, options: dict[str, Any]) -> optimizers.Trained:
    """Train in a rank; an optimizer whose class is unknown is asked for by the setting."""
    settings = {"whole_parameters": True} if optimizer == "user_written" else {}
    return optimizers.train(MATRIX[optimizer], name, **options, **settings)


def check(pool: Pool, world: int, optimizer: str, name: str, **options: Any) -> None:
    """Losses, parameters and the bytes of states equal those of one process."""
    made: list[Together] = []

    def make(model: torch.nn.Module) -> Any:
        made.append(Together(MATRIX[optimizer](model)))
        return made[0]

    no_sync, backwards = options.get("no_sync", False), options.get("backwards", 1)
    expected = reference.train(
        partial(models.build, name),
        models.batches(name, 3, world, backwards),
        make,
        no_sync=no_sync,
    )
    runs = pool.run(world, run, optimizer, name, options)
    for rank, one in enumerate(runs):
        assert one.losses == [step[rank] for step in expected.losses], f"losses of rank {rank}"
        for key, value in expected.parameters.items():
            assert torch.equal(one.parameters[key], value), f"{key} on rank {rank}"
    held = [one.state_bytes for one in runs]
    whole = optimizers.state_bytes(made[0].optimizers)
    if options["stage"] == 0:
        assert held == [whole] * world
    else:
        assert sum(held) == whole


@pytest.mark.sampled(
    "optimizer, name, world, stage",
    [
        combination
        for combination in itertools.product(MATRIX, NAMES, WORLDS, STAGES)
        # Muon takes matrices only, and there are none.
        if combination[:2] not in {("muon", "convgn"), ("muon_plain", "convgn")}
    ],
    16,
    always=[(optimizer, "gpt", 3, 3) for optimizer in MATRIX]
    + [("muon", "gpt", 2, stage) for stage in (0, 1, 2)],
)
def test_equals_one_process(pool: Pool, optimizer: str, name: str, world: int, stage: int) -> None:
    check(pool, world, optimizer, name, stage=stage)
