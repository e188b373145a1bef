"""save and load on accelerators: states on the device, its random numbers, settings as tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.launcher import launch
from tests.motley import compare, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

ADAMW: dict[str, dict[str, Any]] = {
    "fused": {"lr": 1e-2, "fused": True},
    "foreach": {"lr": 1e-2, "foreach": True},
    "capturable": {"lr": torch.tensor(1e-2), "capturable": True},
}


def goes_on(root: str, stage: int, kind: str, settings: dict[str, Any]) -> None:
    """A run that is saved half-way, and another one that goes on from there."""
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        blocks = (nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.3)) for _ in range(3))
        model = nn.Sequential(nn.Linear(4, 9), *blocks, nn.BatchNorm1d(9)).to(device)
        options = {**ADAMW[kind]}
        if isinstance(options["lr"], torch.Tensor):
            options["lr"] = options["lr"].to(device)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        onecopy.shard(model, optimizer, stage=stage, **settings)
        return model, optimizer

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            x = torch.linspace(-1, 1, 32, device=device).view(8, 4) + step
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    first, second = make(0), make(1)
    train(*first, 2)
    onecopy.save(root, *first)
    then = snapshot(first[0], {"": first[1]})
    train(*first, 2)
    train(*second, 1)
    onecopy.load(root, *second)
    found = snapshot(second[0], {"": second[1]})
    for name in ("parameters", "optimizer "):
        compare("loaded", found[name], then[name])
    train(*second, 2)
    found, expected = snapshot(second[0], {"": second[1]}), snapshot(first[0], {"": first[1]})
    for name in ("parameters", "optimizer "):
        compare("resumed", found[name], expected[name])
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ADAMW)
@pytest.mark.parametrize(
    "stage, settings",
    [
        (3, {"precision": "bf16"}),
        (1, {"precision": onecopy.Precision(compute="bf16", master="bf16+16")}),
        (2, {"precision": "fp16"}),
    ],
)
def test_goes_on(tmp_path: Path, stage: int, settings: dict[str, Any], kind: str) -> None:
    """To the last bit, dropout included."""
    launch(goes_on, min(torch.cuda.device_count(), 4), str(tmp_path), stage, kind, settings)
