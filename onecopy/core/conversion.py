"""model.to(), half(), cuda() and their like after shard: only where parameters stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.core.engine import Engine

__all__ = ["convert_buffers"]


def convert_buffers(engine: Engine, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What `Module._apply(convert)` does, for a conversion that leaves the parameters alone.

    Trainers move a model to the device it is on already, and that is fine.

    Raises:
        ShardingError: it would give a parameter another dtype, device or memory.
    """
    for unit in engine.units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            probe = _probe(parameter)
            was_shared = probe.is_shared()
            result = convert(probe)
            if not _is_alike(result, probe) or result.is_shared() != was_shared:
                raise ShardingError(
                    f"this call would give {name} new memory, {result.dtype} on {result.device} "
                    f"(it is {parameter.dtype} on {parameter.device}), outside of the flat buffer "
                    "in which shard has laid it: convert and move the model before shard; for a "
                    "compute dtype say shard(..., precision=...)"
                )
    with torch.no_grad():
        for module in engine.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = convert(buffer)


def _is_alike(result: torch.Tensor, probe: torch.Tensor) -> bool:
    """Whether what came of a probe is itself, or a copy: `to("cpu:0")` copies what is on "cpu"."""
    if result is probe:
        return True
    has_same_form = result.stride() == probe.stride() and result.dtype == probe.dtype
    return has_same_form and result.device == probe.device and torch.equal(result, probe)


def _probe(parameter: torch.Tensor) -> torch.Tensor:
    """A small tensor of the same dtype, device, number of dimensions and memory format."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    sizes = [2] * parameter.dim()
    probe = torch.full(sizes, 3, dtype=parameter.dtype, device=parameter.device)
    return probe.permute([order.index(dim) for dim in range(len(order))])
