"""How torch.compile is kept out of the core, and so to graphs that end at the borders of units."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

__all__ = ["not_compiled"]

REASON = "onecopy gathers and releases here; for fullgraph=True compile each block by itself"

Function = TypeVar("Function", bound=Callable[..., object])


def not_compiled(function: Function) -> Function:
    """Decorates what torch calls back: hooks of modules, autograd, saved tensors and optimizers.

    A compiler that looked inside would trace communication, and parameters while they are released.
    Costs less than half a microsecond per call.
    """
    return cast(Function, torch.compiler.disable(function, reason=REASON))
