"""What `state_dict()` and `load_state_dict()` mean on a sharded model.

`state_dict()` gives whole tensors of their own, in host memory: the values that the optimizer
updates, so the masters where the model computes in a lower dtype. `load_state_dict()` writes to the
masters what it is given, at full precision; the gathered values are only its rounding. All ranks
must call either one together.

Both go module by module, as torch does: at stage 3 reading or writing a parameter gathers its unit
(see touch.py), and the next one's releases it, so that no rank ever holds the whole model on its
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy import handle
from onecopy.core.dtensors import is_dtensor, like, local_of
from onecopy.errors import ShardingError
from onecopy.handle import NotCopied

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from onecopy.core.engine import Engine

__all__ = ["add_state_dict_hooks", "whole_state_dict"]


def add_state_dict_hooks(model: nn.Module, engine: Engine) -> list[RemovableHandle]:
    """Put the hooks on a sharded model; returns their handles."""
    hooks = _StateDictHooks(engine)

    def flush(*_: Any) -> None:
        engine.flush()

    # Partials, since torch marks a hook by an attribute, which a method cannot have.
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if module._parameters:
            handles += [
                module.register_state_dict_pre_hook(flush),
                module.register_load_state_dict_pre_hook(flush),
                module.register_state_dict_post_hook(partial(hooks.after_saving)),
                module.register_load_state_dict_pre_hook(hooks.before_loading),
                module.register_load_state_dict_post_hook(hooks.after_loading),
            ]
    handles.append(model.register_state_dict_post_hook(partial(hooks.after_saving_all)))
    return handles


def whole_state_dict(
    model: nn.Module, *, keep: bool, wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, Any]:
    """`model.state_dict()` where this rank keeps it; elsewhere it takes part, and keeps nothing.

    For files that one rank writes: the others need no host memory for them.

    Args:
        keep: without it the values of parameters are dropped one by one, and what is returned is
            empty.
        wanted: tells by the name which tensors are to be there.
    """
    engine: Engine = handle.of(model).engine
    engine.kept_in_state_dict = lambda name: keep and wanted(name)
    try:
        state: dict[str, Any] = model.state_dict()
    finally:
        engine.kept_in_state_dict = None
    return {name: value for name, value in state.items() if wanted(name)} if keep else {}


class _StateDictHooks(NotCopied):
    """The hooks of one model, each called with one module."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # What each module is being given, and the prefix of its names there.
        self._loaded: dict[nn.Module, tuple[Mapping[str, Any], str]] = {}

    def after_saving(
        self, module: nn.Module, state: dict[str, Any], prefix: str, info: Any
    ) -> None:
        """Put copies in the place of one module's gathered parameters."""
        for key, parameter in module._parameters.items():
            value = state.get(prefix + key)
            found = None if parameter is None else self._engine.find(parameter)
            if parameter is None or found is None:
                continue
            if not isinstance(value, torch.Tensor) or value is parameter:
                continue
            unit, index = found
            # Code of the model's own may have put something else there.
            if unit.is_value_of(index, value):
                # Another unit of this module may have been touched since.
                self._engine.touch.touch([parameter], torch.Tensor.detach)
                whole = unit.gather_value(index)
                if is_dtensor(parameter):
                    # This rank's part, on the device of its mesh.
                    state[prefix + key] = like(parameter, whole)
                else:
                    keeps = self._engine.kept_in_state_dict
                    is_kept = keeps is None or keeps(prefix + key)
                    state[prefix + key] = whole.to("cpu" if is_kept else "meta")

    def after_saving_all(
        self, module: nn.Module, state: dict[str, Any], prefix: str, info: Any
    ) -> None:
        """Other views of flat buffers would be released, and saved with the whole buffer."""
        storages = {unit.flat.untyped_storage()._cdata for unit in self._engine.units}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                local = local_of(value)
                if local.layout is torch.strided and local.untyped_storage()._cdata in storages:
                    state[name] = value.clone()

    def before_loading(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, info: Any, *_: Any
    ) -> None:
        """Remember what this module is given."""
        if info.get("assign_to_params_buffers"):
            raise ShardingError(
                "load_state_dict(assign=True) would replace the parameters of a sharded model by "
                "others that are neither trained nor saved: load with assign=False"
            )
        self._loaded[module] = (state, prefix)

    def after_loading(self, module: nn.Module, _: Any) -> None:
        """Bring to the masters what the gathered parameters had to round."""
        state, prefix = self._loaded.pop(module, ({}, ""))
        with torch.no_grad():
            for key, parameter in module._parameters.items():
                found = None if parameter is None else self._engine.find(parameter)
                value = state.get(prefix + key)
                if found is not None and isinstance(value, torch.Tensor):
                    found[0].load_master(found[1], value)
