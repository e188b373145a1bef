"""One way to train a model, and what it takes: the rows of a plan.

A way is a stage and the choices beside it. A feature that gives more ways (offload, quantized
messages, hybrid groups) adds a field to `Way`, and its cost to `Question.row`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from onecopy.config import Precision
from onecopy.planner import estimate
from onecopy.planner.activations import Batch, activations_of
from onecopy.planner.memory import (
    Memory,
    Sent,
    Step,
    memory_of,
    sent_by,
)
from onecopy.planner.options import PlanOptions
from onecopy.planner.shapes import ModelShape

__all__ = ["Question", "Row", "Way"]

USUAL_SEQUENCE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to train. recompute: activations of blocks are computed again in backward."""

    stage: int
    policy: Precision
    recompute: bool = False

    @property
    def is_lean(self) -> bool:
        """Masters are kept split, to the last bit the same training with fewer bytes."""
        return self.policy.master == "bf16+16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a way takes on one rank.

    memory: bytes on the device at the peak of a step. capacity: bytes that it has.
    paper: bytes of model states as the ZeRO paper counts them; None in full precision.
    sent: bytes per step. messages: the same in elements per parameter, times (N-1)/N.
    largest: parameters of the largest model of such blocks that fits; None where not even one
        block does, or where the model has no repeated blocks.
    """

    way: Way
    memory: Memory
    capacity: int
    paper: float | None
    sent: Sent
    messages: Fraction
    largest: int | None

    @property
    def stage(self) -> int:
        return self.way.stage

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

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
        return Row(
            way=way,
            memory=self.memory(way, self.shape),
            capacity=options.capacity,
            paper=paper,
            sent=sent_by(self.shape, way.stage, options.cluster, widths, options.accumulate),
            messages=messages,
            largest=self._largest(way),
        )

    def memory(self, way: Way, shape: ModelShape) -> Memory:
        """The memory of a rank that trains `shape`, which may be another size of the model."""
        widths = estimate.widths_of(way.policy, self.options.optimizer_states)
        activations = None
        if shape.transformer is not None:
            activations = activations_of(
                shape.transformer, self.batch, widths.compute, recompute=way.recompute
            )
        step = Step(backwards=self.options.accumulate, activations=activations)
        return memory_of(shape, way.stage, self.options.cluster, widths, step)

    def fits(self, way: Way, num_blocks: int) -> bool:
        """Whether the model would fit with so many blocks."""
        shape = self.shape.with_blocks(num_blocks)
        return self.memory(way, shape).total <= self.options.capacity

    def _largest(self, way: Way) -> int | None:
        """Doubles the blocks until they do not fit, then halves the interval.

        With activations computed again wherever that may be chosen.
        """
        if self.options.checkpoint_activations == "auto":
            way = replace(way, recompute=True)
        if not self.shape.num_blocks or not self.fits(way, 1):
            return None
        low, high = 1, 2
        while self.fits(way, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(way, middle) else (low, middle)
        return self.shape.with_blocks(low).num_parameters
