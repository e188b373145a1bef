"""States cut inside nodes or over all of them: training, bytes and memory of every combination.

Two nodes of two ranks, unless said otherwise, on one machine: `node_size` makes nodes of any ranks.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecopy
import onecopy.events
import onecopy.handle
import onecopy.report.memory
from onecopy.core.stages import stage_of
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, Run, full_values, train

CUTS = ("whole", "node", "world")
STAGES = ["/".join(cuts) for cuts in itertools.combinations_with_replacement(CUTS, 3)]
PRESETS = ("mics", "hfsdp", "hpz")
# Ranks, and so many in a node: two equal nodes, and uneven ones.
EVEN, UNEVEN = (4, 2), ((3, 2), (4, 3))


def fits(stage: str, world: tuple[int, int]) -> bool:
    """Optimizer states that are cut inside a node need equal nodes."""
    return world == EVEN or not stage.endswith("node")


def expect(world: int, plan: Plan, runs: list[Run], **options: Any) -> None:
    """The ranks agree to the bit, and with one process but for the order of summation."""
    expected = reference.train(
        partial(models.build, plan.name, plan.seed),
        models.batches(plan.name, plan.steps, world, plan.backwards),
        OPTIMIZERS[plan.optimizer],
        no_sync=plan.no_sync,
        **options,
    )
    for run in runs:
        for name, value in expected.parameters.items():
            torch.testing.assert_close(run.parameters[name], value, rtol=2e-5, atol=2e-6)
            assert torch.equal(run.parameters[name], runs[0].parameters[name]), name


TRAINED = [
    (stage, world, name, backwards, no_sync)
    for stage, world in itertools.product(STAGES, (EVEN, *UNEVEN))
    if fits(stage, world)
    for name, backwards, no_sync in itertools.product(models.OWN_NAMES, (1, 3), (False, True))
]


@pytest.mark.sampled(
    "stage, world, name, backwards, no_sync",
    TRAINED,
    5,
    always=[("node/node/node", EVEN, "gpt", 3, False), ("node/node/world", (3, 2), "odd", 3, True)],
)
def test_equals_one_process(
    pool: Pool, stage: str, world: tuple[int, int], name: str, backwards: int, no_sync: bool
) -> None:
    ranks, node_size = world
    plan = Plan(
        name=name,
        stage=stage,
        optimizer="momentum",
        backwards=backwards,
        no_sync=no_sync,
        settings={"node_size": node_size},
    )
    expect(ranks, plan, pool.run(ranks, train, plan))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16+16": {"precision": onecopy.Precision(compute="bf16", master="bf16+16")},
    "host": {"offload": "cpu"},
    "delayed": {"offload": onecopy.Offload(optimizer="host", gradients="host", delayed_update=2)},
    "speculative": {
        "offload": onecopy.Offload(optimizer="host", gradients="host", speculative_step=True)
    },
    "parameters on host": {
        "offload": onecopy.Offload(optimizer="host", gradients="host", parameters="host")
    },
    "whole parameters": {"whole_parameters": True},
    "keep gathered": {"keep_gathered": ("blocks.1",)},
    "step in backward": {"step_in_backward": True, "max_grad_norm": 0.1},
    "clipped": {"max_grad_norm": 0.1},
    "quantized": {"quantize": onecopy.Quantize()},
}
# Backwards of each step: what is expected after two is wrong twice.
MICROS = (2, 2, 3, 1, 1)


def trained(stage: int | str, node_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What a loop with accumulation, norms, clipping and evaluations in between comes to."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["momentum"](model)
    onecopy.shard(model, optimizer, stage=stage, node_size=node_size, **settings)
    rank, losses, norms = dist.get_rank(), [], []
    in_backward = settings.get("step_in_backward", False)
    for step, micros in enumerate(MICROS):
        for micro in range(1 if in_backward else micros):
            models.loss(model, models.batch("gpt", 10 * step + micro, rank)).backward()
        if "max_grad_norm" not in settings:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(models.loss(model, models.batch("gpt", 99, rank)).item())
    onecopy.flush(model)
    with onecopy.full_parameters(model):
        values = {name: one.detach().clone() for name, one in model.named_parameters()}
    onecopy.unshard(model)
    return {"norms": norms, "losses": losses, **values}


def trained_twice(stage: str, node_size: int, option: str) -> list[dict[str, Any]]:
    """The same at another stage, and at stage 3."""
    return [trained(one, node_size, OPTIONS[option]) for one in (stage, 3)]


OPTED = [
    (stage, world, option)
    for stage, world, option in itertools.product(STAGES[1:], (EVEN, *UNEVEN), OPTIONS)
    # Offloaded parameters and bf16+16 are of stages that release, and that do not.
    if fits(stage, world) and (option != "parameters on host" or not stage.startswith("whole"))
]
HPZ = "node/world/world"


@pytest.mark.sampled(
    "stage, world, option",
    OPTED,
    5,
    always=[(HPZ, EVEN, "bf16"), ("node/node/node", EVEN, "fp16")],
)
def test_equals_stage_3(pool: Pool, stage: str, world: tuple[int, int], option: str) -> None:
    """With every other setting, and as many backwards as nobody expects; hpZ to the bit."""
    ranks, node_size = world
    tight = {"rtol": 1e-5, "atol": 1e-6}
    loose = {"rtol": 5e-2, "atol": 5e-3}
    for found, plain in pool.run(ranks, trained_twice, stage, node_size, option):
        for name, value in plain.items():
            if stage == HPZ:
                value = torch.as_tensor(value)
                assert torch.equal(torch.as_tensor(found[name]), value), name
            else:
                is_rough = "16" in option or option == "quantized"
                tolerance = loose if is_rough else tight
                torch.testing.assert_close(found[name], value, **tolerance)


def step_of(stage: int | str, backwards: int, no_sync: bool) -> tuple[int, int, dict[str, Any]]:
    """Elements of flat and gradient buffers, and bytes by kind, sent and across, of one step."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage, node_size=2)
    sent = {kind: [0, 0] for kind in ("gather", "reduce")}

    def count(event: Any) -> None:
        kind = "gather" if event.kind == "refresh" else event.kind
        if kind in sent:
            sent[kind][0] += event.num_bytes
            sent[kind][1] += event.across_bytes

    for step in range(3):
        if step == 2:
            onecopy.events.add_sink(model, count)
        for micro in range(backwards):
            batch = models.batch("gpt", step, dist.get_rank())
            if no_sync and micro < backwards - 1:
                with onecopy.no_sync(model):
                    models.loss(model, batch).backward()
            else:
                models.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    layouts = [unit.layout for unit in onecopy.handle.of(model).engine.units]
    flat = sum(layout.padded_numel for layout in layouts)
    return flat, sum(layout.gradient_numel for layout in layouts), sent


