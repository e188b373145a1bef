"""What `state_dict()` and `load_state_dict()` mean on a sharded model.

`state_dict()` gives whole tensors of their own: the values that the optimizer updates, so the
masters where the model computes in a lower dtype. `load_state_dict()` writes to the masters what
it is given, at full precision; the gathered values are only its rounding. All ranks must call
either one together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.core.views import view_of
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["add_state_dict_hooks"]


def add_state_dict_hooks(model: nn.Module, engine: Engine) -> list[RemovableHandle]:
    """Put the hooks on a sharded model; returns their handles."""
    loaded: list[tuple[Mapping[str, Any], str]] = []

    def after_saving(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        with torch.no_grad():
            for unit in engine.units:
                _replace_views(state, unit)
        engine.end_hook_hold()

    def before_loading(module: nn.Module, state: Any, prefix: str, info: Any, *_: Any) -> None:
        if info.get("assign_to_params_buffers"):
            raise ShardingError(
                "load_state_dict(assign=True) would replace the parameters of a sharded model by "
                "others that are neither trained nor saved: load with assign=False"
            )
        engine.begin_hook_hold()
        loaded[:] = [(state, prefix)]

    def after_loading(module: nn.Module, _: Any) -> None:
        (state, prefix), loaded[:] = loaded[0], []
        with torch.no_grad():
            for unit in engine.units:
                unit.take_values()
            for name, parameter in module.named_parameters(remove_duplicate=False):
                found, value = engine.find(parameter), state.get(prefix + name)
                if found is not None and isinstance(value, torch.Tensor):
                    found[0].load_master(found[1], value)
        engine.end_hook_hold()

    return [
        model.register_state_dict_pre_hook(engine.begin_hook_hold),
        model.register_state_dict_post_hook(after_saving),
        model.register_load_state_dict_pre_hook(before_loading),
        model.register_load_state_dict_post_hook(after_loading),
    ]


def _replace_views(state: dict[str, Any], unit: Unit) -> None:
    """Views of the flat buffer would be released, and saved with the whole buffer: copies."""
    storage = unit.flat.untyped_storage()._cdata
    views = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and not isinstance(value, nn.Parameter)
        and value.layout is torch.strided
        and value.untyped_storage()._cdata == storage
    }
    places = {
        (start, parameter.size()): index
        for index, (start, parameter) in enumerate(
            zip(unit.layout.starts, unit.parameters, strict=True)
        )
    }
    whole = unit.gather_master()
    for name, view in views.items():
        index = places.get((int(view.storage_offset()), view.size()))
        if index is not None:
            view = view_of(whole, unit.layout.starts[index], unit.parameters[index])
        state[name] = view.clone()
