"""keep_gathered: the same training, and each unit travels once in the block."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.events
import onecopy.handle
from onecopy.core.unit import UnitState
from onecopy.errors import ShardingError
from onecopy.events import Event
from onecopy.parallel import keep_gathered
from tests import models
from tests.pool import Pool
from tests.runs import full_values

BACKWARDS = 3


def train(
    name: str, keeps: bool, how: str, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], list[Event], int, int]:
    """Weights after 3 steps, events of the last, units that are released, bytes left gathered."""
    model = models.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onecopy.shard(model, optimizer, **settings)
    rank, events = dist.get_rank(), list[Event]()
    for step in range(3):
        if step == 2:
            onecopy.events.add_sink(model, events.append)
        with keep_gathered(model) if keeps else nullcontext():
            for number in range(BACKWARDS):
                last = number == BACKWARDS - 1
                with onecopy.no_sync(model) if how == "no_sync" and not last else nullcontext():
                    models.loss(model, models.batch(name, step * 5 + number, rank)).backward()
                if how == "eval" and number == 0:
                    with torch.no_grad():
                        models.loss(model, models.batch(name, 77, rank))
                if how == "look" and number == 0:
                    assert all(parameter.isfinite().all() for parameter in model.parameters())
                if how == "full" and number == 0:
                    with onecopy.full_parameters(model), torch.no_grad():
                        next(model.parameters()).mul_(0.9)
        onecopy.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    units = onecopy.handle.of(model).engine.units
    left = sum(unit.flat.untyped_storage().nbytes() for unit in units if unit.releases)
    return full_values(model), events, sum(unit.releases for unit in units), left


@pytest.mark.sampled(
    "name, world, how, settings",
    list(
        itertools.product(
            ("gpt", "tied", "unused"),
            (2, 3),
            ("plain", "no_sync", "eval", "full"),
            ({"stage": 3}, {"stage": 1}, {"stage": 3, "precision": "bf16"}),
        )
    ),
    6,
    always=[
        ("gpt", 2, "plain", {"stage": 3}),
        ("tied", 2, "eval", {"stage": 3}),
        ("unused", 2, "no_sync", {"stage": 3, "precision": "bf16"}),
        ("gpt", 2, "full", {"stage": 3}),
    ],
)
def test_the_same_training(
    pool: Pool, name: str, world: int, how: str, settings: dict[str, Any]
) -> None:
    """Bit for bit; at stage 3 each unit is gathered once in the block, and nothing is left."""
    plain = pool.run(world, train, name, False, how, settings)
    kept = pool.run(world, train, name, True, how, settings)
    for (expected, _, _, _), (values, events, num_units, left) in zip(plain, kept, strict=True):
        for key, value in expected.items():
            assert torch.equal(values[key], value), key
        gathers = [one.unit for one in events if one.kind == "gather" and one.phase != "api"]
        # What is changed inside full_parameters travels once more.
        assert len(gathers) <= num_units * (2 if how == "full" else 1)
        assert left == 0
        assert len({*gathers}) >= num_units - 1  # "unused" has one that nobody gathers


@pytest.mark.parametrize(
    "settings",
    [
        {"quantize": onecopy.Quantize(weights="int8", gradients=(None, None))},
        {"offload": onecopy.Offload(optimizer="host", gradients="host", delayed_update=1)},
    ],
    ids=["quantized", "delayed"],
)
def test_looking_changes_nothing(pool: Pool, settings: dict[str, Any]) -> None:
    """Looks are at exact values, forwards at those of codes; an update may be under way."""
    settings = {"stage": 3, **settings}
    plain = pool.run(2, train, "gpt", False, "plain", settings)
    looked = pool.run(2, train, "gpt", True, "look", settings)
    for (expected, *_), (values, _, _, left) in zip(plain, looked, strict=True):
        assert all(torch.equal(values[key], value) for key, value in expected.items())
        assert left == 0


class Tiled(nn.Module):
    """A head that is called tile by tile, recomputed in backward, inside of the model's forward."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        with keep_gathered(self) if self.keeps else nullcontext():
            tiles = [checkpoint(self.head, tile, use_reentrant=False) for tile in hidden.split(2)]
        return torch.stack([tile.square().sum() for tile in tiles]).sum()


def train_tiled(keeps: bool, settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    model = Tiled(keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    onecopy.shard(model, optimizer, units=["body", "head"], **settings)
    events: list[Event] = []
    for step in range(4):
        if step == 3:
            onecopy.events.add_sink(model, events.append)
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    gathers = [one.unit for one in events if one.kind == "gather" and one.phase == "forward"]
    return full_values(model), gathers


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"stage": 3}),
        (4, {"stage": "hpz", "node_size": 2, "quantize": onecopy.Quantize(weights="int8")}),
    ],
)
def test_within_a_forward(pool: Pool, world: int, settings: dict[str, Any]) -> None:
    """Tiles of a head, with recomputation; also where a node keeps values, and codes make them."""
    plain = pool.run(world, train_tiled, False, settings)
    kept = pool.run(world, train_tiled, True, settings)
    for (expected, _), (values, gathers) in zip(plain, kept, strict=True):
        assert all(torch.equal(values[key], value) for key, value in expected.items())
        assert gathers.count("head") == 1


def go_wrong() -> list[str]:
    """What is refused, and what an exception leaves."""
    model = models.build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3)
    engine = onecopy.handle.of(model).engine
    batch = models.batch("gpt", 0, dist.get_rank())
    said = []

    def states() -> set[UnitState]:
        return {unit.state for unit in engine.units}

    with keep_gathered(model):
        assert states() == {UnitState.SHARDED}, "nothing is gathered that is not used"
        with keep_gathered([model]):
            models.loss(model, batch)
        assert states() == {UnitState.KEPT}
        assert next(model.parameters()).norm() > 0
        try:
            optimizer.step()
        except ShardingError as error:
            said.append(str(error))
    # What was touched outside of a forward stays for now, as without the block.
    assert UnitState.KEPT not in states()
    try:
        with keep_gathered(model):
            models.loss(model, batch).backward()
            raise KeyError("the user's")
    except KeyError:
        pass
    assert states() == {UnitState.SHARDED}
    models.loss(model, batch).backward()
    optimizer.step()
    try:
        with keep_gathered(nn.Linear(2, 2)):
            pass
    except ShardingError as error:
        said.append(str(error))
    return said


def test_what_is_refused(pool: Pool) -> None:
    for step, plain in pool.run(2, go_wrong):
        assert "optimizer.step() inside keep_gathered" in step and "after the block" in step
        assert "this Linear is not sharded" in plain
