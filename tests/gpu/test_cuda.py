"""The same engine on accelerators, over NCCL: run with `python -m pytest tests/gpu`.

As many ranks as there are devices, at most four. On one device the world is one rank, which still
runs gather, release, reduce and step on the device.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.launcher import launch
from tests import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def train(stage: int, precision: str | None) -> list[torch.Tensor]:
    """A few steps of the small GPT on this rank's device; whole parameters at the end."""
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    model = models.build("tied").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    onecopy.shard(model, optimizer, stage=stage, precision=precision)
    for step in range(4):
        for micro in models.batches("tied", 4, world)[step][rank]:
            _loss(model, micro, device).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with onecopy.full_parameters(model):
        values = [parameter.detach().clone().float().cpu() for parameter in model.parameters()]
    dist.destroy_process_group()
    return values


def _loss(model: nn.Module, batch: models.Batch, device: torch.device) -> torch.Tensor:
    moved = copy.copy(batch)
    moved.tensors.update({name: value.to(device) for name, value in batch.tensors.items()})
    return models.loss(model, moved)


def _expected(world: int) -> list[torch.Tensor]:
    device = torch.device("cuda", 0)
    model = models.build("tied").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in models.batches("tied", 4, world):
        for ranks in step:
            (_loss(model, ranks[0], device) / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equals_one_device(stage: int, precision: str) -> None:
    """Sums in the backend's order: close, not equal."""
    world = min(4, torch.cuda.device_count())
    results = launch(train, world, stage, precision)
    tolerance = 1e-4 if precision == "fp32" else 5e-2
    for ours in results:
        for one, other in zip(ours, _expected(world), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def train_lean(settings: dict[str, Any]) -> list[torch.Tensor]:
    """Three steps at stage 2 with a split master and everything else that saves memory, or not."""
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    onecopy.shard(model, optimizer, stage=2, **settings)
    x = torch.linspace(-1, 1, 512, device=device).view(8, 64)
    for _ in range(3):
        model(x).float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    onecopy.unshard(model)
    values = [parameter.detach().cpu() for parameter in model.parameters()]
    dist.destroy_process_group()
    return values


def test_what_is_kept_in_fewer_bytes() -> None:
    """A split master, updated within backward, has the bits of an fp32 one."""
    world = min(4, torch.cuda.device_count())
    split = onecopy.Precision(compute="bf16", master="bf16+16")
    plain = launch(train_lean, world, {"precision": "bf16"})
    lean = launch(train_lean, world, {"precision": split, "step_in_backward": True})
    for ours, theirs in zip(lean, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def train_offloaded(settings: dict[str, Any]) -> tuple[list[torch.Tensor], set[str]]:
    """Four steps; whole parameters, and on what kinds of devices masters and states lie."""
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    model = models.build("tied").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    onecopy.shard(model, optimizer, max_grad_norm=0.5, **settings)
    for step in range(4):
        for number in range(2):
            batch = models.batch("tied", step, dist.get_rank(), number)
            _loss(model, batch, device).backward()
        optimizer.step()
        optimizer.zero_grad()
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    states = [value for one in optimizer.state.values() for value in one.values() if value.dim()]
    kinds = {tensor.device.type for tensor in [*pieces, *states]}
    onecopy.unshard(model)
    values = [parameter.detach().float().cpu() for parameter in model.parameters()]
    dist.destroy_process_group()
    return values, kinds


OFFLOADS: dict[str, dict[str, Any]] = {
    "host": {"optimizer": "host", "gradients": "host"},
    "all host": {"optimizer": "host", "gradients": "host", "parameters": "host"},
    "gradients": {"gradients": "host"},
    "optimizer": {"optimizer": "host"},
    "values": {"parameters": "host"},
    "speculative": {"optimizer": "host", "gradients": "host", "speculative_step": True},
    # Every unit goes through its parts several times.
    "little pinned": {"optimizer": "host", "gradients": "host", "pinned_bytes": 4 * 4096},
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", OFFLOADS)
def test_offload_trains_like_the_device(stage: int, name: str) -> None:
    """fp32, so that only the host's arithmetic differs; every state is where it was said."""
    offload = onecopy.Offload(**OFFLOADS[name])
    if offload.parameters == "host" and stage < 3:
        pytest.skip("parameters stay on the device below stage 3")
    check_like_the_device(stage, {"offload": offload})


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("gradients", ["device", "nvme"])
def test_offload_to_nvme_trains_like_the_device(stage: int, gradients: str, tmp_path: Path) -> None:
    """The same with files below the folder of the test; each unit is several chunks."""
    offload = onecopy.Offload(
        optimizer="nvme",
        gradients=gradients,
        parameters="nvme" if stage == 3 else "device",
        path=tmp_path,
        buffer_bytes=1,
    )
    check_like_the_device(stage, {"offload": offload})


@cache
def on_the_device(world: int, stage: int) -> list[tuple[list[torch.Tensor], set[str]]]:
    """Once for all that is compared with it: a job of several ranks takes seconds to begin."""
    return launch(train_offloaded, world, {"stage": stage})


def check_like_the_device(stage: int, settings: dict[str, Any]) -> None:
    """Values are close to those of training without offload."""
    world = min(4, torch.cuda.device_count())
    offload = settings.get("offload")
    place = "cuda" if offload is not None and offload.optimizer == "device" else "cpu"
    plain = on_the_device(world, stage)
    offloaded = launch(train_offloaded, world, {"stage": stage, **settings})
    for (values, kinds), (own_values, own_kinds) in zip(plain, offloaded, strict=True):
        assert (kinds, own_kinds) == ({"cuda"}, {place})
        for one, other in zip(values, own_values, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def train_one_step_behind(settings: dict[str, Any]) -> list[torch.Tensor]:
    """Six steps, the update beside the next forward and backward or not."""
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    model = models.build("tied").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    onecopy.shard(model, optimizer, stage=3, **settings)
    for step in range(6):
        _loss(model, models.batch("tied", step, dist.get_rank()), device).backward()
        optimizer.step()
        optimizer.zero_grad()
    onecopy.unshard(model)
    values = [parameter.detach().float().cpu() for parameter in model.parameters()]
    dist.destroy_process_group()
    return values


def test_delayed_offload_is_close() -> None:
    """With small updates one step behind is nearly the same."""
    world = min(4, torch.cuda.device_count())
    offload = onecopy.Offload(optimizer="host", gradients="host", delayed_update=1)
    plain = launch(train_one_step_behind, world, {})
    delayed = launch(train_one_step_behind, world, {"offload": offload})
    for values, own_values in zip(plain, delayed, strict=True):
        for one, other in zip(values, own_values, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
