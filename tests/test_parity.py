"""Every stage and world equals one process that runs the ranks' micro-batches, bit for bit."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onecopy
import onecopy.handle
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, Run, train

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)
EVERY = list(itertools.product(models.OWN_NAMES, WORLDS, STAGES))
MUST = [(name, 3, 3) for name in models.OWN_NAMES] + [("gpt", 2, stage) for stage in STAGES]


def check(pool: Pool, world: int, plan: Plan, **options: Any) -> None:
    """Train both ways and compare losses and parameters exactly."""
    runs = pool.run(world, train, plan, timeout=120)
    expected = reference.train(
        partial(models.build, plan.name, plan.seed),
        models.batches(plan.name, plan.steps, world, plan.backwards),
        OPTIMIZERS[plan.optimizer],
        no_sync=plan.no_sync,
        **options,
    )
    for rank, run in enumerate(runs):
        assert run.losses == [step[rank] for step in expected.losses], f"losses of rank {rank}"
        assert list(run.parameters) == list(expected.parameters)
        for name, value in expected.parameters.items():
            assert torch.equal(run.parameters[name], value), f"{name} on rank {rank}"


@pytest.mark.sampled("name, world, stage", EVERY, 40, always=MUST)
def test_equals_one_process(pool: Pool, name: str, world: int, stage: int) -> None:
    check(pool, world, Plan(name=name, stage=stage))


@pytest.mark.sampled(
    "name, world, stage",
    list(itertools.product(models.HF_NAMES, (2, 3), STAGES)),
    8,
    always=[(name, 2, 3) for name in models.HF_NAMES],
)
def test_hugging_face(pool: Pool, name: str, world: int, stage: int) -> None:
    """Unmodified GPT-2, Llama, T5 and Mixtral."""
    pytest.importorskip("transformers", reason="pip install 'onecopy[test]' brings transformers")
    check(pool, world, Plan(name=name, stage=stage))


@pytest.mark.sampled(
    "optimizer, world, stage", list(itertools.product(OPTIMIZERS, WORLDS, STAGES)), 12
)
@pytest.mark.parametrize("name", ["tied", "odd"])
def test_optimizers(pool: Pool, name: str, optimizer: str, world: int, stage: int) -> None:
    """SGD shows wrong scales that Adam hides."""
    check(pool, world, Plan(name=name, stage=stage, optimizer=optimizer))


@pytest.mark.sampled(
    "name, world, stage, no_sync",
    list(itertools.product(("gpt", "unused", "frozen", "odd"), (2, 3), STAGES, (False, True))),
    16,
    always=[("gpt", 2, 3, True), ("gpt", 2, 3, False), ("unused", 3, 2, True)],
)
def test_accumulation(pool: Pool, name: str, world: int, stage: int, no_sync: bool) -> None:
    """Three backwards for one step: reduced each time, or once after no_sync."""
    plan = Plan(name=name, stage=stage, optimizer="momentum", backwards=3, no_sync=no_sync)
    check(pool, world, plan)


@pytest.mark.sampled(
    "name, world, stage", list(itertools.product(("gpt", "tied", "convgn"), (2, 3), STAGES)), 8
)
def test_bf16_compute_with_fp32_masters(pool: Pool, name: str, world: int, stage: int) -> None:
    """Masters equal those of a reference that computes in bf16 and updates in fp32.

    Stage 0 rounds the sum once more, to the wire's bf16, before every rank receives it.
    """
    plan = Plan(name=name, stage=stage, optimizer="momentum", settings={"precision": "bf16"})
    if stage:
        check(pool, world, plan, precision="bf16")
        return
    runs = pool.run(world, train, plan)
    expected = reference.train(
        partial(models.build, plan.name, plan.seed),
        models.batches(plan.name, plan.steps, world),
        OPTIMIZERS[plan.optimizer],
        precision="bf16",
    )
    for name_, value in expected.parameters.items():
        torch.testing.assert_close(runs[0].parameters[name_], value, rtol=2e-2, atol=2e-3)
        assert all(torch.equal(run.parameters[name_], runs[0].parameters[name_]) for run in runs)


@pytest.mark.sampled("world, stage", list(itertools.product(WORLDS, STAGES)), 6)
def test_clipping(pool: Pool, world: int, stage: int) -> None:
    """The norm is that of the whole gradient; clipped training follows the reference."""
    plan = Plan(name="tied", stage=stage, optimizer="momentum", max_grad_norm=0.05)
    runs = pool.run(world, train, plan)
    expected = reference.train(
        partial(models.build, plan.name, plan.seed),
        models.batches(plan.name, plan.steps, world),
        OPTIMIZERS[plan.optimizer],
        max_grad_norm=plan.max_grad_norm,
    )
    for run in runs:
        assert run.norms == pytest.approx(expected.norms, rel=1e-5)
        assert min(run.norms) > 0.05, "a test of clipping must clip"
        for name, value in expected.parameters.items():
            torch.testing.assert_close(run.parameters[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled("world, stage", list(itertools.product((2, 3, 4), STAGES)), 6)
@pytest.mark.parametrize("name", ["gpt", "convgn"])
def test_equals_one_pass_over_the_whole_batch(
    pool: Pool, name: str, world: int, stage: int
) -> None:
    """The mean over ranks is the gradient of the mean loss: plain SGD on the joined batch."""
    plan = Plan(name=name, stage=stage, optimizer="sgd", steps=2)
    (run, *_) = pool.run(world, train, plan)
    model = models.build(name)
    optimizer = OPTIMIZERS["sgd"](model)
    for step in models.batches(name, plan.steps, world):
        tensors = {
            key: torch.cat([ranks[0].tensors[key] for ranks in step]) for key in step[0][0].tensors
        }
        models.loss(model, models.Batch(name, 0, 0, tensors)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in model.named_parameters():
        error = (run.parameters[key] - value).norm() / value.norm()
        assert error < 1e-5, f"{key}: {error}"


@settings(
    max_examples=12,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**20),
    world=st.sampled_from(WORLDS),
    stage=st.sampled_from(STAGES),
    backwards=st.sampled_from((1, 2)),
    no_sync=st.booleans(),
)
def test_random_module_trees(
    pool: Pool, seed: int, world: int, stage: int, backwards: int, no_sync: bool
) -> None:
    """Shared, unused, frozen, zero-size and odd-shaped parameters in any arrangement."""
    plan = Plan(
        name="tree",
        stage=stage,
        seed=seed,
        optimizer="momentum",
        backwards=backwards,
        no_sync=no_sync,
    )
    check(pool, world, plan)


def train_native(plan: Plan) -> Run:
    """Train with the collectives that other backends use, which Gloo has too."""
    with mock.patch("onecopy.comm.groups.has_native_collectives", return_value=True):
        return train(plan)


@pytest.mark.sampled(
    "world, stage, precision", list(itertools.product((2, 3), (1, 2, 3), ("fp32", "bf16"))), 5
)
def test_native_collectives(pool: Pool, world: int, stage: int, precision: str) -> None:
    """The other transport: its order of summation is the backend's, so not to the last bit."""
    plan = Plan(name="tied", stage=stage, optimizer="momentum", settings={"precision": precision})
    ours = pool.run(world, train_native, plan)
    theirs = pool.run(world, train, plan)
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == [pytest.approx(losses, rel=tolerance) for losses in other.losses]
        for name, value in other.parameters.items():
            torch.testing.assert_close(
                one.parameters[name], value, rtol=tolerance, atol=tolerance / 10
            )


def watched_leaks(name: str) -> bool:
    """Whether a step of this model had to be caught by the net of saved tensors."""
    model = models.build(name)
    onecopy.shard(model, OPTIMIZERS["sgd"](model), stage=3)
    for step in range(2):
        models.loss(model, models.batch(name, step, 0)).backward()
    return bool(onecopy.handle.of(model).hooks.saved.is_needed)


@pytest.mark.parametrize("name", models.NAMES)
def test_output_hooks_suffice(pool: Pool, name: str) -> None:
    """The net is for what hooks cannot see; ordinary models do not need it."""
    if name in models.HF_NAMES:
        pytest.importorskip("transformers", reason="pip install 'onecopy[test]'")
    assert pool.run(1, watched_leaks, name) == [False]