def volumes(stage: str, flat: float, gradient: float, k: int, reduced: int) -> dict[str, Any]:
    """Bytes by kind, inside the node and across, in one of Y = 2 nodes of X = 2 ranks.

    With n elements of flat buffers, g of gradient buffers, and k backwards in the step:

    gather, 2 k times where parameters are released, once where they stay (a refresh):
        inside (X-1)/X n; across (Y-1)/N n where optimizer states are cut over the world,
        but once a step where parameters are cut inside nodes (the secondary is kept)
    reduce, k times (once with no_sync on all but the last):
        inside (X-1)/X g; across (Y-1)/N g, or, where optimizer states are cut inside nodes and
        sums are made with the other nodes' replicas, 2 (Y-1)/Y g/X; that once a step where
        gradients are cut inside nodes (the boundary)
    """
    cut = stage_of(stage)
    if cut.optimizer == "whole":
        return {
            "gather": [0, 0],
            "reduce": [2 * reduced * gradient * 3, 2 * reduced * gradient * 2],
        }
    gathers = 2 * k if cut.releases else 1
    gathers_across = 1 if cut.keeps_secondary else gathers if cut.optimizer == "world" else 0
    gathered = gathers_across * flat
    reduces_across = 1 if cut.sums_at_boundary else reduced
    summed = reduces_across * gradient * (2 if cut.optimizer == "node" else 1)
    # Of four parts of a buffer: inside two are sent, across one.
    return {
        "gather": [2 * gathers * flat + gathered, gathered],
        "reduce": [2 * reduced * gradient + summed, summed],
    }


