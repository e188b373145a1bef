"""A small GPT cut into pipeline stages, trained by torch's schedules and by one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

import onecopy
import onecopy.events
import onecopy.handle
from onecopy.events import Event
from onecopy.parallel import micro_batches, tie
from tests.models import GPT, TOKENS
from tests.runs import full_values

VOCABULARY, WIDTH, DEPTH = 31, 16, 4
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
    "dualpipe": ScheduleDualPipeV,
}
V_SHAPED = ("zero_bubble_v", "dualpipe")


class Part(nn.Module):
    """The blocks of one pipeline stage; the embeddings with the first, the head with the last."""

    def __init__(self, gpt: GPT, number: int, num_stages: int) -> None:
        super().__init__()
        each = DEPTH // num_stages
        self.first, self.last = number * each, (number + 1) * each
        if number == 0:
            self.tokens, self.positions = gpt.tokens, gpt.positions
        self.blocks = nn.ModuleDict(
            {str(index): gpt.blocks[index] for index in range(self.first, self.last)}
        )
        if number == num_stages - 1:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first == 0:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last == DEPTH else x


def build(*, tied: bool = False) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(VOCABULARY, WIDTH, DEPTH, tied=tied)


def batch(step: int, rank: int, micro: int) -> Tensor:
    """(2 * micro, TOKENS) what one data-parallel rank sees in one step of the schedule."""
    generator = torch.Generator().manual_seed(1_009 * step + rank)
    return torch.randint(VOCABULARY, (2 * micro, TOKENS), generator=generator)


def loss_fn(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass
class Pipe:
    """One rank's part of a pipeline."""

    mesh: DeviceMesh
    stages: list[PipelineStage]
    schedule: Any

    def step(self, number: int, micro: int) -> list[float]:
        """Run the schedule; the losses of the micro-batches, where the last stage is here."""
        tokens = batch(number, self.data_rank, micro)
        is_first = any(stage.is_first for stage in self.stages)
        is_last = any(stage.is_last for stage in self.stages)
        losses: list[Tensor] = []
        self.schedule.step(
            *((tokens,) if is_first else ()),
            target=tokens if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        return [loss.item() for loss in losses]

    @property
    def data_rank(self) -> int:
        return self.mesh.get_local_rank("dp")


def make(name: str, pp: int, dp: int, gpt: GPT | None = None) -> tuple[DeviceMesh, list[Part]]:
    """The mesh, and this rank's parts of the model."""
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    gpt = gpt or build()
    return mesh, [Part(gpt, number, num_stages) for number, num_stages in _places(name, mesh)]


def connect(name: str, mesh: DeviceMesh, parts: list[Part], micro: int, **settings: Any) -> Pipe:
    """Stages around the parts, and their schedule."""
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(part, number, num_stages, torch.device("cpu"), group=group)
        for part, (number, num_stages) in zip(parts, _places(name, mesh), strict=True)
    ]
    kind = SCHEDULES[name]
    given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return Pipe(mesh, stages, kind(given, micro, loss_fn=loss_fn, **settings))


def _places(name: str, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Numbers of the pipeline stages of this rank, and how many there are."""
    pp, mine = mesh.size(0), mesh.get_local_rank("pp")
    if name in V_SHAPED:
        return [(mine, 2 * pp), (2 * pp - 1 - mine, 2 * pp)]
    if issubclass(SCHEDULES[name], PipelineScheduleMulti):
        return [(mine, 2 * pp), (mine + pp, 2 * pp)]
    return [(mine, pp)]


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
    pp: int = PP
    dp: int = 1
    micro: int = 4
    stage: int = 3
    optimizer: str = "adamw"
    choices: Choices = ("once", "once")
    max_grad_norm: float | None = None
    calls: int = 1  # of the schedule in one step
    recomputes: bool = False  # blocks, in backward
    tied: bool = False  # the embedding of the first stage and the head of the last
    own_unit: bool = False  # which are units of their own then
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


def prepare(plan: Plan) -> tuple[Pipe, torch.optim.Optimizer]:
    """This rank's parts of the model, sharded, in their schedule."""
    mesh, parts = make(plan.schedule, plan.pp, plan.dp, build(tied=plan.tied))
    optimizer = OPTIMIZERS[plan.optimizer](nn.ModuleList(parts).parameters())
    settings = dict(plan.settings)
    for part in parts if plan.recomputes else ():
        onecopy.checkpoint_activations(part, modules="blocks.?")
    if plan.own_unit:
        settings["units"] = ["blocks.?", "tokens" if mesh.get_local_rank("pp") == 0 else "head"]
    onecopy.shard(parts, optimizer, mesh=mesh, stage=plan.stage, **settings)
    for part in parts if plan.tied else ():
        for name in {"tokens.weight", "head.weight"} & dict(part.named_parameters()).keys():
            tie(part, name)
    scales = {"scale_grads": False} if plan.calls > 1 else {}
    return connect(plan.schedule, mesh, parts, plan.micro, **scales), optimizer


def train(plan: Plan) -> Run:
    pipe, optimizer = prepare(plan)
    parts = [stage.submod for stage in pipe.stages]
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
    gpt = build(tied=plan.tied)
    optimizer = OPTIMIZERS[plan.optimizer](gpt.parameters())
    run = Run([], {}, [], [], (0, 0), 0)
    for step in range(STEPS * plan.calls):
        gradients: dict[tuple[int, int], dict[str, Tensor]] = {}
        for rank, micro in itertools.product(range(plan.dp), range(plan.micro)):
            rows = batch(step, rank, plan.micro).chunk(plan.micro)[micro]
            loss = loss_fn(gpt(rows), rows)
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
    named = gpt.named_parameters(remove_duplicate=False)
    run.values = {name: p.detach() for name, p in named}
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
            allowed = {"abs": tolerance.get("atol", 0), "rel": tolerance.get("rtol", 0)}
            assert losses == pytest.approx(of_rank, **allowed)
        assert run.norms == pytest.approx(expected.norms)
    assert names == expected.values.keys()
