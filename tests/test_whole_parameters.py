"""Optimizers that look at whole matrices: each is owned by one rank, and equals one process."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import onecopy
import onecopy.events
import onecopy.handle
from onecopy import Config, Precision
from onecopy.comm.transport import parts_to_sum, shares
from onecopy.core.layout import Layout
from onecopy.core.partition import assign_owners, find_units
from onecopy.errors import ShardingError
from onecopy.events import Event
from tests import models, optimizers, reference
from tests.optimizers import MATRIX, Together, Trained
from tests.pool import Pool
from tests.runs import full_values

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
NAMES = ("gpt", "tied", "convgn", "unused", "odd", "frozen", "mlp")
LEAN = Precision(compute="bf16", master="bf16+16", gradient="bf16")


def run(optimizer: str, name: str, options: dict[str, Any]) -> Trained:
    """Train in a rank; an optimizer whose class is unknown is asked for by the setting."""
    settings = {"whole_parameters": True} if optimizer == "user_written" else {}
    return optimizers.train(MATRIX[optimizer], name, **options, **settings)


def check(
    pool: Pool,
    world: int,
    optimizer: str,
    name: str,
    options: dict[str, Any],
    **of_reference: Any,
) -> None:
    """Losses, parameters and the bytes of states equal those of one process."""
    made: list[Together] = []

    def make(model: nn.Module) -> Any:
        made.append(Together(MATRIX[optimizer](model)))
        return made[0]

    expected = reference.train(
        partial(models.build, name),
        models.batches(name, 3, world, options.get("backwards", 1)),
        make,
        no_sync=options.get("no_sync", False),
        **of_reference,
    )
    runs = pool.run(world, run, optimizer, name, options)
    for rank, one in enumerate(runs):
        assert one.losses == [step[rank] for step in expected.losses], f"losses of rank {rank}"
        for key, value in expected.parameters.items():
            assert torch.equal(one.parameters[key], value), f"{key} on rank {rank}"
    held = [one.state_bytes for one in runs]
    whole = optimizers.state_bytes(made[0].optimizers)
    assert held == [whole] * world if options["stage"] == 0 else sum(held) == whole


@pytest.mark.sampled(
    "optimizer, name, world, stage",
    [
        combination
        for combination in itertools.product(MATRIX, NAMES, WORLDS, STAGES)
        # Muon takes matrices only, and there are none.
        if combination[:2] not in {("muon", "convgn"), ("muon_plain", "convgn")}
    ],
    9,
    always=[
        ("muon", "gpt", 3, 3),
        ("adafactor", "gpt", 3, 2),
        ("user_written", "convgn", 4, 1),
        # More ranks than matrices: some own nothing of a unit.
        ("muon", "mlp", 4, 3),
        ("adafactor_foreach", "odd", 2, 0),
    ],
)
def test_equals_one_process(pool: Pool, optimizer: str, name: str, world: int, stage: int) -> None:
    """Bit for bit, and so do the states' bytes, summed over the ranks."""
    check(pool, world, optimizer, name, {"stage": stage})


@pytest.mark.sampled(
    "name, world, stage, no_sync",
    list(itertools.product(("gpt", "unused"), (2, 3), STAGES, (False, True))),
    3,
    always=[("unused", 3, 3, True), ("gpt", 2, 1, False)],
)
def test_accumulation(pool: Pool, name: str, world: int, stage: int, no_sync: bool) -> None:
    """Three backwards for one step, reduced each time or once."""
    options = {"stage": stage, "backwards": 3, "no_sync": no_sync}
    check(pool, world, "muon", name, options)


@pytest.mark.sampled(
    "world, stage, precision",
    list(itertools.product((2, 3), (1, 2, 3), ("bf16", LEAN))),
    3,
    always=[(3, 3, "bf16"), (2, 1, LEAN)],
)
def test_low_precision(pool: Pool, world: int, stage: int, precision: str | Precision) -> None:
    """Masters of matrices, split and stepped unit by unit too, are those of one process."""
    rounded = {} if precision == "bf16" else {"gradient_dtype": torch.bfloat16}
    options = {"stage": stage, "precision": precision, "backwards": 2}
    check(pool, world, "muon", "gpt", options, precision="bf16", **rounded)


