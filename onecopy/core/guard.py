"""The released-parameter guard: a class that parameters wear while their unit is released.

The storage of a released parameter holds no bytes, and torch would crash the process on reading
it. So the parameter's `__class__` is a subclass of its own class whose `__torch_function__` lets
through what needs no values (shape, dtype, hooks, `zeros_like`) and for everything else first has
the unit gathered (see touch.py). Swapping `__class__` costs well under a microsecond.

What bypasses `__torch_function__`, and therefore the guard, is listed in docs/parameters.md:
`torch.tensor(p)`, `as_subclass`, `DisableTorchFunctionSubclass`, the transforms of torch.func, and
tensors that were taken from the parameter while it was gathered (`p.detach()`, a view).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch

from onecopy.core.compiling import not_compiled
from onecopy.core.dtensors import local_of
from onecopy.errors import ParameterReleasedError, ShardingError

__all__ = ["Gatherer", "guard_class", "is_guarded"]

Kind = TypeVar("Kind", bound=torch.Tensor)


class Gatherer(Protocol):
    """What brings the values of guarded parameters."""

    def touch(self, tensors: Sequence[torch.Tensor], function: Callable[..., Any]) -> None:
        """`function` is about to use `tensors`, guarded parameters among them: take guards off."""

    def is_released(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter should wear its guard."""


# These need the parameters as places in the graph, not their values.
_BACKWARDS = (torch.autograd.backward, torch.autograd.grad)

_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes grad requires_grad is_leaf grad_fn names "
    "is_cpu is_cuda is_meta is_mps is_xpu is_sparse is_sparse_csr is_quantized is_nested is_mkldnn "
    "output_nr retains_grad grad_dtype _base _version _backward_hooks _post_accumulate_grad_hooks"
).split()
_SETTABLE = (
    "grad",
    "grad_dtype",
    "requires_grad",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_METHODS = (
    "size stride dim numel nelement element_size storage_offset is_contiguous is_floating_point "
    "is_complex is_signed is_inference get_device requires_grad_ register_hook "
    "register_post_accumulate_grad_hook retain_grad __len__ __hash__ _is_view has_names "
    "new_empty new_zeros new_ones new_full new_empty_strided __dir__"
).split()
_FUNCTIONS = (
    "numel is_floating_point is_complex is_signed is_inference empty_like zeros_like ones_like "
    "full_like rand_like randn_like randint_like result_type can_cast is_same_size"
).split()


# Of these, those that make tensors: DTensors look at the tensor inside for that.
_MAKING = frozenset(
    getattr(place, name)
    for place, names in ((torch.Tensor, _METHODS), (torch, _FUNCTIONS))
    for name in names
    if name.startswith("new_") or name.endswith("_like")
)


@cache
def _needs_no_values() -> frozenset[Any]:
    """Functions, as `__torch_function__` sees them, that read metadata only."""
    found: set[Any] = set()
    for name in _PROPERTIES:
        if hasattr(torch.Tensor, name):
            found.add(getattr(torch.Tensor, name).__get__)
    for name in _SETTABLE:
        found.add(getattr(torch.Tensor, name).__set__)
        found.add(getattr(torch.Tensor, name).__delete__)
    found.update(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name))
    found.update(getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name))
    return frozenset(found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def guard_class(plain_class: type[Kind], gatherer: weakref.ref[Gatherer]) -> type[Kind]:
    """A guarded subclass of `plain_class`, for tensors whose values `gatherer` brings."""

    class ReleasedParameter(plain_class):  # type: ignore[valid-type,misc]
        """A parameter, or another tensor, whose values are elsewhere."""

        _gatherer = gatherer
        _plain = plain_class

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            return _call(func, args, kwargs or {})

    if hasattr(plain_class, "_local_tensor"):
        # All code of DTensors comes here, also where __torch_function__ does not hear of it.
        ReleasedParameter._local_tensor = property(_local_tensor)
        ReleasedParameter.__repr__ = _describe  # type: ignore[assignment]
    ReleasedParameter.__name__ = f"Released{plain_class.__name__}"
    ReleasedParameter.__qualname__ = ReleasedParameter.__name__
    return ReleasedParameter


@not_compiled
def _local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor inside a guarded DTensor, for whoever takes it by this name."""
    if parameter.numel():
        _gatherer_of(parameter).touch([parameter], _local_tensor)
    return local_of(parameter)


@not_compiled
def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any function of torch on guarded parameters, of one model or of several."""
    if func in _needs_no_values():
        with torch._C.DisableTorchFunctionSubclass():
            if func in _MAKING:
                guarded = [one for one in _tensors(args) if is_guarded(one)]
                return _unguarded(guarded, partial(func, *args, **kwargs))
            return func(*args, **kwargs)
    if func is torch.Tensor.__repr__:
        return _describe(args[0])
    if func is torch.Tensor.type and len(args) == 1 and not kwargs:
        # The name of the type; with a type it is a conversion.
        return torch.empty(0, dtype=args[0].dtype, device=args[0].device).type()
    if func is torch.Tensor.share_memory_:
        raise ShardingError(
            "share_memory_() would move a parameter out of its unit's buffer, which is given back "
            "and taken again: share copies, p.detach().clone().share_memory_(), or the model "
            "before shard"
        )
    tensors = [*_tensors(args), *_tensors(kwargs)]
    guarded = [tensor for tensor in tensors if is_guarded(tensor)]
    if func in _BACKWARDS:
        return _unguarded(guarded, partial(func, *args, **kwargs))
    for gatherer in dict.fromkeys(_gatherer_of(tensor) for tensor in guarded if tensor.numel()):
        gatherer.touch(tensors, func)
    if any(is_guarded(tensor) for tensor in guarded):
        # Without elements, there is nothing to gather and nothing to read.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def is_guarded(tensor: object) -> bool:
    """Whether it wears a guard now."""
    return hasattr(type(tensor), "_gatherer")


def _gatherer_of(tensor: torch.Tensor) -> Gatherer:
    gatherer: Gatherer | None = type(tensor)._gatherer()  # type: ignore[attr-defined]
    if gatherer is None:
        raise ParameterReleasedError(
            f"the sharded model of a parameter (shape {tuple(tensor.shape)}) has been deleted, and "
            "its values with it: keep the model, or take copies of values, p.detach().clone()"
        )
    return gatherer


def _unguarded(guarded: Sequence[torch.Tensor], call: Callable[[], Any]) -> Any:
    """Call what needs no values of guarded parameters, though it may look at what they are: a
    backward that names them (the units' hooks gather what it needs), `zeros_like`.
    """
    guards = [(tensor, type(tensor)) for tensor in guarded]
    for tensor, guard in guards:
        tensor.__class__ = guard._plain  # type: ignore[attr-defined]
    try:
        return call()
    finally:
        for tensor, guard in guards:
            gatherer = guard._gatherer()  # type: ignore[attr-defined]
            if gatherer is not None and gatherer.is_released(tensor):
                tensor.__class__ = guard


def _describe(parameter: torch.Tensor, **_: Any) -> str:
    return (
        f"{type(parameter).__name__}(shape={tuple(parameter.shape)}, dtype={parameter.dtype}, "
        f"device={parameter.device}, requires_grad={parameter.requires_grad})"
    )
