"""Ranks in nodes: what the planner says they send and hold, against ranks that train."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import onecopy
import onecopy.events
import onecopy.handle
from onecopy import Quantize
from onecopy.comm import quantized
from onecopy.comm.groups import ImaginedWorld
from onecopy.events import SENT, Event
from onecopy.planner import estimate, traffic
from onecopy.planner.cluster import Cluster
from onecopy.planner.modules import units_of
from onecopy.planner.options import PlanOptions
from onecopy.planner.papers import Quantized, Zeropp
from onecopy.planner.shapes import ModelShape, UnitShape
from onecopy.planner.sharded import ModelTraffic, model_traffic
from onecopy.planner.traffic import Sent, sent_by
from onecopy.simulator.simulate import simulate
from tests.pool import Pool

STAGES = (0, 1, 2, 3, "hpz", "hfsdp", "mics", "whole/node/world", "whole/node/node")
# Optimizer states over the world: nodes may differ in size.
UNEVEN = (0, 1, 2, 3, "hpz", "hfsdp", "whole/node/world")


class Blocks(nn.Module):
    """Units of different sizes, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 50)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(50, 70), nn.Tanh(), nn.Linear(70, 50)) for _ in range(3)
        )
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = y + block(y)
        return y


def shape_of(precision: str) -> ModelShape:
    return ModelShape(name="", units=units_of(Blocks(), PlanOptions(precision=precision)))


@dataclass
class Found:
    """What one rank sent in a step, and how many of these bytes left its node."""

    sent: Sent
    by_kind: dict[str, int]
    formula: ModelTraffic


def of(events: list[Event]) -> Sent:
    away = sum(one.across_bytes for one in events if one.kind in SENT)
    return Sent(inside=sum(one.num_bytes for one in events if one.kind in SENT) - away, across=away)


