"""The optimizer one step behind: it runs on the host while the next forward and backward run.

With W_k the weights after k updates and g_i the gradient of step i, training without delay is
W_i = U(W_{i-1}, g_i), with g_i taken at W_{i-1}. With it, from a first step on, g_i is taken at
W_{i-2}, while W_{i-1} is being computed from g_{i-1}; the order of updates stays as it is.

The update gets pieces of its own, which share memory with the optimizer's, the gradients of the
step, and copies of the settings: what the loop does meanwhile (zero_grad, the next backward, a
scheduler) does not meet it.
Values that the device has are those of before until the update is published, with the next step.

Source: ZeRO-Offload (Ren et al. 2021), section 5.2, one-step delayed parameter update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.core.settings_copy import copy_of_groups
from onecopy.core.worker import Worker, make_thread

if TYPE_CHECKING:
    from onecopy.core.unit import Unit

__all__ = ["DelayedUpdate"]

# The paper's: the first updates are large.
FIRST_STEPS = 40


@dataclass(frozen=True, slots=True)
class _Part:
    """The pieces of one unit that are updated, by number of their group, with their gradients."""

    pieces: dict[int, list[nn.Parameter]]
    gradients: dict[nn.Parameter, torch.Tensor]


class DelayedUpdate:
    """One optimizer's update that is under way, if any is.

    Attributes:
        is_under_way: an update has been started and not been finished, on every rank alike.
        first_steps: how many steps are made without delay.

    Args:
        wanted: True, or the number of the first step that is delayed; 1 is the very first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, wanted: bool | int) -> None:
        self.first_steps = FIRST_STEPS if wanted is True else wanted - 1
        self._optimizer = optimizer
        self._thread = make_thread()
        self._update: Future[None] | None = None
        # An update has been started and not been published; of which units.
        self.is_under_way = False
        self._units: list[Unit] = []
        # By the optimizer's piece, the one that shares its memory.
        self._twins: dict[nn.Parameter, nn.Parameter] = {}
        self._states: defaultdict[Any, Any] = defaultdict(dict)

    def start(self, pieces: dict[Unit, dict[int, list[nn.Parameter]]]) -> None:
        """Begin to update pieces by the gradients that they have, which are taken from them.

        Args:
            pieces: by unit and number of their group.
        """
        optimizer = self._optimizer
        # A scheduler changes a learning rate that is a tensor.
        groups = copy_of_groups(optimizer, refuses=False)
        parts = [self._part(unit, of_unit) for unit, of_unit in pieces.items()]
        self._units, self.is_under_way = list(pieces), True
        worker = Worker(optimizer, self._states, groups)
        for unit in self._units:
            # A gather brings up what the device does not have, and must not look at the master now.
            unit.slice.send_up()
            unit.slice.is_in_update = True
            assert unit.gradients is not None, "what has a gradient is trainable"
            unit.gradients.forget_overflow()
        self._update = self._thread.submit(_run, worker, parts)

    def join(self) -> None:
        """Wait until the update has been computed; its states are the optimizer's then.

        Raises what the optimizer has raised.
        """
        update, self._update = self._update, None
        if update is None:
            return
        try:
            update.result()
        finally:
            for piece, twin in self._twins.items():
                if twin in self._states:
                    self._optimizer.state[piece] = self._states[twin]
            self._twins.clear()
            self._states = defaultdict(dict)

    def finish(self) -> None:
        """Wait likewise, and bring the new values to the device, before they change again."""
        try:
            self.join()
        finally:
            for unit in self._units:
                unit.slice.is_in_update = False
                # The device does not have what the master has now.
                unit.slice.join_master()
                unit.slice.send_up()
            self._units, self.is_under_way = [], False

    def close(self) -> None:
        """No update follows."""
        self._thread.shutdown()

    def _part(self, unit: Unit, pieces: dict[int, list[nn.Parameter]]) -> _Part:
        twins: dict[int, list[nn.Parameter]] = {}
        gradients: dict[nn.Parameter, torch.Tensor] = {}
        mine = {piece for of_group in pieces.values() for piece in of_group}
        # Then later backwards add to the memory that the gradients are parts of.
        stays = any(
            piece.grad is not None for piece in unit.slice.pieces.values() if piece not in mine
        )
        for number, of_group in pieces.items():
            for piece in of_group:
                if piece.grad is None:
                    continue
                twin = nn.Parameter(piece.detach(), requires_grad=piece.requires_grad)
                self._twins[piece] = twin
                if piece in self._optimizer.state:
                    self._states[twin] = self._optimizer.state[piece]
                twins.setdefault(number, []).append(twin)
                gradients[twin] = piece.grad.clone() if stays else piece.grad
                piece.grad = None
        return _Part(twins, gradients)


def _run(worker: Worker, parts: Iterable[_Part]) -> None:
    """Step unit by unit, so that what a step needs beside its states exists for one at a time."""
    with torch.no_grad():
        for part in parts:
            worker.step(part.pieces, part.gradients)
            for twin in part.gradients:
                twin.grad = None
            part.gradients.clear()
