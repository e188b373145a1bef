"""Gathering on touch: code that uses a parameter outside its module's forward sees its values.

A released parameter's guard comes here before any function of torch reads or writes it: a weight
used by another module, a method that is not `forward`, `nn.init`, a moving average, a norm. The
unit is gathered when every rank does the same (agreed as any unforeseen use; a rank that does
something else gets the error that names both). Inside a forward or a backward the use is recorded
in the schedule, so it is foreseen from the next step on.

A unit that was touched outside of both stays gathered until another one is touched, and at the
latest until the next forward, backward or step begins; tensors taken from it keep its memory.
Whatever was written by then, through them too, reaches the masters; only elements that changed do,
so reading never costs a master its precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.unit import UnitState

if TYPE_CHECKING:
    from onecopy.core.backward import Backward
    from onecopy.core.engine import Engine
    from onecopy.core.saved_tensors import SavedTensors
    from onecopy.core.unit import Unit

__all__ = ["Touch"]


class Touch:
    """The `Gatherer` behind the guards of one model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._backward: Backward | None = None
        self._saved: SavedTensors | None = None

    def connect(self, backward: Backward, saved: SavedTensors) -> None:
        """Whom to tell when a touch happens in backward, or in a forward with gradients."""
        self._backward, self._saved = backward, saved

    def is_released(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter should wear its guard."""
        found = self._engine.find(parameter)
        return found is not None and found[0].state is not UnitState.GATHERED

    def touch(self, tensors: Sequence[torch.Tensor], function: Callable[..., Any]) -> None:
        """Gather the units of all parameters among `tensors`, which `function` is about to use."""
        engine = self._engine
        found = [place for one in tensors if (place := engine.find(one)) is not None]
        units = {unit: unit.names[index] for unit, index in found}
        for unit in [unit for unit in units if not unit.releases]:
            # Its new values are on their way; other ranks need not want it, too.
            engine.demand(unit)
            if not unit.slice.is_in_update:
                # While it is, nobody can tell what was written from what is being updated.
                unit.expect_writes()
            del units[unit]
        if not units:
            return
        assert self._backward is not None, "connected as soon as there are hooks"
        if torch._C._current_graph_task_id() != -1:
            self._backward.enter()
            if self._backward.stepper is not None:
                self._backward.stepper.refuse_taken(units)
        else:
            self._backward.recover()
        is_outside = not engine.schedule.is_running
        if is_outside:
            engine.release_untouched(units)
        for unit, name in units.items():
            if unit.state is not UnitState.GATHERED:
                self._gather(unit, name, function, is_outside)

    def _gather(
        self, unit: Unit, name: str, function: Callable[..., Any], is_outside: bool
    ) -> None:
        wish = f"the values of parameter {name} ({function.__name__})"
        self._engine.demand(unit, wish, exactly=is_outside)
        if is_outside:
            # A graph, or an alias, may hold its memory: no net is spread here.
            unit.keep_for_graph()
            unit.expect_writes()
            unit.drop_secondary()
        elif self._saved is not None and not self._saved.is_watched:
            unit.keep_for_graph()
            self._saved.need()
