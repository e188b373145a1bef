"""Bytes of one rank at the peak of a step, and what moves between tiers, from the runtime's layout.

Model states are those that the rank holds after a backward; beside them a step has the units that
are gathered, the buffers in which gradients come and go, and the activations. Each is the most that
is held of its kind. Not all are at their most together: gradients come as activations go. So the
peak is looked for at the moments of a backward, see `_moments`; it is at least the true one, and
the tests compare it with live tensors.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from onecopy.core.stages import Stage
from onecopy.planner import estimate
from onecopy.planner.activations import Activations
from onecopy.planner.cluster import Cluster
from onecopy.planner.estimate import AnyStage, DiskTraffic, ElementWidths
from onecopy.planner.shapes import ModelShape
from onecopy.planner.sized import NOTHING, Placed, SizedUnit, added, row_for, sized
from onecopy.planner.staging import staged_bytes
from onecopy.planner.traffic import kept_errors
from onecopy.policies import Quantize
from onecopy.report.states import StateBytes

__all__ = [
    "KINDS",
    "Memory",
    "Step",
    "memory_of",
    "moved_by",
    "swapped_by",
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
class Step:
    """What a step has beside the model's states.

    backwards: in it. activations: of each, None where they are not known.
    prefetch_bytes: as in `Config`, of units gathered ahead of their use.
    quantize: what is sent in fewer bits, if anything is.
    """

    backwards: int = 1
    activations: Activations | None = None
    prefetch_bytes: int | None = None
    quantize: Quantize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank on its device, by kind, each at its most.

    parameters, gradients, optimizer: model states, as `estimate.state_bytes` has them.
    gathered: whole units that are there only while they are used.
    buffers: gradients of whole units on their way to their owners.
    activations: None where the model's shape does not tell.
    at_peak: the same at the moment when their sum is largest.
    host, nvme: model states that lie in host memory and on NVMe, and not among all these.
    staged: in host memory, likewise: buffers for what is on its way, and inputs of blocks that wait
        there for backward.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    buffers: int
    activations: int | None
    at_peak: Mapping[str, int]
    host: StateBytes = NOTHING
    nvme: StateBytes = NOTHING
    staged: int = 0

    @property
    def on_host(self) -> int:
        """Bytes of host memory."""
        return self.host.total + self.staged

    @property
    def states(self) -> int:
        """Model states: what does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The most that is there at one moment."""
        return sum(self.at_peak.values())

    @property
    def sum(self) -> int:
        """Of all kinds, though they are not at their most together."""
        return sum(size or 0 for size in self.by_kind().values())

    def __add__(self, other: Memory) -> Memory:
        """Of two models on one rank, each at its peak."""
        mine, more = self.by_kind(), other.by_kind()
        both = {kind: (mine[kind] or 0) + (more[kind] or 0) for kind in KINDS}
        at_peak = {kind: self.at_peak[kind] + other.at_peak[kind] for kind in KINDS}
        return Memory(
            **both,
            at_peak=at_peak,
            host=added([(1, self.host), (1, other.host)]),
            nvme=added([(1, self.nvme), (1, other.nvme)]),
            staged=self.staged + other.staged,
        )

    def by_kind(self) -> dict[str, int | None]:
        """The parts by name, in the order of the table."""
        return {kind: getattr(self, kind) for kind in KINDS}


def memory_of(
    model: ModelShape,
    stage: AnyStage,
    cluster: Cluster,
    widths: ElementWidths,
    step: Step = Step(),
    rank: int | None = None,
) -> Memory:
    """What a rank holds at `stage`.

    Args:
        widths: of units that do not say their own.
        rank: None means the fullest one.
    """
    cut = row_for(stage, cluster)
    quantize = step.quantize
    is_coded = quantize is not None and quantize.weights is not None
    is_coded = is_coded and cut.optimizer == "world" and cluster.devices > 1
    units = [replace(one, is_coded=is_coded) for one in sized(model, cut, cluster, widths)]
    states = [(one.unit.count, one.states(rank)) for one in units]
    states += _uneven(units, cut, cluster, rank)
    on_device = added((count, one.device) for count, one in states)
    most = {
        "parameters": on_device.parameters,
        "gradients": on_device.gradients + _waiting(units, step.backwards, rank),
        "optimizer": on_device.optimizer,
        "gathered": _gathered(units, step.prefetch_bytes) if cut.releases else 0,
        "buffers": _buffers(units, cut, cluster.devices, step.backwards)
        + _errors(units, rank or 0, quantize),
    }
    activations = step.activations
    own = {"activations": 0 if activations is None else activations.most}
    moments = [{**most, **own, **moment} for moment in _moments(units, step)]
    return Memory(
        **most,
        activations=None if activations is None else activations.most,
        at_peak=max(moments, key=lambda moment: sum(moment.values())),
        host=added((count, one.host) for count, one in states),
        nvme=added((count, one.nvme) for count, one in states),
        staged=staged_bytes(units) + (0 if activations is None else activations.on_host),
    )


def _moments(units: list[SizedUnit], step: Step) -> Iterator[dict[str, int]]:
    """What differs from the most at the moments of a backward of which one is the peak.

    At the loss, activations are at their most, and no gradient has come: those of the step before
    are gone. At the head, its own come. Then each block that lets go of activations brings
    gradients. Within a run of alike blocks both go evenly, so the sum is largest at an end.

    From the second backward on all gradients are there before, and in models with several stacks,
    or blocks that the units do not show, what comes when is not known: then all is there at once.
    """
    found, blocks = step.activations, [one for one in units if one.unit.count > 1]
    num_blocks = sum(one.unit.count for one in blocks)
    if found is None or step.backwards > 1 or [one for one, _ in found.stacks] != [num_blocks]:
        yield {}
        return
    (_, kept), last = found.stacks[0], found.inside + found.outside
    coming = {id(one): one.unit.count * one.mean_kept for one in units}
    before = sum(one.unit.count * one.gradients_kept for one in units)
    yield {"gradients": before, "buffers": 0, "activations": found.kept + found.loss}
    yield {"gradients": before, "activations": found.kept + found.head}
    here = before + sum(coming[id(one)] for one in units if one.unit.count == 1)
    yield {"gradients": here, "activations": num_blocks * kept + last}
    for one in reversed(blocks):
        num_blocks -= one.unit.count
        here += coming[id(one)]
        yield {"gradients": here, "activations": (num_blocks + 1) * kept + last}


def _uneven(
    units: list[SizedUnit], cut: Stage, cluster: Cluster, rank: int | None
) -> list[tuple[int, Placed]]:
    """What a rank, or the fullest one, has more than the mean, where parameters are not cut."""
    whole = [one for one in units if one.layout.is_whole]
    if not whole or not cut.shards_anything:
        return []
    numbers: Iterable[int] = range(cluster.num_owners(cut.optimizer))
    if rank is not None:
        numbers = (cluster.slice_of(rank, cut.optimizer),)
    ranks = ([(one.unit.count, one.owned(number)) for one in whole] for number in numbers)
    return max(ranks, key=lambda parts: sum(count * own.total for count, own in parts))


def _waiting(units: list[SizedUnit], backwards: int, rank: int | None) -> int:
    """How much longer sums are that wait in a node than the means that come of them."""
    if backwards == 1:
        return 0
    return sum(one.unit.count * max(0, one.node_sum(rank) - one.mean_kept) for one in units)


def _gathered(units: list[SizedUnit], prefetch_bytes: int | None) -> int:
    """Units around others, and the two largest neighbours: one in use, one on its way.

    Units of one module are in use together.
    """
    passing = [one for one in units if not one.unit.stays]
    around = sum(one.values for one in passing if one.unit.surrounds)
    inner = [one for one in passing if not one.unit.surrounds]
    if prefetch_bytes is not None:
        most = sum(one.unit.count * one.values for one in inner)
        in_use = max((sum(values) for values in _used_together(inner)), default=0)
        return around + min(most, in_use + prefetch_bytes)
    groups = list(_used_together(inner))
    pairs = [*itertools.pairwise(groups), *itertools.pairwise(reversed(groups))]
    alone = max((sum(values) for values in groups), default=0)
    return around + max([alone, *(sum(used) + max(coming) for used, coming in pairs)])


def _used_together(units: list[SizedUnit]) -> Iterator[list[int]]:
    """Bytes of the units of each module; of alike ones those of two, who may follow each other."""
    group: list[int] = []
    for one in units:
        if group and not one.unit.joins:
            yield group
            group = []
        group.append(one.values)
        for _ in range(min(one.unit.count, 2) - 1):
            yield group
            group = [one.values]
    if group:
        yield group


def _neighbours(sizes: list[tuple[int, int]], num_units: int) -> int:
    """The most that so many units have together that follow each other; sizes with their counts."""
    in_order = [size for count, size in sizes for _ in range(min(count, num_units))]
    starts = range(max(1, len(in_order) - num_units + 1))
    return max(sum(in_order[start : start + num_units]) for start in starts)


def _buffers(units: list[SizedUnit], cut: Stage, devices: int, backwards: int) -> int:
    """Local gradients of the units in backward, what comes in of others, autograd's own.

    Where local gradients are kept anyway they count as gradients, not here. From the second
    backward on there are means already, to which new ones are added; and where the optimizer steps
    in backward, or on the host, means are here only.
    """
    inner = [(one.unit.count, one.gradients) for one in units if not one.lasts and one.gradients]
    around = sum(one.unit.count * one.gradients for one in units if one.lasts)
    inner_mean = max((one.mean for one in units if not one.lasts), default=0)
    around_mean = sum(one.unit.count * one.mean for one in units if one.lasts)
    # Where gradients are cut, one reduce ends before the next unit's buffer takes its memory. Else
    # the next one is launched while one is on its way, and without slices a third that comes back.
    both: Callable[[int, int], int] = max if cut.cut_gradients else operator.add
    on_the_way = 1 if cut.cut_gradients else 2
    comes_back = not cut.shards_anything and devices > 1
    local = _neighbours(inner, on_the_way + comes_back) + around
    coming = [(one.unit.count, one.incoming) for one in units if not one.lasts and one.gradients]
    incoming = both(
        _neighbours(coming, on_the_way),
        sum(one.unit.count * one.incoming for one in units if one.lasts),
    )
    if comes_back:
        # The sums come back into a buffer of their own. Of two units; one is counted as the mean
        # that it becomes.
        incoming += both(_neighbours(inner, 1), around)
    keeps_none = any(
        one.unit.trainable and (one.offload or not one.widths.gradient) for one in units
    )
    again = both(inner_mean, around_mean) if backwards > 1 or keeps_none else 0
    if backwards > 1:
        # Means that lay in the buffer of local gradients have made room for others.
        again += sum(one.unit.count * one.mean_in_buffer for one in units)
    # A mean leaves for the host in the dtype that it has on the wire, in a copy of its own.
    leaving = max((one.gradients // one.num_owners for one in units if one.offload), default=0)
    autograd = max((one.gradient_of_autograd for one in units), default=0)
    return (0 if cut.keeps_gradient_buffer else local) + incoming + again + leaving + autograd


def _errors(units: list[SizedUnit], rank: int, quantize: Quantize | None) -> int:
    """What error feedback keeps, and where it makes errors: in fp32, of one part at a time."""
    if quantize is None or not quantize.error_feedback:
        return 0
    kept = sum(one.unit.count * kept_errors(one, rank, quantize) for one in units)
    parts = (one.part_of(one.layout.strides) for one in units if one.unit.trainable)
    return kept + 3 * 4 * max(parts, default=0)


def moved_by(
    model: ModelShape, stage: AnyStage, cluster: Cluster, widths: ElementWidths, backwards: int
) -> int:
    """Bytes that a rank moves between its device and host memory per step, at most."""
    total = 0
    for one in sized(model, stage, cluster, widths):
        moved = estimate.bytes_moved(one.cut, one.state_widths, one.offload, backwards)
        total += one.unit.count * -(-one.layout.padded_numel // one.num_owners) * moved
    return total


def swapped_by(
    model: ModelShape, stage: AnyStage, cluster: Cluster, widths: ElementWidths, backwards: int
) -> DiskTraffic:
    """Bytes that a rank reads from NVMe and writes to it per step, at most."""
    total = DiskTraffic(read=0, written=0)
    for one in sized(model, stage, cluster, widths):
        if one.offload is None:
            continue
        states, owned = one.state_widths, -(-one.layout.padded_numel // one.num_owners)
        each = estimate.gather_traffic(one.cut, states, one.offload) * (2 * backwards * owned)
        if one.unit.trainable:
            each += estimate.optimizer_traffic(one.cut, states, one.offload) * owned
            # With the flags that ride along.
            each += estimate.gradient_traffic(states, one.offload, backwards) * one.slice_numel
        total += each * one.unit.count
    return total
