"""The simulator: one real training step, by the real engine, on fake tensors in an imagined world.

Nothing here models what the runtime does: `shard`, forward, backward and the optimizer's step run
as they would on one rank of the world, with tensors that have sizes and no memory. What is reported
is read from the storages that are alive, and from the runtime's own events.

What a single operation frees before it returns (work space of a kernel) is not seen, and nor is
what the allocator keeps for later.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onecopy import handle
from onecopy.api import shard
from onecopy.comm.groups import ImaginedWorld
from onecopy.errors import ConfigError
from onecopy.events import Event
from onecopy.memory.live_tensors import storage_of, tensors_in
from onecopy.report.memory import measure
from onecopy.simulator.fake import NEEDS_VALUES, fake_tensors

__all__ = ["MemoryAt", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class MemoryAt:
    """Live bytes at one moment of the step.

    what: the event that was reported just before. unit: whose. phase: of the step.
    parameters: flat buffers that are there, and masters. gradients: full buffers and owned slices.
    optimizer: states. rest: activations, inputs and temporaries.
    """

    what: str
    unit: str
    phase: str
    parameters: int
    gradients: int
    optimizer: int
    rest: int

    @property
    def total(self) -> int:
        """The sum, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What one rank of the imagined world did in a step after the first.

    peak: where the most bytes were alive. timeline: at each event of the runtime.
    events: with the bytes that the rank sends. seconds: that the simulation took.
    """

    world_size: int
    num_parameters: int
    peak: MemoryAt
    timeline: list[MemoryAt]
    events: list[Event]
    seconds: float


Batch = Callable[[], Any]
Loss = Callable[[nn.Module, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def simulate(
    build: Callable[[], nn.Module],
    batch: Batch,
    world: ImaginedWorld,
    *,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    loss: Loss | None = None,
    backwards: int = 1,
    **settings: Any,
) -> Simulation:
    """Run a training step of a model on one rank of a world that is not there.

    Args:
        build: makes the model, as the training script does; called where tensors have no memory.
        batch: makes one rank's micro-batch: a tensor, or a dict of keyword arguments.
        world: how many data-parallel ranks there are, which of them is simulated (slices may differ
            by their padding), and whether they would use a backend's own collectives (NCCL).
        optimizer: makes the optimizer from the parameters.
        backwards: per step, each of a micro-batch.
        loss: of the model and a batch; by default the output's `loss`, or the sum of the output.
        **settings: of `shard`: stage, precision, units, ...

    Raises:
        ConfigError: the model needs values that are not there (a choice by the data).
    """
    if world.size < 1 or not 0 <= world.rank < world.size:
        raise ConfigError(f"rank {world.rank} of {world.size}: give a rank from 0 to N - 1")
    begin = time.perf_counter()
    with fake_tensors(), _Ledger() as ledger:
        model = build()
        made = optimizer(model.parameters())
        shard(model, made, mesh=world, **settings)
        record = _Record(model, made, ledger)
        run = _Run(model, made, batch, loss or _default_loss, backwards)
        # The first step records the order of use, and makes the optimizer's states.
        run.step()
        with record.measuring():
            run.step()
    return Simulation(
        world_size=world.size,
        num_parameters=sum(one.numel() for one in model.parameters()),
        peak=record.peak,
        timeline=record.timeline,
        events=record.events,
        seconds=time.perf_counter() - begin,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """What is simulated."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    loss: Loss
    backwards: int

    def step(self) -> None:
        """One training step.

        Raises:
            ConfigError: it needs values.
        """
        try:
            for _ in range(self.backwards):
                (self.loss(self.model, self.batch()) / self.backwards).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        except NEEDS_VALUES as error:
            raise ConfigError(
                f"this {type(self.model).__name__} decides by the values of its data ({error}), "
                "which a simulation does not have: simulate it with that part replaced, or use the "
                "closed formulas, onecopy plan without --simulate"
            ) from error


def _default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    found = getattr(output, "loss", None)
    if found is not None:
        return found  # type: ignore[no-any-return]
    tensors = [one for one in tensors_in(output) if one.is_floating_point()]
    return torch.stack([one.float().mean() for one in tensors]).sum()


class _Ledger(TorchDispatchMode):
    """All storages that are alive, and their bytes as a running sum.

    Sizes are fixed, but for those of `elastic` storages, which the engine frees and grows.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.after_operation: Callable[[], None] | None = None
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._fixed = 0
        self._elastic: list[torch.UntypedStorage] = []

    def begin(self, elastic: list[torch.UntypedStorage]) -> None:
        """From now on `num_bytes` is exact."""
        self._elastic = elastic
        places = {id(one) for one in elastic}
        for key, (reference, _) in list(self._sizes.items()):
            storage = reference()
            size = 0 if storage is None or key in places else storage.nbytes()
            self._sizes[key] = (reference, size)
        self._fixed = sum(size for _, size in self._sizes.values())

    def num_bytes(self) -> int:
        """Of all that is alive."""
        return self._fixed + sum(one.nbytes() for one in self._elastic)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and id(storage) not in self._sizes:
                self._add(storage)
        if self.after_operation is not None:
            self.after_operation()
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._sizes[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self._fixed += size

    def _forget(self, key: int) -> None:
        self._fixed -= self._sizes.pop(key)[1]


class _Record:
    """What happens in the measured step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: _Ledger) -> None:
        self._model = model
        self._sinks = handle.of(model).events.sinks
        self._optimizer = optimizer
        self._ledger = ledger
        self._event = Event(kind="step", unit="", phase="api")
        self._peak_bytes = 0
        self.events: list[Event] = []
        self.timeline: list[MemoryAt] = []
        self.peak = MemoryAt("", "", "", 0, 0, 0, 0)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around the step."""
        units = handle.of(self._model).engine.units
        elastic = [tensor for unit in units for tensor in unit.state_tensors]
        elastic += [unit.gradients.buffer for unit in units if unit.gradients is not None]
        storages = {id(one): one for one in map(storage_of, elastic) if one is not None}
        self._ledger.begin(list(storages.values()))
        self._optimizer_bytes = measure(self._model, self._optimizer).optimizer
        self._ledger.after_operation = self._look
        self._sinks.append(self._note)
        try:
            yield
        finally:
            self._sinks.remove(self._note)
            self._ledger.after_operation = None

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if event.kind not in ("wait", "pass"):
            # A wait ends what another event has begun, a pass begins with what follows.
            self._event = event
            self.timeline.append(self._now())

    def _look(self) -> None:
        total = self._ledger.num_bytes()
        if total > self._peak_bytes:
            self._peak_bytes, self.peak = total, self._now()

    def _now(self) -> MemoryAt:
        states = measure(self._model)
        known = states.parameters + states.gradients + self._optimizer_bytes
        return MemoryAt(
            what=self._event.kind,
            unit=self._event.unit,
            phase=self._event.phase,
            parameters=states.parameters,
            gradients=states.gradients,
            optimizer=self._optimizer_bytes,
            rest=self._ledger.num_bytes() - known,
        )
