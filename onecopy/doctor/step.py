"""One real training step at stage 3, compared with one process that does it without ranks."""

from __future__ import annotations

import copy

import torch
from torch import nn

import onecopy
from onecopy.doctor.results import Training

__all__ = ["compare_step"]

WIDTH, BLOCKS, BATCH = 96, 4, 8
SEED = 0


def compare_step(rank: int, world_size: int, device: torch.device) -> Training:
    """Train one step on all ranks together; every rank calls it, and compares for itself."""
    batches = [_batch(number, device) for number in range(world_size)]
    sharded = _model(device)
    alone = copy.deepcopy(sharded)
    before = [parameter.detach().clone() for parameter in alone.parameters()]
    _step_alone(alone, batches)

    optimizer = torch.optim.AdamW(sharded.parameters())
    onecopy.shard(sharded, optimizer, stage=3)
    _loss(sharded, batches[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    values = sharded.state_dict()
    onecopy.unshard(sharded)

    wanted = dict(alone.named_parameters())
    pairs = [(values[name], parameter.detach()) for name, parameter in wanted.items()]
    change = max(
        _largest(parameter.detach(), old)
        for parameter, old in zip(wanted.values(), before, strict=True)
    )
    return Training(
        num_parameters=sum(parameter.numel() for parameter in wanted.values()),
        different=sum(int((have != want).sum()) for have, want in pairs),
        largest=max(_largest(have, want) for have, want in pairs) / change,
    )


def _model(device: torch.device) -> nn.Module:
    # Made on the host: the same values on every kind of device.
    generator = torch.Generator().manual_seed(SEED)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1, generator=generator)
    return model.to(device)


def _batch(number: int, device: torch.device) -> torch.Tensor:
    """(BATCH, 16) fp32, another for each rank"""
    generator = torch.Generator().manual_seed(SEED + 1 + number)
    return torch.randn(BATCH, 16, generator=generator).to(device)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch)
    return output.square().mean()


def _step_alone(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Gradients are added in the order of the ranks, then divided, as the owner of a slice does."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    sums: list[torch.Tensor] = []
    for batch in batches:
        grads = torch.autograd.grad(_loss(model, batch), parameters)
        sums = [one + two for one, two in zip(sums, grads, strict=True)] if sums else list(grads)
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total * (1.0 / len(batches))
    optimizer.step()


def _largest(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max())
