"""One rank of tests/test_wire.py: trains at every stage and reads its interface's counters.

Run as `python -m tests.wire_rank '<JSON of Place>'` in the network namespace of the interface;
prints one JSON list of `Traffic`, in the order of the stages, as the last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import onecopy
import onecopy.events
from onecopy.events import Event

STAGES = (0, 1, 2, 3)
# The first steps also record the schedule, which takes messages of its own.
WARM_STEPS, STEPS = 2, 3
WIDTH, BLOCKS, BATCH = 512, 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs: its number, the address of the first rank, its own interface."""

    rank: int
    world_size: int
    address: str
    port: int
    interface: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sent in STEPS steps.

    counted: by the events. tx_bytes, tx_packets: by the interface.
    """

    stage: int
    counted: int
    tx_bytes: int
    tx_packets: int


def main(place: Place) -> list[Traffic]:
    """Train at each stage; how much went out."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store = dist.TCPStore(place.address, place.port, place.world_size, place.rank == 0, limit)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=limit
    )
    traffic = [_train(stage, place.interface) for stage in STAGES]
    dist.barrier()
    dist.destroy_process_group()
    return traffic


def _train(stage: int, interface: str) -> Traffic:
    """The traffic of STEPS steps of a model of BLOCKS MiB, between two barriers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    onecopy.shard(model, optimizer, stage=stage)
    batch = torch.randn(BATCH, WIDTH)
    _run(model, optimizer, batch, WARM_STEPS)
    with _recorded(model) as events, _read(interface) as sent:
        _run(model, optimizer, batch, STEPS)
    counted = sum(event.num_bytes for event in events)
    onecopy.unshard(model)
    return Traffic(stage=stage, counted=counted, tx_bytes=sent[0], tx_packets=sent[1])


def _run(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, n: int) -> None:
    """Take n steps and wait until all that they send has arrived."""
    for _ in range(n):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        # Updated values are still under way, until a forward wants them.
        model(batch)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[Event]]:
    events: list[Event] = []
    remove = onecopy.events.add_sink(model, events.append)
    try:
        yield events
    finally:
        remove()


@contextmanager
def _read(interface: str) -> Iterator[list[int]]:
    """At the end of the block, the list holds the bytes and packets that went out inside."""
    sent: list[int] = []
    before = _counters(interface)
    yield sent
    sent += [now - then for now, then in zip(_counters(interface), before, strict=True)]


def _counters(interface: str) -> list[int]:
    """Bytes and packets, read while no rank sends: two ranks may share the interface."""
    folder = Path("/sys/class/net") / interface / "statistics"
    dist.barrier()
    values = [int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets")]
    dist.barrier()
    return values


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in main(Place(**json.loads(sys.argv[1])))]))
