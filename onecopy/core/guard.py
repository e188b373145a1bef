"""The released-parameter guard: a class that parameters wear while their unit is released.

The storage of a released parameter holds no bytes, and torch would crash the process on reading
it. So the parameter's `__class__` is a subclass of its own class whose `__torch_function__` lets
through what needs no values (shape, dtype, hooks, `zeros_like`) and raises
`ParameterReleasedError` for everything else. Swapping `__class__` costs well under a microsecond.

What bypasses `__torch_function__`, and therefore the guard, is listed in docs/released.md:
`torch.tensor(p)`, `as_subclass`, `DisableTorchFunctionSubclass`, the transforms of torch.func, and
tensors that were taken from the parameter while it was gathered (`p.detach()`, a view).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

__all__ = ["guard_class"]

Touch = Callable[[torch.Tensor], None]

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


def guard_class(
    parameter_class: type[nn.Parameter], touch: Touch, is_released: Callable[[], bool]
) -> type[nn.Parameter]:
    """A guarded subclass of `parameter_class` for the parameters of one unit.

    Args:
        touch: called with each guarded parameter whose values are about to be used; it raises, or
            it sees to it that the values are there and the guard is off.
        is_released: whether the unit's parameters should wear the guard.
    """

    class ReleasedParameter(parameter_class):  # type: ignore[valid-type,misc]
        """A parameter whose values are with their owners."""

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            kwargs = kwargs or {}
            if func in _needs_no_values():
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is torch.Tensor.__repr__:
                return _describe(args[0])
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                # The name of the type; with a type it is a conversion.
                return torch.empty(0, dtype=args[0].dtype, device=args[0].device).type()
            guarded = [one for one in (*_tensors(args), *_tensors(kwargs)) if type(one) is cls]
            if func in _BACKWARDS:
                return _unguarded(
                    guarded, parameter_class, cls, is_released, partial(func, *args, **kwargs)
                )
            for tensor in guarded:
                if tensor.numel():
                    touch(tensor)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

    ReleasedParameter.__name__ = f"Released{parameter_class.__name__}"
    ReleasedParameter.__qualname__ = ReleasedParameter.__name__
    return ReleasedParameter


def _unguarded(
    guarded: Sequence[torch.Tensor],
    plain: type,
    guard: type,
    is_released: Callable[[], bool],
    call: Callable[[], Any],
) -> Any:
    """Run a backward that names parameters: the units' hooks gather what it needs."""
    for tensor in guarded:
        tensor.__class__ = plain
    try:
        return call()
    finally:
        if is_released():
            for tensor in guarded:
                tensor.__class__ = guard


def _describe(parameter: torch.Tensor) -> str:
    return (
        f"{type(parameter).__name__}(shape={tuple(parameter.shape)}, dtype={parameter.dtype}, "
        f"device={parameter.device}, requires_grad={parameter.requires_grad})"
    )
