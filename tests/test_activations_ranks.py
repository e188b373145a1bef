"""Checkpointed activations on several ranks: the same training, and bytes that are as planned."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onecopy
from onecopy.errors import ActivationError, ConfigError
from onecopy.events import Event
from onecopy.planner.papers import Transformer
from onecopy.policies import Activations
from tests import models, pipelines, reference, runs
from tests.models import ROWS, TOKENS
from tests.pool import Pool

STEPS, BACKWARDS = 3, 2
WIDTH, DEPTH = 16, 3  # of the model "gpt"
INPUT_BYTES = ROWS * TOKENS * WIDTH * 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: `num_alike` ranks, next to each other, have the same model and the same data."""

    name: str = "gpt"
    stage: int = 3
    policy: dict[str, Any] = field(default_factory=dict)
    num_alike: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    backwards: int = BACKWARDS
    shard_first: bool = True


def train(plan: Plan) -> tuple[dict[str, torch.Tensor], list[Event]]:
    """Whole parameters after some steps, and what was reported of the last one."""
    mesh = init_device_mesh(
        "cpu",
        (dist.get_world_size() // plan.num_alike, plan.num_alike),
        mesh_dim_names=("dp", "tp"),
    )
    policy = dict(plan.policy)
    if plan.num_alike > 1:
        policy["partition"] = mesh["tp"]
    model = models.build(plan.name)
    optimizer = runs.OPTIMIZERS["adamw"](model)
    if not plan.shard_first:
        onecopy.checkpoint_activations(model, **policy)
    onecopy.shard(model, optimizer, mesh=mesh["dp"], stage=plan.stage, **plan.settings)
    if plan.shard_first:
        onecopy.checkpoint_activations(model, Activations(**policy))
    events: list[Event] = []
    last = STEPS - 1
    for step in range(STEPS):
        look = events.append if step == last else lambda event: None
        stop = onecopy.events.add_sink(model, look)
        for micro in range(plan.backwards):
            batch = models.batch(plan.name, step, dist.get_rank() // plan.num_alike, micro)
            models.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        stop()
    return runs.full_values(model), events


def expected(plan: Plan, world_size: int) -> dict[str, torch.Tensor]:
    """Of plain training in one process."""
    batches = models.batches(plan.name, STEPS, world_size // plan.num_alike, plan.backwards)
    make = runs.OPTIMIZERS["adamw"]
    return reference.train(lambda: models.build(plan.name), batches, make).parameters


def check(pool: Pool, world_size: int, plan: Plan) -> list[Event]:
    """The same values on every rank, to the last bit; returns the events of the first rank."""
    want = expected(plan, world_size)
    results = pool.run(world_size, train, plan)
    for values, _ in results:
        assert all(torch.equal(values[name], want[name]) for name in want)
    events: list[Event] = results[0][1]
    return events


def of_kind(events: list[Event], kind: str) -> list[tuple[str, int, str]]:
    """Module, bytes and place of events, in their order."""
    return [(one.unit, one.num_bytes, one.what) for one in events if one.kind == kind]


PLACES = ("device", "host", "nvme")
RUNS = list(itertools.product(("gpt", "nested", "frozen", "hf_gpt2", "hf_llama"), range(4), PLACES))


@pytest.mark.sampled(("name", "stage", "place"), RUNS, 5, always=[("gpt", 3, "nvme")])
def test_trains_like_a_plain_model(
    pool: Pool, tmp_path: Path, name: str, stage: int, place: str
) -> None:
    """Wherever inputs are kept, whichever call came first."""
    policy = {"place": place, "path": str(tmp_path) if place == "nvme" else None}
    check(pool, 2, Plan(name=name, stage=stage, policy=policy, shard_first=stage % 2 == 0))


def test_recomputation_shares_the_gather_of_backward(pool: Pool) -> None:
    """3 Psi: each unit is gathered once in forward and once in backward, as without."""
    plan = Plan(policy={"place": "host"}, backwards=1)
    events = check(pool, 2, plan)
    gathered = [one.unit for one in events if one.kind == "gather"]
    for block in range(DEPTH):
        assert gathered.count(f"blocks.{block}") == 2
    names = [f"blocks.{block}" for block in range(DEPTH)]
    assert of_kind(events, "keep") == [(name, INPUT_BYTES, "host") for name in names]
    assert of_kind(events, "fetch") == [(name, INPUT_BYTES, "host") for name in names[::-1]]


@pytest.mark.parametrize("place", PLACES)
def test_partitioned_inputs(pool: Pool, tmp_path: Path, place: str) -> None:
    """Each rank of a tensor group keeps 1/MP, and sends that once for each block."""
    policy = {"place": place, "path": str(tmp_path) if place == "nvme" else None}
    plan = Plan(policy=policy, num_alike=2, stage=2)
    events = check(pool, 4, plan)
    names = [f"blocks.{block}" for block in range(DEPTH)]
    part = INPUT_BYTES // 2
    assert of_kind(events, "keep") == [(name, part, place) for name in names] * BACKWARDS
    # Of batch x sequence x hidden elements, each rank has all but its own part from the others.
    assert of_kind(events, "collect") == [(name, part, "") for name in names[::-1]] * BACKWARDS
    shape = Transformer(layers=DEPTH, hidden=WIDTH, heads=2, sequence=TOKENS)
    # The paper rounds (MP-1)/MP to 1.
    assert part * 2 == 4 * shape.partitioned_elements(ROWS) == INPUT_BYTES
    assert 12 * shape.partitioned_elements(ROWS) == shape.model_parallel_elements(ROWS)
    assert part * DEPTH == 2 * shape.checkpoint_bytes(ROWS, partitions=2)  # which counts 16 bit
    # And as a plan counts it.
    for choice, kept_on_host in (("partition", 0), ("partition+host", part * DEPTH)):
        plan = onecopy.plan(
            12 * DEPTH * WIDTH**2 + 1000,
            devices=4,
            tensor=2,
            layers=DEPTH,
            hidden=WIDTH,
            micro_batch=ROWS,
            sequence=TOKENS,
            precision="fp32",
            checkpoint_activations=choice,
        )
        given = plan.question.row(plan.rows[2].way)
        transformer = plan.question.parts(plan.model)[0].transformer
        assert transformer is not None
        counted = plan.question._activations(given.way, transformer, 4)
        assert (sum(n * size for n, size in counted.stacks), counted.on_host) == (
            (0, kept_on_host) if kept_on_host else (part * DEPTH, 0)
        )
    copied = {"device": [], "host": ["host"] * 3, "nvme": ["host", "host", "nvme"]}[place]
    fetched = [(name, part, what) for name, what in zip(names[::-1], copied, strict=False)]
    assert of_kind(events, "fetch") == fetched * BACKWARDS


def test_parts_of_any_size(pool: Pool) -> None:
    """What three ranks cannot divide: the last part ends in zeros."""
    plan = Plan(policy={"every": 2}, num_alike=3, stage=0)
    events = check(pool, 3, plan)
    part = -(-ROWS * TOKENS * WIDTH // 3) * 4
    assert (
        of_kind(events, "keep") == [("blocks.0", part, "device"), ("blocks.2", part, "device")] * 2
    )


# With other ways to spread a model ------------------------------------------------------------


class Tensors(nn.Module):
    """Blocks to be parallelized, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(_Hidden() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.1)


def tensor_parallel(stage: int, sequence: bool) -> list[bool]:
    """Whether checkpointing changes nothing, wherever inputs are."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    cut = {"input_layouts": Shard(1)} if sequence else {}
    out = {"output_layouts": Shard(1)} if sequence else {}
    styles: dict[str, Any] = {"up": tp.ColwiseParallel(**cut), "down": tp.RowwiseParallel(**out)}
    if sequence:
        styles["norm"] = tp.SequenceParallel()
    found = []
    policies: list[dict[str, Any]] = [{"place": "host"}, {"place": "device"}]
    if not sequence:
        # With tokens cut, each rank has another input.
        policies += [{"partition": mesh["tp"]}, {"partition": mesh["tp"], "place": "host"}]
    for policy in (None, *policies):
        torch.manual_seed(0)
        model = Tensors()
        for block in model.blocks:
            tp.parallelize_module(block, mesh["tp"], dict(styles))
        if sequence:
            parts: dict[str, Any] = {
                "first": tp.PrepareModuleOutput(
                    output_layouts=Replicate(), desired_output_layouts=Shard(1)
                ),
                "last": tp.PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
                ),
            }
            tp.parallelize_module(model, mesh["tp"], parts)
        if policy is not None:
            onecopy.checkpoint_activations(model, **policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        onecopy.shard(model, optimizer, mesh=mesh, stage=stage)
        for step in range(2):
            torch.manual_seed(step + 10 * mesh.get_local_rank("dp"))
            model(torch.randn(2, TOKENS, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        onecopy.unshard(model)
        found.append([getattr(one, "_local_tensor", one) for one in model.parameters()])
    return [all(map(torch.equal, one, found[0])) for one in found[1:]]


@pytest.mark.sampled(
    ("stage", "sequence"), list(itertools.product(range(4), (False, True))), 1, always=[(3, False)]
)
def test_tensor_parallel_models(pool: Pool, stage: int, sequence: bool) -> None:
    """Hidden states of all ranks, or of a part of the tokens on each; dropout."""
    for equal in pool.run(4, tensor_parallel, stage, sequence):
        assert equal == [True] * (2 if sequence else 4)


def pipelined(schedule: str, policy: dict[str, Any] | None) -> list[torch.Tensor]:
    """Parameters of this rank's pipeline stages after two steps of four micro-batches."""
    mesh, parts = pipelines.make(schedule, 2, 1)
    optimizer = torch.optim.SGD(nn.ModuleList(parts).parameters(), lr=0.1)
    onecopy.shard(parts, optimizer, mesh=mesh, stage=3)
    if policy is not None:
        for part in parts:
            onecopy.checkpoint_activations(part, modules="blocks.*", **policy)
    pipe = pipelines.connect(schedule, mesh, parts, 4)
    for step in range(2):
        with onecopy.parallel.micro_batches(pipe.stages, 4):
            pipe.step(step, 4)
        optimizer.step()
        optimizer.zero_grad()
    return [value for part in parts for value in runs.full_values(part).values()]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_pipelines(pool: Pool, tmp_path: Path, schedule: str) -> None:
    """Several micro-batches wait at once."""
    plain = pool.run(2, pipelined, schedule, None)
    kept = pool.run(2, pipelined, schedule, {"place": "nvme", "path": str(tmp_path)})
    for ours, theirs in zip(kept, plain, strict=True):
        assert all(map(torch.equal, ours, theirs))


def joined(policy: dict[str, Any] | None) -> list[torch.Tensor]:
    """Parameters after batches of which the ranks have different numbers."""
    model = models.build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3)
    if policy is not None:
        onecopy.checkpoint_activations(model, **policy)
    rank = dist.get_rank()
    batches = [models.batch("gpt", step, rank) for step in range(2 + rank)]
    for batch in onecopy.join(model, batches):
        models.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(runs.full_values(model).values())


def test_ranks_whose_data_end_earlier(pool: Pool) -> None:
    """They go along."""
    plain, kept = pool.run(2, joined, None), pool.run(2, joined, {"place": "host"})
    assert all(map(torch.equal, kept[0], plain[0]))


def other_inputs() -> str:
    """The ranks of the group have different data."""
    model = models.build("gpt")
    onecopy.checkpoint_activations(model, partition=dist.group.WORLD)
    # Without a backward, anything goes: pipelines learn shapes so.
    models.loss(model, models.batch("gpt", 0, dist.get_rank()))
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    model = models.build("gpt")
    onecopy.checkpoint_activations(model, partition=dist.group.WORLD)
    try:
        models.loss(model, models.batch("gpt", 0, dist.get_rank())).backward()
    except ActivationError as error:
        return str(error)
    return "nothing"


def test_other_inputs_are_an_error(pool: Pool) -> None:
    """Before gradients are silently wrong."""
    for said in pool.run(2, other_inputs):
        assert "the input of blocks.2 is another one on rank 1 than on rank 0" in said


def wrong_group() -> list[str]:
    """Meshes that say too much, and groups of others."""
    model = models.build("mlp")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    said = []
    for partition in (mesh, dist.new_group([dist.get_rank()], use_local_synchronization=True), 3):
        try:
            onecopy.checkpoint_activations(model, partition=partition, modules="*")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_groups_that_do_not_fit(pool: Pool) -> None:
    """Are refused where they are given."""
    for said in pool.run(2, wrong_group):
        assert "('dp', 'tp')" in said[0] and "is 3" in said[1] and len(said) == 2
