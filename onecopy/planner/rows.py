"""One way to train a model, and what it takes: the rows of a plan.

A way is a stage and the choices beside it. A feature that gives more ways (quantized messages,
hybrid groups) adds a field to `Way`, and its cost to `Question.row`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from onecopy.config import Offload, Precision
from onecopy.planner import estimate
from onecopy.planner.activations import Batch, activations_of
from onecopy.planner.estimate import ElementWidths
from onecopy.planner.memory import (
    Memory,
    Sent,
    Step,
    memory_of,
    moved_by,
    sent_by,
)
from onecopy.planner.options import PlanOptions
from onecopy.planner.shapes import ModelShape

__all__ = ["ALL_HOST", "HOST", "Question", "Row", "Way"]

HOST = Offload(optimizer="host", gradients="host")
ALL_HOST = Offload(optimizer="host", gradients="host", parameters="host")

USUAL_SEQUENCE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to train.

    recompute: activations of blocks are computed again in backward. offload: which states leave
    the device. nvme: they would go to NVMe instead of host memory, which is a plan only: this
    version cannot do it (ZeRO-Infinity).
    """

    stage: int
    policy: Precision
    recompute: bool = False
    offload: Offload | None = None
    nvme: bool = False

    @property
    def is_lean(self) -> bool:
        """Masters are kept split, to the last bit the same training with fewer bytes."""
        return self.policy.master == "bf16+16"

    @property
    def tier(self) -> str:
        """The slowest memory in which states lie: "device", "host" or "nvme"."""
        return "nvme" if self.nvme else "device" if self.offload is None else "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Bytes of states in a slower memory than the device's: host memory or NVMe.

    rank: of one rank. node: of all ranks of a node. capacity: of a node; None where it is not said.
    moved: between there and the device, by a rank per step.
    """

    rank: int
    node: int
    capacity: int | None
    moved: int

    @property
    def fits(self) -> bool:
        """As far as is known."""
        return self.capacity is None or self.node <= self.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a way takes on one rank.

    memory: bytes on the device at the peak of a step. capacity: bytes that it has.
    paper: bytes of model states as the ZeRO paper counts them; None in full precision.
    sent: bytes per step. messages: the same in elements per parameter, times (N-1)/N.
    largest: parameters of the largest model of such blocks that fits; None where not even one
        block does, where the model has no repeated blocks, or where the capacity of the tier in
        which states lie is not said.
    outside: what lies in host memory or on NVMe, if anything does.
    """

    way: Way
    memory: Memory
    capacity: int
    paper: float | None
    sent: Sent
    messages: Fraction
    largest: int | None
    outside: Outside | None = None

    @property
    def stage(self) -> int:
        return self.way.stage

    @property
    def fits_device(self) -> bool:
        return self.memory.total <= self.capacity

    @property
    def fits(self) -> bool:
        """In all tiers, as far as their capacity is known."""
        return self.fits_device and (self.outside is None or self.outside.fits)

    @property
    def share(self) -> float:
        """Of the device's memory; above 1 where it does not fit."""
        return self.memory.total / self.capacity


@dataclass(frozen=True, slots=True)
class Question:
    """A model and the circumstances; answers with rows."""

    shape: ModelShape
    options: PlanOptions

    @property
    def batch(self) -> Batch:
        """What one rank computes at a time."""
        options, transformer = self.options, self.shape.transformer
        limit = transformer.context if transformer and transformer.context else USUAL_SEQUENCE
        return Batch(
            samples=options.micro_batch,
            sequence=options.sequence or min(USUAL_SEQUENCE, limit),
            backwards=options.accumulate,
        )

    def row(self, way: Way) -> Row:
        """What a way takes."""
        options, devices = self.options, self.options.devices
        widths = estimate.widths_of(way.policy, options.optimizer_states)
        messages = estimate.elements_sent(way.stage, devices, options.accumulate)
        paper = None
        if widths.compute < estimate.FP32.compute:
            # The paper's K: the fp32 master and the optimizer's fp32 states.
            states = 4 + 4 * options.optimizer_states
            numel = self.shape.num_parameters
            paper = estimate.paper_state_bytes(way.stage, numel, devices, states)
        memory = self.memory(way, self.shape)
        return Row(
            way=way,
            memory=memory,
            capacity=options.capacity,
            paper=paper,
            sent=sent_by(self.shape, way.stage, options.cluster, widths, options.accumulate),
            messages=messages,
            largest=self._largest(way),
            outside=self._outside(way, memory, widths),
        )

    def _outside(self, way: Way, memory: Memory, widths: ElementWidths) -> Outside | None:
        if way.offload is None:
            return None
        options, shape = self.options, self.shape.with_offload(way.offload)
        return Outside(
            rank=memory.host.total,
            node=self._of_node(memory),
            capacity=options.capacity_of(way.tier),
            moved=moved_by(shape, way.stage, options.cluster, widths, options.accumulate),
        )

    def _of_node(self, memory: Memory) -> int:
        """Bytes of all of a node's ranks outside their devices."""
        return memory.host.total * self.options.cluster.devices_per_node

    def memory(self, way: Way, shape: ModelShape) -> Memory:
        """The memory of a rank that trains `shape`, which may be another size of the model."""
        widths = estimate.widths_of(way.policy, self.options.optimizer_states)
        activations = None
        if shape.transformer is not None:
            activations = activations_of(
                shape.transformer, self.batch, widths.compute, recompute=way.recompute
            )
        step = Step(backwards=self.options.accumulate, activations=activations)
        shape = shape.with_offload(way.offload)
        return memory_of(shape, way.stage, self.options.cluster, widths, step)

    def fits(self, way: Way, num_blocks: int) -> bool:
        """Whether the model would fit with so many blocks."""
        return self.fits_all(way, self.memory(way, self.shape.with_blocks(num_blocks)))

    def fits_all(self, way: Way, memory: Memory) -> bool:
        """Whether this much of each tier is there, as far as is known."""
        capacity = self.options.capacity_of(way.tier)
        fits = memory.total <= self.options.capacity
        return fits and (capacity is None or self._of_node(memory) <= capacity)

    def _largest(self, way: Way) -> int | None:
        """Doubles the blocks until they do not fit, then halves the interval.

        With activations computed again wherever that may be chosen.
        """
        if self.options.checkpoint_activations == "auto":
            way = replace(way, recompute=True)
        if way.offload is not None and self.options.capacity_of(way.tier) is None:
            return None
        if not self.shape.num_blocks or not self.fits(way, 1):
            return None
        low, high = 1, 2
        while self.fits(way, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(way, middle) else (low, middle)
        return self.shape.with_blocks(low).num_parameters
