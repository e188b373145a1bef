"""How many bytes of model states this rank really holds, read from the tensors themselves."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onecopy import handle
from onecopy.report.states import StateBytes

if TYPE_CHECKING:
    from torch import nn

    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["MemoryLedger", "StateBytes", "measure", "of_optimizer", "of_process", "padded_numel"]

RECENT = 4


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
            gradients += [*unit.gradients.local_tensors, *unit.gradients.mean.tensors]
    on_disk = _on_disk(engine, optimizer)
    return StateBytes(
        parameters=_bytes(parameters) + on_disk[0],
        gradients=_bytes(gradients) + on_disk[1],
        optimizer=0 if optimizer is None else of_optimizer(optimizer) + on_disk[2],
        host=_on_host(engine, optimizer),
        nvme=sum(on_disk),
    )


def _on_disk(engine: Engine, optimizer: torch.optim.Optimizer | None) -> tuple[int, int, int]:
    """Bytes of parameters with masters, of gradients and of optimizer states that rest there."""
    parameters = gradients = states = 0
    for unit in engine.units:
        if unit.slice.disk is None:
            continue
        parameters += unit.slice.disk.num_bytes
        if unit.gradients is not None:
            gradients += unit.gradients.mean.bytes_on_disk
        for piece in unit.slice.pieces.values():
            state = {} if optimizer is None else optimizer.state.get(piece, {})
            at_rest = [one for one in _tensors_of(state) if one is not None and _is_empty(one)]
            states += sum(one.nbytes for one in at_rest)
    return parameters, gradients, states


def _is_empty(tensor: torch.Tensor) -> bool:
    """Whether the values are elsewhere: the storage is empty."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().nbytes() < tensor.nbytes


def _on_host(engine: Engine, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the states that are offloaded."""
    units = [unit for unit in engine.units if unit.slice.lane is not None]
    tensors: list[torch.Tensor | None] = []
    for unit in units:
        tensors += unit.slice.on_host
        if unit.gradients is not None:
            tensors.append(unit.gradients.mean.tensors[1])
        if not unit.slice.is_offloaded:
            continue
        for piece in unit.slice.pieces.values():
            state = {} if optimizer is None else optimizer.state.get(piece, {})
            tensors += _tensors_of(state)
    return _bytes(tensors)


def of_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the states that an optimizer holds on this rank."""
    # Listed at once: a delayed update adds states from another thread.
    states = list(optimizer.state.values())
    return _bytes([one for state in states for one in _tensors_of(state)])


def _tensors_of(state: dict[str, Any]) -> list[torch.Tensor | None]:
    # Step counters are scalars of the optimizer's own, not states of parameters.
    return [one for one in list(state.values()) if isinstance(one, torch.Tensor) and one.dim()]


def padded_numel(model: nn.Module) -> int:
    """Elements of all flat buffers of a sharded model, padding included.

    Raises:
        ShardingError: the model is not sharded.
    """
    engine: Engine = handle.of(model).engine
    return sum(unit.layout.padded_numel for unit in engine.units)


def _bytes(tensors: list[torch.Tensor | None]) -> int:
    # What rests on disk would be read by a look at it.
    with torch._C.DisableTorchFunctionSubclass():
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor is not None
        }
    return sum(storages.values())


def of_process(device: torch.device) -> dict[str, int]:
    """Bytes that this process has now ("process") and had at most so far ("peak").

    On an accelerator those that torch has allocated there, on CPU those that are resident in memory
    (Linux only; empty elsewhere).
    """
    if device.type == "cpu":
        return _resident()
    return {
        "process": torch.accelerator.memory_allocated(device),
        "peak": torch.accelerator.max_memory_allocated(device),
    }


def _resident() -> dict[str, int]:
    try:
        lines = Path("/proc/self/status").read_bytes().splitlines()
    except OSError:
        return {}
    names = {b"VmRSS": "process", b"VmHWM": "peak"}
    found = (line.split() for line in lines if line.startswith((b"VmRSS", b"VmHWM")))
    return {names[words[0].rstrip(b":")]: int(words[1]) * 1024 for words in found}


class MemoryLedger:
    """Bytes of a sharded model's states and gathered units, followed from event to event.

    Only the unit of an event is looked at, and those of the last few events, whose bytes may have
    come or gone after them: so that this is cheap. All are looked at first at the first event.
    """

    def __init__(self, model: nn.Module, optimizer_bytes: int) -> None:
        engine: Engine = handle.of(model).engine
        self._units = {unit.name: unit for unit in engine.units}
        self._sizes: dict[str, tuple[int, int, int]] = {}
        self._totals = [0, 0, 0]
        self._optimizer_bytes = optimizer_bytes
        self._recent: deque[str] = deque(maxlen=RECENT)

    def look(self, name: str) -> dict[str, int]:
        """Bytes by kind, after something has happened to the unit of that name, if there is one."""
        if not self._sizes:
            self._sizes = {one: _sizes_of(unit) for one, unit in self._units.items()}
            self._totals = [sum(kind) for kind in zip(*self._sizes.values(), strict=True)]
        if name in self._units and name not in self._recent:
            self._recent.append(name)
        for one in self._recent:
            before, now = self._sizes[one], _sizes_of(self._units[one])
            if now != before:
                self._sizes[one] = now
                changes = zip(self._totals, before, now, strict=True)
                self._totals = [total - old + new for total, old, new in changes]
        parameters, gradients, gathered = self._totals
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": self._optimizer_bytes,
            "gathered": gathered,
        }


def _sizes_of(unit: Unit) -> tuple[int, int, int]:
    """Bytes of a unit's parameters with masters, its gradients, and of what is gathered of it."""
    states, gathered = _bytes(list(unit.state_tensors)), 0
    if unit.releases:
        gathered = unit.flat.untyped_storage().nbytes()
        states -= gathered
    gradients = 0
    if unit.gradients is not None:
        gradients = _bytes([*unit.gradients.local_tensors, unit.gradients.mean.value])
    return states, gradients, gathered
