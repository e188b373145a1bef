"""Fragmentation on an accelerator: what the allocator holds beside what is in use stays bounded.

The lengths of the second hundred steps are those of the first. Where long-lived tensors were made
among short-lived ones, these would no longer fit where they were before.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.launcher import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

WIDTH, DEPTH, STEPS = 512, 8, 100
# The allocator takes small blocks, and what lies between 1 and 10 MB, in segments of this.
SEGMENT_BYTES = 20 << 20


def train(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Bytes reserved at most, and reserved but not in use at the end, after each hundred steps."""
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(DEPTH)
    )
    model = nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer, units=("*",), **settings)
    draw = random.Random(0)
    lengths = [draw.randrange(64, 8192) for _ in range(STEPS)]
    seen = []
    for _ in range(2):
        for length in lengths:
            model(torch.randn(length, WIDTH, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        seen.append((torch.cuda.max_memory_reserved(), unused))
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_held_stays_bounded(stage: int) -> None:
    """The second hundred steps take no more from the device than the first."""
    world = min(2, torch.cuda.device_count())
    for (reserved, unused), (later, unused_later) in launch(train, world, {"stage": stage}):
        assert later <= reserved + SEGMENT_BYTES
        assert unused_later <= unused + SEGMENT_BYTES
