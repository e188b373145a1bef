"""What `param.grad` is after a reduce: a tensor without storage that stands for the owned slices.

The gradient of a parameter lies in pieces with its owners. Loops and trainers nevertheless call
`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`: with each rank's part of the gradient
that would clip by different norms on different ranks, without a word. So after a backward
`param.grad` is an `OwnedGradient`: its norms are those of the whole gradient (one collective
serves all parameters), scaling and clamping it in place acts on the owned pieces, and everything
else gathers the whole gradient, on all ranks together. It vanishes before autograd accumulates
again. Where somebody holds it when the gradient is cleared, it keeps the values, as in plain
PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.dtensors import is_cut_over, like, local_values
from onecopy.core.owned_gradient import OwnedGradient
from onecopy.core.precision import map_tensors
from onecopy.core.whole_gradients import WholeGradients
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.comm.collectives import Collectives
    from onecopy.core.tied import Tie
    from onecopy.core.unit import Unit

__all__ = ["OwnedGradients"]

# The list of stand-ins, and the argument of sys.getrefcount.
_NUM_OWN_REFERENCES = 2
# Multiply by, or divide by, their only argument.
_FACTORS = frozenset(
    getattr(torch.Tensor, name) for name in ("mul_", "div_", "__imul__", "__itruediv__")
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
        self._indices = [index for _, index in places]
        self._number_of = {place: number for number, place in enumerate(places)}
        self.names = [unit.names[index] for unit, index in places]
        self._parameters = [unit.parameters[index] for unit, index in places]
        self._pieces = [unit.slice.pieces.get(index) for unit, index in places]
        self._stand_ins = [
            OwnedGradient(self, number, parameter)
            for number, parameter in enumerate(self._parameters)
        ]
        # What scales them has to come to the host all the same.
        self._are_on_host = any(
            unit.gradients is not None and unit.gradients.mean.device.type == "cpu"
            for unit in self._units
        )
        cut = [
            (group, [n for n, one in enumerate(self._parameters) if is_cut_over(one, group)])
            for group in collectives.groups.tensor
        ]
        self._cut = [(group, numbers) for group, numbers in cut if numbers]
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
        # Whose gradients an update under way has taken, which may not be added to; see delayed.py.
        self._handed_over: set[Unit] = set()
        # The gradients were applied in backward. Where they were measured before, as squares of
        # this rank's parts of the norms.
        self._are_applied = False
        self._squares: torch.Tensor | None = None
        # Sums are in the nodes; what brings them to the pieces, on all ranks together.
        self._are_complete = True
        self.complete: Callable[[], object] | None = None
        # Of parameters that other pipeline stages hold, too.
        self.ties: list[Tie] = []

    def _complete(self) -> None:
        """Before values of gradients are looked at or changed."""
        if not self._are_complete and self.complete is not None:
            self.complete()

    def follow(self, before: OwnedGradients) -> None:
        """Take the place of others, now that more parameters have gradients."""
        places = [self._place(number) for number in range(len(self._units))]
        before.settle()
        self.complete, self.ties = before.complete, before.ties
        shown, present = before._places(before._shown), before._places(before._present)
        self._present = {number for number, place in enumerate(places) if place in present}
        if before._squares is not None:
            # Measured in a backward whose step is still to come.
            numbers = {place: number for number, place in enumerate(places)}
            self._squares = self._zeros()
            for number, square in enumerate(before._squares):
                self._squares[numbers[before._place(number)]] = square
        if shown:
            before._hide()
            self.show(
                set(places) - shown,
                are_applied=before._are_applied,
                are_complete=before._are_complete,
            )
        self._handed_over = before._handed_over

    def _places(self, numbers: Collection[int]) -> set[tuple[int, int]]:
        return {self._place(number) for number in numbers}

    def _place(self, number: int) -> tuple[int, int]:
        return self._units[number].number, self._indices[number]

    def show(
        self,
        absent: Container[tuple[int, int]] = (),
        *,
        are_applied: bool = False,
        are_complete: bool = True,
    ) -> None:
        """After a reduce: every parameter with a gradient has one to measure and to change.

        Args:
            absent: unit and number there of the parameters that no rank had a gradient for.
            are_applied: they exist no more, the backward has updated the parameters with them.
            are_complete: False where sums are still in the nodes.
        """
        self._norms.clear()
        self._wholes.drop()
        self._are_applied, self._are_complete = are_applied, are_complete
        self._shown.clear()
        self._suspended.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self._parameters):
                if not parameter.requires_grad:
                    continue
                if absent and number not in self._present and self._place(number) in absent:
                    # It may have one from before that was known.
                    parameter.grad = None
                    continue
                if are_complete:
                    self._present.add(number)
                parameter.grad = self._stand_ins[number]
                self._shown[number] = None

    def clear(self, units: Collection[Unit] | None = None, *, set_to_none: bool = True) -> None:
        """`zero_grad` of these units' parameters, or of all, is about to clear the pieces.

        Whoever holds a gradient that is set to None keeps it, whole, as in plain PyTorch.
        """
        if self._suspended:
            self.resume()
        # What was written into the gradients of others still counts.
        self._wholes.take_writes(uncounted=True)
        self._wholes.drop()
        self._norms.clear()
        if set_to_none:
            self._remove_all(units)
        for tie in self.ties:
            tie.is_summed = tie.is_summed and units is not None and tie.unit not in units
        self._handed_over -= self._handed_over if units is None else set(units)

    def _remove_all(self, units: Collection[Unit] | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self._parameters):
                if units is None or self._units[number] in units:
                    parameter.grad = None
                    if number in self._shown:
                        del self._shown[number]
                        self._let_go(number)
                    self._present.discard(number)

    def _let_go(self, number: int) -> None:
        """A gradient is no longer its parameter's. If somebody holds it, it keeps its values, as
        in plain PyTorch, and the parameter gets another stand-in.
        """
        if self._are_applied or sys.getrefcount(self._stand_ins[number]) <= _NUM_OWN_REFERENCES:
            return
        stand_in = self._stand_ins[number]
        unit, index, piece = self._units[number], self._indices[number], self._pieces[number]
        stand_in.is_partial = unit.gradients is not None and unit.gradients.node_sum is not None
        if unit in self._handed_over:
            stand_in.is_taken = True
        elif piece is None or piece.grad is None:
            stand_in.part = unit.flat.new_zeros(0 if piece is None else piece.numel())
        else:
            part = unit.slice.from_piece(index, self._at_rest(number, piece.grad))
            stand_in.part = part.to(unit.flat.device, unit.flat.dtype, copy=True)
        self._stand_ins[number] = OwnedGradient(self, number, self._parameters[number])

    def is_cleared(self, stand_in: OwnedGradient) -> bool:
        """Whether this is not, or no more, the gradient of its parameter."""
        number = stand_in.number
        if stand_in is self._stand_ins[number] and number in self._shown and not self._suspended:
            with torch._C.DisableTorchFunctionSubclass():
                is_in_place = self._parameters[number].grad is stand_in
            if not is_in_place:
                self._settle_some((number,))
        return stand_in is not self._stand_ins[number]

    @property
    def are_shown(self) -> bool:
        """There are gradients to measure and to change."""
        return bool(self._shown)

    def hide(self) -> None:
        """Before autograd accumulates again, which would fail on a stand-in."""
        if not self._shown:
            return
        self.settle(uncounted=True)
        for tie in self.ties:
            tie.refuse_more()
        for number in self._shown:
            if self._units[number] in self._handed_over:
                raise ShardingError(
                    f"a backward would add to the gradient of {self.names[number]}, which "
                    "optimizer.step() has taken: with delayed_update the update that it belongs to "
                    "is still running. Call optimizer.zero_grad() between a step and the next "
                    "backward"
                )
        self._handed_over.clear()
        self._hide()

    def _hide(self) -> None:
        self._norms.clear()
        self._wholes.drop()
        with torch._C.DisableTorchFunctionSubclass():
            for number in self._shown:
                self._parameters[number].grad = None
        self._shown.clear()

    def hand_over(self, units: Iterable[Unit]) -> None:
        """An update that runs on takes the gradients of these units."""
        self.settle()
        self._wholes.drop()
        self._handed_over |= set(units)

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
        """Take over what the user has done to all `param.grad` since the last look.

        Before every use of the pieces' gradients: values written into whole gradients reach the
        pieces; `p.grad = None` (or zero_grad() of a part, or of a module around this one) means
        here, too, that the gradient is gone; a tensor put there takes its place.

        Args:
            uncounted: also values that were written in ways that torch does not count.
        """
        if self._suspended:
            self.resume()
        self._wholes.take_writes(uncounted=uncounted)
        self._settle(range(len(self._parameters)))

    def _settle_some(self, numbers: Iterable[int]) -> None:
        """The same for those that are asked about: of very many, each may be."""
        if self._suspended:
            self.resume()
        self._wholes.take_writes()
        self._settle(numbers)

    def _settle(self, numbers: Iterable[int]) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for number in numbers:
                gradient = self._parameters[number].grad
                if gradient is None:
                    if number in self._shown:
                        self._remove(number)
                elif gradient is not self._stand_ins[number] and not self._is_whole(
                    number, gradient
                ):
                    self._take(number, gradient)

    def _remove(self, number: int) -> None:
        self._let_go(number)
        del self._shown[number]
        self._present.discard(number)
        self._forget(number)
        piece = self._pieces[number]
        if piece is not None:
            piece.grad = None

    def _forget(self, number: int) -> None:
        """What is summed in nodes of one parameter's gradient is gone."""
        gradients = self._units[number].gradients
        assert gradients is not None, "what has a gradient is trainable"
        gradients.forget_parameter(self._indices[number])

    def _is_whole(self, number: int, gradient: torch.Tensor) -> bool:
        place = (self._units[number], self._indices[number])
        return self._wholes.place_of(gradient) == place

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        """A whole gradient of the user's takes the place of the reduced one."""
        self._refuse_applied()
        if type(gradient) is OwnedGradient:
            # Of another parameter, or of before.
            gradient = gradient.gradients.value_of(gradient, "assigned to another one")
        if number in self._shown:
            self._let_go(number)
        self._forget(number)
        unit, index = self._units[number], self._indices[number]
        piece = self._pieces[number]
        if piece is not None:
            values = local_values(self._parameters[number], gradient)
            part = unit.slice.as_piece(index, unit.slice.own_part(index, values))
            piece.grad = part.to(piece.device, unit.dtypes.gradient, copy=True)
        self._parameters[number].grad = self._stand_ins[number]
        self._shown[number] = None
        self._present.add(number)
        self._norms.clear()

    def whole(self, stand_in: OwnedGradient, what: str) -> torch.Tensor:
        """The whole gradient of one parameter, in its dtype; a collective, so all ranks ask."""
        self._refuse_applied()
        self._complete()
        # The unit's are gathered together.
        self._settle_some(self._numbers[self._units[stand_in.number]])
        return self.value_of(stand_in, what)

    def value_of(self, stand_in: OwnedGradient, what: str) -> torch.Tensor:
        """The same of the gradients as they are known here."""
        number = stand_in.number
        self._refuse_taken(stand_in)
        unit, index = self._units[number], self._indices[number]
        what = f"the gradient of {self.names[number]} ({what})"
        if stand_in.part is not None:
            self._collectives.agreement.agree(what)
            whole = unit.gather_pieces(index, stand_in.part)
            stand_in.whole = like(self._parameters[number], whole)
            stand_in.part = None
        if stand_in.whole is not None:
            return stand_in.whole
        return self._wholes.get(unit, what)[index]

    def take_writes(self, result: Any) -> Any:
        """After a function on whole gradients: `result`, a stand-in where it is one of them."""
        self._norms.clear()
        place = self._wholes.place_of(result)
        self._wholes.take_writes()
        self._wholes.forget_unheld()
        return result if place is None else self._stand_ins[self._number_of[place]]

    @contextmanager
    def revealed(self) -> Iterator[None]:
        """Inside, `param.grad` is a plain tensor with the whole gradient; what is changed, put
        there or removed by the end of the block counts.
        """
        self._complete()
        self.settle()
        shown = list(self._shown)
        self._wholes.are_kept = True
        wholes: dict[Unit, Sequence[torch.Tensor]] = {}
        try:
            for number in shown:
                self._refuse_applied()
                self._refuse_taken(self._stand_ins[number])
                unit, index = self._units[number], self._indices[number]
                if unit not in wholes:
                    what = f"the gradient of {self.names[number]} (grads=True)"
                    wholes[unit] = self._wholes.get(unit, what)
                self._parameters[number].grad = wholes[unit][index]
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
        self._refuse_taken(self._stand_ins[number])
        if order not in self._norms or number in self._asked[order]:
            self._norms[order] = self.norms(order)
            self._asked[order] = set()
        self._asked[order].add(number)
        return self._norms[order][number]

    def scale(self, factor: torch.Tensor, unit: Unit | None = None) -> None:
        """Multiply all gradients, or those of one unit, by a 0-d tensor."""
        self._refuse_applied()
        self._complete()
        if unit is None:
            self.settle()
        self._norms.clear()
        numbers = range(len(self._pieces)) if unit is None else self._numbers.get(unit, [])
        if self._is_one(factor):
            return
        if unit is None:
            self._wholes.change(lambda whole: whole.mul_(factor))
        for at_hand in self._at_hand(numbers, changes=True):
            for device, present in _by_device(self._gradients(at_hand).values()).items():
                torch._foreach_mul_(present, factor.to(device))

    def change_part(
        self, unit: Unit, index: int, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Put what `change` makes of it in the place of this rank's part of one gradient.

        Args:
            change: from and to 1-D tensors, in memory order, on the unit's device; without elements
                where this rank owns nothing. It may be a collective.
        """
        self._refuse_applied()
        self._complete()
        self.settle(uncounted=True)
        self._norms.clear()
        self._wholes.drop()
        number = self._number_of[unit, index]
        for at_hand in self._at_hand([number], changes=True):
            if number not in at_hand:
                continue
            gradient = self._gradients(at_hand).get(number)
            if gradient is None:
                change(unit.flat.new_empty(0, dtype=unit.dtypes.gradient))
                continue
            own = unit.slice.from_piece(index, gradient).to(unit.flat.device, copy=True)
            gradient.copy_(unit.slice.as_piece(index, change(own)))

    def sum_ties(self) -> None:
        """Before a norm of the whole model, and before a step; a collective of pipeline stages."""
        for tie in self.ties:
            tie.sum()

    def counted_norms(self, order: float) -> torch.Tensor:
        """`norms`, 0 for those parameters that are counted in another pipeline stage."""
        norms = self.norms(order)
        elsewhere = {(tie.unit.number, tie.index) for tie in self.ties if tie.is_counted_elsewhere}
        places = map(self._place, range(len(self._units)))
        norms[[n for n, place in enumerate(places) if place in elsewhere]] = 0.0
        return norms

    def _at_hand(self, numbers: Iterable[int], *, changes: bool) -> Iterator[list[int]]:
        """These numbers in groups: those whose gradients are in memory, and then, unit by unit,
        those that are brought from disk and go back there.
        """
        groups: dict[Unit | None, list[int]] = {}
        for number in numbers:
            gradients = self._units[number].gradients
            is_away = gradients is not None and gradients.mean.is_on_disk
            groups.setdefault(self._units[number] if is_away else None, []).append(number)
        yield groups.pop(None, [])
        for unit, group in groups.items():
            assert unit is not None and unit.gradients is not None, "what is on disk has a unit"
            with unit.gradients.mean.at_hand(changes=changes):
                yield group

    def change(
        self, number: int, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Apply an elementwise in-place function to this rank's part of one gradient."""
        self._refuse_applied()
        self._complete()
        self._settle_some((number,))
        self._refuse_taken(self._stand_ins[number])
        self._norms.clear()
        piece = self._pieces[number]
        if function in _FACTORS and not kwargs and len(args) == 1 and self._is_one(args[0]):
            return
        with torch.no_grad():
            place = (self._units[number], self._indices[number])
            self._wholes.change(lambda whole: function(whole, *args, **kwargs), place)
            if piece is not None and piece.grad is not None:
                gradient = self._at_rest(number, piece.grad)
                args, kwargs = map_tensors((args, kwargs), lambda one: one.to(gradient.device))
                function(gradient, *args, **kwargs)

    def _gradients(self, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        """This rank's parts of gradients, where their values lie."""
        pieces = [(number, self._pieces[number]) for number in numbers]
        return {
            number: self._at_rest(number, piece.grad)
            for number, piece in pieces
            if piece is not None and piece.grad is not None
        }

    def _at_rest(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        gradients = self._units[number].gradients
        assert gradients is not None, "what has a gradient is trainable"
        return gradients.mean.at_rest(gradient)

    def _is_one(self, factor: Any) -> bool:
        """Whether multiplying by it changes nothing. To know that must cost no wait for an
        accelerator, so that where gradients are on one nobody asks.
        """
        if isinstance(factor, torch.Tensor) and factor.device.type != "cpu":
            if not self._are_on_host:
                return False
        return bool(factor == 1)

    def norms(self, order: float) -> torch.Tensor:
        """(number of trainable parameters,) norms of the whole gradients; a collective."""
        self._complete()
        self.settle(uncounted=True)
        infinite = order == float("inf")
        with torch.no_grad():
            if self._are_applied and order == 2.0 and self._squares is not None:
                local = self._squares.clone()
            else:
                self._refuse_applied()
                local = self._add_powers(self._zeros(), order, range(len(self._pieces)))
            total = self._collectives.sum_of(local, maximum=infinite)
            for group, cut in self._cut:
                # Ranks of a tensor group have parts of these, and replicas of the others.
                parts = total[cut]
                self._collectives.over(group, parts, maximum=infinite)
                total[cut] = parts
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
        for at_hand in self._at_hand(numbers, changes=False):
            grads = self._gradients(at_hand)
            if grads:
                norms = torch._foreach_norm(list(grads.values()), order, dtype=local.dtype)
                values = torch.stack([norm.to(local) for norm in norms])
                is_inf = order == float("inf")
                local[list(grads)] = values if is_inf else values**order
        return local

    def _refuse_taken(self, stand_in: OwnedGradient) -> None:
        number = stand_in.number
        is_current = stand_in is self._stand_ins[number]
        if stand_in.is_taken or (is_current and self._units[number] in self._handed_over):
            raise ShardingError(
                f"the gradient of {self.names[number]} exists no more: optimizer.step() has taken "
                "it for an update that runs on (delayed_update). Look at gradients between "
                "backward and step"
            )
        if stand_in.is_partial:
            raise ShardingError(
                f"the gradient of {self.names[number]} exists no more: it was cleared while its "
                "sums were still in the nodes, and the sum over them was never made. Look at "
                "gradients before they are cleared"
            )

    def _refuse_applied(self) -> None:
        if self._are_applied:
            raise ShardingError(
                "these gradients exist no more: with step_in_backward the backward has updated "
                "the parameters with them. To clip say max_grad_norm=... at shard, which clips by "
                'the norm of the step before, or step_in_backward="two-pass" with it'
            )


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    """Gradients of offloaded units lie in host memory, those of others on the device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for one in tensors:
        found.setdefault(one.device, []).append(one)
    return found
