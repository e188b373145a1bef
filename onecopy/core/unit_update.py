"""The update of one unit, computed beside its masters and states, which stay as they are.

Stand-ins of the pieces and of their states, in memory of their own, are filled and updated in
another thread. If all that went in is what the step would take, `publish` puts them in the place of
the originals by exchanging memory: nothing is copied, tensors stay who they are, and the memory of
before takes the next update. Else nothing has happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onecopy.core.settings_copy import SettingsCopy, UnfitError, is_same
from onecopy.core.views import is_fake
from onecopy.core.watch import Watch, address_of
from onecopy.core.worker import Worker

if TYPE_CHECKING:
    from onecopy.core.unit import Unit

__all__ = ["GradientWriteError", "NotNowError", "Spare", "UnitUpdate", "surroundings"]

_NUMBERS = (bool, int, float, type(None), str)


class NotNowError(Exception):
    """Somebody holds what would have to be watched."""


class GradientWriteError(Exception):
    """The optimizer changes gradients, and was stopped before: give it copies."""


@dataclass(slots=True)
class Spare:
    """Memory that takes the updates of one unit, kept from step to step.

    master: (s,) as the master; None before the first update.
    states: by id of a tensor among the states, that tensor and another one of its form.
    """

    master: torch.Tensor | None = None
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class UnitUpdate:
    """See the module's docstring.

    Attributes:
        unit: whose update it is.
        watch: what goes in.
        future: set by who has it computed.
        error: what was raised there.

    Args:
        pieces: the optimizer's of this unit, by number of their group.
        copies_gradients: the optimizer may change them.

    Raises:
        NotNowError: somebody else has a tensor of the same memory.
        UnfitError: the optimizer keeps what cannot be watched.
    """

    future: Future[None]

    def __init__(
        self,
        unit: Unit,
        pieces: dict[int, list[nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        settings: SettingsCopy,
        spare: Spare,
        copies_gradients: bool,
    ) -> None:
        self.unit = unit
        self.error: Exception | None = None
        self._optimizer = optimizer
        self._settings = settings
        self._spare = spare
        self._copies = copies_gradients
        self._master = unit.slice.master_tensor
        if is_fake(self._master):
            raise NotNowError
        self._pieces = {number: list(of_group) for number, of_group in pieces.items()}
        flat = [piece for of_group in pieces.values() for piece in of_group]
        self._gradients = {piece: piece.grad for piece in flat if piece.grad is not None}
        self._states = {piece: dict(optimizer.state.get(piece) or {}) for piece in flat}
        self._dicts = {piece: optimizer.state.get(piece) for piece in flat}
        self.watch = self._watch(flat)
        # What the thread reads: no guard is met there, and no counter of the original moves.
        self._read = {piece: gradient.data for piece, gradient in self._gradients.items()}
        self._twins: dict[nn.Parameter, nn.Parameter] = {}
        self._written: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._twin_states: defaultdict[Any, Any] = defaultdict(dict)
        self._groups, self._attributes = settings.copied()
        self._worker = Worker(optimizer, self._twin_states, self._groups, self._attributes)
        self._surroundings: tuple[Any, ...] = ()

    def _watch(self, pieces: list[nn.Parameter]) -> Watch:
        """Masters, states and gradients, if nobody else can change them."""
        states = [
            value
            for state in self._states.values()
            for name, value in state.items()
            if _is_tensor(name, value)
        ]
        gradients = list(self._gradients.values())
        hidden = Counter[int]()
        # The master's other pieces, and the tensor that gradients are parts of, with its others.
        address = address_of(self._master)
        hidden[address] = len(self.unit.slice.pieces) - len(pieces)
        mine = set(pieces)
        for piece in self.unit.slice.pieces.values():
            if piece not in mine and piece.grad is not None:
                hidden[address_of(piece.grad)] += 1
        bases = {id(one._base): one._base for one in gradients if one._base is not None}
        hidden.update(address_of(base) for base in bases.values())
        bases.clear()
        guarded = [*pieces, *states, *gradients]
        if len({id(one) for one in guarded}) < len(guarded) or any(map(_is_guarded, guarded)):
            raise NotNowError
        if not self._are_in_place(mine):
            raise NotNowError
        watch = Watch(guarded, [self._master], hidden)
        if watch.is_shared:
            raise NotNowError
        return watch

    def _are_in_place(self, pieces: set[nn.Parameter]) -> bool:
        """Whether pieces are parts of the master: nobody has given them other memory."""
        owned, first = self.unit.slice, self._master.data_ptr()
        return all(
            piece.data_ptr() == first + place.start * self._master.itemsize
            for place in owned.places
            if (piece := owned.pieces[place.index]) in pieces and piece.numel()
        )

    # In the thread ----------------------------------------------------------------------------

    def compute(self) -> None:
        """Fill the stand-ins and update them; `error` says why if that has failed."""
        if self.watch.is_touched:
            return
        try:
            self._compute()
        except Exception as error:
            # What it has been through holds stand-ins, whose memory is to be nobody else's.
            self.error = error.with_traceback(None)
            error.__cause__ = error.__context__ = None
            self.forget()

    def _compute(self) -> None:
        """Raises UnfitError where the optimizer does what cannot be taken back, or not be made
        twice, GradientWriteError where it changes gradients and copies were not made, and what it
        raises itself.
        """
        with torch.no_grad():
            self._surroundings = surroundings()
            with torch._C.DisableTorchFunctionSubclass():
                self._fill()
            gradients = {
                self._twins[piece]: self._gradient(piece, gradient)
                for piece, gradient in self._read.items()
            }
            self._read.clear()
            with _Observed([] if self._copies else gradients.values()):
                twins = {
                    number: [self._twins[piece] for piece in of_group]
                    for number, of_group in self._pieces.items()
                }
                self._worker.step(twins, gradients)
            self._take_gradients(gradients)
        if not self._settings.are(self._groups, self._attributes):
            raise UnfitError("its step changes a setting or an attribute in place")

    def _fill(self) -> None:
        spare, owned = self._spare, self.unit.slice
        if spare.master is None or not _has_form_of(spare.master, self._master):
            spare.master = torch.empty_like(self._master)
        spare.master.copy_(self._master)
        places = {owned.pieces[place.index]: place for place in owned.places}
        before, spare.states = spare.states, {}
        for piece, state in self._states.items():
            place = places[piece]
            part = spare.master[place.start : place.start + place.numel]
            twin = nn.Parameter(
                owned.as_piece(place.index, part), requires_grad=piece.requires_grad
            )
            self._twins[piece] = twin
            if self._dicts[piece] is not None:
                self._twin_states[twin] = {
                    name: self._filled(value, before) for name, value in state.items()
                }

    def _filled(self, value: Any, before: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = before.get(id(value))
        if found is None or found[0] is not value or not _has_form_of(found[1], value):
            found = value, torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        self._spare.states[id(value)] = found
        return found[1].copy_(value)

    def _gradient(self, piece: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.dtype != piece.dtype:
            return gradient.to(piece.dtype)
        return gradient.clone() if self._copies else gradient

    def _take_gradients(self, gradients: dict[nn.Parameter, torch.Tensor]) -> None:
        for piece, twin in self._twins.items():
            given, left = gradients.get(twin), twin.grad
            if left is not given:
                raise UnfitError("its step puts other tensors in the place of gradients")
            twin.grad = None
            if given is not None and self._copies and self._gradients[piece].dtype == given.dtype:
                self._written.append((piece, given))

    # At the step ------------------------------------------------------------------------------

    def holds(self, pieces: dict[int, list[nn.Parameter]]) -> bool:
        """Whether the step would take what has gone in; settings are looked at for all units."""
        return (
            self.watch.is_intact
            and self.unit.slice.master_tensor is self._master
            and _are_the_same(self._pieces, pieces)
            and all(
                piece.grad is self._gradients.get(piece)
                for of_group in pieces.values()
                for piece in of_group
            )
            and all(map(self._has_its_state, self._states))
        )

    def is_made_like(self, now: tuple[Any, ...]) -> bool:
        """Whether torch computed in the thread as it would here."""
        return self._surroundings == now

    def _has_its_state(self, piece: nn.Parameter) -> bool:
        now, was = self._optimizer.state.get(piece), self._states[piece]
        if now is not self._dicts[piece]:
            return not now and not was and (now is None or self._dicts[piece] is None)
        return now is None or (
            list(now) == list(was)
            and all(
                now[name] is value if isinstance(value, torch.Tensor) else is_same(now[name], value)
                for name, value in was.items()
            )
        )

    def publish(self) -> None:
        """Put what was computed in the place of the originals."""
        spare, state = self._spare, self._optimizer.state
        assert spare.master is not None, "it was computed"
        originals: dict[int, torch.Tensor] = {
            id(twin): piece for piece, twin in self._twins.items()
        }
        for original, filled in spare.states.values():
            originals[id(filled)] = original
        for piece, twin in self._twins.items():
            if twin not in self._twin_states:
                state.pop(piece, None)
                continue
            found = self._twin_states[twin]
            its = state.setdefault(piece, {})
            for name in [name for name in its if name not in found]:
                del its[name]
            for name, value in found.items():
                its[name] = originals.get(id(value), value)
        for original, filled in spare.states.values():
            original.data, filled.data = filled.data, original.data
        for piece, gradient in self._written:
            assert piece.grad is not None, "it had one"
            piece.grad.copy_(gradient)
        self.forget()
        spare.master = self.unit.slice.exchange_master(spare.master)

    def forget(self) -> None:
        """Let go of stand-ins, which share the memory that is published."""
        self._twins.clear()
        self._twin_states.clear()
        self._written.clear()
        self._read.clear()


class _Observed(TorchDispatchMode):
    """Stops an optimizer in this thread before it does what it must not do ahead of its step."""

    def __init__(self, gradients: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gradients = {address_of(gradient) for gradient in gradients}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at one operation, then make it."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnfitError("its step draws random numbers")
        if "c10d" in func.namespace:
            raise UnfitError("its step sends something to other ranks")
        if func._schema.is_mutable and self._changes_gradients(func, args, kwargs):
            raise GradientWriteError
        return func(*args, **kwargs)

    def _changes_gradients(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        if func.__name__.startswith("_fused_"):
            # They say so for the sake of gradient scalers, of which there is none here.
            return False
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            tensors = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(one, torch.Tensor) and self._has(one) for one in tensors):
                return True
        return False

    def _has(self, tensor: torch.Tensor) -> bool:
        return address_of(tensor) in self._gradients


def surroundings() -> tuple[Any, ...]:
    """How torch computes in the thread that asks, as far as a step could notice."""
    return (
        torch.get_default_dtype(),
        torch._C._is_any_autocast_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        # Are numbers near zero taken for zero?
        bool(torch.full((), 1e-39, dtype=torch.float32).mul(1.0) == 0),
    )


def _is_tensor(name: str, value: Any) -> bool:
    """Whether a state is a tensor that can be watched; numbers are compared."""
    if isinstance(value, _NUMBERS):
        return False
    if isinstance(value, torch.Tensor) and _is_guarded(value):
        raise UnfitError(f"it keeps one tensor as {name!r} of several parameters")
    if type(value) is not torch.Tensor or value.untyped_storage().nbytes() != value.nbytes:
        raise UnfitError(f"it keeps a {type(value).__name__} as {name!r}, which is no plain tensor")
    return True


def _is_guarded(tensor: torch.Tensor) -> bool:
    return hasattr(type(tensor), "_gatherer")


def _has_form_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    forms = [(tensor.size(), tensor.stride(), tensor.dtype) for tensor in (one, other)]
    return forms[0] == forms[1]


def _are_the_same(
    pieces: dict[int, list[nn.Parameter]], others: dict[int, list[nn.Parameter]]
) -> bool:
    return pieces.keys() == others.keys() and all(
        list(map(id, of_group)) == list(map(id, others[number]))
        for number, of_group in pieces.items()
    )
