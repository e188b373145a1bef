"""The user's optimizer, run on the pieces of one unit alone.

What a step needs beside its states (the fp32 master where it is kept split, fp32 gradients where
they are kept in bf16) then exists for one unit at a time. The optimizer's own `step` is called for
each unit, with copies of its param_groups that hold this unit's pieces. Its hooks stay silent:
`optimizer.step()` itself still runs once, on pieces whose gradients are out of sight, so that
hooks, schedulers and counters (in param_groups, or attributes of the optimizer) see one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from onecopy.core.chunked_step import ChunkedStep
from onecopy.core.step_alone import step_alone
from onecopy.core.unit import UnitState

if TYPE_CHECKING:
    import torch
    from torch import nn

    from onecopy.core.unit import Unit

__all__ = ["UnitSteps"]


class UnitSteps:
    """See the module's docstring."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.chunked = ChunkedStep(optimizer)
        # By unit, then by number of the group.
        self._pieces: dict[Unit, dict[int, list[nn.Parameter]]] = {}
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []

    def add(self, unit: Unit, group: int, piece: nn.Parameter) -> None:
        """The optimizer has this piece, in this one of its groups.

        Raises:
            ConfigError: it is on disk, may not be cut, and is larger than the buffers.
        """
        if unit.slice.disk is not None:
            self.chunked.add(unit, piece)
        self._pieces.setdefault(unit, {}).setdefault(group, []).append(piece)

    def settle_states(self) -> None:
        """What the optimizer was given for units on disk goes there."""
        for unit, groups in self._pieces.items():
            if unit.slice.disk is not None:
                pieces = (piece for group in groups.values() for piece in group)
                self.chunked.settle_states(unit, pieces)

    def with_gradients(self) -> dict[Unit, dict[int, list[nn.Parameter]]]:
        """The pieces by unit and number of their group, of units that have a gradient."""
        return {unit: groups for unit, groups in self._pieces.items() if _have_gradient(groups)}

    def pieces_of(self, unit: Unit) -> dict[int, list[nn.Parameter]]:
        """The optimizer's pieces of one unit, by number of their group."""
        return self._pieces.get(unit, {})

    def has_gradient(self, unit: Unit) -> bool:
        """Whether one of them has a gradient."""
        return _have_gradient(self.pieces_of(unit))

    def run(self, units: Iterable[Unit]) -> None:
        """Update the pieces of units that have a gradient; nothing is sent around yet."""
        on_disk = {}
        with_gradients = self.with_gradients()
        work = [unit for unit in units if unit in with_gradients]
        in_memory = [unit for unit in work if unit.slice.disk is None]
        following = dict(itertools.pairwise(in_memory))
        for unit in work:
            pieces = with_gradients[unit]
            if unit.state is UnitState.GATHERING:
                # A refresh under way still reads the values that are about to change.
                unit.finish_gather()
            if unit.slice.disk is not None:
                on_disk[unit] = pieces
            else:
                self._run_in_memory(unit, pieces, following.get(unit))
        self.chunked.run(on_disk)

    def _run_in_memory(
        self, unit: Unit, pieces: dict[int, list[nn.Parameter]], following: Unit | None
    ) -> None:
        assert unit.gradients is not None, "what has a gradient is trainable"
        unit.slice.join_master()
        with unit.gradients.mean.in_master_dtype():
            if following is not None and following.gradients is not None:
                # Travels meanwhile.
                following.gradients.mean.start_fetch()
            optimizer = self._optimizer
            step_alone(optimizer, optimizer.param_groups, pieces)
        _rest(unit)

    def publish(self, unit: Unit, update: Callable[[], None]) -> None:
        """Let `update` put new masters and states of a unit in the place of those of now."""
        unit.slice.join_master()
        update()
        _rest(unit)

    def hide(self, units: Iterable[Unit]) -> None:
        """Put the gradients of units that have been updated out of the optimizer's sight."""
        for unit in units:
            for group in self._pieces.get(unit, {}).values():
                for piece in group:
                    if piece.grad is not None:
                        self._hidden.append((piece, piece.grad))
                        piece.grad = None

    def show(self) -> None:
        """Undo `hide`."""
        for piece, gradient in self._hidden:
            piece.grad = gradient
        self._hidden.clear()


def _have_gradient(groups: dict[int, list[nn.Parameter]]) -> bool:
    return any(piece.grad is not None for group in groups.values() for piece in group)


def _rest(unit: Unit) -> None:
    unit.slice.rest()
    # Travels while the next unit is updated.
    unit.slice.send_up()
