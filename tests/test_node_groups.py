"""Which ranks are in one node: from a mesh, from torchrun, from a number; and what does not fit."""

from __future__ import annotations

import logging
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onecopy
import onecopy.events
from onecopy.errors import ShardingError
from tests.pool import Pool

NAMES = ("dp_replicate", "dp_shard")


def across(stage: str = "hpz", **settings: Any) -> int:
    """Bytes that leave this rank's node in a backward of a sharded model; it trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage, **settings)
    events: list[onecopy.events.Event] = []
    onecopy.events.add_sink(model, events.append)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    assert any(event.kind == "reduce" for event in events)
    return sum(event.across_bytes for event in events)


def by_number(size: int) -> int:
    return across(node_size=size)


def by_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> int:
    return across(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names)[NAMES])


def by_torchrun(sizes: tuple[int, ...]) -> int:
    """As torchrun says it to the ranks of so large nodes."""
    node = [number for number, size in enumerate(sizes) for _ in range(size)][dist.get_rank()]
    said = {"LOCAL_WORLD_SIZE": sizes[node], "WORLD_SIZE": sum(sizes), "GROUP_RANK": node}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in said.items()}):
        return across()


def test_three_ways_to_say_the_same(pool: Pool) -> None:
    expected = pool.run(4, by_number, 2)
    assert all(expected)
    assert pool.run(4, by_mesh, (2, 2), NAMES) == expected
    assert pool.run(4, by_torchrun, (2, 2)) == expected
    assert pool.run(4, by_torchrun, (3, 1)) == pool.run(4, by_number, 3)
    assert pool.run(4, by_torchrun, (4,)) == [0] * 4


def test_data_dimensions_of_a_larger_mesh(pool: Pool) -> None:
    """Two data groups of two nodes with one rank each, beside a dimension for other purposes."""
    assert all(pool.run(4, by_mesh, (2, 1, 2), (*NAMES, "tensor")))


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_nodes_of_any_size(pool: Pool, size: int) -> None:
    """One rank in each, a last one that is smaller, and one node for all."""
    assert [found > 0 for found in pool.run(4, by_number, size)] == [size < 4] * 4


def cut_inside_uneven_nodes() -> str:
    with pytest.raises(ShardingError) as caught:
        across("mics", node_size=2)
    return str(caught.value)


def contradict() -> str:
    with pytest.raises(ShardingError) as caught:
        across(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES), node_size=4)
    return str(caught.value)


def test_what_does_not_fit_is_said_before(pool: Pool) -> None:
    for text in pool.run(3, cut_inside_uneven_nodes):
        assert "[2, 1]" in text and 'stage="hpz"' in text, text
    for text in pool.run(4, contradict):
        assert "node_size=4" in text and "leave node_size out" in text, text


def said_on_one_node(stage: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onecopy")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    across(stage)
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    return said


def test_one_node_is_said_once(pool: Pool) -> None:
    (said, other) = pool.run(2, said_on_one_node, "hpz")
    assert len(said) == 1 and "P_os+g+p" in said[0] and "node_size" in said[0], said
    assert other == []
