"""The way back: full values into the parameters, whole states into the optimizers."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from onecopy.comm.compare import gather_objects
from onecopy.core.dtensors import like
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from torch import nn

    from onecopy.core.engine import Engine
    from onecopy.core.optimizer import Binding

__all__ = ["restore_models"]


def restore_models(engines: Iterable[Engine], bindings: Iterable[Binding]) -> None:
    """Give gathered models memory of their own, and their optimizers the parameters back."""
    engines, bindings = list(engines), list(bindings)
    states: dict[int, dict[int, dict[str, Any]]] = {}
    for binding in bindings:
        binding.adopt_new_groups()
        whole = states[id(binding)] = {}
        for engine in engines:
            whole.update(_gather_states(engine, binding))
    with torch.no_grad():
        for unit in (unit for engine in engines for unit in engine.units):
            unit.detach_parameters()
    for binding in bindings:
        whole = states[id(binding)]
        optimizer = binding.optimizer
        for group, parameters, names in zip(
            optimizer.param_groups, binding.parameters, binding.names, strict=True
        ):
            for piece in group["params"]:
                optimizer.state.pop(piece, None)
            group["params"] = parameters
            if names is not None:
                group["param_names"] = names
            for parameter in parameters:
                if id(parameter) in whole:
                    state = optimizer.state[parameter] = whole[id(parameter)]
                    _place_counter(state, group, parameter.device)


def _place_counter(state: dict[str, Any], group: dict[str, Any], device: torch.device) -> None:
    """Some count steps on the device of their parameters, as torch's own loading knows."""
    if isinstance(state.get("step"), torch.Tensor):
        if group.get("fused") or group.get("capturable"):
            state["step"] = state["step"].to(device)


def _gather_states(engine: Engine, binding: Binding) -> dict[int, dict[str, Any]]:
    """Whole optimizer states by parameter id, put together from all ranks' pieces."""
    whole: dict[int, dict[str, Any]] = {}
    for unit in engine.units:
        if unit not in binding.units:
            continue
        mine = {
            number: (unit.slice.place_of(number).offset, binding.optimizer.state[piece])
            for number, piece in unit.slice.pieces.items()
            if piece in binding.optimizer.state
        }
        packed = gather_objects(engine.collectives.groups.shard, _pack(mine))
        everyone = [_unpack(one, unit.flat.device) for one in packed]
        for number, parameter in enumerate(unit.parameters):
            parts = [part[number] for part in everyone if number in part]
            if parts:
                # Where no parameter is cut there is one part, in the shapes it had.
                state = _assemble(unit.views[number], parts, is_whole=unit.layout.is_whole)
                # Back to where the optimizer steps now; counters stay where it had them.
                shape, device = unit.views[number].shape, parameter.device
                whole[id(parameter)] = {
                    name: _placed(parameter, value, device, shape) if _is_cut(value) else value
                    for name, value in state.items()
                }
    return whole


def _placed(
    parameter: nn.Parameter, value: torch.Tensor, device: torch.device, shape: torch.Size
) -> torch.Tensor:
    """A state where its parameter lies; a DTensor where that is one, and shaped like it."""
    value = value.to(device)
    return like(parameter, value) if value.shape == shape else value


def _is_cut(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _pack(value: Any) -> bytes:
    """Tensor subclasses and dtypes that plain pickling of tensors cannot do are saved so."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpack(data: bytes, device: torch.device) -> Any:
    """What another rank has packed; tensors of its accelerator come to this rank's."""
    num_devices = 0 if device.type == "cpu" else torch.accelerator.device_count()
    moves = {f"{device.type}:{index}": str(device) for index in range(num_devices)}
    # From a rank of this very program.
    return torch.load(io.BytesIO(data), map_location=moves, weights_only=False)


def _assemble(
    parameter: torch.Tensor, parts: list[tuple[int, dict[str, Any]]], *, is_whole: bool
) -> dict[str, Any]:
    """One whole state: tensors as long as their piece are joined, the rest is the first rank's.

    Raises:
        ShardingError: a state of a cut parameter is a tensor subclass, which cannot be joined.
    """
    parts = sorted(parts, key=lambda part: part[0])
    state: dict[str, Any] = {}
    for name, value in parts[0][1].items():
        values = [part[1][name] for part in parts]
        is_cut = not is_whole and isinstance(value, torch.Tensor) and value.dim() == 1
        if is_cut and sum(one.numel() for one in values) == parameter.numel():
            if type(value) is not torch.Tensor:
                raise ShardingError(
                    f"the optimizer's state {name!r} is a {type(value).__name__}, whose parts from "
                    "several ranks cannot be put together: shard with whole_parameters=True, so "
                    "that none is cut"
                )
            joined = torch.cat(values)
            state[name] = joined.as_strided(parameter.size(), parameter.stride()).clone()
        else:
            state[name] = value
    return state
