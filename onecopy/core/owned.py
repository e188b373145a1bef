"""What `param.grad` is after a reduce: a tensor without storage that stands for the owned slices.

The gradient of a parameter lies in pieces with its owners. Loops and trainers nevertheless call
`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`: with each rank's part of the gradient
that would clip by different norms on different ranks, without a word. So after a backward
`param.grad` is an `OwnedGradient`: its norms are those of the whole gradient (one collective
serves all parameters), scaling and clamping it in place acts on the owned pieces, and everything
that would need its values raises. It vanishes before autograd accumulates again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.comm.collectives import Collectives
    from onecopy.core.unit import Unit

__all__ = ["OwnedGradient", "OwnedGradients"]

_NORMS = (torch.linalg.vector_norm, torch.norm, torch.Tensor.norm)
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


class OwnedGradient(torch.Tensor):
    """See the module's docstring."""

    _reference: weakref.ref[OwnedGradients]
    _number: int

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
        self._number = number
        return self

    @property
    def _gradients(self) -> OwnedGradients:
        found = self._reference()
        if found is None:
            raise ShardingError("the sharded model that this gradient belonged to is gone")
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype: the values are with their owners."""
        return f"OwnedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Norms, in-place scaling and metadata; everything else raises."""
        kwargs = kwargs or {}
        if func in _METADATA or func is OwnedGradient.__repr__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, OwnedGradient):
            if func in _SAME:
                return first
            order = _norm_order(func, args, kwargs)
            if order is not None:
                return first._gradients.norm(first._number, order)
            if func in _IN_PLACE_FUNCTIONS:
                first._gradients.change(first._number, func, args[1:], kwargs)
                return first
        raise ShardingError(_describe(args, getattr(func, "__name__", str(func))))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operations that come past __torch_function__, from within torch."""
        raise ShardingError(_describe(args, str(func)))


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


def _describe(args: Any, operation: str) -> str:
    items = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
    found = [one for one in items if isinstance(one, OwnedGradient)]
    name = found[0]._gradients.names[found[0]._number] if found else "a parameter"
    return (
        f"the gradient of {name} lies in pieces with its owners, so {operation} has no values to "
        "work on. Norms and in-place scaling or clamping work here (and "
        "torch.nn.utils.clip_grad_norm_); the owned pieces are the .grad of the parameters in "
        "optimizer.param_groups"
    )


class OwnedGradients:
    """The stand-ins of one model's parameters, and what they know together."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        self._collectives = collectives
        places = [
            (unit, index)
            for unit in units
            if unit.gradients is not None
            for index, parameter in enumerate(unit.parameters)
            if parameter.numel()
        ]
        self._units = [unit for unit, _ in places]
        self.names = [unit.names[index] for unit, index in places]
        self._parameters = [unit.parameters[index] for unit, index in places]
        self._pieces = [unit.pieces.get(index) for unit, index in places]
        self._stand_ins = [
            OwnedGradient(self, number, parameter)
            for number, parameter in enumerate(self._parameters)
        ]
        self._norms: dict[float, torch.Tensor] = {}
        # Which parameters' norms have been asked for since they were measured.
        self._asked: dict[float, set[int]] = {}
        self._shown: list[int] = []
        self._numbers: dict[Unit, list[int]] = {}
        for number, unit in enumerate(self._units):
            self._numbers.setdefault(unit, []).append(number)
        # The gradients were applied in backward. Where they were measured before, as squares of
        # this rank's parts of the norms.
        self._are_applied = False
        self._squares: torch.Tensor | None = None

    def show(self, *, are_applied: bool = False) -> None:
        """After a reduce: every trainable parameter has a gradient to measure and to scale.

        Also one that got none: ranks need not know of one another's, and its norm is zero.

        Args:
            are_applied: they exist no more, the backward has updated the parameters with them.
        """
        self._norms.clear()
        self._are_applied = are_applied
        self._shown = []
        with torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    parameter.grad = self._stand_ins[number]
                    self._shown.append(number)

    def hide(self, units: Collection[Unit] | None = None) -> None:
        """Before autograd accumulates again, which would fail on a stand-in; or zero_grad.

        Args:
            units: only those of these units; None for all.
        """
        if not self._shown:
            return
        self.notice_cleared()
        self._norms.clear()
        hidden = [one for one in self._shown if units is None or self._units[one] in units]
        self._shown = sorted(set(self._shown) - set(hidden))
        with torch._C.DisableTorchFunctionSubclass():
            for number in hidden:
                if self._parameters[number].grad is self._stand_ins[number]:
                    self._parameters[number].grad = None

    def notice_cleared(self) -> None:
        """`p.grad = None` by the user means here, too, that the gradient is gone.

        So does `zero_grad()` of a part of the model, or of a module around it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for number in self._shown:
                piece = self._pieces[number]
                if piece is not None and self._parameters[number].grad is None:
                    piece.grad = None

    def check(self) -> None:
        """Before a step: gradients must have come by `backward`.

        Raises:
            ShardingError: somebody has put a gradient of his own into `param.grad`; a step would
                not see it.
        """
        self.notice_cleared()
        with torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self._parameters):
                gradient = parameter.grad
                if gradient is not None and type(gradient) is not OwnedGradient:
                    raise ShardingError(
                        f"the gradient of {self.names[number]} was put into param.grad by hand, "
                        "where the step of a sharded model does not see it: let loss.backward() "
                        "make gradients, or change the owned pieces, the .grad of the parameters "
                        "in optimizer.param_groups. Set param.grad = None to go on"
                    )

    def norm(self, number: int, order: float) -> torch.Tensor:
        """The norm of one parameter's whole gradient, 0-d; a collective at the first call.

        All ranks must ask, as they do where they clip. One collective serves all parameters once;
        whoever asks again has it measured again: by then somebody may have changed the pieces
        (`GradScaler.unscale_`).
        """
        if order not in self._norms or number in self._asked[order]:
            self._norms[order] = self.norms(order)
            self._asked[order] = set()
        self._asked[order].add(number)
        return self._norms[order][number]

    def scale(self, factor: torch.Tensor, unit: Unit | None = None) -> None:
        """Multiply all gradients, or those of one unit, by a 0-d tensor."""
        self._refuse_applied()
        self._norms.clear()
        numbers = range(len(self._pieces)) if unit is None else self._numbers.get(unit, [])
        pieces = [self._pieces[number] for number in numbers]
        grads = [piece.grad for piece in pieces if piece is not None]
        present = [grad for grad in grads if grad is not None]
        if present:
            torch._foreach_mul_(present, factor)

    def change(
        self, number: int, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Apply an elementwise in-place function to this rank's part of one gradient."""
        self._refuse_applied()
        self._norms.clear()
        piece = self._pieces[number]
        if piece is not None and piece.grad is not None:
            with torch.no_grad():
                function(piece.grad, *args, **kwargs)

    def norms(self, order: float) -> torch.Tensor:
        """(number of trainable parameters,) norms of the whole gradients; a collective."""
        self.notice_cleared()
        infinite = order == float("inf")
        with torch.no_grad():
            if self._are_applied and order == 2.0 and self._squares is not None:
                local = self._squares.clone()
            else:
                self._refuse_applied()
                local = self._add_powers(self._zeros(), order, range(len(self._pieces)))
            total = self._collectives.sum_of(local, maximum=infinite)
            return total if infinite else total ** (1.0 / order)

    def begin_backward(self, *, measures: bool) -> None:
        """A backward begins that applies gradients; `measures`: after `measure` of each unit."""
        self._are_applied = False
        self._squares = self._zeros() if measures else None

    def measure(self, unit: Unit) -> None:
        """Keep the norms of a unit's gradients, which are about to be applied."""
        assert self._squares is not None, "this backward measures"
        with torch.no_grad():
            self._add_powers(self._squares, 2.0, self._numbers.get(unit, []))

    def _zeros(self) -> torch.Tensor:
        device = self._parameters[0].device
        is_double = any(one.dtype == torch.float64 for one in self._parameters)
        dtype = torch.float64 if is_double else torch.float32
        return torch.zeros(len(self._pieces), dtype=dtype, device=device)

    def _add_powers(
        self, local: torch.Tensor, order: float, numbers: Iterable[int]
    ) -> torch.Tensor:
        """Put norms to the power of their order into their places; largest magnitudes for inf."""
        pieces = [(number, self._pieces[number]) for number in numbers]
        grads = [
            (number, piece.grad)
            for number, piece in pieces
            if piece is not None and piece.grad is not None
        ]
        if grads:
            norms = torch._foreach_norm([grad for _, grad in grads], order, dtype=local.dtype)
            values = torch.stack([norm.to(local.dtype) for norm in norms])
            is_inf = order == float("inf")
            local[[number for number, _ in grads]] = values if is_inf else values**order
        return local

    def _refuse_applied(self) -> None:
        if self._are_applied:
            raise ShardingError(
                "these gradients exist no more: with step_in_backward the backward has updated "
                "the parameters with them. To clip say max_grad_norm=... at shard, which clips by "
                'the norm of the step before, or step_in_backward="two-pass" with it'
            )


_IN_PLACE_FUNCTIONS = frozenset(
    getattr(torch.Tensor, name) for name in _IN_PLACE if hasattr(torch.Tensor, name)
)
_METADATA: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name) for name in _METADATA_METHODS]
    + [
        getattr(torch.Tensor, name).__get__
        for name in _METADATA_PROPERTIES
        if hasattr(torch.Tensor, name)
    ]
    + [torch.is_complex, torch.is_floating_point, torch.numel]
)
