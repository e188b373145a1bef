"""Every stage and world equals one process that runs the ranks' micro-batches, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, train

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)


def check(pool: Pool, world: int, plan: Plan, **options: object) -> None:
    """Train both ways and compare losses and parameters exactly."""
    runs = pool.run(world, train, plan)
    expected = reference.train(
        partial(models.build, plan.name, plan.seed),
        models.batches(plan.name, plan.steps, world, plan.backwards),
        OPTIMIZERS[plan.optimizer],
        no_sync=plan.no_sync,
        max_grad_norm=plan.max_grad_norm,
        **options,
    )
    for rank, run in enumerate(runs):
        assert run.losses == [step[rank] for step in expected.losses], f"losses of rank {rank}"
        assert list(run.parameters) == list(expected.parameters)
        for name, value in expected.parameters.items():
            assert torch.equal(run.parameters[name], value), f"{name} on rank {rank}"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", models.OWN_NAMES)
def test_equals_one_process(pool: Pool, name: str, world: int, stage: int) -> None:
    check(pool, world, Plan(name=name, stage=stage))
