"""What `param.grad` is after a reduce: a tensor without storage that stands for the owned slices.

The gradient of a parameter lies in pieces with its owners. Loops and trainers nevertheless call
`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`: with each rank's part of the gradient
that would clip by different norms on different ranks, without a word. So after a backward
`param.grad` is an `OwnedGradient`: its norms are those of the whole gradient (one collective
serves all parameters), scaling and clamping it in place acts on the owned pieces, and everything
else gathers the whole gradient, on all ranks together. It vanishes before autograd accumulates
again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.whole_gradients import WholeGradients, own_part
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.comm.collectives import Collectives
    from onecopy.core.unit import Unit

__all__ = ["OwnedGradient", "OwnedGradients"]

# The list of stand-ins, and the argument of sys.getrefcount.
_NUM_OWN_REFERENCES = 2
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


class OwnedGradient(torch.Tensor):
    """See the module's docstring."""

    _reference: weakref.ref[OwnedGradients]
    _number: int
    _arrived: torch.Tensor | None
    # The gradient is the parameter's no more, and whole here, or this rank's part of it.
    _whole: torch.Tensor | None
    _part: torch.Tensor | None

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
        self._arrived = self._whole = self._part = None
        return self

    @property
    def _gradients(self) -> OwnedGradients:
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
            if first._gradients.is_cleared(first):
                return _on_whole_gradients(func, args, kwargs)
            order = _norm_order(func, args, kwargs)
            if order is not None:
                return first._gradients.norm(first._number, order)
            if func in _IN_PLACE_FUNCTIONS and _are_numbers(args[1:], kwargs):
                first._gradients.change(first._number, func, args[1:], kwargs)
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
        name = found[0]._gradients.names[found[0]._number] if found else "a parameter"
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
            owners.setdefault(value._gradients)
            return value._gradients.whole(value, getattr(func, "__name__", str(func)))
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
        self._indices = [index for _, index in places]
        self.names = [unit.names[index] for unit, index in places]
        self._parameters = [unit.parameters[index] for unit, index in places]
        self._pieces = [unit.pieces.get(index) for unit, index in places]
        self._stand_ins = [
            OwnedGradient(self, number, parameter)
            for number, parameter in enumerate(self._parameters)
        ]
        self._wholes = WholeGradients(collectives)
        self._norms: dict[float, torch.Tensor] = {}
        # Which parameters' norms have been asked for since they were measured.
        self._asked: dict[float, set[int]] = {}
        self._shown: dict[int, None] = {}
        self._suspended: dict[int, torch.Tensor] = {}
        # Which have had a gradient, on any rank, since the last zero_grad.
        self._present: set[int] = set()
        self._numbers: dict[Unit, list[int]] = {}
        for number, unit in enumerate(self._units):
            self._numbers.setdefault(unit, []).append(number)
        # The gradients were applied in backward. Where they were measured before, as squares of
        # this rank's parts of the norms.
        self._are_applied = False
        self._squares: torch.Tensor | None = None

    def follow(self, before: OwnedGradients) -> None:
        """Take the place of others, now that more parameters have gradients."""
        places = [
            (unit.number, index) for unit, index in zip(self._units, self._indices, strict=True)
        ]
        before.settle()
        shown, present = before._places(before._shown), before._places(before._present)
        self._present = {number for number, place in enumerate(places) if place in present}
        if before._squares is not None:
            # Measured in a backward whose step is still to come.
            numbers = {place: number for number, place in enumerate(places)}
            self._squares = self._zeros()
            for unit, index, square in zip(
                before._units, before._indices, before._squares, strict=True
            ):
                self._squares[numbers[unit.number, index]] = square
        if shown:
            before.hide()
            self.show(set(places) - shown, are_applied=before._are_applied)

    def _places(self, numbers: Collection[int]) -> set[tuple[int, int]]:
        return {(self._units[number].number, self._indices[number]) for number in numbers}

    def show(self, absent: Container[tuple[int, int]] = (), *, are_applied: bool = False) -> None:
        """After a reduce: every parameter with a gradient has one to measure and to change.

        Args:
            absent: unit and number there of the parameters that no rank had a gradient for.
            are_applied: they exist no more, the backward has updated the parameters with them.
        """
        self._norms.clear()
        self._wholes.drop()
        self._are_applied = are_applied
        self._shown.clear()
        self._suspended.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self._parameters):
                place = (self._units[number].number, self._indices[number])
                if not parameter.requires_grad:
                    continue
                if number in self._present or place not in absent:
                    self._present.add(number)
                    parameter.grad = self._stand_ins[number]
                    self._shown[number] = None

    def clear(self, units: Collection[Unit] | None = None, *, set_to_none: bool = True) -> None:
        """`zero_grad` of these units' parameters, or of all, is about to clear the pieces.

        Whoever holds a gradient that is set to None keeps it, whole, as in plain PyTorch.
        """
        self.settle(uncounted=True)
        if not set_to_none:
            self._norms.clear()
            self._wholes.drop()
            return
        for number in self._hide(units):
            self._let_go(number)
        if units is None:
            self._present.clear()
        else:
            self._present = {one for one in self._present if self._units[one] not in units}

    def _let_go(self, number: int) -> None:
        """A gradient is no longer its parameter's. If somebody holds it, it keeps its values, as
        in plain PyTorch, and the parameter gets another stand-in.
        """
        if self._are_applied or sys.getrefcount(self._stand_ins[number]) <= _NUM_OWN_REFERENCES:
            return
        stand_in = self._stand_ins[number]
        unit, index, piece = self._units[number], self._indices[number], self._pieces[number]
        if piece is None or piece.grad is None:
            stand_in._part = unit.flat.new_zeros(0 if piece is None else piece.numel())
        else:
            part = unit.from_piece(index, piece.grad)
            stand_in._part = part.to(unit.flat.dtype, copy=True)
        self._stand_ins[number] = OwnedGradient(self, number, self._parameters[number])

    def is_cleared(self, stand_in: OwnedGradient) -> bool:
        """Whether this is not, or no more, the gradient of its parameter."""
        number = stand_in._number
        if stand_in is self._stand_ins[number] and number in self._shown and not self._suspended:
            with torch._C.DisableTorchFunctionSubclass():
                is_in_place = self._parameters[number].grad is stand_in
            if not is_in_place:
                self.settle()
        return stand_in is not self._stand_ins[number]

    def hide(self, units: Collection[Unit] | None = None) -> None:
        """Before autograd accumulates again, which would fail on a stand-in.

        Args:
            units: only those of these units; None for all.
        """
        if self._shown:
            self.settle(uncounted=True)
            self._hide(units)

    def _hide(self, units: Collection[Unit] | None) -> list[int]:
        self._norms.clear()
        hidden = [one for one in self._shown if units is None or self._units[one] in units]
        with torch._C.DisableTorchFunctionSubclass():
            # Before the whole ones are forgotten.
            for number in hidden:
                del self._shown[number]
                gradient = self._parameters[number].grad
                if gradient is not None and self._is_own(number, gradient):
                    self._parameters[number].grad = None
        self._wholes.drop()
        return hidden

    def suspend(self) -> None:
        """A forward begins: compilers, for one, look at the gradients of what it uses."""
        if not self._shown or self._suspended:
            return
        self.settle()
        with torch._C.DisableTorchFunctionSubclass():
            for number in self._shown:
                gradient = self._parameters[number].grad
                if gradient is not None:
                    self._suspended[number] = gradient
                    self._parameters[number].grad = None

    def resume(self) -> None:
        """Undo `suspend`: loops may clip after another forward."""
        with torch._C.DisableTorchFunctionSubclass():
            for number, gradient in self._suspended.items():
                if self._parameters[number].grad is None:
                    self._parameters[number].grad = gradient
        self._suspended.clear()

    def settle(self, *, uncounted: bool = False) -> None:
        """Take over what the user has done to `param.grad` since the last look.

        Before every use of the pieces' gradients: values written into whole gradients reach the
        pieces; `p.grad = None` (or zero_grad() of a part, or of a module around this one) means
        here, too, that the gradient is gone; a tensor put there takes its place.

        Args:
            uncounted: also values that were written in ways that torch does not count.
        """
        if self._suspended:
            self.resume()
        self._wholes.take_writes(uncounted=uncounted)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self._parameters):
                gradient = parameter.grad
                if gradient is None:
                    if number in self._shown:
                        self._remove(number)
                elif not self._is_own(number, gradient):
                    self._take(number, gradient)

    def _remove(self, number: int) -> None:
        self._let_go(number)
        del self._shown[number]
        self._present.discard(number)
        piece = self._pieces[number]
        if piece is not None:
            piece.grad = None

    def _is_own(self, number: int, gradient: torch.Tensor) -> bool:
        place = (self._units[number], self._indices[number])
        return gradient is self._stand_ins[number] or self._wholes.place_of(gradient) == place

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        """A whole gradient of the user's takes the place of the reduced one."""
        self._refuse_applied()
        if type(gradient) is OwnedGradient:
            # Of another parameter, or of before.
            gradient = gradient._gradients._value_of(gradient, "assigned to another one")
        if number in self._shown:
            self._let_go(number)
        unit, index = self._units[number], self._indices[number]
        piece = self._pieces[number]
        if piece is not None:
            piece.grad = own_part(unit, index, gradient).to(unit.dtypes.gradient, copy=True)
        self._parameters[number].grad = self._stand_ins[number]
        self._shown[number] = None
        self._present.add(number)
        self._norms.clear()

    def whole(self, stand_in: OwnedGradient, what: str) -> torch.Tensor:
        """The whole gradient of one parameter, in its dtype; a collective, so all ranks ask."""
        self._refuse_applied()
        self.settle()
        return self._value_of(stand_in, what)

    def _value_of(self, stand_in: OwnedGradient, what: str) -> torch.Tensor:
        number = stand_in._number
        unit, index = self._units[number], self._indices[number]
        what = f"the gradient of {self.names[number]} ({what})"
        if stand_in._part is not None:
            self._collectives.agreement.agree(what)
            stand_in._whole = unit.gather_pieces(index, stand_in._part)
            stand_in._part = None
        if stand_in._whole is not None:
            return stand_in._whole
        return self._wholes.get(unit, index, what)

    def take_writes(self, result: Any) -> Any:
        """After a function on whole gradients: `result`, a stand-in where it is one of them."""
        self._norms.clear()
        place = self._wholes.place_of(result)
        self._wholes.take_writes()
        self._wholes.forget_unheld()
        if place is None:
            return result
        return next(
            self._stand_ins[number]
            for number, unit in enumerate(self._units)
            if (unit, self._indices[number]) == place
        )

    @contextmanager
    def revealed(self) -> Iterator[None]:
        """Inside, `param.grad` is a plain tensor with the whole gradient; what is changed, put
        there or removed by the end of the block counts.
        """
        self.settle()
        shown = list(self._shown)
        self._wholes.are_kept = True
        for number in shown:
            self._parameters[number].grad = self.whole(self._stand_ins[number], "grads=True")
        try:
            yield
        finally:
            self.settle(uncounted=True)
            for number in shown:
                if self._parameters[number].grad is not None:
                    self._parameters[number].grad = self._stand_ins[number]
            self._wholes.are_kept = False
            self._wholes.drop()

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
        if unit is None:
            self.settle()
        self._norms.clear()
        numbers = range(len(self._pieces)) if unit is None else self._numbers.get(unit, [])
        pieces = [self._pieces[number] for number in numbers]
        grads = [piece.grad for piece in pieces if piece is not None]
        if unit is None:
            self._wholes.change(lambda whole: whole.mul_(factor))
        present = [grad for grad in grads if grad is not None]
        if present:
            torch._foreach_mul_(present, factor)

    def change(
        self, number: int, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Apply an elementwise in-place function to this rank's part of one gradient."""
        self._refuse_applied()
        self.settle()
        self._norms.clear()
        piece = self._pieces[number]
        with torch.no_grad():
            place = (self._units[number], self._indices[number])
            self._wholes.change(lambda whole: function(whole, *args, **kwargs), place)
            if piece is not None and piece.grad is not None:
                function(piece.grad, *args, **kwargs)

    def norms(self, order: float) -> torch.Tensor:
        """(number of trainable parameters,) norms of the whole gradients; a collective."""
        self.settle(uncounted=True)
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
