"""Settings of optimizers' parameter groups, with names in the place of parameters.

Where ranks have other parameters (pipeline stages), each has groups of its own. A checkpoint has
those of the whole model: groups of the same number with the same settings become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from onecopy.checkpoint.naming import Named, NamedOptimizer, Path

__all__ = ["NAMES", "SavedGroups", "are_equal", "groups_of", "joined"]

# Settings that say which parameters there are.
NAMES = ("params", "param_names")

# By the optimizer's path its groups, in order.
SavedGroups = dict["Path", list[dict[str, Any]]]


def groups_of(named: Named) -> SavedGroups:
    """The groups of this rank's optimizers."""
    return joined({one.path: _groups_of(named, one)} for one in named.optimizers)


def _groups_of(named: Named, optimizer: NamedOptimizer) -> list[dict[str, Any]]:
    binding, found = optimizer.binding, []
    groups = zip(binding.optimizer.param_groups, binding.parameters, binding.names, strict=True)
    for group, parameters, given in groups:
        settings = {key: _on_host(value) for key, value in group.items() if key not in NAMES}
        names = [named.name_of(parameter) for parameter in parameters]
        settings["params"] = list(dict.fromkeys(names))
        if given is not None:
            # All of them, where the group itself has those of this rank's pieces.
            settings["param_names"] = [
                given[names.index(name)] if names.count(name) == 1 else name
                for name in settings["params"]
            ]
        found.append(settings)
    return found


def _on_host(value: Any) -> Any:
    """Tensors as other ranks can take them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return type(value)(map(_on_host, value)) if type(value) in (list, tuple) else value


def joined(everyone: Iterable[SavedGroups]) -> SavedGroups:
    """The groups of the whole model: those of the first rank, and what the others have besides."""
    whole: SavedGroups = {}
    for theirs in everyone:
        for path, groups in theirs.items():
            found = whole.setdefault(path, [])
            taken: set[int] = set()
            for number, group in enumerate(groups):
                taken.add(_join(found, number, group, taken))
    return whole


def _join(found: list[dict[str, Any]], number: int, group: dict[str, Any], taken: set[int]) -> int:
    """Add a group to the one that it is a part of, or as another one; the number that it has."""
    candidates = [number, *(one for one in range(len(found)) if one != number)]
    for one in candidates:
        if one < len(found) and one not in taken and are_equal(_rest(found[one]), _rest(group)):
            _add_parameters(found[one], group)
            return one
    found.append({**group, **{key: list(group[key]) for key in NAMES if key in group}})
    return len(found) - 1


def _add_parameters(whole: dict[str, Any], group: dict[str, Any]) -> None:
    new = [place for place, name in enumerate(group["params"]) if name not in whole["params"]]
    for key in NAMES:
        if key in whole and key in group:
            whole[key] += [group[key][place] for place in new]


def _rest(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NAMES}


def are_equal(first: Any, second: Any) -> bool:
    """Whether settings are the same; tensors by their values."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        both = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return both and torch.equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(are_equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(are_equal(*pair) for pair in pairs)
    return bool(first == second)
