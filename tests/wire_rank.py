"""One rank of tests/test_wire.py: trains at every stage and reads its interface's counters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import onecopy
import onecopy.events
from benchmarks.network import Counters, settled
from onecopy.events import Event

STAGES = (0, 1, 2, 3)
# The first steps also record the schedule, which takes messages of its own.
WARM_STEPS, STEPS = 2, 3
WIDTH, BLOCKS, BATCH = 512, 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sent in STEPS steps.

    counted: by the events. seen: by the interface.
    """

    stage: int
    counted: int
    seen: Counters


def train_at_every_stage(interface: str) -> list[Traffic]:
    """How much went out by the interface, in the order of the stages."""
    dist.init_process_group("gloo")
    traffic = [_train(stage, interface) for stage in STAGES]
    dist.barrier()
    dist.destroy_process_group()
    return traffic


def _train(stage: int, interface: str) -> Traffic:
    """The traffic of STEPS steps of a model of BLOCKS MiB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    # Where there are no network namespaces, ranks that are neighbours would send nothing.
    onecopy.shard(model, optimizer, stage=stage, neighbours="send")
    batch = torch.randn(BATCH, WIDTH)
    _run(model, optimizer, batch, WARM_STEPS)
    before = settled(interface)
    events: list[Event] = []
    remove = onecopy.events.add_sink(model, events.append)
    _run(model, optimizer, batch, STEPS)
    remove()
    seen = settled(interface).since(before)
    onecopy.unshard(model)
    return Traffic(stage=stage, counted=sum(event.num_bytes for event in events), seen=seen)


def _run(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, n: int) -> None:
    """Take n steps and wait until all that they send has arrived."""
    for _ in range(n):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        # Updated values are still under way, until a forward wants them.
        model(batch)
