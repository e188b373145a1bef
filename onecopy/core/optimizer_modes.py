"""Optimizers with a mode for training and one for evaluation, whose parameters differ.

Those of Schedule-Free (Defazio et al. 2024) are evaluated at an average of the points at which
gradients are taken: `optimizer.eval()` and `optimizer.train()` change the parameters in place,
outside of any step. On an attached optimizer they change what the rank owns, so models must be
told. A change of mode is seen by the settings of the groups, where these optimizers note it, and
which are the same on all ranks; a call that changes nothing costs nothing.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.core.optimizer import Binding

__all__ = ["show_modes", "unshow_modes"]

MODES = ("train", "eval")


def show_modes(binding: Binding) -> None:
    """Let `train()` and `eval()` of the optimizer, if there are such, reach the parameters."""
    for mode in MODES:
        if callable(getattr(binding.optimizer, mode, None)):
            vars(binding.optimizer)[mode] = partial(_change_mode, weakref.ref(binding), mode)


def unshow_modes(binding: Binding) -> None:
    """Leave the optimizer as it was."""
    for mode in MODES:
        vars(binding.optimizer).pop(mode, None)


def _change_mode(reference: weakref.ref[Binding], mode: str) -> None:
    binding = reference()
    if binding is None:
        return
    optimizer = binding.optimizer
    before = _settings(optimizer.param_groups)
    binding.publish()
    getattr(type(optimizer), mode)(optimizer)
    if _settings(optimizer.param_groups) == before:
        return
    for engine, _ in binding.engines:
        if engine.is_held:
            raise ShardingError(
                f"optimizer.{mode}() inside full_parameters changes masters whose gathered values "
                "are written back afterwards: call it before the block"
            )
        # Units gathered on touch would keep the values from before.
        engine.rest()
    binding.show_values()


def _settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key != "params"} for one in groups]
