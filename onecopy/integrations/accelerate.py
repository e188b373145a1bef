"""Accelerate: `prepare` in the place of `accelerator.prepare`, and a script stays as it is.

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, stage=3)

Accelerate knows its ways to shard by name and has no place for others. But a model that it has
prepared once is left alone, and its preparation for evaluation does all that is wanted here (mixed
precision, `torch.compile`) without putting DistributedDataParallel around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy import handle
from onecopy.api import shard
from onecopy.core import build
from onecopy.errors import ConfigError
from onecopy.extras import require

require("accelerate", "onecopy.integrations.accelerate")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from onecopy.integrations.accelerate_states import take_over  # noqa: E402

if TYPE_CHECKING:
    from accelerate import Accelerator

    from onecopy.core.optimizer import Binding

__all__ = ["adopt", "prepare"]

# Who else would shard, or wrap the model, and what to do about each.
RIVALS = {
    DistributedType.DEEPSPEED: "without its DeepSpeed plugin (no --use_deepspeed)",
    DistributedType.FSDP: "without its FSDP plugin (no --use_fsdp)",
    DistributedType.MEGATRON_LM: "without its Megatron-LM plugin (no --use_megatron_lm)",
    DistributedType.XLA: "on CPUs or GPUs: onecopy does not run on XLA devices",
}


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    device_placement: Sequence[bool | None] | None = None,
    **settings: Any,
) -> Any:
    """Shard the models among these objects, and prepare all of them for an Accelerate script.

    The call for `accelerator.prepare(*objects)`, with the same result: one object, or a tuple in
    the order given; models, optimizers, schedulers and data loaders in any number, anything else as
    it is. Models are sharded together with the optimizers that have their parameters, in place, and
    keep their class. Optimizers may also come in a later call than their models. All ranks must
    call it together.

    Args:
        accelerator: an `accelerate.Accelerator` without a plugin that shards.
        device_placement: for each object whether to move it to the accelerator's device; None asks
            the accelerator.
        **settings: those of `onecopy.shard`: stage, precision, mesh, ..., or config.

    Raises:
        ConfigError: the accelerator would shard models itself; or see `onecopy.shard`.
        ShardingError, MismatchError: see `onecopy.shard`.
    """
    refuse_rivals(accelerator)
    places = list(device_placement or [None] * len(objects))
    if len(places) != len(objects):
        raise ConfigError(
            f"device_placement has {len(places)} entries for {len(objects)} objects: give one each"
        )
    models = [one for one in objects if isinstance(one, nn.Module)]
    for one, place in zip(objects, places, strict=True):
        if isinstance(one, nn.Module) and (
            accelerator.device_placement if place is None else place
        ):
            _move(one, accelerator.device)
    optimizers = [plain(one) for one in objects if isinstance(one, torch.optim.Optimizer)]
    known = [one for one in accelerator._models if handle.find(one) is not None]
    distinct = {id(handle.inner(one)): handle.inner(one) for one in [*models, *known]}
    for its_models, its_optimizers in _groups(list(distinct.values()), optimizers):
        if any(handle.find(one) is None for one in its_models) or its_optimizers:
            shard(its_models, its_optimizers, **settings)
    adopted = {id(one): adopt(accelerator, one) for one in models}
    others = [pair for pair in zip(objects, places, strict=True) if id(pair[0]) not in adopted]
    rest = iter(_prepare_others(accelerator, others))
    result = tuple(adopted[id(one)] if id(one) in adopted else next(rest) for one in objects)
    return result if len(result) != 1 else result[0]


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
    take_over(accelerator)
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


def plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, where Accelerate has put a wrapper around it."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _move(model: nn.Module, device: torch.device) -> None:
    """To the device of the accelerator; what has no values yet goes there when it is sharded."""
    if handle.find(model) is None and not any(build.unmade(model)):
        model.to(device)


def _groups(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[list[nn.Module], list[torch.optim.Optimizer]]]:
    """Models that share an optimizer, together; a model without any alone.

    Optimizers that are attached already are left out, and so is what belongs to no model, of which
    `shard` is told with the first group.
    """
    groups: list[tuple[list[nn.Module], list[torch.optim.Optimizer]]] = [([m], []) for m in models]
    for optimizer in optimizers:
        if any(binding_of(one, optimizer) for one in models):
            continue
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        its = [g for g in groups if any(id(p) in held for one in g[0] for p in one.parameters())]
        if not its:
            its = groups[:1]
        groups = [group for group in groups if group not in its]
        merged = ([one for g in its for one in g[0]], [one for g in its for one in g[1]])
        groups.append((merged[0], [*merged[1], optimizer]))
    return groups


def binding_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Binding | None:
    """What attaches an optimizer to a sharded model."""
    owner = handle.find(model)
    bindings: list[Binding] = [] if owner is None else owner.bindings
    return next((one for one in bindings if one.optimizer is optimizer), None)


def _prepare_others(accelerator: Accelerator, others: Sequence[tuple[Any, bool | None]]) -> Any:
    """What Accelerate makes of objects that are no models."""
    if not others:
        return ()
    prepared = accelerator.prepare(
        *(one for one, _ in others), device_placement=[place for _, place in others]
    )
    result = prepared if len(others) > 1 else (prepared,)
    for one in result:
        if isinstance(one, AcceleratedOptimizer):
            _tell_skipped_steps(accelerator, one)
    return result


def _tell_skipped_steps(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    """Let Accelerate know of steps that an overflow in fp16 has skipped, so that schedulers wait.

    It would take a call of `step` for a step that was made.
    """
    inner = plain(optimizer)
    binding = next(filter(None, (binding_of(m, inner) for m in accelerator._models)), None)
    if binding is None:
        return

    def after_step(*_: Any) -> None:
        # The first is read where there is no GradScaler, the second where there is.
        optimizer._is_overflow = binding.is_skipped
        optimizer._accelerate_step_called = not binding.is_skipped

    inner.register_step_post_hook(after_step)