VOLUMES = list(itertools.product((*STAGES, *PRESETS), (1, 3), (False, True)))


@pytest.mark.sampled(
    "stage, backwards, no_sync",
    VOLUMES,
    5,
    always=[(preset, 3, False) for preset in PRESETS],
)
def test_bytes_equal_the_formula(pool: Pool, stage: str, backwards: int, no_sync: bool) -> None:
    """In a step whose number of backwards is that of the step before."""
    for flat, gradient, sent in pool.run(4, step_of, stage, backwards, no_sync):
        # In quarters of buffers of fp32, which are a byte each.
        assert sent == volumes(stage, flat, gradient, backwards, 1 if no_sync else backwards)


def held(stage: str, precision: str) -> list[tuple[int, int]]:
    """Bytes of parameters and of gradients beyond the plain ones, between backwards: as measured,
    and by the formula.
    """
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage, node_size=2, precision=precision)
    engine = onecopy.handle.of(model).engine
    batch = models.batch("gpt", 0, dist.get_rank())
    for _ in range(2):
        for _ in range(2):
            models.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = onecopy.report.memory.measure(model)
    models.loss(model, batch).backward()
    between = onecopy.report.memory.measure(model)
    models.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    after = onecopy.report.memory.measure(model)
    assert after == before, "nothing is left of either"
    layouts = [unit.layout for unit in engine.units]
    flat = sum(layout.padded_numel for layout in layouts)
    gradient = sum(layout.gradient_numel for layout in layouts)
    itemsize = {"fp32": 4, "bf16": 2}[precision]
    cut = stage_of(stage)
    # A half of each: there are two ranks in a node. A mean is a quarter, or where states are cut
    # inside nodes a half, and comes with the boundary.
    secondary = itemsize * flat // 2 if cut.keeps_secondary else 0
    sums = 4 * gradient // 2 if cut.sums_at_boundary else 4 * gradient // 4
    return [
        (between.parameters - before.parameters, secondary),
        (between.gradients - before.gradients, sums),
    ]


@pytest.mark.sampled("stage, precision", list(itertools.product(PRESETS, ("fp32", "bf16"))), 2)
def test_memory_equals_the_formula(pool: Pool, stage: str, precision: str) -> None:
    """A node part of the parameters in the compute dtype, one of the gradients in fp32."""
    for found in pool.run(4, held, stage, precision):
        for measured, formula in found:
            assert measured == formula


def resumed(
    stage: int | str, node_size: int, source: str, target: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, load `source` if there is one, save to `target`; the values, and those a step on."""
    model = models.build("gpt", 1)
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage, node_size=node_size)

    def step(number: int) -> None:
        for _ in range(2):
            models.loss(model, models.batch("gpt", number, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    models.loss(model, models.batch("gpt", 9, 0)).backward()
    optimizer.zero_grad()
    if source:
        onecopy.load(source, model, optimizer)
    onecopy.save(target, model, optimizer, step=1)
    values = full_values(model)
    step(1)
    return values, full_values(model)


@pytest.mark.sampled("other", [2, "hpz", "hfsdp", "whole/node/world"], 1)
@pytest.mark.sampled("stage", PRESETS, 1)
def test_checkpoints_fit_every_stage(pool: Pool, tmp_path: Path, stage: str, other: Any) -> None:
    """From two nodes to uneven ones and back; all ranks see the same data."""
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    runs = pool.run(4, resumed, stage, 2, "", first)
    runs += pool.run(3, resumed, other, 2, first, second)
    runs += pool.run(4, resumed, stage, 2, second, third)
    values, ahead = runs[0]
    for found, then in runs[1:]:
        for name, value in values.items():
            assert torch.equal(found[name], value), name
            torch.testing.assert_close(then[name], ahead[name], rtol=1e-5, atol=1e-6)
