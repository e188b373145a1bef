"""The user's optimizer, run on some pieces alone, as a part of one step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["step_alone"]

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
            {**group, "params": pieces.get(number, [])} for number, group in enumerate(groups)
        ]
        _plain_step(optimizer)(optimizer)
    for piece, values in memory:
        if piece.data_ptr() != values.data_ptr():
            # The optimizer has given it other memory: `p.data = ...`.
            values.copy_(piece.detach())
            piece.data = values


@contextmanager
def _once_for_all(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, hooks are silent; afterwards attributes are who they were.

    So a counter that the optimizer's own `step` advances is, in each unit, what it would be if all
    were updated at once.
    """
    kept = dict(vars(optimizer))
    try:
        for name in HOOKS:
            # A subclass that calls the step of its parent comes to the hooks once more.
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(kept)


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of its class, without what torch wraps it into: profiling, and hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__") if getattr(step, "hooked", False) else step  # noqa: B009
