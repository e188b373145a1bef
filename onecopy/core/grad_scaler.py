"""torch.amp.GradScaler on a sharded model: all ranks step, or none does.

A scaler looks for overflow in the gradients that it finds in the optimizer, which are those that
this rank owns: left to itself it would skip steps, and change its scale, on some ranks only. Some
optimizers, by an attribute, ask the scaler to leave both to them; attached ones do. In `step` they
agree on what the ranks have found, unscale what is not unscaled yet, and write the result where
the scaler's `update` reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from types import FrameType

    from onecopy.core.engine import Engine
    from onecopy.core.gradients import Gradients

__all__ = ["LEAVES_TO_OPTIMIZER", "agree_by_hand", "is_stepping"]

# What a scaler asks an optimizer before it decides by itself.
LEAVES_TO_OPTIMIZER = "_step_supports_amp_scaling"


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler is calling this optimizer's `step`."""
    return hasattr(optimizer, "found_inf")


def agree_by_hand(
    optimizer: torch.optim.Optimizer,
    parts: Sequence[tuple[Engine, Sequence[Gradients]]],
    *,
    were_local: bool,
) -> bool:
    """Unscale what the optimizer is about to step; whether any rank has overflowed. A collective.

    Args:
        parts: models and those of their gradients that are about to be stepped.
        were_local: some of them had been on their ranks when the scaler looked at them.

    Raises:
        ShardingError: they are scaled twice, or were unscaled before they were reduced.
    """
    # Taken away: the scaler leaves them behind where this raises.
    scale, found = vars(optimizer).pop("grad_scale", None), vars(optimizer).pop("found_inf")
    if any(engine.loss_scale and of_model for engine, of_model in parts):
        raise ShardingError(
            'a GradScaler, and precision="fp16", which scales by itself: leave the GradScaler '
            'away, or say precision=onecopy.Precision(compute="fp16", loss_scale=1.0)'
        )
    if were_local and scale is None:
        raise ShardingError(
            "scaler.unscale_ was called while gradients of no_sync were still on their ranks: it "
            "has unscaled none of them. Let the last backward before it be outside of no_sync"
        )
    flag = torch.zeros((), device=parts[0][0].units[0].flat.device) + found
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for _, of_model in parts:
            for gradients in of_model:
                flag += _unscale(gradients, inverse).to(flag.device)
    for engine, _ in parts:
        flag = engine.collectives.sum_of(flag, maximum=True, what="overflow")
        flag = engine.collectives.over_model(flag, maximum=True)
    record = _record(optimizer)
    record.clear()
    record[flag.device] = flag
    # Unscaled: fused optimizers would do it again.
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    return bool(flag)


def _unscale(gradients: Gradients, inverse: torch.Tensor) -> torch.Tensor:
    """Multiply the owned means of a unit; 0-d, above 0 where one is not finite."""
    mean, pieces = gradients.mean, gradients.unit.slice.pieces.values()
    found = torch.zeros((), device=mean.device)
    means = [mean.at_rest(piece.grad) for piece in pieces if piece.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(means, found, inverse.to(mean.device))
    return found


def _record(optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
    """What the scaler has found in this optimizer, by device: its `update` reads it.

    The scaler does not say who it is, but its `step` is running.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            state: dict[str, Any] = frame.f_locals["optimizer_state"]
            record: dict[torch.device, torch.Tensor] = state["found_inf_per_device"]
            return record
        frame = frame.f_back
    raise ShardingError(
        f"something other than torch.amp.GradScaler has set found_inf on this "
        f"{type(optimizer).__name__}: each rank would decide by the gradients that it owns. Use "
        'torch.amp.GradScaler, precision="fp16", which scales by itself, or precision="bf16"'
    )
