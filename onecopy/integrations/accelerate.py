"""Accelerate: `prepare` in the place of `accelerator.prepare`, and a script stays as it is.

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, stage=3)

Accelerate knows its ways to shard by name and has no place for others. But a model that it has
prepared once is left alone, and its preparation for evaluation does all that is wanted here (mixed
precision, `torch.compile`) without putting DistributedDataParallel around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onecopy.errors import ConfigError
from onecopy.extras import require

require("accelerate", "onecopy.integrations.accelerate")

from accelerate.utils import DistributedType  # noqa: E402

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

__all__ = ["adopt"]

# Who else would shard, or wrap the model, and what to do about each.
RIVALS = {
    DistributedType.DEEPSPEED: "without its DeepSpeed plugin (no --use_deepspeed)",
    DistributedType.FSDP: "without its FSDP plugin (no --use_fsdp)",
    DistributedType.MEGATRON_LM: "without its Megatron-LM plugin (no --use_megatron_lm)",
    DistributedType.XLA: "on CPUs or GPUs: onecopy does not run on XLA devices",
}


def adopt(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Tell an accelerator of a sharded model, which it then treats as one that it has prepared.

    It gets what the accelerator is set to (autocast for mixed precision, `torch.compile`), and
    `accelerator.prepare` returns it unchanged from now on.

    Returns:
        the model; compiled where the accelerator compiles.

    Raises:
        ConfigError: the accelerator would shard the model another way.
    """
    refuse_rivals(accelerator)
    prepared: nn.Module = accelerator.prepare_model(
        model, device_placement=False, evaluation_mode=True
    )
    return prepared


def refuse_rivals(accelerator: Accelerator) -> None:
    """Raises ConfigError where the accelerator itself would shard models, or change their layers.

    Before anything is sharded, so that nothing is half done.
    """
    remedy = RIVALS.get(accelerator.distributed_type)
    if remedy is not None:
        raise ConfigError(
            f"this accelerator is set to {accelerator.distributed_type.value}, and onecopy shards "
            f"by itself: make the Accelerator {remedy}, or run `accelerate config` again"
        )
    if accelerator.mixed_precision == "fp8":
        raise ConfigError(
            'Accelerator(mixed_precision="fp8") replaces layers of the model, which onecopy does '
            'not support: use "bf16" or "fp16", or precision="bf16" of onecopy'
        )
    parallelism = accelerator.parallelism_config
    if parallelism is not None and parallelism.total_size > 1:
        raise ConfigError(
            "Accelerator(parallelism_config=...) shards by itself: leave it out, and give the "
            "device mesh of the job to onecopy: prepare(..., mesh=mesh)"
        )
