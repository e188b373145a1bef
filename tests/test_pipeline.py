"""Pipelines of torch.distributed.pipelining over sharded stages, against one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import onecopy
import onecopy.events
import onecopy.handle
from onecopy.errors import MismatchError, ShardingError
from onecopy.events import Event
from onecopy.parallel import micro_batches
from tests import pipelines
from tests.pool import Pool
from tests.rank import RankError
from tests.runs import full_values

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}
PP, STEPS = 2, 3
Choices = tuple[str, str] | None  # gather, reduce; None: without micro_batches


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Options of a run; `settings` go to shard."""

    schedule: str = "1f1b"
    dp: int = 1
    micro: int = 4
    stage: int = 3
    optimizer: str = "adamw"
    choices: Choices = ("once", "once")
    max_grad_norm: float | None = None
    calls: int = 1  # of the schedule in one step
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """One rank's view."""

    losses: list[list[float]]
    values: dict[str, Tensor]
    norms: list[float]
    events: list[Event]
    numels: tuple[int, int]  # padded elements of flat and gradient buffers
    data_rank: int


def around(stages: list[Any], plan: Plan) -> AbstractContextManager[None]:
    if plan.choices is None:
        return nullcontext()
    gather, reduce = plan.choices
    return micro_batches(stages, plan.micro, gather=gather, reduce=reduce)  # type: ignore[arg-type]


def train(plan: Plan) -> Run:
    mesh, parts = pipelines.make(plan.schedule, PP, plan.dp)
    optimizer = OPTIMIZERS[plan.optimizer](nn.ModuleList(parts).parameters())
    onecopy.shard(parts, optimizer, mesh=mesh, stage=plan.stage, **plan.settings)
    scales = {"scale_grads": False} if plan.calls > 1 else {}
    pipe = pipelines.connect(plan.schedule, mesh, parts, plan.micro, **scales)
    run = Run([], {}, [], [], (0, 0), pipe.data_rank)
    for step in range(STEPS):
        if step == STEPS - 1:
            for part in parts:
                onecopy.events.add_sink(part, run.events.append)
        for call in range(plan.calls):
            with around(pipe.stages, plan):
                run.losses.append(pipe.step(plan.calls * step + call, plan.micro))
        if plan.max_grad_norm is not None:
            run.norms.append(onecopy.clip_grad_norm_(parts, plan.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    layouts = [unit.layout for part in parts for unit in onecopy.handle.of(part).engine.units]
    run.numels = (
        sum(one.padded_numel for one in layouts),
        sum(one.gradient_numel for one in layouts),
    )
    run.events = list(run.events)
    for part in parts:
        run.values |= full_values(part)
    return run


def one_process(plan: Plan) -> Run:
    """The same on the global batch, with sums in the same order."""
    gpt = pipelines.build()
    optimizer = OPTIMIZERS[plan.optimizer](gpt.parameters())
    run = Run([], {}, [], [], (0, 0), 0)
    for step in range(STEPS * plan.calls):
        gradients: dict[tuple[int, int], dict[str, Tensor]] = {}
        for rank, micro in itertools.product(range(plan.dp), range(plan.micro)):
            rows = pipelines.batch(step, rank, plan.micro).chunk(plan.micro)[micro]
            loss = pipelines.loss_fn(gpt(rows), rows)
            loss.backward()
            run.losses.append([loss.item()])
            gradients[rank, micro] = {name: p.grad for name, p in gpt.named_parameters()}  # type: ignore[misc]
            for parameter in gpt.parameters():
                parameter.grad = None
        divisor = 1 if plan.calls > 1 else plan.micro
        for name, parameter in gpt.named_parameters():
            each = {key: of_all[name] for key, of_all in gradients.items()}
            parameter.grad = summed(each, plan) / divisor
        if plan.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(gpt.parameters(), plan.max_grad_norm)
            run.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    run.values = {name: p.detach() for name, p in gpt.named_parameters()}
    return run


def summed(each: dict[tuple[int, int], Tensor], plan: Plan) -> Tensor:
    """The mean over ranks of the sums over micro-batches, in the order of the reduces."""
    ranks, micros = range(plan.dp), range(plan.micro)
    if plan.choices is not None and plan.choices[1] == "once":
        local = [sum(each[rank, micro] for micro in micros) for rank in ranks]
        return sum(local) / plan.dp  # type: ignore[return-value]
    means = [sum(each[rank, micro] for rank in ranks) / plan.dp for micro in micros]
    return sum(means)  # type: ignore[return-value]


def compare(plan: Plan, runs: list[Run], expected: Run, **tolerance: float) -> None:
    """Equal, to the last bit unless there is a tolerance."""
    names: set[str] = set()
    for run in runs:
        for name, value in run.values.items():
            torch.testing.assert_close(
                value, expected.values[name], **(tolerance or {"rtol": 0, "atol": 0})
            )
        names |= run.values.keys()
        if run.losses[0]:
            losses = [loss for losses in run.losses for loss in losses]
            start, size = run.data_rank * plan.micro, plan.dp * plan.micro
            of_rank = [
                loss
                for first in range(start, len(expected.losses), size)
                for (loss,) in expected.losses[first : first + plan.micro]
            ]
            assert losses == pytest.approx(of_rank, abs=tolerance.get("atol", 0), rel=0)
        assert run.norms == pytest.approx(expected.norms)
    assert names == expected.values.keys()


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
    9,
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
    compare(plan, pool.run(PP * plan.dp, train, plan), one_process(plan))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, max_grad_norm=0.3, optimizer="sgd"),
        Plan(schedule="interleaved", dp=2, max_grad_norm=0.3, stage=1, optimizer="sgd"),
    ],
)
def test_the_norm_is_that_of_the_whole_model(pool: Pool, plan: Plan) -> None:
    """Clipping over all pipeline stages and chunks; the sum of squares has another order."""
    runs = pool.run(PP * plan.dp, train, plan)
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
    return {"precision": how} if how in ("bf16", "fp16") else {}


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("bf16", Plan(schedule="interleaved")),
        ("fp16", Plan(schedule="interleaved", choices=("once", "each"))),
        ("fp16", Plan(stage=1)),
        ("offload", Plan(stage=2)),
        ("calls", Plan(calls=2)),
    ],
)
def test_what_one_rank_computes(pool: Pool, how: str, plan: Plan) -> None:
    """Low precision with its loss scale, offloading, several calls of the schedule in one step."""
    plan = replace(plan, settings=settings_of(how))
    compare(plan, pool.run(PP, train, plan), pool.run(1, one_rank, plan, how)[0])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("choices", [one for one in CHOICES if one is not None], ids="-".join)
