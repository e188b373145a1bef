"""What `shard` is given: refused with a remedy before anything has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from onecopy import handle
from onecopy.core.dtensors import check_dtensor, is_dtensor
from onecopy.core.hooks import is_hooked
from onecopy.core.optimizer import refuse_strangers
from onecopy.core.tiling import refuse_replaced
from onecopy.core.update_rules import check_optimizer
from onecopy.errors import ConfigError, ShardingError

if TYPE_CHECKING:
    from onecopy.config import Config

__all__ = [
    "IGNORED_BY_DDP",
    "NotForDDP",
    "check_models",
    "check_modules",
    "check_settings",
    "describe_optimizer",
]

CALL = "the call is shard(model, optimizer, stage=...)"
# By the name of the class, as some are from packages that need not be there.
WRAPPERS = {
    "DistributedDataParallel": "averages gradients itself: pass the model inside, wrapper.module, "
    "and do not wrap it; stage 0 is what it does",
    "DataParallel": "copies the model in each forward: pass the model inside, wrapper.module, and "
    "start one process for each device with torchrun",
    "FullyShardedDataParallel": "has cut the model's states already: build the model without it, "
    "and shard that; its ShardingStrategy is stage here (docs/from-fsdp.md)",
    "FSDPModule": "is what fully_shard has made, which has cut the model's states already: build "
    "the model without that call, and shard it (docs/from-fsdp.md)",
    "DeepSpeedEngine": "has taken the model already: pass the model that deepspeed.initialize was "
    "given, without that call (docs/from-deepspeed.md)",
}

# Where DistributedDataParallel looks, when it is made, for names of parameters to leave alone.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


class NotForDDP:
    """Stands at a sharded model under the name `IGNORED_BY_DDP`, and refuses to be looked at.

    Wrapped all the same, the model would send its gradients twice, and fail in its second backward,
    with an error that does not name the wrapper.
    """

    def __iter__(self) -> Iterator[str]:
        raise ShardingError(
            "a sharded model was given to DistributedDataParallel (by accelerator.prepare or a "
            "trainer, if not by the script): use it as it is, its gradients are averaged already. "
            "In Accelerate, Lightning and the Trainer say so through onecopy.integrations, see "
            "docs/accelerate.md, docs/lightning.md and docs/trainer.md"
        )


def check_models(models: Sequence[object], optimizers: Sequence[Optimizer]) -> None:
    """Refuse what are no models and no optimizers, and those that do not belong together.

    Raises:
        ShardingError: says which, and what was most likely meant.
    """
    for one in models:
        _check_model(one)
    for optimizer in optimizers:
        check_optimizer(optimizer)
        refuse_replaced(optimizer)
    if len({id(one) for one in optimizers}) < len(optimizers):
        raise ShardingError("the same optimizer is passed twice: pass it once")
    modules = [one for one in models if isinstance(one, nn.Module)]
    parameters = {id(parameter) for one in modules for parameter in one.parameters()}
    for optimizer in optimizers:
        _refuse_attached(modules, optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if held and not any(id(parameter) in parameters for parameter in held):
            raise ShardingError(
                f"the {type(optimizer).__name__} holds parameters of none of the given models: it "
                "was made for another one, or before this one was copied or its parameters were "
                "replaced. Make it from model.parameters() and pass both to shard"
            )
        refuse_strangers(optimizer.param_groups, lambda one: id(one) in parameters)


def check_modules(models: Sequence[nn.Module]) -> None:
    """Refuse models that cannot be laid out anew.

    Raises:
        ShardingError: a part is sharded or wrapped already, belongs to two models, or has no
            parameters, or gradients.
    """
    seen: dict[int, nn.Module] = {}
    for one in models:
        for name, module in one.named_modules():
            if handle.find(module) is not None:
                raise ShardingError(
                    f"module {name} of this {type(one).__name__} is sharded already: shard the "
                    "whole model once, or pass the parts one by one"
                )
            _refuse_wrapper(name, module)
        if not any(parameter.numel() for parameter in one.parameters()):
            raise ShardingError(f"this {type(one).__name__} has no parameters to shard")
        for name, parameter in one.named_parameters():
            if seen.setdefault(id(parameter), one) is not one or is_hooked(parameter):
                raise ShardingError(
                    f"parameter {name} of this {type(one).__name__} belongs to another sharded "
                    "model too, and can be laid out in one only: put both models into one module "
                    "(nn.ModuleList([a, b])) and shard that"
                )
            if is_dtensor(parameter):
                check_dtensor(name, parameter)
            if parameter.grad is not None:
                raise ShardingError(
                    f"parameter {name} already has a gradient, which a step after shard would not "
                    "see: call optimizer.zero_grad() before shard"
                )


def check_settings(model: nn.Module, config: Config, settings: Mapping[str, Any]) -> None:
    """Refuse settings of a call that only attaches, where they are others than those in force.

    Raises:
        ConfigError: names the first that differs.
    """
    in_force: Config = handle.of(model).engine.config
    for name in settings:
        asked, there = getattr(config, name), getattr(in_force, name)
        # In the place of "auto" what was chosen is in force, and memory has done its part.
        if asked not in ("auto", there) and not (config.is_auto and name == "memory"):
            raise ConfigError(
                f"this {type(model).__name__} is sharded with {name}={there!r}, and a further call "
                f"of shard only attaches optimizers: leave {name}={asked!r} out, or call "
                "onecopy.unshard(model) first to partition it anew"
            )


def describe_optimizer(optimizer: Optimizer) -> str:
    """What ranks must agree on: each steps a part of every parameter, by the same rule."""
    groups = []
    for group in optimizer.param_groups:
        plain = {
            name: value
            for name, value in group.items()
            if isinstance(value, int | float | str | None) or _are_numbers(value)
        }
        said = ", ".join(f"{name}={plain[name]!r}" for name in sorted(plain))
        groups.append(f"{len(group['params'])} parameters ({said})")
    return f"{type(optimizer).__name__} of {'; '.join(groups)}"


def _are_numbers(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(one, int | float) for one in value)


def _check_model(one: object) -> None:
    if isinstance(one, nn.Module):
        return
    if isinstance(one, Optimizer):
        raise ShardingError(
            f"the model is of class {type(one).__name__}, an optimizer: the model comes first, "
            f"{CALL}"
        )
    if isinstance(one, nn.Parameter):
        raise ShardingError(f"shard takes the model, not its parameters: {CALL}")
    if isinstance(one, type):
        raise ShardingError(
            f"the model is the class {one.__name__} itself: make a model of it, as in "
            f"model = {one.__name__}(...); {CALL}"
        )
    raise ShardingError(f"the model is a {type(one).__name__}, not a torch.nn.Module: {CALL}")


def _refuse_wrapper(name: str, module: nn.Module) -> None:
    for kind in type(module).__mro__:
        if kind.__name__ in WRAPPERS and kind.__module__.partition(".")[0] in (
            "torch",
            "deepspeed",
        ):
            what = f"module {name} of the model" if name else "the model"
            raise ShardingError(f"{what} is a {kind.__name__}, which {WRAPPERS[kind.__name__]}")


def _refuse_attached(models: Sequence[nn.Module], optimizer: Optimizer) -> None:
    for one in models:
        owner = handle.find(one)
        if owner is not None and any(b.optimizer is optimizer for b in owner.bindings):
            raise ShardingError(
                f"this {type(optimizer).__name__} is attached to this {type(one).__name__} "
                "already: one call of shard is enough. After loading a state, or in a second phase "
                "of training, both just go on"
            )
