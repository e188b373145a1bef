"""quantize="auto": the same decision on all ranks, and the rule that it follows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onecopy
from benchmarks.network import CannotMakeNodesError, network
from onecopy.comm import link_speed, meshes
from onecopy.comm.link_speed import COST_SHARE, HopTimes
from onecopy.comm.nodes import find_nodes, make_groups
from onecopy.config import Config
from tests.pool import Pool

PLAIN_BYTES = 1 << 20
MEGABITS = 40


def times(*, coded_seconds: float, coding_seconds: float) -> HopTimes:
    """Of a hop that takes a second as it is."""
    return HopTimes(
        plain_seconds=1.0,
        coded_seconds=coded_seconds,
        coding_seconds=coding_seconds,
        plain_bytes=PLAIN_BYTES,
        coded_bytes=PLAIN_BYTES // 2,
    )


def test_coding_may_cost_a_small_part_of_a_slow_transfer() -> None:
    assert times(coded_seconds=0.6, coding_seconds=COST_SHARE - 0.01).pays
    assert not times(coded_seconds=0.6, coding_seconds=COST_SHARE + 0.01).pays
    assert not times(coded_seconds=1.1, coding_seconds=COST_SHARE - 0.01).pays


def choice(stage: int | str, node_size: int | None) -> Config:
    """The settings that "auto" comes to."""
    model = nn.Linear(8, 8)
    onecopy.shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        stage=stage,
        node_size=node_size,
        quantize="auto",
        precision="bf16",
    )
    model(torch.ones(2, 8)).square().mean().backward()
    return onecopy.config_of(model)


def test_one_node_sends_what_it_has(pool: Pool) -> None:
    for config in pool.run(2, choice, 3, None):
        assert config.quantize is None
        assert "no links between nodes" in config.origin_of("quantize")


@pytest.mark.parametrize("stage", [1, 3, "mics"])
def test_all_ranks_decide_alike(pool: Pool, stage: int | str) -> None:
    """Nodes on one machine, each of another size where that can be."""
    world, node_size = (4, 2) if stage == "mics" else (3, 2)
    first, *others = pool.run(world, choice, stage, node_size)
    assert "sums across nodes" in first.origin_of("quantize")
    assert all(other == first for other in others)


def measured() -> link_speed.Decision:
    """On a node of its own."""
    world = meshes.world_group()
    nodes = make_groups(world, "world", find_nodes(world, None, None), in_hops=True)
    bf16, cpu = torch.bfloat16, torch.device("cpu")
    return link_speed.decide(nodes, cpu, values=bf16, gradients=bf16, native=False)


@pytest.mark.usefixtures("rank_environment")
def test_a_link_is_as_slow_as_it_is() -> None:
    """However busy the machine is: that makes it slower yet, and the choice follows the times."""
    try:
        with network(ranks=(1, 1), megabits=MEGABITS) as nodes:
            first, second = nodes.launch(measured)
    except CannotMakeNodesError as reason:
        pytest.skip(f"there can be no network of namespaces: {reason}")
    assert first == second
    # Nothing goes inside a node of one rank.
    values, sums = first.times["values"], first.times["sums across nodes"]
    assert list(first.times) == ["values", "sums across nodes"]
    for one in (values, sums):
        assert one.megabytes_per_second < 1.5 * MEGABITS / 8
    chosen = first.quantize
    assert (chosen is not None and chosen.weights is not None) == values.pays
    assert (chosen is not None and chosen.gradients is not None) == sums.pays
