"""Hops of hops: node groups of several machines, and long quantized sums in windows."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
import onecopy.events
from onecopy import handle
from onecopy.comm import quantized
from onecopy.comm.collectives import Collectives
from onecopy.comm.groups import Groups
from onecopy.comm.meshes import world_group
from onecopy.comm.nodes import find_nodes, make_groups
from onecopy.comm.quantized import transports_of
from onecopy.comm.transport import Division
from onecopy.events import Events
from onecopy.policies import Quantize
from tests.pool import Pool

BLOCK, NUM_FLAGS = 16, 3


def trained(stage: str, group: int, machine: int | None) -> tuple[list[float], Any, int]:
    """Losses, the groups' shape, and bytes to other groups; on machines of so many ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    said = {"LOCAL_WORLD_SIZE": machine, "WORLD_SIZE": world, "GROUP_RANK": rank // (machine or 1)}
    if machine is None:
        said = {}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in said.items()}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 16), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        onecopy.shard(model, optimizer, stage=stage, node_size=group)
    events: list[onecopy.events.Event] = []
    onecopy.events.add_sink(model, events.append)
    losses = []
    for step in range(3):
        for part in range(2):
            torch.manual_seed(100 * step + 10 * part + rank)
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    groups: Groups = handle.of(model).engine.collectives.groups
    arranged = groups.nodes
    if arranged is not None and groups.replica.size == 1:
        arranged = arranged.inner
    if arranged is not None:
        used = {
            arranged.inside.process_group,
            *(one.group.process_group for one in arranged.columns),
        }
        every = {one.process_group for one in groups.all}
        assert used <= every, "a transfer in it could not be interrupted"
    shape = None if arranged is None else (arranged.inside.size, arranged.columns[0].group.ranks)
    return losses, shape, sum(event.across_bytes for event in events)


@pytest.mark.parametrize(
    ("world", "group", "machine"),
    [(4, 2, 1), pytest.param(8, 4, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("stage", ["mics", "hfsdp", "hpz"])
def test_a_group_of_several_machines_trains_alike(
    pool: Pool, stage: str, world: int, group: int, machine: int
) -> None:
    """In two hops inside the group: the same values in the order of summation of the hops."""
    flat = pool.run(world, trained, stage, group, None)
    in_hops = pool.run(world, trained, stage, group, machine)
    for rank, ((losses, none, leaving), (same, shape, as_much)) in enumerate(
        zip(flat, in_hops, strict=True)
    ):
        assert none is None
        place = rank % machine
        first = rank // group * group
        assert shape == (machine, tuple(range(first + place, first + group, machine)))
        assert same == pytest.approx(losses, rel=1e-5)
        assert as_much == leaving, "what leaves the group is the same"


def reduced(window: int, numel: int, code: str) -> tuple[list[torch.Tensor], list[int]]:
    """A mean by one reduce, by one after node sums, and by one across; and what they have sent."""
    world = world_group()
    groups = make_groups(world, "world", find_nodes(world, None, 2), in_hops=True)
    quantize = Quantize(gradients=(code, "int8"), block=BLOCK)
    transports = transports_of(groups, native=False, quantize=quantize)
    ways = Collectives(groups, key="test", model_number=0, transports=transports, events=Events())
    strides = [numel + NUM_FLAGS] * world.size
    ends = [(number + 1) * (numel + NUM_FLAGS) for number in range(world.size)]
    division = Division(strides, [(end - NUM_FLAGS, end) for end in ends])
    torch.manual_seed(world.rank)
    buffers = [torch.randn(sum(strides)) for _ in range(2)]
    for buffer in buffers:
        for first, end in division.exact:
            buffer[first:end] = world.rank
    with mock.patch.object(quantized, "WINDOW_NUMEL", window):
        at_once = ways.reduce(buffers[0].clone(), division, torch.float32, 0)
        lone = buffers[0].clone()
        reading = ways.reduce(lone, division, torch.float32, 1)
        reading.advance()
        lone.fill_(float("nan"))
        first = ways.reduce(buffers[1].clone(), division, torch.float32, 2, is_boundary=False)
        node_sum = first.finish().clone()
        both = ways.reduce(buffers[0].clone(), division, torch.float32, 3, node_sum=node_sum)
        means = [one.finish() for one in (at_once, reading, both)]
        across = ways.reduce_across(first.finish(), division, torch.float32, 4)
        means.append(across.finish())
    return means, [at_once.num_bytes, at_once.across_bytes]


@pytest.mark.parametrize("code", ["int8", "fp8"])
def test_windows_change_no_value(pool: Pool, code: str) -> None:
    """Of slices of whole blocks: blocks are the same, wherever a window ends."""
    numel = 10 * BLOCK - NUM_FLAGS
    whole = pool.run(4, reduced, 1 << 19, numel, code)
    for window in (BLOCK, 3 * BLOCK - 1, 7 * BLOCK):
        for (means, sent), (expected, sent_whole) in zip(
            pool.run(4, reduced, window, numel, code), whole, strict=True
        ):
            for mean, one in zip(means, expected, strict=True):
                assert torch.equal(mean, one)
            # Payloads are padded to 16 bytes, each for itself.
            assert all(
                0 <= more - less < 16 * 40 for more, less in zip(sent, sent_whole, strict=True)
            )
