"""How torch.compile is kept out of the core, and so to graphs that end at the borders of units."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback as _compiler_at_work

__all__ = ["not_compiled"]

REASON = "onecopy gathers and releases here; for fullgraph=True compile each block by itself"

Function = TypeVar("Function", bound=Callable[..., object])


def not_compiled(function: Function) -> Function:
    """Decorates what torch calls back: hooks of modules, autograd, saved tensors and optimizers.

    A compiler that looked inside would trace communication, and parameters while they are released.
    `torch.compiler.disable` costs two microseconds per call, so it comes in only while a compiler
    is at work in this thread; else the call goes straight through.
    """
    disabled = torch.compiler.disable(function, reason=REASON)

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if _compiler_at_work() is None:
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    # A compiler that comes to this call breaks its graph here, and leaves its frame alone.
    skipped = torch._dynamo.decorators.skip(call)
    vars(skipped)["_torchdynamo_disable_msg"] = REASON
    return cast(Function, skipped)
