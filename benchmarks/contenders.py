"""Who takes part: each a way to train the same model, with weights of its own from one seed.

Floors, which communicate nothing (so they train on their own rank's data alone):
    compute          forward and backward
    compute+step     and the optimizer's step on all parameters: the least that DDP and stage 0
                     can take
    compute+step/N   and the step on 1/N of every parameter: the least for the sharded ones

Peers: ddp, zero_redundancy (ZeroRedundancyOptimizer over DDP), fsdp2 (fully_shard on each block
and on the model). Ours: onecopy-0 to onecopy-3.

On several nodes also hsdp (fsdp2, cut inside nodes only) and ours that know nodes, by the names of
the papers; see ONECOPY.

All use `torch.optim.AdamW(fused=True)` and defaults otherwise, but for DDP's
`gradient_as_bucket_view=True`, which is its better side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import onecopy
from benchmarks.model import GPT, SIZES
from onecopy.policies import Quantize

__all__ = ["CONTENDERS", "FLOORS", "ONECOPY", "Contender", "Setting", "build", "floor_of"]

FLOORS = ("compute", "compute+step", "compute+step/N")
CONTENDERS = (
    *FLOORS,
    *("ddp", "zero_redundancy", "fsdp2"),
    *(f"onecopy-{stage}" for stage in range(4)),
)
LEARNING_RATE = 1e-3
# Settings of shard for each of ours.
ONECOPY: dict[str, dict[str, Any]] = {
    **{f"onecopy-{stage}": {"stage": stage} for stage in range(4)},
    "mics": {"stage": "mics"},
    "hfsdp": {"stage": "hfsdp"},
    "hpz": {"stage": "hpz"},
    "qwz": {"stage": 3, "quantize": Quantize(gradients=None)},
    "qgz": {"stage": 3, "quantize": Quantize(weights=None)},
    "zero++": {"stage": "hpz", "quantize": Quantize()},
    "auto": {"stage": 3, "quantize": "auto"},
    "hpz-auto": {"stage": "hpz", "quantize": "auto"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same for all contenders of a run."""

    size: str
    nproc: int
    dtype: str
    micro_batch: int
    context: int


@dataclass(slots=True, kw_only=True)
class Contender:
    """One way to train.

    model, optimizer: as the way's own tools for checkpoints take them.
    forward: the loss of a batch of tokens.
    step: after backward, the update; zero_grad follows it.
    settle: wait for transfers that the last step has left under way.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[Tensor], Tensor]
    step: Callable[[], object]
    zero_grad: Callable[[], object]
    settle: Callable[[], object] = field(default=lambda: None)


def floor_of(name: str) -> str:
    """The floor whose optimizer updates as many parameters per rank."""
    return "compute+step" if name in ("ddp", "onecopy-0") else "compute+step/N"


def build(name: str, setting: Setting) -> Contender:
    """A contender, in the default process group."""
    torch.manual_seed(0)
    model = GPT(SIZES[setting.size], setting.context)
    if name in FLOORS:
        return _floor(name, model, setting)
    if name in ("fsdp2", "hsdp"):
        return _fsdp2(name, model, setting)
    if name in ("ddp", "zero_redundancy"):
        return _ddp(name, model, setting)
    return _onecopy(name, model, setting)


def _adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _autocast(setting: Setting) -> AbstractContextManager[object]:
    if setting.dtype == "fp32":
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16)


def _floor(name: str, model: nn.Module, setting: Setting) -> Contender:
    """In bf16 the model is bf16 for compute, and fp32 masters are updated and copied back."""
    low = setting.dtype == "bf16"
    masters = list(model.parameters())
    if low:
        masters = [nn.Parameter(master.detach().clone()) for master in masters]
        model.to(torch.bfloat16)
    parameters = list(model.parameters())
    divisor = setting.nproc if name == "compute+step/N" else 1
    cuts = [-(-master.numel() // divisor) for master in masters]
    pieces = [
        nn.Parameter(master.detach().view(-1)[:cut])
        for master, cut in zip(masters, cuts, strict=True)
    ]
    optimizer = _adamw(pieces)

    def step() -> None:
        for piece, parameter, cut in zip(pieces, parameters, cuts, strict=True):
            assert parameter.grad is not None, "every parameter of the model gets a gradient"
            piece.grad = parameter.grad.view(-1)[:cut].to(piece.dtype)
        optimizer.step()
        if low:
            for piece, parameter, cut in zip(pieces, parameters, cuts, strict=True):
                parameter.data.view(-1)[:cut].copy_(piece.data)

    def zero_grad() -> None:
        optimizer.zero_grad()
        model.zero_grad()

    nothing: Callable[[], object] = lambda: None  # noqa: E731
    return Contender(
        name=name,
        model=model,
        optimizer=optimizer,
        forward=model,
        step=nothing if name == "compute" else step,
        zero_grad=zero_grad,
    )


def _ddp(name: str, model: nn.Module, setting: Setting) -> Contender:
    """In bf16 under autocast, as users of DDP do; gradients travel in fp32 then."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if name == "zero_redundancy":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True
        )
    else:
        optimizer = _adamw(list(model.parameters()))

    def forward(tokens: Tensor) -> Tensor:
        with _autocast(setting):
            loss: Tensor = wrapped(tokens)
        return loss

    return Contender(
        name=name,
        model=model,
        optimizer=optimizer,
        forward=forward,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
    )


def _fsdp2(name: str, model: GPT, setting: Setting) -> Contender:
    size = dist.get_world_size()
    shape, dimensions = (size,), ("shard",)
    if name == "hsdp":
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        shape, dimensions = (size // here, here), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dimensions)
    policy = MixedPrecisionPolicy()
    if setting.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = _adamw(list(model.parameters()))
    return Contender(
        name=name,
        model=model,
        optimizer=optimizer,
        forward=model,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
    )


def _onecopy(name: str, model: nn.Module, setting: Setting) -> Contender:
    settings = ONECOPY[name]
    optimizer = _adamw(list(model.parameters()))
    onecopy.shard(model, optimizer, precision=setting.dtype, **settings)

    def settle() -> None:
        # Stages 1 and 2 leave updated values under way until they are touched.
        if settings["stage"] in (1, 2):
            for parameter in model.parameters():
                parameter.detach()

    return Contender(
        name=name,
        model=model,
        optimizer=optimizer,
        forward=model,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        settle=settle,
    )
