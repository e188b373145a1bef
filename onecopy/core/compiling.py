"""How torch.compile is kept out of the core, and so to graphs that end at the borders of units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TypeVar, cast

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback as _compiler_at_work
from torch._dynamo.callback import callback_handler
from torch.utils.weak import WeakIdKeyDictionary

from onecopy.core.dtensors import is_dtensor, like, local_of
from onecopy.memory import buffers

__all__ = ["not_compiled", "show_offsets"]

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


# DTensors; the values say nothing.
_in_buffers = WeakIdKeyDictionary()


def show_offsets(parameters: Iterable[torch.Tensor]) -> None:
    """While a compiler is at work, DTensors among these say where what is inside of them begins.

    A compiler makes a DTensor anew of what is inside, a part of a flat buffer, and expects that of
    the old one to begin where that of the new one does. At other times it says 0: to
    `copy.deepcopy` and `torch.save` anything else is memory of its own, which it does not have.
    """
    found = [one for one in parameters if is_dtensor(one)]
    if found and not len(_in_buffers):
        for callbacks, callback in (
            (callback_handler.start_callbacks, _compiler_starts),
            (callback_handler.end_callbacks, _compiler_ends),
        ):
            if callback not in callbacks:
                callbacks.append(callback)
    for one in found:
        _in_buffers[one] = None


def _compiler_starts(_: object) -> None:
    for parameter in list(_in_buffers):
        _begin_at(parameter, int(local_of(parameter).storage_offset()))


def _compiler_ends(_: object) -> None:
    for parameter in list(_in_buffers):
        _begin_at(parameter, 0)


def _begin_at(parameter: torch.Tensor, offset: int) -> None:
    """Let a DTensor that has values say this offset."""
    local = local_of(parameter)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if parameter.storage_offset() != offset and not buffers.is_freed(local):
            memory = local.as_strided(local.size(), local.stride(), offset)
            parameter.data = like(parameter, memory)
