"""How many tensors of a parameter's size a real optimizer keeps, before it has made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["USUAL_STATES", "groups_of", "num_states"]

# Of an optimizer that is not known, or not there yet: as many as Adam's.
USUAL_STATES = 2

# By the class in torch.optim and the settings of a group. Adafactor's are at most so many: moments
# of a matrix are a row and a column.
_STATES: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "ASGD": lambda _: 1,
    "Adadelta": lambda _: 2,
    "Adafactor": lambda _: 1,
    "Adagrad": lambda _: 1,
    "Adam": lambda group: 3 if group.get("amsgrad") else 2,
    "Adamax": lambda _: 2,
    "Muon": lambda _: 1,
    "NAdam": lambda _: 2,
    "RAdam": lambda _: 2,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Rprop": lambda _: 2,
    "SGD": lambda group: int(bool(group.get("momentum"))),
}


def groups_of(optimizer: torch.optim.Optimizer | None) -> dict[int, Mapping[str, Any]]:
    """The group of each parameter, by the parameter's id."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(one): group for group in groups for one in group["params"]}


def num_states(
    optimizer: torch.optim.Optimizer | None,
    parameters: list[torch.nn.Parameter],
    group_of: Mapping[int, Mapping[str, Any]] | None = None,
) -> tuple[int, bool]:
    """Tensors that it will keep for each of these parameters, at most, and whether that is known.

    Of classes that are not torch.optim's, or derived from one, what is there already is counted;
    where nothing is, `USUAL_STATES` are assumed.

    Args:
        group_of: what `groups_of` says of the optimizer, where it is asked about for many units.
    """
    if optimizer is None:
        return USUAL_STATES, False
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _STATES:
            rule = _STATES[kind.__name__]
            group_of = groups_of(optimizer) if group_of is None else group_of
            found = {
                id(group_of[id(one)]): group_of[id(one)]
                for one in parameters
                if id(one) in group_of
            }
            return max(map(rule, found.values()), default=0), True
    held = [_held(optimizer.state[one], one) for one in parameters if one in optimizer.state]
    return (max(held), True) if held else (USUAL_STATES, False)


def _held(state: Mapping[str, Any], parameter: Any) -> int:
    """Tensors of a parameter's size that its state is as large as, rounded up."""
    # Only those that have optimizers have torch.
    from onecopy.core.dtensors import local_of

    # Step counters are scalars of the optimizer's own.
    tensors = (one for one in state.values() if hasattr(one, "numel") and one.dim())
    elements: int = sum(local_of(one).numel() for one in tensors)
    return -(-elements // max(local_of(parameter).numel(), 1))
