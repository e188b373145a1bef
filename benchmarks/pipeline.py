"""What micro_batches keeps and what it sends: a GPT in 2 pipeline stages x 2 data ranks, 1F1B.

    python -m benchmarks.pipeline [--size 1m|5m|10m] [--micro K]

For each stage and choice, of the rank that needs most: the peak of live tensor bytes in a step, and
what it sends in gathers, refreshes and reduces, in elements per parameter times (N-1)/N. Both are
counted, not timed: the load of the machine does not matter.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import onecopy
import onecopy.events
import onecopy.handle
from benchmarks.model import GPT, SIZES, Size, batch
from onecopy.memory.live_tensors import LiveTensors
from onecopy.parallel import micro_batches

PP, DP, CONTEXT, ROWS = 2, 2, 16, 1
CHOICES = [(1, "once", "once"), (2, "once", "once"), (2, "once", "each")] + [
    (3, gather, reduce) for gather, reduce in itertools.product(("once", "each"), repeat=2)
]


class Part(nn.Module):
    """Half of the layers of a GPT."""

    def __init__(self, gpt: GPT, number: int) -> None:
        super().__init__()
        half = len(gpt.blocks) // PP
        self.blocks = gpt.blocks[:half] if number == 0 else gpt.blocks[half:]
        self.is_first = number == 0
        if self.is_first:
            self.embedding, self.positions = gpt.embedding, gpt.positions
        else:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embedding(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.head(self.norm(x))


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(size: Size, micro: int, stage: int, gather: Any, reduce: Any) -> tuple[float, float]:
    """Peak bytes per parameter of this rank's part, and elements sent per parameter."""
    if not dist.is_initialized():
        dist.init_process_group()
    mesh = init_device_mesh("cpu", (PP, DP), mesh_dim_names=("pp", "dp"))
    mine, data_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    part, sent = Part(GPT(size, CONTEXT), mine), 0
    with LiveTensors() as live:
        live.watch(part.parameters())
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
        onecopy.shard(part, optimizer, mesh=mesh, stage=stage)
        pipe = PipelineStage(part, mine, PP, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(pipe, micro, loss_fn=loss_fn)
        for step in range(3):
            if step == 2:
                events: list[onecopy.events.Event] = []
                onecopy.events.add_sink(part, events.append)
                live.reset_peak()
            tokens = batch(size, (ROWS * micro, CONTEXT), step, data_rank)
            given = (tokens[:, :-1],) if mine == 0 else ()
            target = tokens[:, 1:].contiguous() if mine == PP - 1 else None
            with micro_batches(pipe, micro, gather=gather, reduce=reduce):
                schedule.step(*given, target=target, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
        sent = sum(one.num_bytes for one in events if one.kind in onecopy.events.SENT)
    units = onecopy.handle.of(part).engine.units
    numel = sum(unit.layout.padded_numel for unit in units)
    return live.peak_bytes / numel, sent / 4 / numel / ((DP - 1) / DP)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES][:3], default="5m")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches")
    options = parser.parse_args()
    print(f"{'stage':>5} {'gather':>7} {'reduce':>7} {'bytes per parameter':>20} {'sent':>6}")
    for stage, gather, reduce in CHOICES:
        given = (SIZES[options.size], options.micro, stage, gather, reduce)
        ranks = onecopy.launch(measure, PP * DP, *given)
        peak, sent = (max(values) for values in zip(*ranks, strict=True))
        print(f"{stage:>5} {gather:>7} {reduce:>7} {peak:>20.1f} {sent:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
