"""copy.deepcopy of a sharded model: a plain model with full values, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.core.build import point
from onecopy.core.dtensors import local_of
from onecopy.core.views import view_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from onecopy.core.engine import Engine

__all__ = ["copy_plain"]

_HOOKS = (
    "_forward_pre_hooks _forward_pre_hooks_with_kwargs _forward_hooks _forward_hooks_with_kwargs "
    "_forward_hooks_always_called _state_dict_pre_hooks _state_dict_hooks "
    "_load_state_dict_pre_hooks _load_state_dict_post_hooks"
).split()


def copy_plain(
    engine: Engine,
    attributes: Collection[str],
    handles: Iterable[RemovableHandle],
    memo: dict[int, Any],
) -> nn.Module:
    """What `copy.deepcopy` makes of the engine's model; a collective, like every gather.

    Parameters get the values of the masters, in their dtype.

    Args:
        attributes: what shard has set on the model itself; the copy has none of it.
        handles: of the hooks that shard has registered; the copy has none of them.
        memo: of the deepcopy that is running.
    """
    model = engine.model
    numbers = {handle.id for handle in handles}
    own = {name: vars(model).pop(name) for name in attributes if name in vars(model)}
    for module in model.modules():
        for hooks in _hooks_of(module):
            # In place of ours the copy gets None, which is taken out below. (Some of the dicts hold
            # flags, and True is everybody's.)
            ours = [hook for number, hook in hooks.items() if number in numbers and callable(hook)]
            memo.update((id(hook), None) for hook in ours)
    try:
        with engine.hold():
            copied: nn.Module = copy.deepcopy(model, memo)
            _take_masters(engine, memo)
    finally:
        vars(model).update(own)
    for module in copied.modules():
        for hooks in _hooks_of(module):
            for number in numbers & hooks.keys():
                del hooks[number]
    return copied


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [found for name in _HOOKS if (found := vars(module).get(name))]


def _take_masters(engine: Engine, memo: dict[int, Any]) -> None:
    """Where the gathered values are rounded to the compute dtype, take the masters'."""
    for unit in engine.units:
        if unit.dtypes.master == unit.dtypes.compute:
            continue
        whole = unit.gather_master()
        unit.slice.rest()
        for start, parameter in zip(unit.layout.starts, unit.parameters, strict=True):
            with torch.no_grad():
                point(memo[id(parameter)], view_of(whole, start, local_of(parameter)).clone())