@pytest.mark.sampled(
    "settings, world",
    list(
        itertools.product(
            (
                {"step_in_backward": True, "stage": 3},
                {"keep_gathered": ("blocks.1",), "stage": 3},
                {"max_grad_norm": 1e9, "stage": 2},
                {"units": ("blocks.0.up", "blocks.2"), "stage": 3},
            ),
            (2, 3),
        )
    ),
    3,
)
def test_beside_other_settings(pool: Pool, settings: dict[str, Any], world: int) -> None:
    """What other settings do, they do with whole matrices too."""
    check(pool, world, "muon", "gpt", settings)


# There and back -------------------------------------------------------------------------------

# For each optimizer the states of its parameters, by name.
States = list[dict[str, dict[str, Any]]]


def _states(model: nn.Module, made: list[torch.optim.Optimizer]) -> States:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()}
        for optimizer in made
    ]


def there_and_back(optimizer: str, stage: int) -> tuple[dict[str, Tensor], States]:
    """One plain step, two sharded ones with states saved and loaded between, a plain one."""
    model = models.build("gpt")
    made = list(MATRIX[optimizer](model))
    for step in range(4):
        if step == 1:
            onecopy.shard(model, made, stage=stage)
        if step == 2:
            for one in made:
                one.load_state_dict(one.state_dict())
        if step == 3:
            onecopy.unshard(model)
        rank = dist.get_rank() if step in (1, 2) else 0
        models.loss(model, models.batch("gpt", step, rank)).backward()
        Together(made).step()
        Together(made).zero_grad()
    return dict(model.named_parameters()), _states(model, made)


@pytest.mark.sampled(
    "optimizer, world, stage",
    list(itertools.product(("muon", "adafactor", "shampoo"), (2, 3), STAGES)),
    3,
    always=[("muon", 3, 3), ("adafactor", 2, 1)],
)
def test_there_and_back(pool: Pool, optimizer: str, world: int, stage: int) -> None:
    """States made before `shard` go on, and are whole again after `unshard`, shapes included."""
    kept: list[tuple[nn.Module, list[torch.optim.Optimizer]]] = []
    batches = [
        [[models.batch("gpt", step, rank)] for rank in range(world if step in (1, 2) else 1)]
        for step in range(4)
    ]

    def make(model: nn.Module) -> Any:
        kept.append((model, list(MATRIX[optimizer](model))))
        return Together(kept[0][1])

    expected = reference.train(partial(models.build, "gpt"), batches, make)
    whole = _states(*kept[0])
    for parameters, states in pool.run(world, there_and_back, optimizer, stage):
        for name, value in expected.parameters.items():
            assert torch.equal(parameters[name], value), name
        for ours, theirs in zip(states, whole, strict=True):
            assert ours.keys() == theirs.keys()
            for name, state in theirs.items():
                for key, value in state.items():
                    found = torch.as_tensor(ours[name][key])
                    assert torch.equal(found, torch.as_tensor(value)), (name, key)


# What loops do --------------------------------------------------------------------------------


def side_by_side(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """A plain model and a sharded one, on the same batches on every rank, clipped by torch.

    The optimizer is attached late, and gets more matrices in mid-run.
    """
    plain, sharded = models.build("gpt"), models.build("gpt")
    onecopy.shard(sharded, stage=stage, whole_parameters=True)
    norms = 0
    pairs = []
    for model in (plain, sharded):
        first, second, *_ = (p for p in model.parameters() if p.dim() == 2)
        muon = torch.optim.Muon([first], lr=0.02)
        if model is sharded:
            onecopy.shard(model, muon)
        pairs.append((model, muon, second))
    for step in range(3):
        found = []
        for model, muon, second in pairs:
            if step == 1:
                muon.add_param_group({"params": [second], "lr": 0.1})
            models.loss(model, models.batch("gpt", step, 0)).backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0).item())
            muon.step()
            model.zero_grad(set_to_none=step == 0)
        norms += found[0] == pytest.approx(found[1], rel=1e-5)
    return dict(plain.named_parameters()), full_values(sharded), norms


