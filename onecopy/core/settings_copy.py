"""The settings of an optimizer as they were at one moment, and whether they still are.

By value: a learning rate may be a tensor that a scheduler changes in place.
"""

from __future__ import annotations

import types
from enum import Enum
from typing import Any

import torch

__all__ = ["SettingsCopy", "UnfitError", "copy_of_groups", "is_same"]

# Attributes of every optimizer that its update rule does not read, or that others put there: hooks,
# schedulers, gradient scalers, and onecopy itself.
_NOT_ITS_OWN = frozenset(
    "state param_groups step zero_grad grad_scale found_inf _opt_called _step_count "
    "_hook_for_profile _zero_grad_profile_name _warned_capturable_if_run_uncaptured "
    "_step_supports_amp_scaling".split()
)
_HOOKS = "_optimizer_"
# What cannot change.
_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    range,
    Enum,
    torch.dtype,
    torch.device,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
)


class UnfitError(Exception):
    """An optimizer whose updates cannot be made ahead; the message says what it does."""


class SettingsCopy:
    """Those of the groups, and the attributes of the optimizer's own.

    Raises:
        UnfitError: one is an object that may change without a trace.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = copy_of_groups(optimizer)
        self.attributes: dict[str, Any] = _copied(_attributes_of(optimizer), "attributes")

    def copied(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Groups and attributes once more, for somebody who may change them."""
        return _copied(self.groups, "param_groups"), _copied(self.attributes, "attributes")

    def are(self, groups: list[dict[str, Any]], attributes: dict[str, Any]) -> bool:
        """Whether others are the same, to the last bit."""
        return is_same(self.groups, groups) and is_same(self.attributes, attributes)

    def are_those_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer still has them."""
        return self.are(_groups_of(optimizer), _attributes_of(optimizer))


def copy_of_groups(
    optimizer: torch.optim.Optimizer, *, refuses: bool = True
) -> list[dict[str, Any]]:
    """The settings of each group, without its parameters.

    Args:
        refuses: raise UnfitError where one is an object that may change without a trace; else that
            is the optimizer's own.
    """
    return _copied(_groups_of(optimizer), "param_groups", refuses=refuses)  # type: ignore[no-any-return]


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NOT_ITS_OWN and not name.startswith(_HOOKS)
    }


def _copied(value: Any, place: str, *, refuses: bool = True) -> Any:
    if type(value) is torch.Tensor:
        return value.detach().clone()
    if type(value) is dict:
        return {
            key: _copied(item, f"{place}[{key!r}]", refuses=refuses) for key, item in value.items()
        }
    if type(value) in (list, tuple):
        items = enumerate(value)
        return type(value)(_copied(item, f"{place}[{n}]", refuses=refuses) for n, item in items)
    if isinstance(value, _VALUES) or not refuses:
        return value
    raise UnfitError(f"it has a {type(value).__name__} in {place}, whose changes cannot be seen")


def is_same(one: Any, other: Any) -> bool:
    """Whether two settings, or two numbers of an optimizer's state, are equal to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            return False
        bits = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return torch.equal(*bits)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float):
        return one.hex() == float(other).hex()
    return one is other or bool(one == other)
