"""The tensor that stands in `param.grad` for the owned pieces, and what torch may do with it.

Norms are those of the whole gradient (one collective serves all parameters), scaling and clamping
in place acts on the owned pieces, metadata is the parameter's, and everything else is called with
whole gradients, gathered on all ranks together. What it means is in owned.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.dtensors import is_dtensor
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.core.owned import OwnedGradients

__all__ = ["OwnedGradient"]

_NORMS = (torch.linalg.vector_norm, torch.norm, torch.Tensor.norm)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SAME = (
    torch.Tensor.detach,
    torch.Tensor.detach_,
    torch.Tensor.requires_grad_,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
)
# In-place and elementwise: on the pieces they do what they would do on the whole.
_IN_PLACE = (
    "mul_ div_ clamp_ clamp_min_ clamp_max_ clip_ neg_ zero_ nan_to_num_ sign_ "
    "__imul__ __itruediv__"
).split()
_METADATA_METHODS = (
    "size stride dim numel nelement element_size is_contiguous is_floating_point is_complex "
    "get_device storage_offset __len__ __hash__"
).split()
_METADATA_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes grad grad_fn requires_grad is_leaf is_sparse "
    "is_cpu is_cuda is_meta is_nested is_quantized names _version _base _backward_hooks"
).split()

# What only DTensors have.
_DTENSOR_PROPERTIES = ("placements", "device_mesh")
_DTENSOR_METHODS = ("to_local", "full_tensor", "redistribute")


class OwnedGradient(torch.Tensor):
    """See the module's docstring.

    Attributes:
        number: the parameter's, among those of its model that have gradients.
        part: 1-D, this rank's part of a gradient that is its parameter's no more, until somebody
            wants its values.
        whole: shaped like the parameter, such a gradient from then on.
        is_taken: it was its parameter's until an update took its values (delayed_update).
        is_partial: it was cleared before its sums over nodes were made.
    """

    part: torch.Tensor | None
    whole: torch.Tensor | None
    is_taken: bool
    is_partial: bool
    _reference: weakref.ref[OwnedGradients]
    _parameter: weakref.ref[torch.Tensor]
    number: int
    _arrived: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[OwnedGradient],
        gradients: OwnedGradients,
        number: int,
        parameter: torch.Tensor,
    ) -> OwnedGradient:
        """A gradient shaped like `parameter`, without storage."""
        self: OwnedGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        # Weak: Python's collector does not see what a parameter's .grad holds.
        self._reference = weakref.ref(gradients)
        self._parameter = weakref.ref(parameter)
        self.number = number
        self._arrived = self.whole = self.part = None
        self.is_taken = self.is_partial = False
        return self

    @property
    def gradients(self) -> OwnedGradients:
        """Those of its model."""
        found = self._reference()
        if found is None:
            raise ShardingError("the sharded model that this gradient belonged to is gone")
        return found

    def take_arrived(self) -> torch.Tensor | None:
        """The gradient that autograd has just added."""
        arrived, self._arrived = self._arrived, None
        return arrived

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype: the values are with their owners."""
        return f"OwnedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __getattr__(self, name: str) -> Any:
        """Where the parameter is a DTensor, what its gradient has beside what all tensors have."""
        parameter = self._parameter()
        if is_dtensor(parameter):
            if name in _DTENSOR_PROPERTIES:
                return getattr(parameter, name)
            if name in _DTENSOR_METHODS:
                method = _viewing(getattr(type(parameter), name))
                return lambda *args, **kwargs: _on_whole_gradients(method, (self, *args), kwargs)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Norms, in-place scaling and metadata as such; everything else on whole gradients."""
        kwargs = kwargs or {}
        if func in _METADATA or func is OwnedGradient.__repr__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func is _SET_DATA:
            func = _replace_values
        if isinstance(first, OwnedGradient):
            if func in _SAME:
                return first
            if first.gradients.is_cleared(first):
                return _on_whole_gradients(func, args, kwargs)
            order = _norm_order(func, args, kwargs)
            if order is not None:
                return first.gradients.norm(first.number, order)
            if func in _IN_PLACE_FUNCTIONS and _are_numbers(args[1:], kwargs):
                first.gradients.change(first.number, func, args[1:], kwargs)
                return first
        is_one_for_all = not any(isinstance(one, list | tuple) for one in args[1:])
        if func in _FOREACH and is_one_for_all and _are_numbers(args[1:], kwargs):
            stand_ins = list(_flatten(first))
            if all(isinstance(one, OwnedGradient) for one in stand_ins):
                return [_FOREACH[func](one, *args[1:], **kwargs) for one in stand_ins]
        return _on_whole_gradients(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operations that come past __torch_function__, from within torch.

        One of them is autograd's, which adds a gradient to what it takes for the earlier ones: it
        is kept for the hook that comes next.
        """
        first = args[0] if args else None
        if isinstance(first, OwnedGradient) and torch._C._current_graph_task_id() != -1:
            if func is torch.ops.aten.add_.Tensor:
                first._arrived = args[1]
                return first
            if func is torch.ops.aten.add.Tensor:
                return args[1].clone()
        found = [one for one in _flatten(args) if isinstance(one, OwnedGradient)]
        name = found[0].gradients.names[found[0].number] if found else "a parameter"
        raise ShardingError(
            f"the gradient of {name} lies in pieces with its owners, and {func} asks for its "
            "values from within torch: look at it inside onecopy.full_parameters(model, "
            "grads=True), where it is a plain tensor"
        )


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, dict):
        yield from _flatten(list(value.values()))
    else:
        yield value


