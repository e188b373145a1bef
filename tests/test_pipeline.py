"""Pipelines of torch.distributed.pipelining over sharded stages, against one process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

import onecopy
from onecopy.errors import MismatchError, ShardingError
from onecopy.parallel import micro_batches
from tests import pipelines
from tests.pipelines import (
    OPTIMIZERS,
    PP,
    STEPS,
    Choices,
    Plan,
    Run,
    around,
    compare,
    one_process,
    train,
)
from tests.pool import Pool
from tests.runs import full_values

CHOICES: list[Choices] = [*itertools.product(("once", "each"), ("once", "each")), None]


@pytest.mark.sampled(
    "plan",
    [
        Plan(schedule=name, dp=dp, micro=micro, stage=stage, optimizer=optimizer, choices=choices)
        for name, dp, micro, stage, optimizer, choices in itertools.product(
            ("gpipe", "1f1b", "interleaved"), (1, 2), (1, 2, 4, 8), (1, 2, 3), OPTIMIZERS, CHOICES
        )
        if micro >= PP or name == "gpipe"
    ],
    7,
    always=[
        Plan(schedule="gpipe", dp=2, micro=1, optimizer="sgd"),
        Plan(schedule="gpipe", dp=1, micro=8, stage=2, choices=("each", "once")),
        Plan(schedule="1f1b", dp=2, micro=8, choices=None),
        Plan(schedule="1f1b", dp=1, micro=2, stage=1, choices=("once", "each")),
        Plan(schedule="interleaved", dp=2, micro=4, choices=("each", "each"), optimizer="sgd"),
        Plan(schedule="interleaved", dp=2, micro=2, stage=2),
    ],
)
def test_a_pipeline_equals_one_process(pool: Pool, plan: Plan) -> None:
    """Losses and weights, to the last bit."""
    compare(plan, pool.run(plan.pp * plan.dp, train, plan), one_process(plan))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, max_grad_norm=0.3, optimizer="sgd"),
        Plan(schedule="interleaved", dp=2, max_grad_norm=0.3, stage=1, optimizer="sgd"),
    ],
)
def test_the_norm_is_that_of_the_whole_model(pool: Pool, plan: Plan) -> None:
    """Clipping over all pipeline stages and chunks; the sum of squares has another order."""
    runs = pool.run(plan.pp * plan.dp, train, plan)
    compare(plan, runs, one_process(plan), rtol=1e-5, atol=1e-6)


def one_rank(plan: Plan, how: str) -> Run:
    """The whole model, sharded on one rank with the same settings."""
    gpt = pipelines.build()
    optimizer = OPTIMIZERS[plan.optimizer](gpt.parameters())
    onecopy.shard(gpt, optimizer, stage=0, **settings_of(how, on_one=True))
    run = Run([], {}, [], [], (0, 0), 0)
    for step in range(STEPS):
        for call in range(plan.calls):
            with around([gpt], plan):
                every = pipelines.batch(plan.calls * step + call, 0, plan.micro)
                for rows in every.chunk(plan.micro):
                    loss = pipelines.loss_fn(gpt(rows), rows)
                    loss.backward()
                    run.losses.append([loss.item()])
        if plan.calls == 1:
            for parameter in gpt.parameters():
                parameter.grad.div_(plan.micro)
        optimizer.step()
        optimizer.zero_grad()
    run.values = full_values(gpt)
    return run


def settings_of(how: str, *, on_one: bool = False) -> dict[str, Any]:
    if how == "offload":
        return {} if on_one else {"offload": "cpu"}
    if how == "fp16":
        return {"precision": onecopy.Precision(compute="fp16", loss_scale=256.0)}
    return {"precision": how.removesuffix(" skips")} if "16" in how else {}


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("bf16", Plan(schedule="interleaved")),
        ("fp16", Plan(schedule="interleaved", choices=("once", "each"))),
        ("fp16", Plan(stage=1)),
        ("fp16 skips", Plan(stage=2, optimizer="sgd")),
        ("offload", Plan(stage=2)),
        ("checkpoint", Plan(schedule="interleaved", recomputes=True)),
        ("calls", Plan(calls=2)),
    ],
)
def test_what_one_rank_computes(pool: Pool, how: str, plan: Plan) -> None:
    """Low precision with its loss scale, offloading, several calls of the schedule in one step."""
    plan = replace(plan, settings=settings_of(how))
    (expected,) = pool.run(1, one_rank, plan, how)
    compare(plan, pool.run(plan.pp, train, plan), expected)
    if "skips" not in how:
        assert not torch.equal(expected.values["head.weight"], pipelines.build().head.weight)


@pytest.mark.parametrize(
    ("stage", "choices"),
    [(1, ("each", "each")), *((3, one) for one in CHOICES if one is not None)],
)
def test_traffic(pool: Pool, stage: int, choices: tuple[str, str]) -> None:
    """Elements sent for one step of k micro-batches: 2, k + 1, 2k + 1 or 3k per parameter."""
    plan = Plan(dp=2, micro=4, stage=stage, choices=choices)
    gathers, reduces = (1 if one == "once" else plan.micro for one in choices)
    # Once for a forward and once for a backward, unless they stay; a refresh where they are whole.
    gathers = 1 if stage == 1 or gathers == 1 else 2 * gathers
    for run in pool.run(plan.pp * plan.dp, train, plan):
        flat, gradient = run.numels
        sent = {
            kind: sum(one.num_bytes for one in run.events if kind in (one.kind, "all"))
            for kind in ("gather", "refresh", "reduce")
        }
        assert sent["reduce"] == reduces * gradient * 4 // 2
        assert sent["gather" if stage == 3 else "refresh"] == gathers * flat * 4 // 2
        assert sent["refresh" if stage == 3 else "gather"] == 0


@pytest.mark.sampled(
    "plan",
    [
        Plan(schedule=name, dp=dp, micro=4, stage=stage, optimizer="sgd", choices=(gather, "once"))
        for name, dp, stage, gather in itertools.product(
            ("zero_bubble", "zero_bubble_v"), (1, 2), (1, 3), ("once", "each")
        )
    ],
    2,
    always=[
        Plan(schedule="zero_bubble", dp=2, optimizer="sgd"),
        Plan(schedule="zero_bubble_v", dp=1, optimizer="sgd", stage=1),
    ],
)
def test_backwards_in_two_parts(pool: Pool, plan: Plan) -> None:
    """Schedules without bubbles add weight gradients by hand, which no hook sees."""
    runs = pool.run(plan.pp * plan.dp, train, plan)
    compare(plan, runs, one_process(plan), rtol=1e-5, atol=1e-6)


def go_wrong(pp: int, schedule: str, choices: Choices, num: int) -> None:
    plan = Plan(schedule=schedule, dp=1)
    mesh, parts = pipelines.make(schedule, pp, 1)
    optimizer = OPTIMIZERS["sgd"](nn.ModuleList(parts).parameters())
    onecopy.shard(parts, optimizer, mesh=mesh, stage=3)
    pipe = pipelines.connect(schedule, mesh, parts, plan.micro)
    with around(pipe.stages, replace(plan, choices=choices, micro=num)):
        pipe.step(0, plan.micro)


@pytest.mark.parametrize(
    ("schedule", "choices", "num", "words"),
    [
        ("1f1b", ("once", "once"), 8, ("micro_batches(num=8)", "has run 4", "n_microbatches")),
        ("gpipe", ("once", "never"), 4, ("reduce='never'", '"once" nor "each"')),
        ("zero_bubble_v", None, 4, ("two parts", "micro_batches(stages, num)")),
        ("dualpipe", ("once", "once"), 4, ("two parts (DualPipe)", "ScheduleZBVZeroBubble")),
    ],
)
def test_what_is_refused(
    pool: Pool, schedule: str, choices: Choices, num: int, words: tuple[str, ...]
) -> None:
    """Around the block, or in a backward, where torch wraps the error."""
    # One rank has all stages where the error comes in their midst: no other one waits for it.
    pp = 1 if choices is None else PP
    for one in pool.run(pp, go_wrong, pp, schedule, choices, num, expect_failures=True):
        assert all(word in str(one) for word in words), one


def share_all() -> list[str]:
    """Stages that are sharded over the ranks of all stages."""
    mesh, (part,) = pipelines.make("gpipe", PP, 1)
    said = []
    try:
        onecopy.shard(part, stage=1)
    except MismatchError as error:
        said.append(str(error))
    alike = nn.Linear(2, 2)
    onecopy.shard(alike, stage=1)
    stage = PipelineStage(
        alike, mesh.get_local_rank("pp"), PP, torch.device("cpu"), group=mesh.get_group("pp")
    )
    schedule = pipelines.SCHEDULES["gpipe"](stage, 2)
    for wrong in (stage, schedule, [nn.Linear(2, 2)]):
        try:
            with micro_batches(wrong, 2):
                pass
        except ShardingError as error:
            said.append(str(error))
    return said


def test_a_mesh_that_is_forgotten(pool: Pool) -> None:
    for mismatch, sharded, schedule, plain in pool.run(PP, share_all):
        assert "pipeline" in mismatch and "mesh=" in mismatch
        assert "hold other pipeline stages" in sharded and "mesh=mesh" in sharded
        assert "ScheduleGPipe" in schedule and "pass the PipelineStage" in schedule
        assert "this Linear is not sharded" in plain