@pytest.mark.parametrize("stage", [1, 3])
def test_what_loops_do(pool: Pool, stage: int) -> None:
    """A late optimizer, add_param_group, torch's clipping, zero_grad with zeros."""
    for plain, sharded, norms in pool.run(2, side_by_side, stage, record_warnings=True):
        assert norms == 3
        for name, value in plain.items():
            assert torch.equal(sharded[name], value), name


def unfreeze(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Matrices frozen at shard, trained from the second step on, beside a plain model."""
    plain, sharded = models.build("gpt"), models.build("gpt")
    for model in (plain, sharded):
        model.blocks[1].requires_grad_(False)
        muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
        if model is sharded:
            onecopy.shard(sharded, muon, stage=stage)
        for step in range(3):
            if step == 1:
                model.blocks[1].requires_grad_(True)
            models.loss(model, models.batch("gpt", step, 0)).backward()
            muon.step()
            muon.zero_grad()
    return dict(plain.named_parameters()), full_values(sharded)


def test_matrices_unfrozen_in_mid_run(pool: Pool) -> None:
    """They too have been whole from the start."""
    for plain, sharded in pool.run(2, unfreeze, 3, record_warnings=True):
        for name, value in plain.items():
            assert torch.equal(sharded[name], value), name


def attach_late() -> list[str]:
    """Matrices that are cut already are found before anything is stepped."""
    messages = []
    model = models.build("gpt")
    onecopy.shard(model, stage=3)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    with pytest.raises(ShardingError) as refused:
        onecopy.shard(model, torch.optim.Muon(matrices))
    messages.append(str(refused.value))
    other = models.build("gpt")
    first, second, *rest = other.parameters()
    adafactor, sgd = torch.optim.Adafactor([first]), torch.optim.SGD(rest, lr=0.1)
    onecopy.shard(other, [adafactor, sgd], stage=3)
    adafactor.add_param_group({"params": [second]})
    with pytest.raises(ShardingError) as refused:
        adafactor.step()
    messages.append(str(refused.value))
    return messages


def test_matrices_that_are_cut_already(pool: Pool) -> None:
    """The optimizer's and the parameter's names, and what to do."""
    for late, added in pool.run(1, attach_late, record_warnings=True):
        assert "Muon needs whole parameters" in late
        assert "tokens.weight" in late
        assert "whole_parameters=True" in late
        assert "Adafactor needs whole parameters" in added
        assert "positions.weight" in added


# Balance, bytes and the other transport -------------------------------------------------------


@pytest.mark.parametrize("num_slices", [2, 3, 4, 7])
def test_balance(num_slices: int) -> None:
    """On a stack of blocks no rank owns 10 % more matrix elements than the mean."""
    model = models.GPT(997, width=32, depth=12)
    muon = torch.optim.Muon([p for p in model.blocks.parameters() if p.dim() == 2])
    held = {id(p) for group in muon.param_groups for p in group["params"]}
    specs = find_units(model, Config(), lambda p: muon if id(p) in held else None)
    totals = [0] * num_slices
    for spec in assign_owners(specs, num_slices):
        assert (spec.owners is not None) == spec.is_whole == (id(spec.parameters[0][1]) in held)
        for owner, (_, parameter) in zip(spec.owners or (), spec.parameters, strict=False):
            totals[owner] += parameter.numel()
    mean = sum(totals) / num_slices
    assert mean > 0
    assert max(totals) <= 1.1 * mean


def one_step(name: str, stage: int) -> tuple[list[Layout], list[Event]]:
    """Layouts of the units, and the events of one step."""
    model = models.build(name)
    made = MATRIX["muon" if name == "mlp" else "adafactor"](model)
    onecopy.shard(model, made, stage=stage)
    events: list[Event] = []
    for step in range(2):
        if step == 1:
            onecopy.events.add_sink(model, events.append)
        models.loss(model, models.batch(name, step, dist.get_rank())).backward()
        Together(made).step()
        Together(made).zero_grad()
    return [unit.layout for unit in onecopy.handle.of(model).engine.units], events


def _reduced(rank: int, layout: Layout) -> int:
    """Elements that a rank sends in a reduce, counted one by one."""
    owners = [owner for owner, numel in enumerate(layout.strides) for _ in range(numel)]
    world, total = layout.num_slices, len(owners)
    if max(layout.strides) * world <= 2 * total:
        return sum(owner != rank for owner in owners)
    # One rank owns more than two equal parts: each sums an equal part, and sends that on.
    sums = [next(r for r in range(world) if e < _end(r, world, total)) for e in range(total)]
    dealt = sum(by == rank != owner for by, owner in zip(sums, owners, strict=True))
    return sum(by != rank for by in sums) + dealt


def _end(rank: int, world: int, total: int) -> int:
    return sum((total + place) // world for place in range(rank + 1))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["mlp", "convgn"])
def test_bytes(pool: Pool, name: str, stage: int) -> None:
    """A rank sends its slice to each peer in a gather, what others own in a reduce."""
    world = 4
    gathers = {0: 0, 1: 1, 2: 1, 3: 2}[stage]
    for rank, (layouts, events) in enumerate(pool.run(world, one_step, name, stage)):
        sent = {
            kind: sum(event.num_bytes for event in events if event.kind in kinds)
            for kind, kinds in (("reduce", {"reduce"}), ("gather", {"gather", "refresh"}))
        }
        if stage == 0:
            gradient = sum(layout.gradient_numel for layout in layouts)
            assert sent == {"reduce": 2 * 4 * gradient * (world - 1) // world, "gather": 0}
            continue
        assert any(0 in layout.slice_numels for layout in layouts), "more ranks than matrices"
        own = sum(layout.slice_numels[rank] for layout in layouts)
        assert sent["gather"] == 4 * gathers * (world - 1) * own
        assert sent["reduce"] == 4 * sum(_reduced(rank, layout) for layout in layouts)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any))
def test_parts_to_sum(numels: list[int]) -> None:
    """As owned, unless one rank owns far more; what ranks send each other fits together."""
    parts, ranks = parts_to_sum(numels), range(len(numels))
    assert sum(parts) == sum(numels)
    assert max(parts) * len(parts) <= max(2 * sum(parts), sum(parts) + len(parts))
    for rank in ranks:
        sent = shares(rank, parts, numels)
        assert sum(sent) == parts[rank]
        assert sent == [shares(owner, numels, parts)[rank] for owner in ranks]


def run_native(name: str, options: dict[str, Any]) -> Trained:
    """With the collectives that other backends use, which Gloo has too."""
    with mock.patch("onecopy.comm.groups.has_native_collectives", return_value=True):
        return run("adafactor", name, options)


@pytest.mark.sampled(
    "world, stage, precision",
    list(itertools.product((2, 3, 4), (1, 2, 3), ("fp32", "bf16"))),
    2,
    always=[(4, 3, "fp32"), (3, 2, "bf16")],
)
@pytest.mark.parametrize("name", ["mlp", "convgn"])
def test_native_collectives(pool: Pool, name: str, world: int, stage: int, precision: str) -> None:
    """Unequal slices, some empty, over the other transport: equal but for the order of sums."""
    options = {"stage": stage, "precision": precision}
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    ours = pool.run(world, run_native, name, options)
    theirs = pool.run(world, run, "adafactor", name, options)
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == [pytest.approx(losses, rel=tolerance) for losses in other.losses]
        for key, value in other.parameters.items():
            torch.testing.assert_close(
                one.parameters[key], value, rtol=tolerance, atol=tolerance / 10
            )
