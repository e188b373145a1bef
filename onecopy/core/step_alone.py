"""The user's optimizer, run on some pieces alone, as a part of one step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["bring_home", "step_alone"]

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_alone(
    optimizer: torch.optim.Optimizer,
    groups: Iterable[dict[str, Any]],
    pieces: dict[int, list[nn.Parameter]],
) -> None:
    """Let an optimizer update these pieces only, by number of their group in `groups`."""
    memory = [(piece, piece.detach()) for group in pieces.values() for piece in group]
    with _once_for_all(optimizer):
        optimizer.param_groups = [
            {**_apart(group), "params": pieces.get(number, [])}
            for number, group in enumerate(groups)
        ]
        _plain_step(optimizer)(optimizer)
    for piece, home in memory:
        if piece.data_ptr() != home.data_ptr():
            bring_home(piece, home)


def bring_home(piece: nn.Parameter, home: torch.Tensor) -> None:
    """An optimizer has given a piece other memory (`p.data = ...`): back, with its values."""
    home.copy_(piece.detach())
    piece.data = home


@contextmanager
def _once_for_all(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, hooks are silent; afterwards attributes are who they were.

    So a counter that the optimizer's own `step` advances is, in each unit, what it would be if all
    were updated at once.
    """
    kept = dict(vars(optimizer))
    try:
        vars(optimizer).update(_apart(kept))
        for name in HOOKS:
            # A subclass that calls the step of its parent comes to the hooks once more.
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(kept)


def _apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings or attributes, with copies of what counts in place: numbers in tensors and lists."""
    return {name: _copy(value) for name, value in settings.items()}


def _copy(value: Any) -> Any:
    if type(value) is torch.Tensor and value.numel() == 1 and not value.requires_grad:
        return value.clone()
    numbers = value.values() if type(value) is dict else value if type(value) is list else ()
    if numbers and all(type(one) in (int, float, bool) for one in numbers):
        return value.copy()
    return value


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of its class, without what torch wraps it into: profiling, and hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__") if getattr(step, "hooked", False) else step  # noqa: B009
