"""Bytes of one rank at the peak of a step, and what it sends, from the runtime's own layout.

Model states are those that the rank holds after a backward; beside them the peak has the units
that are gathered, the buffers in which gradients come and go, and the activations. Each is the
most that is held of its kind, so their sum is at least the true peak; the tests compare it with
live tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise

from onecopy.core.layout import ALIGNMENT_BYTES, Layout
from onecopy.core.stages import STAGES
from onecopy.planner import estimate
from onecopy.planner.estimate import ElementWidths
from onecopy.planner.shapes import ModelShape, TransformerShape, UnitShape
from onecopy.report.states import StateBytes

__all__ = [
    "KINDS",
    "Batch",
    "Cluster",
    "Memory",
    "Sent",
    "Step",
    "activation_bytes",
    "memory_of",
    "sent_by",
]

# What each part of a rank's memory is called.
KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered units",
    "buffers": "gradients on their way",
    "activations": "activations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How many ranks there are, and how many of them share a node."""

    devices: int
    devices_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one rank computes at a time: samples, tokens of each, and backwards per step."""

    samples: int
    sequence: int
    backwards: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one backward."""
        return self.samples * self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step has beside the model's states.

    backwards: in it. activations: bytes at their peak, None where they are not known.
    prefetch_bytes: as in `Config`, of units gathered ahead of their use.
    """

    backwards: int = 1
    activations: int | None = None
    prefetch_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank at the peak, by kind.

    parameters, gradients, optimizer: model states, as `estimate.state_bytes` has them.
    gathered: whole units that are there only while they are used.
    buffers: gradients of whole units on their way to their owners.
    activations: None where the model's shape does not tell.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    buffers: int
    activations: int | None

    @property
    def states(self) -> int:
        """Model states: what does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.gathered + self.buffers + (self.activations or 0)

    def __add__(self, other: Memory) -> Memory:
        """Of two models on one rank, each at its peak."""
        both = zip(self.by_kind().items(), other.by_kind().values(), strict=True)
        return Memory(**{kind: (first or 0) + (second or 0) for (kind, first), second in both})

    def by_kind(self) -> dict[str, int | None]:
        """The parts by name, in the order of the table."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes that one rank sends per step, to ranks of its node and to others."""

    inside: int
    across: int

    @property
    def total(self) -> int:
        return self.inside + self.across