def trained(
    stage: int | str,
    node_size: int,
    precision: str,
    backwards: int,
    no_sync: bool = False,
    quantize: Quantize | None = None,
) -> Found:
    """The third of three steps: the second knows how many backwards a step has."""
    model = Blocks()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    settings = {"stage": stage, "node_size": node_size, "precision": precision}
    onecopy.shard(model, optimizer, quantize=quantize, **settings)
    events: list[Event] = []
    for step in range(3):
        if step == 2:
            onecopy.events.add_sink(model, events.append)
        for micro in range(backwards):
            keeps = no_sync and micro < backwards - 1
            with onecopy.no_sync(model) if keeps else nullcontext():
                model(torch.randn(2, 16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    owner = onecopy.handle.of(model)
    kinds: Counter[str] = Counter()
    for one in events:
        kinds[one.kind] += one.num_bytes if one.kind in SENT else 0
    units = {0: [unit for unit in owner.engine.units if unit.gradients is not None]}
    return Found(of(events), dict(+kinds), model_traffic(owner.engine, units))


@pytest.mark.sampled(
    "stage, ranks, precision, backwards, no_sync",
    [
        *itertools.product(STAGES, [(4, 2)], ("fp32", "bf16"), (1, 3), (False, True)),
        *itertools.product(UNEVEN, [(3, 2), (4, 3)], ("fp32", "bf16"), (1, 3), (False,)),
    ],
    4,
    always=[(stage, (4, 2), "bf16", 3, False) for stage in STAGES]
    + [(stage, (3, 2), "bf16", 3, False) for stage in ("hpz", "hfsdp")],
)
def test_bytes_inside_and_across_are_those_of_the_planner(
    pool: Pool,
    stage: int | str,
    ranks: tuple[int, int],
    precision: str,
    backwards: int,
    no_sync: bool,
) -> None:
    cluster = Cluster(devices=ranks[0], devices_per_node=ranks[1])
    found = pool.run(ranks[0], trained, stage, ranks[1], precision, backwards, no_sync)
    for rank, one in enumerate(found):
        planned = planned_for(stage, cluster, precision, backwards, no_sync=no_sync, rank=rank)
        assert one.sent == planned, rank
        expected, reduces = one.formula, 1 if no_sync else backwards
        gathers = 2 * backwards * expected.gather + expected.gather_once
        assert one.by_kind.get("gather", 0) == gathers
        assert one.by_kind["reduce"] == reduces * expected.reduce + expected.reduce_once
        assert one.by_kind.get("refresh", 0) == expected.refresh[0]


def planned_for(
    stage: int | str, cluster: Cluster, precision: str, backwards: int, **more: Any
) -> Sent:
    widths = estimate.widths_of(PlanOptions(precision=precision).policy, 2)
    return sent_by(shape_of(precision), stage, cluster, widths, backwards, **more)


ALL = Quantize(block=128)
WEIGHTS, GRADIENTS = Quantize(gradients=None), Quantize(weights=None)


@pytest.mark.sampled(
    "stage, ranks, precision, quantize",
    [
        *itertools.product(STAGES, [(4, 2), (4, 4)], ("fp32", "bf16"), (ALL, WEIGHTS, GRADIENTS)),
        *itertools.product(UNEVEN, [(3, 2)], ("fp32", "bf16"), (ALL,)),
    ],
    3,
    always=[(stage, (4, 2), "bf16", ALL) for stage in (0, 3, "hpz", "mics")]
    + [("hpz", (3, 2), "bf16", ALL), (3, (4, 4), "bf16", ALL), ("hfsdp", (4, 2), "fp32", ALL)],
)
def test_bytes_of_codes_are_those_of_the_planner(
    pool: Pool,
    stage: int | str,
    ranks: tuple[int, int],
    precision: str,
    quantize: Quantize,
) -> None:
    cluster = Cluster(devices=ranks[0], devices_per_node=ranks[1])
    found = pool.run(ranks[0], trained, stage, ranks[1], precision, 2, False, quantize)
    for rank, one in enumerate(found):
        assert one.sent == planned_for(
            stage, cluster, precision, 2, rank=rank, quantize=quantize
        ), rank
        gathers = 4 * one.formula.gather + one.formula.gather_once
        assert one.by_kind.get("gather", 0) == gathers
        assert one.by_kind["reduce"] == 2 * one.formula.reduce + one.formula.reduce_once


def trained_in_windows(*arguments: Any) -> Found:
    """With windows so short that these small models' sums have several."""
    with mock.patch.object(quantized, "WINDOW_NUMEL", 256):
        return trained(*arguments)


@pytest.mark.parametrize(("stage", "precision"), [("hfsdp", "bf16"), (3, "fp32")])
def test_bytes_of_windows_are_those_of_the_planner(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, stage: int | str, precision: str
) -> None:
    assert traffic.WINDOW_NUMEL == quantized.WINDOW_NUMEL
    cluster = Cluster(devices=4, devices_per_node=2)
    at_once = planned_for(stage, cluster, precision, 2, quantize=ALL)
    monkeypatch.setattr(traffic, "WINDOW_NUMEL", 256)
    found = pool.run(4, trained_in_windows, stage, 2, precision, 2, False, ALL)
    for rank, one in enumerate(found):
        planned = planned_for(stage, cluster, precision, 2, rank=rank, quantize=ALL)
        assert one.sent == planned, rank
    assert planned.total > at_once.total


# In a world that is not there -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "ranks", "rank"),
    [(stage, (64, 8), 11) for stage in ("hpz", "hfsdp", "mics", 3)]
    + [("hpz", (5, 2), rank) for rank in range(5)],
)
def test_simulated_ranks_send_what_the_planner_says(
    stage: int | str, ranks: tuple[int, int], rank: int
) -> None:
    """64 ranks in 8 nodes, and 5 in nodes of 2, 2 and 1."""
    cluster = Cluster(devices=ranks[0], devices_per_node=ranks[1])
    found = simulate(
        Blocks,
        lambda: torch.randn(2, 16),
        ImaginedWorld(ranks[0], rank),
        optimizer=lambda all_: torch.optim.AdamW([one for one in all_ if one.requires_grad]),
        backwards=2,
        stage=stage,
        node_size=ranks[1],
        precision="bf16",
    )
    assert of(found.events) == planned_for(stage, cluster, "bf16", 2, rank=rank)


# The table of docs/slow-networks.md -------------------------------------------------------------


def test_what_each_choice_costs() -> None:
    """Each cell, from bytes of a model of 2^30 parameters in 32 equal units."""
    text = (Path(__file__).parent.parent / "docs/slow-networks.md").read_text()
    _, table = text.split("| stage | bytes per parameter | across, 1 |")
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[2:]]
    numel, cluster = 1 << 30, Cluster(devices=64, devices_per_node=8)
    shape = ModelShape(name="", units=(UnitShape(name="", numels=(numel // 32,), count=32),))
    assert [row[0] for row in rows] == ["2", "3", "hpz", "hfsdp", "mics"]
    for name, *cells in rows:
        stage = int(name) if name.isdigit() else name
        held = estimate.state_bytes(stage, numel, 64, estimate.BF16, node_size=8).total
        found = [held / numel]
        for hop, backwards in (("across", 1), ("across", 4), ("inside", 1)):
            share = {"across": 7 / 64, "inside": 7 / 8}[hop] * 2 * numel
            for quantize in (None, Quantize()):
                sent = sent_by(shape, stage, cluster, estimate.BF16, backwards, quantize=quantize)
                found.append(getattr(sent, hop) / share)
        assert found == pytest.approx([float(cell) for cell in cells], rel=0.005), name


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("gradients", [None, "int4"])
@pytest.mark.parametrize("stage", [3, "hpz"])
@pytest.mark.parametrize("backwards", [1, 4])
def test_the_papers_volumes_are_ours(
    stage: int | str, weights: str | None, gradients: str | None, backwards: int
) -> None:
    """Every combination of qwZ, hpZ and qgZ of ZeRO++, within padding, flags and scales of 1 %."""
    numel, cluster = 1 << 24, Cluster(devices=64, devices_per_node=8)
    shape = ModelShape(name="", units=(UnitShape(name="", numels=(numel,)),))
    quantize = None
    if weights or gradients:
        quantize = Quantize(weights=weights, gradients=(None, gradients) if gradients else None)
    sent = sent_by(shape, stage, cluster, estimate.BF16, backwards, quantize=quantize)
    paper = Zeropp(
        weights=Quantized(bits=8) if weights else None,
        gradients=Quantized(bits=4) if gradients else None,
        secondary=stage == "hpz",
    )
    volume = float(paper.across_nodes(backwards)) * 2 * numel * 7 / 64
    assert sent.across == pytest.approx(volume, rel=0.01)