def test_traffic(pool: Pool, stage: int, choices: tuple[str, str]) -> None:
    """Elements sent for one step of k micro-batches: 2, k + 1, 2k + 1 or 3k per parameter."""
    plan = Plan(dp=2, micro=4, stage=stage, choices=choices)
    gathers, reduces = (1 if one == "once" else plan.micro for one in choices)
    # Once for a forward and once for a backward, unless they stay; a refresh where they are whole.
    gathers = 1 if stage == 1 or gathers == 1 else 2 * gathers
    for run in pool.run(PP * plan.dp, train, plan):
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
    runs = pool.run(PP * plan.dp, train, plan)
    compare(plan, runs, one_process(plan), rtol=1e-5, atol=1e-6)


def go_wrong(schedule: str, choices: Choices, num: int) -> None:
    plan = Plan(schedule=schedule, dp=1)
    mesh, parts = pipelines.make(schedule, PP, 1)
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
    """On some rank, where torch may wrap the error; the others lose their neighbour."""
    runs = pool.run(PP, go_wrong, schedule, choices, num, expect_failures=True)
    said = [str(one) for one in runs if isinstance(one, RankError)]
    assert any(all(word in one for word in words) for one in said), said


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
    try:
        with micro_batches(stage, 2):
            pass
    except ShardingError as error:
        said.append(str(error))
    return said


def test_a_mesh_that_is_forgotten(pool: Pool) -> None:
    for mismatch, sharded in pool.run(PP, share_all):
        assert "pipeline" in mismatch and "mesh=" in mismatch
        assert "hold other pipeline stages" in sharded and "mesh=mesh" in sharded
