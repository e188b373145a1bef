"""Who takes part: each a way to train the same model, with weights of its own from one seed.

Floors train on their own rank's data alone, so their losses are not compared (see floors.py):
    compute     forward and backward
    floor-0     and the bare messages that stage 0 must send, and the update of all parameters
    floor-1     and those of stages 1 and 2, and the update of 1/N of every parameter
    floor-3     and those of stage 3, and the same update

Peers: ddp, zero_redundancy (ZeroRedundancyOptimizer over DDP), fsdp2 (fully_shard on each block and
on the model), fsdp2-keep (with reshard_after_forward=False), and DeepSpeed's stages
(with_deepspeed.py).

Ours: onecopy-0 to onecopy-3, states in host memory or on disk, and quantized transfers.

On several nodes also hsdp (fsdp2, cut inside nodes only) and ours that know nodes, by the names of
the papers; see ONECOPY.

All use `torch.optim.AdamW(fused=True)` and defaults otherwise, but for DDP's
`gradient_as_bucket_view=True`, which is its better side. DeepSpeed's offload has its own CPU Adam.
"""

from __future__ import annotations

import importlib
import os
import time
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

__all__ = [
    "CONTENDERS",
    "FLOORS",
    "LEARNING_RATE",
    "ONECOPY",
    "Contender",
    "Setting",
    "adamw",
    "build",
]

FLOORS = ("compute", "floor-0", "floor-1", "floor-3")
DEEPSPEED = ("deepspeed-1", "deepspeed-2", "deepspeed-3", "deepspeed-3-cpu", "deepspeed-3-nvme")
CONTENDERS = (
    *FLOORS,
    *("ddp", "zero_redundancy", "fsdp2", "fsdp2-keep"),
    *DEEPSPEED,
    *(f"onecopy-{stage}" for stage in range(4)),
    *("onecopy-3-cpu", "onecopy-3-nvme", "qwz", "qgz", "zero++"),
)
LEARNING_RATE = 1e-3
# Settings of shard for each of ours.
ONECOPY: dict[str, dict[str, Any]] = {
    **{f"onecopy-{stage}": {"stage": stage} for stage in range(4)},
    "onecopy-3-cpu": {"stage": 3, "offload": "cpu"},
    "onecopy-3-nvme": {"stage": 3, "offload": "nvme"},
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
    """What is the same for all contenders of a run.

    disk: a folder for states on disk, of those that have any there.
    neighbours: whether ours read from one another, or send: see `onecopy.Config`.
    device: where all compute.
    """

    size: str
    nproc: int
    dtype: str
    micro_batch: int
    context: int
    disk: str = ""
    neighbours: str = "read"
    device: str = "cpu"


@dataclass(slots=True, kw_only=True)
class Contender:
    """One way to train.

    model, optimizer: as the way's own tools for checkpoints take them.
    forward: the loss of a batch of tokens. backward: of that loss.
    step: after backward, the update; zero_grad follows it.
    settle: wait for transfers that the last step has left under way.
    wrap_seconds: from a model in plain PyTorch to one that trains on all ranks.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[Tensor], Tensor]
    step: Callable[[], object]
    zero_grad: Callable[[], object]
    backward: Callable[[Tensor], object] = Tensor.backward
    settle: Callable[[], object] = field(default=lambda: None)
    wrap_seconds: float = 0.0


def build(name: str, setting: Setting) -> Contender:
    """A contender, in the default process group."""
    make = _maker(name)
    # torch.optim and torch's hooks import it when they are first used: start-up is without imports.
    importlib.import_module("torch._dynamo")
    torch.manual_seed(0)
    model = GPT(SIZES[setting.size], setting.context).to(setting.device)
    if dist.get_world_size() > 1:
        dist.barrier()
    begin = time.perf_counter()
    contender = make(name, model, setting)
    contender.wrap_seconds = time.perf_counter() - begin
    return contender


def _maker(name: str) -> Callable[[str, GPT, Setting], Contender]:
    # Imported here: neither takes part in all benchmarks, and DeepSpeed takes long to import.
    if name in FLOORS:
        from benchmarks.floors import floor

        return floor
    if name in DEEPSPEED:
        from benchmarks import with_deepspeed

        with_deepspeed.prepare(name)
        return with_deepspeed.deepspeed_contender
    if name in ("fsdp2", "fsdp2-keep", "hsdp"):
        return _fsdp2
    if name in ("ddp", "zero_redundancy"):
        return _ddp
    importlib.import_module("onecopy.api")
    return _onecopy


def adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Everybody's optimizer."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _autocast(setting: Setting) -> AbstractContextManager[object]:
    if setting.dtype == "fp32":
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16)


def _ddp(name: str, model: nn.Module, setting: Setting) -> Contender:
    """In bf16 under autocast, as users of DDP do; gradients travel in fp32 then."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if name == "zero_redundancy":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True
        )
    else:
        optimizer = adamw(list(model.parameters()))

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
    # None is torch's default: all but the root give their parameters back after forward.
    reshard = False if name == "fsdp2-keep" else None
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = adamw(list(model.parameters()))
    return Contender(
        name=name,
        model=model,
        optimizer=optimizer,
        forward=model,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
    )


def _onecopy(name: str, model: nn.Module, setting: Setting) -> Contender:
    settings = dict(ONECOPY[name])
    if settings.get("offload") == "nvme":
        settings["offload"] = f"nvme:{setting.disk}"
    optimizer = adamw(list(model.parameters()))
    settings |= {"precision": setting.dtype, "neighbours": setting.neighbours}
    onecopy.shard(model, optimizer, **settings)

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
