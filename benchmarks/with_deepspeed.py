"""DeepSpeed as a contender; it is no dependency of anything here, see README.md for installing it.

Three settings make the comparison fair. `gradient_clipping` is said, since a configuration without
it may clip. At stage 3 all limits below which DeepSpeed keeps parameters gathered are 0: a small
model would lie within them whole, and would not be cut at all. And its buffers for messages, 2 GB
by default, are not longer than the model: more would only be memory that is never used.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from torch import nn

from benchmarks.contenders import LEARNING_RATE, Contender, Setting, adamw
from benchmarks.formula import num_parameters

__all__ = ["deepspeed_contender", "is_installed", "prepare", "reason_against_nvme"]

# torch's default, which DeepSpeed's own Adam does not share.
WEIGHT_DECAY = 0.01
DEFAULT_BUCKET_NUMEL = 500_000_000


def is_installed() -> bool:
    """Whether DeepSpeed can be imported; it is not tried, as that takes seconds."""
    return importlib.util.find_spec("deepspeed") is not None


def reason_against_nvme() -> str:
    """Why its operation for disks cannot be built here; empty where it can."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    return "" if builder.is_compatible(verbose=False) else "libaio is missing (libaio-dev)"


def deepspeed_contender(name: str, model: nn.Module, setting: Setting) -> Contender:
    """`deepspeed.initialize` at a stage, with its defaults but for what the file's head says."""
    import deepspeed

    config = _config(name, setting)
    optimizer = adamw(list(model.parameters()))
    if "offload_optimizer" in config["zero_optimization"]:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
    engine, made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return Contender(
        name=name,
        model=engine,
        optimizer=made,
        forward=engine,
        backward=engine.backward,
        step=engine.step,
        zero_grad=lambda: None,  # its step does it
    )


def prepare(name: str) -> None:
    """Import it and build its operations, which no start-up time is to contain."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.utils

    deepspeed.utils.logger.setLevel("ERROR")
    if name.endswith(("-cpu", "-nvme")):
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
    if name.endswith("-nvme"):
        from deepspeed.ops.op_builder import AsyncIOBuilder

        AsyncIOBuilder().load(verbose=False)


def _config(name: str, setting: Setting) -> dict[str, Any]:
    _, stage, *tier = name.split("-")
    longest = min(DEFAULT_BUCKET_NUMEL, num_parameters(setting))
    zero: dict[str, Any] = {
        "stage": int(stage),
        "reduce_bucket_size": longest,
        "allgather_bucket_size": longest,
    }
    if zero["stage"] == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
    for place in tier:
        away = {"device": place, "pin_memory": False}
        if place == "nvme":
            away["nvme_path"] = setting.disk
        zero |= {"offload_optimizer": away, "offload_param": dict(away)}
    return {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "bf16": {"enabled": setting.dtype == "bf16"},
        "wall_clock_breakdown": False,
        "steps_per_print": 1 << 30,
    }
