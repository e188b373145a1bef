"""The optimizer ahead of its step: each unit is updated as soon as its gradient has arrived.

Whether a gradient is clipped, scaled or dropped is known when all have arrived, and mostly it is
not: so the host begins while the rest of the backward still runs, and the step finds out whether
what was taken is what it would have taken. If so it keeps the update, else it makes it. What was
taken are gradients, masters, states, settings and attributes of the optimizer; none of them is
changed before the step (see unit_update.py), so there is nothing to roll back.

The optimizer is run as by the step, unit by unit, and values are the same to the last bit.

Source: SuperOffload (Lian et al. 2025, arXiv 2509.21271), speculation-then-validation. There values
are updated in place and rolled back; here they are computed beside, and memory is exchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from onecopy.core.settings_copy import SettingsCopy, UnfitError
from onecopy.core.unit import UnitState
from onecopy.core.unit_update import (
    GradientWriteError,
    NotNowError,
    Spare,
    UnitUpdate,
    surroundings,
)
from onecopy.core.watch import Guards
from onecopy.core.worker import make_thread

if TYPE_CHECKING:
    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit
    from onecopy.core.unit_step import UnitSteps

__all__ = ["SpeculativeStep"]


class SpeculativeStep:
    """Of one optimizer; see the module's docstring.

    Attributes:
        is_paused: a step is being made, or a closure runs: nothing is begun.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        unit_steps: UnitSteps,
        engines: Mapping[Unit, Engine],
    ) -> None:
        self.is_paused = False
        self._optimizer = optimizer
        self._unit_steps = unit_steps
        self._engines = engines
        self._thread = make_thread()
        self._guards = Guards()
        # In the order of their beginning.
        self._updates: dict[Unit, UnitUpdate] = {}
        self._spares: dict[Unit, Spare] = {}
        self._settings: SettingsCopy | None = None
        self._is_off = False
        self._copies_gradients = False
        # How often the gradient of a unit has arrived since the last step, and had by that step.
        self._counts: dict[Unit, int] = {}
        self._expected: dict[Unit, int] = {}

    # Moments ----------------------------------------------------------------------------------

    def arrived(self, unit: Unit) -> None:
        """The owned gradient of a unit has a mean more: begin, if the step is likely to be next."""
        if not unit.slice.is_offloaded or not self._unit_steps.has_gradient(unit):
            return
        assert unit.gradients is not None, "what has a gradient is trainable"
        self._end(unit, "dropped")
        count = 1 if unit.gradients.mean.is_fresh else self._counts.get(unit, 0) + 1
        self._counts[unit] = count
        if not self.is_paused and not self._is_off and count == self._expected.get(unit, 1):
            self._begin(unit)

    def run(self, units: Iterable[Unit]) -> None:
        """Make the step on these units, as `UnitSteps.run` does, with what was made ahead."""
        chosen = {unit: None for unit in units if self._unit_steps.has_gradient(unit)}
        for unit in chosen:
            # In one order on all ranks: updates are kept as they come.
            if unit.state is UnitState.GATHERING:
                unit.finish_gather()
        settings, self._settings = self._settings, None
        is_same = settings is not None and settings.are_those_of(self._optimizer)
        updates, self._updates = self._updates, {}
        rest = dict(chosen)
        for unit, update in updates.items():
            update.watch.end(self._guards)
            if unit not in chosen:
                what = "dropped"
            elif not is_same or not update.watch.is_unchanged:
                what = "redone"
            elif update.future.cancel():
                what = "late"
            elif not self._keep(update):
                what = "redone"
            else:
                what = "kept"
                del rest[unit]
            self._tell(unit, what)
        # As without speculation, and in that order.
        self._unit_steps.run(rest)
        self._learn()

    def drop(self) -> None:
        """No step is made of what has arrived, or somebody is to see plain states."""
        for unit in list(self._updates):
            self._end(unit, "dropped")
        self._settings = None

    def skip(self) -> None:
        """The step leaves everything as it is."""
        self.drop()
        self._learn()

    def close(self) -> None:
        """No step follows."""
        self.drop()
        self._thread.shutdown(cancel_futures=True)

    # Details ----------------------------------------------------------------------------------

    def _begin(self, unit: Unit) -> None:
        try:
            if self._settings is None:
                self._settings = SettingsCopy(self._optimizer)
            update = UnitUpdate(
                unit,
                self._unit_steps.pieces_of(unit),
                self._optimizer,
                self._settings,
                self._spares.setdefault(unit, Spare()),
                self._copies_gradients,
            )
        except NotNowError:
            return
        except UnfitError as error:
            self._switch_off(error)
            return
        update.watch.begin(self._guards)
        update.future = self._thread.submit(update.compute)
        self._updates[unit] = update

    def _end(self, unit: Unit, what: str) -> None:
        update = self._updates.pop(unit, None)
        if update is not None:
            update.watch.is_touched = True
            update.watch.end(self._guards)
            self._tell(unit, what)

    def _keep(self, update: UnitUpdate) -> bool:
        """Publish an update if it was made as the step would make it."""
        update.future.result()
        unit, error = update.unit, update.error
        if isinstance(error, UnfitError):
            self._switch_off(error)
        self._copies_gradients |= isinstance(error, GradientWriteError)
        # An error of the optimizer's own is met again in the step, where the loop hears of it.
        if error is not None:
            # Whatever else holds tensors of it.
            self._spares.pop(unit, None)
            return False
        if not update.is_made_like(surroundings()):
            return False
        if not update.holds(self._unit_steps.pieces_of(unit)):
            return False
        self._unit_steps.publish(unit, update.publish)
        return True

    def _learn(self) -> None:
        self._expected.update(self._counts)
        self._counts.clear()

    def _tell(self, unit: Unit, what: str) -> None:
        self._engines[unit].events.emit("speculation", unit.name, what=what)

    def _switch_off(self, error: UnfitError) -> None:
        if not self._is_off:
            self._is_off = True
            self.drop()
            self._spares.clear()
            warnings.warn(
                f"speculative_step: {type(self._optimizer).__name__} is run at its step only, as "
                f"without it: {error}",
                stacklevel=2,
            )
