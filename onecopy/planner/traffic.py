"""What a rank sends in a step, inside its node and across nodes, from the runtime's own layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onecopy.comm.coding import Coding
from onecopy.config import Quantize
from onecopy.planner import estimate
from onecopy.planner.cluster import Cluster
from onecopy.planner.estimate import AnyStage, ElementWidths, Traffic
from onecopy.planner.shapes import ModelShape
from onecopy.planner.sized import SizedUnit, sized

__all__ = ["Messages", "Sent", "counts_of", "messages_of", "sent_by"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes that one rank sends, to ranks of its node and to others."""

    inside: int
    across: int

    @property
    def total(self) -> int:
        return self.inside + self.across

    def __add__(self, other: Sent) -> Sent:
        return Sent(inside=self.inside + other.inside, across=self.across + other.across)

    def times(self, inside: int, across: int) -> Sent:
        """So many hops of each kind."""
        return Sent(inside=inside * self.inside, across=across * self.across)


NOTHING = Sent(inside=0, across=0)
# Bytes of the values that have codes.
CODED_WIDTHS = {2, 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What a rank sends for a unit, each hop made once.

    values: a gather or a refresh. sums: a reduce; where it is an all-reduce, one half of it.
    """

    values: Sent
    sums: Sent


@dataclass(frozen=True, slots=True)
class _Wire:
    """How values travel in a hop: as they are, so many bytes each, or as codes."""

    width: int
    coding: Coding | None = None

    def num_bytes(self, numel: int, exact: int = 0) -> int:
        """Of so many values that go to one rank, of which some must not be rounded."""
        if self.coding is None:
            return numel * self.width
        return self.coding.num_bytes(numel, exact * self.width)


@dataclass(frozen=True, slots=True)
class _Wires:
    """By kind of hop, as `comm/quantized.py` has its transports."""

    inside: _Wire
    values: _Wire
    sums: _Wire
    sums_across: _Wire

    @classmethod
    def of(cls, one: SizedUnit, quantize: Quantize | None) -> _Wires:
        """Of a unit's values and sums; sums that are coded across nodes were not rounded before."""
        widths = one.widths
        value, total = _Wire(widths.compute), _Wire(widths.wire)
        if quantize is None or not {widths.compute, widths.wire} <= CODED_WIDTHS:
            return cls(value, value, total, total)

        def coded(code: str | None, width: int, plain: _Wire) -> _Wire:
            return plain if code is None else _Wire(width, Coding(code, quantize.block))

        inside, across = quantize.gradients or (None, None)
        if one.cluster.num_nodes == 1:
            across = inside
        return cls(
            value,
            coded(quantize.weights, widths.compute, value),
            coded(inside, widths.wire, total),
            coded(across, max(4, widths.master), total),
        )


def messages_of(one: SizedUnit, rank: int, quantize: Quantize | None = None) -> Messages:
    """Of a unit, every message counted from its sender to its receiver.

    Values of the own slice go to the other nodes, and those of the node part then to the ranks of
    this node; a sum goes the other way, each time what is not handled, or owned, here.
    """
    wires, how_far = _Wires.of(one, quantize), one.cut.optimizer
    messages = {"whole": _of_whole, "node": _of_nodes, "world": _of_world}[how_far](
        one, rank, wires
    )
    return messages if one.unit.trainable else replace(messages, sums=NOTHING)


def kept_errors(one: SizedUnit, rank: int, quantize: Quantize | None) -> int:
    """Bytes that error feedback keeps of a unit: a code of 8 bits for each value that is coded.

    Source: LoCo (Xie et al. 2024), section 3.
    """
    if quantize is None or not quantize.error_feedback or not one.unit.trainable:
        return 0
    kept, nothing = _Wire(0, Coding("int8", quantize.block)), _Wire(0)
    wires = _Wires.of(one, quantize)
    coded = (kept if wire.coding else nothing for wire in (wires.sums, wires.sums_across))
    count = {"whole": _of_whole, "node": _of_nodes, "world": _of_world}[one.cut.optimizer]
    return count(one, rank, _Wires(nothing, nothing, *coded)).sums.total


def _of_whole(one: SizedUnit, rank: int, wires: _Wires) -> Messages:
    """Each rank sums an equal part, and sends that to all others: in one hop."""
    cluster, here = one.cluster, one.cluster.node_of(rank)
    halves = _halves(one, 0, cluster.devices, rank, wires.sums_across)
    inside = sum(halves[peer] for peer in here)
    return Messages(values=NOTHING, sums=Sent(inside=inside, across=sum(halves) - inside))


def _of_nodes(one: SizedUnit, rank: int, wires: _Wires) -> Messages:
    """States of a node: its replicas are the ranks of the same place in the others."""
    cluster, layout = one.cluster, one.layout
    number, node = cluster.slice_of(rank, "node"), rank // cluster.devices_per_node
    value = wires.inside.num_bytes(layout.slice_numels[number]) * (layout.num_slices - 1)
    summed = sum(
        _of_slice(one, other, wires.sums) for other in range(layout.num_slices) if other != number
    )
    across = sum(_halves(one, number, cluster.num_nodes, node, wires.sums_across))
    return Messages(values=Sent(inside=value, across=0), sums=Sent(inside=summed, across=across))


def _of_world(one: SizedUnit, rank: int, wires: _Wires) -> Messages:
    """In two hops, of which that across nodes has nobody to go to where there is one."""
    cluster, slices = one.cluster, one.layout.slice_numels
    number, handled = cluster.slice_of(rank, "world"), cluster.handled(rank)
    here, others = cluster.node_of(rank), cluster.num_nodes - 1
    part = sum(slices[handled.start : handled.stop])
    values = Sent(
        inside=(wires.inside if others else wires.values).num_bytes(part) * (len(here) - 1),
        across=wires.values.num_bytes(slices[number]) * others,
    )
    leaving = (other for other in handled if other != number)
    sums = Sent(
        inside=sum(_of_part(one, peer, wires.sums) for peer in here if peer != rank),
        across=sum(_of_slice(one, other, wires.sums_across) for other in leaving),
    )
    return Messages(values=values, sums=sums)


def _of_slice(one: SizedUnit, number: int, wire: _Wire) -> int:
    """Bytes of a slice of a sum."""
    layout = one.layout
    stride = layout.strides[number]
    return wire.num_bytes(stride, stride - layout.slice_numels[number])


def _of_part(one: SizedUnit, rank: int, wire: _Wire) -> int:
    """Bytes of a sum that a rank handles for its node."""
    handled, layout = one.cluster.handled(rank), one.layout
    numel = sum(layout.strides[handled.start : handled.stop])
    return wire.num_bytes(numel, numel - sum(layout.slice_numels[handled.start : handled.stop]))


def _halves(one: SizedUnit, number: int, replicas: int, own: int, wire: _Wire) -> list[int]:
    """Half of what an all-reduce of a slice sends to each replica: its chunk, and the own one."""
    stride, value = one.layout.strides[number], one.layout.slice_numels[number]
    chunk = stride // replicas
    sizes = [
        wire.num_bytes(chunk, min(chunk, max(0, end - value)))
        for end in range(chunk, stride + 1, chunk)
    ]
    return [0 if place == own else (size + sizes[own]) // 2 for place, size in enumerate(sizes)]


def sent_by(  # noqa: PLR0913
    model: ModelShape,
    stage: AnyStage,
    cluster: Cluster,
    widths: ElementWidths,
    backwards: int,
    *,
    no_sync: bool = False,
    rank: int = 0,
    quantize: Quantize | None = None,
) -> Sent:
    """Bytes that a rank sends per step.

    So it is on Gloo, where messages over all ranks go across nodes once, then inside. A backend's
    own collectives (NCCL) find their way themselves; as much is sent in all.
    """
    total = NOTHING
    for one in sized(model, stage, cluster, widths):
        messages = messages_of(one, rank, quantize)
        inside, across = counts_of(one, backwards, no_sync)
        sent = messages.values.times(inside.gather + inside.refresh, across.gather + across.refresh)
        sent += messages.sums.times(inside.reduce, across.reduce)
        total += sent.times(one.unit.count, one.unit.count)
    return total


def counts_of(one: SizedUnit, backwards: int, no_sync: bool = False) -> tuple[Traffic, Traffic]:
    """How many hops of each kind a step has for a unit: inside nodes, and across nodes.

    What is frozen never changes: it is not refreshed, and what nodes keep of it not renewed.
    """
    inside = estimate.traffic(one.cut, backwards, no_sync)
    across = estimate.traffic_across(one.cut, backwards, no_sync)
    if not one.unit.trainable:
        inside, across = replace(inside, refresh=0), replace(across, refresh=0)
        if one.cut.keeps_secondary:
            across = replace(across, gather=0)
    return inside, across