def _are_numbers(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """No tensor with a shape among them: on a piece they mean what they mean on the whole."""
    return not any(
        isinstance(one, torch.Tensor) and one.dim() for one in _flatten([*args, *kwargs.values()])
    )


def _on_whole_gradients(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `func` with whole gradients in the place of stand-ins; writes reach the pieces."""
    owners: dict[OwnedGradients, None] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, OwnedGradient):
            owners.setdefault(value.gradients)
            return value.gradients.whole(value, getattr(func, "__name__", str(func)))
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(whole(item) for item in value)
        return value

    result = func(*whole(args), **whole(kwargs))
    for owner in owners:
        # In-place functions return what they were given.
        result = owner.take_writes(result)
    return result


def _viewing(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same with another tensor of the same memory, by which it is known that this is held."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = method(*args, **kwargs)
        return result.view_as(result)

    return call


def _replace_values(gradient: torch.Tensor, values: torch.Tensor) -> None:
    """`gradient.data = values`."""
    if values.size() != gradient.size():
        raise ShardingError(
            f"a gradient of shape {tuple(gradient.shape)} was given .data of shape "
            f"{tuple(values.shape)}: give the parameter a gradient of its own shape"
        )
    with torch.no_grad():
        gradient.copy_(values)


def _norm_order(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """p, where this is a call of a norm over all elements."""
    # Not `in (None, False)`: dim=0 equals False.
    given = {
        name: value for name, value in kwargs.items() if value is not None and value is not False
    }
    if func not in _NORMS or len(args) > 2 or not set(given) <= {"ord", "p"}:
        return None
    order = args[1] if len(args) > 1 else given.get("ord", given.get("p", 2.0))
    return 2.0 if order == "fro" else float(order)


_IN_PLACE_FUNCTIONS = frozenset(
    getattr(torch.Tensor, name) for name in _IN_PLACE if hasattr(torch.Tensor, name)
)
# Functions on lists, and what they do to each.
_FOREACH: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: torch.linalg.vector_norm,
    torch._foreach_mul_: torch.Tensor.mul_,
    torch._foreach_div_: torch.Tensor.div_,
    torch._foreach_clamp_min_: torch.Tensor.clamp_min_,
    torch._foreach_clamp_max_: torch.Tensor.clamp_max_,
    torch._foreach_zero_: torch.Tensor.zero_,
}
_METADATA: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name) for name in _METADATA_METHODS]
    + [
        getattr(torch.Tensor, name).__get__
        for name in _METADATA_PROPERTIES
        if hasattr(torch.Tensor, name)
    ]
    + [torch.is_complex, torch.is_floating_point, torch.numel]
)
