"""What the runtime remembers from one step to the next, beside tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onecopy import handle

if TYPE_CHECKING:
    from torch import nn

__all__ = ["counters_of", "restore_counters"]


def counters_of(model: nn.Module) -> dict[str, Any]:
    """The loss scale, and the norm that clips the next step in backward, as plain numbers."""
    owner = handle.of(model)
    found: dict[str, Any] = {}
    if owner.engine.loss_scale is not None:
        found["loss_scale"] = owner.engine.loss_scale.state_dict()
    stepper = owner.backward.stepper
    if stepper is not None and stepper.norm is not None:
        found["previous_norm"] = float(stepper.norm)
    return found


def restore_counters(model: nn.Module, saved: dict[str, Any]) -> None:
    """Continue with them.

    A loss scale stays as it is where the run that was saved had none. A norm does not: it is that
    of a step which this run has not made; the next step is then clipped like a first one.
    """
    owner = handle.of(model)
    if owner.engine.loss_scale is not None and "loss_scale" in saved:
        owner.engine.loss_scale.load_state_dict(saved["loss_scale"])
    stepper = owner.backward.stepper
    if stepper is not None and not stepper.needs_passes:
        norm, device = saved.get("previous_norm"), owner.engine.units[0].flat.device
        stepper.norm = None if norm is None else torch.tensor(norm, device=device)
