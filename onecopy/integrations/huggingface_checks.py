"""What a Trainer is told, looked at before any work is done."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn

from onecopy.config import Config
from onecopy.core.dtensors import is_dtensor
from onecopy.errors import ConfigError, ShardingError
from onecopy.integrations.accelerate import refuse_rivals
from onecopy.options import unknown_setting
from onecopy.policies import settings_of

__all__ = ["check_trainer", "take_settings"]


def take_settings(trainer: type, kwargs: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The settings of onecopy among the keyword arguments of a Trainer, and the others.

    Raises:
        ConfigError: an argument is neither onecopy's nor the Trainer's, or a value does not fit.
    """
    known = settings_of(Config)
    own = {name: value for name, value in kwargs.items() if name in known}
    others = {name: value for name, value in kwargs.items() if name not in own}
    config = Config.make(others.pop("config", None), own, f"argument of {trainer.__name__}")
    accepted = _arguments_of(trainer)
    for name in others:
        if accepted is not None and name not in accepted:
            raise unknown_setting(name, {"config", *known, *accepted})
    return config, others


def _arguments_of(trainer: type) -> set[str] | None:
    """Names that the constructors of a class take, None where one takes anything.

    The mixin's own takes anything, and so may those of classes that derive from it.
    """
    names: set[str] = set()
    for base in trainer.__mro__:
        if "__init__" not in vars(base) or base.__module__.startswith("onecopy."):
            continue
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names |= {one.name for one in parameters} - {"self"}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            return names
    return None


def check_trainer(trainer: Any, config: Config) -> None:
    """Refuse what cannot work before anything has changed.

    Raises:
        ConfigError: an argument of the Trainer and onecopy contradict each other.
        ShardingError: the model cannot be sharded.
    """
    _check_rivals(trainer)
    _check_launch(trainer.args)
    _check_model(trainer.model)
    _check_clipping(trainer.args, config)
    _check_optimizer(trainer.args)
    if trainer.args.bf16_full_eval or trainer.args.fp16_full_eval:
        raise ConfigError(
            "TrainingArguments(bf16_full_eval=True), or fp16_full_eval, would convert the sharded "
            'model to evaluate it: leave it out. precision="bf16" of onecopy computes in bf16 in '
            "training and evaluation, with fp32 masters; bf16=True evaluates in autocast"
        )


def _check_rivals(trainer: Any) -> None:
    """Who else would shard or wrap the model."""
    args = trainer.args
    rivals = {
        "DeepSpeed": (trainer.is_deepspeed_enabled, "deepspeed=...", "--use_deepspeed"),
        "FSDP": (trainer.is_fsdp_enabled or args.fsdp, "fsdp=...", "--use_fsdp"),
    }
    for name, (is_asked, argument, flag) in rivals.items():
        if is_asked:
            raise ConfigError(
                f"{name} and onecopy both shard the model: leave TrainingArguments({argument}) and "
                f"{flag} of `accelerate launch` out, and say stage=... to {type(trainer).__name__}"
            )
    refuse_rivals(trainer.accelerator)
    parallelism = args.parallelism_config
    if parallelism is not None and parallelism.total_size > 1:
        raise ConfigError(
            "TrainingArguments(parallelism_config=...) shards by itself: leave it out. Models with "
            "tensor parallelism train in a loop of your own, see docs/tensor-parallel.md"
        )


def _check_launch(args: Any) -> None:
    """The Trainer must know of all ranks: it deals out the data."""
    if args.n_gpu > 1:
        raise ConfigError(
            f"this process sees {args.n_gpu} devices, and the Trainer would copy the model to each "
            f"(DataParallel): start one process for each, torchrun --nproc-per-node={args.n_gpu} "
            "script.py"
        )

    if dist.is_initialized() and dist.get_world_size() != args.world_size:
        raise ConfigError(
            f"the process group has {dist.get_world_size()} ranks, and the Trainer knows of "
            f"{args.world_size}, so all would train on the same data: start the script with "
            "torchrun or onecopy.launch, and leave init_process_group to TrainingArguments"
        )


def _check_model(model: nn.Module) -> None:
    kind = type(model).__name__
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        raise ShardingError(
            f"this {kind} is quantized, and packed weights have no slices: load it without "
            'quantization_config. To send and keep fewer bits, say quantize="zero++" or '
            "Quantize(frozen=...), see docs/slow-networks.md"
        )
    cut = next((name for name, one in model.named_parameters() if is_dtensor(one)), None)
    if cut is not None or getattr(model, "is_distributed_loading_by_transformers", False):
        raise ShardingError(
            f"this {kind} is sharded already, by tp_plan or distributed_config of from_pretrained"
            f"{'' if cut is None else f' ({cut} is a DTensor)'}: load it without them"
        )
    device_map: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    if len(set(device_map.values())) > 1:
        raise ShardingError(
            f"this {kind} is spread over several devices by device_map: load it without "
            "device_map, each rank trains on one device. A model that no device holds is built "
            "inside onecopy.init_sharded(), see docs/large-models.md"
        )


def _check_clipping(args: Any, config: Config) -> None:
    if config.step_in_backward == "two-pass":
        raise ConfigError(
            'step_in_backward="two-pass" needs optimizer.step(closure), and the Trainer calls it '
            "without one: say step_in_backward=True"
        )
    if config.step_in_backward and args.max_grad_norm:
        raise ConfigError(
            f"step_in_backward={config.step_in_backward!r} leaves no gradients to clip after "
            "backward: say TrainingArguments(max_grad_norm=0), and max_grad_norm=... to onecopy, "
            "which clips by the norm of the step before"
        )
    if config.max_grad_norm is not None and not config.step_in_backward:
        raise ConfigError(
            f"max_grad_norm={config.max_grad_norm} of onecopy would clip what the Trainer has "
            "clipped: say it to TrainingArguments(max_grad_norm=...) alone, whose default is 1.0"
        )


def _check_optimizer(args: Any) -> None:
    """Some of the Trainer's update each parameter within backward, and have no step."""
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        raise ConfigError(
            f"TrainingArguments(optim={name!r}) updates parameters by hooks of its own within "
            "backward, before gradients are reduced: choose another optimizer, and say "
            "step_in_backward=True to onecopy, which keeps no gradients either"
        )
