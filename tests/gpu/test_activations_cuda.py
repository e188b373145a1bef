"""Checkpointed activations on an accelerator: copies run beside the computation."""

from __future__ import annotations

from pathlib import Path
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

WIDTH, DEPTH, TOKENS = 256, 8, 4096
INPUT_BYTES = TOKENS * WIDTH * 4


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.1)


def train(policy: dict[str, Any] | None, stage: int) -> tuple[list[torch.Tensor], int]:
    """Parameters after a few steps, and the bytes that are taken between forward and backward."""
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
    model = nn.Sequential(nn.Linear(16, WIDTH), blocks, nn.Linear(WIDTH, 1)).to(device)
    # The first block gets what needs no gradient, and draws the same random numbers all the same.
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    onecopy.shard(model, optimizer, stage=stage)
    if policy is not None:
        policy = dict(policy)
        if policy.pop("partition", False):
            policy["partition"] = dist.group.WORLD
        onecopy.checkpoint_activations(model, **policy)
    torch.manual_seed(1)
    taken = 0
    for _ in range(6):
        x = torch.randn(TOKENS, 16, device=device)
        before = torch.cuda.memory_allocated()
        losses = [model(part).square().mean() for part in x.chunk(2)]
        taken = torch.cuda.memory_allocated() - before
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    onecopy.unshard(model)
    values = [parameter.detach().cpu() for parameter in model.parameters()]
    dist.destroy_process_group()
    return values, taken


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_places(tmp_path: Path, place: str, stage: int) -> None:
    """The same training; on the device at most the inputs, or nothing of them."""
    world = min(2, torch.cuda.device_count())
    policy = {"place": place, "path": str(tmp_path) if place == "nvme" else None}
    plain, kept = launch(train, world, None, stage), launch(train, world, policy, stage)
    for (ours, taken), (theirs, before) in zip(kept, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        assert taken < before / 3
        if place != "device":
            # The outputs of the last block, and small things.
            assert taken < 3 * INPUT_BYTES


@pytest.mark.parametrize("place", ["device", "host"])
def test_partition(place: str) -> None:
    """Each of two ranks, which have the same data, keeps one half."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device: nothing to cut over")
    plain = launch(train, 2, None, 0)
    kept = launch(train, 2, {"place": place, "partition": True}, 0)
    for (ours, taken), (theirs, before) in zip(kept, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        assert taken < before / 4
