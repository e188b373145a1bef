"""A rank that trains in so much memory and no more, for tests/test_nvme_memory.py.

Run as `python -m tests.memory_rank` with a JSON of `Job` as its only argument; its last line of
output is a JSON of `Outcome`. Memory counts from where torch and onecopy are imported, and the
process group is there: what it takes to train any model at all is not what the model takes.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import onecopy
from tests.rank import die_with_parent

BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank does.

    store: a file by which the ranks find one another.
    limit: bytes that the process may take beside what it has after its imports; 0 for any.
    settings: of `shard`, in words.
    num_blocks, width: of the model; a block has width * width parameters, and width more.
    """

    rank: int
    world: int
    store: str
    limit: int
    settings: dict[str, Any]
    num_blocks: int
    width: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    peak: bytes of the process at the most, beside what it had after its imports.
    numel: parameters of the model.
    losses: of each step; the last one is that after the last step.
    error: why it ended before; "" where it did not.
    """

    peak: int
    numel: int
    losses: list[float]
    error: str = ""


class Chain(nn.Module):
    """Many equal blocks, each a unit."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = (x + functional.gelu(block(x))) / 2
        return x


def resident(field: str = "VmRSS") -> int:
    """Bytes that the kernel says this process has, or had at the most ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field} in /proc/self/status")


def import_what_is_needed() -> None:
    """Train a model of a few bytes: torch loads libraries when they are first needed.

    So does onecopy with its modules: a fifth of the memory that a rank may take.
    """
    for name in ("api", "core.chunked_step", "core.slice_on_disk", "memory.swap_files"):
        importlib.import_module(f"onecopy.{name}")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    functional.gelu(model(torch.randn(2, 2))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(job: Job) -> Outcome:
    """Train a model that never exists whole."""
    settings = dict(job.settings)
    if isinstance(settings.get("offload"), dict):
        settings["offload"] = onecopy.Offload(**settings["offload"])
    import_what_is_needed()
    base = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    if job.limit:
        data = resident("VmData") + job.limit
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    losses: list[float] = []
    numel = 0
    error = ""
    try:
        torch.manual_seed(0)
        with onecopy.init_sharded():
            model = Chain(job.num_blocks, job.width)
        numel = sum(one.numel() for one in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        onecopy.shard(model, optimizer, stage=3, **settings)
        generator = torch.Generator().manual_seed(1 + job.rank)
        data_, target = torch.randn(2, BATCH, job.width, generator=generator)
        for step in range(job.steps + 1):
            loss = (model(data_) - target).square().mean()
            losses.append(loss.item())
            if step < job.steps:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except (MemoryError, RuntimeError, onecopy.OneCopyError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return Outcome(peak=resident("VmHWM") - base, numel=numel, losses=losses, error=error)


def main() -> None:
    """Do the job."""
    die_with_parent()
    torch.set_num_threads(1)
    job = Job(**json.loads(sys.argv[1]))
    limit = timedelta(seconds=60)
    store = dist.FileStore(job.store, job.world)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=limit)
    dist.barrier()
    outcome = train(job)
    print(json.dumps(asdict(outcome)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