@dataclass(frozen=True, slots=True)
class _Sized:
    """A kind of unit, laid out for a number of ranks."""

    unit: UnitShape
    layout: Layout
    widths: ElementWidths

    @property
    def values(self) -> int:
        """Bytes of the whole unit's parameters in the compute dtype."""
        return self.layout.padded_numel * self.widths.compute

    @property
    def gradients(self) -> int:
        """Bytes of the whole unit's gradients, as they are sent."""
        return self.layout.gradient_numel * self.widths.wire if self.unit.trainable else 0

    @property
    def mean(self) -> int:
        """Bytes of the owned part of the unit's mean gradient, as it is summed."""
        return max(self.layout.strides) * max(4, self.widths.master) if self.unit.trainable else 0

    @property
    def gradient_of_autograd(self) -> int:
        """Bytes of the largest gradient as autograd hands it over.

        Weights that embedding and head share lie at the root: autograd adds up two gradients.
        """
        if not self.unit.trainable:
            return 0
        return max(self.unit.numels) * self.widths.compute * (2 if self.unit.surrounds else 1)

    @property
    def lasts(self) -> bool:
        """Its gradients are reduced when a backward ends, those of others on the way."""
        return self.unit.surrounds or self.unit.stays

    @property
    def state_widths(self) -> ElementWidths:
        """A frozen parameter is its own master and has neither gradient nor states."""
        if self.unit.trainable:
            return self.widths
        compute = self.widths.compute
        return ElementWidths(compute=compute, master=compute, gradient=0, optimizer=0, reduce=0)

    def stage(self, of_model: int) -> int:
        """The stage of this unit: parameters that stay are not cut."""
        if not self.unit.stays:
            return of_model
        own = STAGES[of_model].with_whole_parameters
        return next(number for number, cut in STAGES.items() if cut == own)

    def owned(self, stage: int, rank: int, devices: int) -> StateBytes:
        """What a rank owns of a unit with whole parameters more than the mean over ranks."""
        mean = -(-self.layout.padded_numel // devices)
        more = self.layout.slice_numels[rank] - mean
        return estimate.owned_bytes(self.stage(stage), more, self.state_widths)

    def states(self, stage: int, devices: int) -> StateBytes:
        """Of one such unit."""
        widths, stage = self.state_widths, self.stage(stage)
        flat = estimate.state_bytes(stage, self.layout.padded_numel, devices, widths)
        # Gradient buffers are longer, by the flags that ride along.
        wide = estimate.state_bytes(stage, self.layout.gradient_numel, devices, widths)
        return StateBytes(
            parameters=flat.parameters, gradients=wide.gradients, optimizer=flat.optimizer
        )


def _sized(model: ModelShape, stage: int, devices: int, widths: ElementWidths) -> Iterator[_Sized]:
    is_cut = STAGES[stage].shards_anything
    for unit in model.units:
        if not unit.count or not sum(unit.numels):
            continue
        own = unit.widths or widths
        groups = (devices, 1) if is_cut else (1, devices)
        alignment = ALIGNMENT_BYTES // min(own.compute, own.master)
        yield _Sized(unit, _layout(unit.numels, unit.owners, *groups, alignment), own)


@lru_cache(maxsize=1024)
def _layout(
    numels: tuple[int, ...],
    owners: tuple[int, ...] | None,
    shard: int,
    replica: int,
    alignment: int,
) -> Layout:
    """As the runtime would lay it out; a plan asks for the same ones again and again."""
    return Layout(
        numels, num_slices=shard, num_replicas=replica, alignment=alignment, owners=owners
    )


def memory_of(
    model: ModelShape,
    stage: int,
    cluster: Cluster,
    widths: ElementWidths,
    step: Step = Step(),
) -> Memory:
    """What a rank holds at `stage`, the fullest one.

    Args:
        widths: of units that do not say their own.
    """
    devices = cluster.devices
    units = list(_sized(model, stage, devices, widths))
    states = [(one.unit.count, one.states(stage, devices)) for one in units]
    states += _uneven(units, stage, devices)
    return Memory(
        parameters=sum(count * one.parameters for count, one in states),
        gradients=sum(count * one.gradients for count, one in states),
        optimizer=sum(count * one.optimizer for count, one in states),
        gathered=_gathered(units, step.prefetch_bytes) if STAGES[stage].releases else 0,
        buffers=_buffers(units, stage, devices, step.backwards),
        activations=step.activations,
    )


def _uneven(units: list[_Sized], stage: int, devices: int) -> list[tuple[int, StateBytes]]:
    """What the fullest rank has more than the mean, where parameters are not cut."""
    whole = [one for one in units if one.layout.is_whole]
    if not whole or not STAGES[stage].shards_anything:
        return []
    ranks = (
        [(one.unit.count, one.owned(stage, rank, devices)) for one in whole]
        for rank in range(devices)
    )
    return max(ranks, key=lambda parts: sum(count * one.total for count, one in parts))


def _gathered(units: list[_Sized], prefetch_bytes: int | None) -> int:
    """Units around others, and the two largest neighbours: one in use, one on its way."""
    passing = [one for one in units if not one.unit.stays]
    around = sum(one.values for one in passing if one.unit.surrounds)
    inner = [one for one in passing if not one.unit.surrounds]
    if prefetch_bytes is not None:
        most = sum(one.unit.count * one.values for one in inner)
        return around + min(most, max((one.values for one in inner), default=0) + prefetch_bytes)
    in_order = [one.values for one in inner for _ in range(min(one.unit.count, 2))]
    pairs = (first + second for first, second in pairwise(in_order))
    return around + max(pairs, default=sum(in_order))


def _buffers(units: list[_Sized], stage: int, devices: int, backwards: int) -> int:
    """Local gradients of the units in backward, what comes in of others, autograd's own.

    Where local gradients are kept anyway they count as gradients, not here. From the second
    backward on there are means already, to which new ones are added; and where the optimizer steps
    in backward, means are here only.
    """
    cut = STAGES[stage]
    inner = max((one.gradients for one in units if not one.lasts), default=0)
    around = sum(one.unit.count * one.gradients for one in units if one.lasts)
    inner_mean = max((one.mean for one in units if not one.lasts), default=0)
    around_mean = sum(one.unit.count * one.mean for one in units if one.lasts)
    # Where gradients are cut, one reduce ends before the next unit's buffer takes its memory.
    both: Callable[[int, int], int] = max if cut.cut_gradients else operator.add
    local = 0 if cut.keeps_gradient_buffer else inner + around
    incoming = both(inner, around) * (devices - 1) // devices
    if not cut.shards_anything and devices > 1:
        # The sums come back into a buffer of their own.
        incoming += both(inner, around)
    keeps_none = any(one.unit.trainable and not one.widths.gradient for one in units)
    again = both(inner_mean, around_mean) if backwards > 1 or keeps_none else 0
    autograd = max((one.gradient_of_autograd for one in units), default=0)
    return local + incoming + again + autograd


def activation_bytes(
    transformer: TransformerShape, batch: Batch, width: int, *, recompute: bool
) -> int:
    """Bytes of activations at their peak, fused attention assumed.

    Args:
        width: bytes of the compute dtype.
        recompute: only the inputs of blocks are kept, and one block is computed again at a time.

    At the beginning of backward all blocks' values exist and the loss's, later the gradients
    inside of one block. The loop is taken to keep the logits until backward has ended.
    """
    tokens, sequence, block = batch.tokens, batch.sequence, 0
    whole = transformer.outside.num_bytes(width, sequence)
    for stack in transformer.stacks:
        saved = stack.saved.num_bytes(width, sequence)
        whole += stack.count * (stack.hidden * width if recompute else saved)
        # Where attention writes its weights out, so do their gradients.
        matrix = 16 * stack.saved.positions * sequence
        norms = max(16 * stack.hidden, 8 * stack.normed)
        working = max(norms, 2 * width * stack.widest, matrix)
        block = max(block, working + (saved if recompute else 0))
    # Logits, their logarithms, and two gradients of these.
    loss = 4 * width if not transformer.upcasts_logits else 12 + width
    block += width * transformer.vocabulary
    return tokens * (whole + max(block, loss * transformer.vocabulary))


def sent_by(
    model: ModelShape, stage: int, cluster: Cluster, widths: ElementWidths, backwards: int
) -> Sent:
    """Bytes that a rank sends per step, every message counted from its sender to its receiver.

    So it is on Gloo, and for 16-bit gradients on NCCL; NCCL's own collectives may pass messages on
    from rank to rank, which sends as much in all and less of it across nodes.
    """
    devices, total = cluster.devices, 0
    for one in _sized(model, stage, devices, widths):
        messages = estimate.traffic(stage, backwards)
        refreshes = messages.refresh if one.unit.trainable else 0
        flat = (messages.gather + refreshes) * one.layout.padded_numel * one.widths.compute
        sums = messages.reduce * one.gradients
        total += one.unit.count * (flat + sums) * (devices - 1) // devices
    if devices == 1:
        return Sent(inside=0, across=0)
    inside = total * (cluster.devices_per_node - 1) // (devices - 1)
    return Sent(inside=inside, across=total - inside)
