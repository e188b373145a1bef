"""How many bytes of model states this rank really holds, read from the tensors themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onecopy import handle
from onecopy.report.states import StateBytes

if TYPE_CHECKING:
    from torch import nn

    from onecopy.core.engine import Engine

__all__ = ["StateBytes", "measure", "padded_numel"]


def measure(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> StateBytes:
    """Live bytes of a sharded model's states now; each storage counts once, as it is now.

    Call it after backward and before the step to compare with the formula.

    Raises:
        ShardingError: the model is not sharded.
    """
    engine: Engine = handle.of(model).engine
    parameters: list[torch.Tensor | None] = []
    gradients: list[torch.Tensor | None] = []
    for unit in engine.units:
        parameters += unit.state_tensors
        if unit.gradients is not None:
            gradients += [unit.gradients.buffer, unit.gradients.carry, unit.gradients.mean]
    states: list[Any] = []
    if optimizer is not None:
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            # Step counters are scalars of the optimizer's own, not states of parameters.
            if isinstance(value, torch.Tensor) and value.dim()
        ]
    return StateBytes(
        parameters=_bytes(parameters), gradients=_bytes(gradients), optimizer=_bytes(states)
    )


def padded_numel(model: nn.Module) -> int:
    """Elements of all flat buffers of a sharded model, padding included.

    Raises:
        ShardingError: the model is not sharded.
    """
    engine: Engine = handle.of(model).engine
    return sum(unit.layout.padded_numel for unit in engine.units)


def _bytes(tensors: list[torch.Tensor | None]) -> int:
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())
