"""An object of the user's optimizer class that updates stand-ins of pieces.

Where it does so in another thread it has settings of its own, as they were when it was made: what
the loop does meanwhile (a scheduler, `zero_grad`, the next backward) does not meet it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from onecopy.core.step_alone import step_alone

__all__ = ["Worker", "make_thread"]


class Worker:
    """See the module's docstring.

    Args:
        state: what it keeps, by stand-in.
        groups: the settings of each group; in another thread copies.
        attributes: the optimizer's, where it is to have others than those of now.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        state: MutableMapping[Any, Any],
        groups: list[dict[str, Any]],
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self._optimizer = object.__new__(type(optimizer))
        vars(self._optimizer).update(vars(optimizer), state=state, **(attributes or {}))
        self._groups = groups

    def step(
        self, pieces: dict[int, list[nn.Parameter]], gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        """Update stand-ins, by number of their group; each `.grad` is its gradient afterwards."""
        for stand_in, gradient in gradients.items():
            stand_in.grad = gradient.to(stand_in.dtype)
        step_alone(self._optimizer, self._groups, pieces)


def make_thread() -> ThreadPoolExecutor:
    """What runs updates, one after another; the interpreter waits for it before it ends."""
    return ThreadPoolExecutor(1, thread_name_prefix="onecopy-update")
