"""One rank of tests/test_network.py: trains in several ways and reads its node's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onecopy
import onecopy.events
from benchmarks.network import Counters, settled

WIDTH, BLOCKS, BATCH = 512, 4, 4
# The first steps also record the schedule, which takes messages of its own.
WARM_STEPS, STEPS = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What this rank has sent to other nodes, by its events, and its node's interface in all."""

    counted: int
    seen: Counters


def make_model() -> nn.Module:
    """BLOCKS MiB in fp32."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


def train(
    ways: Sequence[tuple[Mapping[str, Any], int]],
) -> tuple[Counters, list[list[Step]]]:
    """What a reading itself adds, then the steps of each way.

    Args:
        ways: settings of shard, and how many backwards a step has.
    """
    dist.init_process_group("gloo")
    before = settled()
    reading = settled().since(before)
    steps = [_train(*way) for way in ways]
    dist.barrier()
    dist.destroy_process_group()
    return reading, steps


def _train(settings: Mapping[str, Any], backwards: int) -> list[Step]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    onecopy.shard(model, optimizer, **settings)
    batch = torch.randn(BATCH, WIDTH)
    sent: list[int] = []
    onecopy.events.add_sink(model, lambda event: sent.append(event.across_bytes))
    steps = []
    before = settled()
    for number in range(WARM_STEPS + STEPS):
        sent.clear()
        for _ in range(backwards):
            model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = settled()
        if number >= WARM_STEPS:
            steps.append(Step(counted=sum(sent), seen=now.since(before)))
        before = now
    onecopy.unshard(model)
    return steps
