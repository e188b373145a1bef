"""What a rank sends in a step, inside its node and across nodes, from the runtime's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from onecopy.comm.coding import Coding
from onecopy.planner import estimate
from onecopy.planner.cluster import Cluster
from onecopy.planner.estimate import AnyStage, ElementWidths, Traffic
from onecopy.planner.shapes import ModelShape
from onecopy.planner.sized import SizedUnit, sized
from onecopy.policies import Quantize

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
# So many elements of what a rank handles are summed at a time, about, where sums are coded.
WINDOW_NUMEL = 1 << 19

# First and last + 1 element; None is all that follows.
Window = tuple[int, int | None]
Windows = list[Window]
ALL: Window = (0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What a rank sends for a unit, each hop made once.

    values: a gather or a refresh. sums: a reduce; where it is an all-reduce, one half of it.
    last_sums: the same where it goes across nodes at once, if that is not the same.
    """

    values: Sent
    sums: Sent
    last_sums: Sent | None = None

    def reduces(self, inside: int, across: int) -> Sent:
        """So many hops of each kind; those that go across follow one inside at once."""
        last = self.sums if self.last_sums is None else self.last_sums
        at_once = min(inside, across)
        return last.times(at_once, across) + self.sums.times(inside - at_once, 0)


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
    messages = _counted(one, rank, _Wires.of(one, quantize))
    return messages if one.unit.trainable else replace(messages, sums=NOTHING, last_sums=None)


def kept_errors(one: SizedUnit, rank: int, quantize: Quantize | None) -> int:
    """Bytes that error feedback keeps of a unit: a code of 8 bits for each value that is coded.

    Source: LoCo (Xie et al. 2024), section 3.
    """
    if quantize is None or not quantize.error_feedback or not one.unit.trainable:
        return 0
    kept, nothing = _Wire(0, Coding("int8", quantize.block)), _Wire(0)
    wires = _Wires.of(one, quantize)
    coded = (kept if wire.coding else nothing for wire in (wires.sums, wires.sums_across))
    return _counted(one, rank, _Wires(nothing, nothing, *coded)).sums.total


def _counted(one: SizedUnit, rank: int, wires: _Wires) -> Messages:
    by_cut = {"whole": _of_whole, "node": _of_nodes, "world": _of_world}
    return by_cut[one.cut.optimizer](one, rank, wires)


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
    sums = _sums_of_world(one, rank, wires, [ALL])
    last = _sums_of_world(one, rank, wires, _windows(one, here, wires.sums.coding))
    return Messages(values=values, sums=sums, last_sums=last)


def _sums_of_world(one: SizedUnit, rank: int, wires: _Wires, windows: Windows) -> Sent:
    """Of what each rank handles, piece by piece; inside its node, and then to the owners."""
    cluster = one.cluster
    handled, number = cluster.handled(rank), cluster.slice_of(rank, "world")
    inside = across = 0
    for window in windows:
        for peer in cluster.node_of(rank):
            pieces = [(0, 0), *_cut(one, cluster.handled(peer), window)]
            if peer != rank:
                inside += wires.sums.num_bytes(*map(sum, zip(*pieces, strict=True)))
        for other, (numel, exact) in zip(handled, _cut(one, handled, window), strict=True):
            if other != number:
                across += wires.sums_across.num_bytes(numel, exact)
    return Sent(inside=inside, across=across)


def _windows(one: SizedUnit, here: range, coding: Coding | None) -> Windows:
    """Long sums that are coded go in pieces, where more than one rank and one node are in them."""
    cluster, strides = one.cluster, one.layout.strides
    longest = max(sum(strides[low.start : low.stop]) for low in map(cluster.handled, here))
    if coding is None or len(here) == 1 or cluster.num_nodes == 1:
        return [ALL]
    step = -(-WINDOW_NUMEL // coding.block) * coding.block
    if longest <= step or len(set(cluster.node_sizes)) > 1:
        return [ALL]
    return [(low, low + step) for low in range(0, longest, step)]


def _cut(one: SizedUnit, slices: range, window: Window) -> Iterator[tuple[int, int]]:
    """Of each of some slices that follow each other, how many elements are in a window of them.

    And how many of these are flags, which lie at the end of a slice and stay exact.
    """
    first, last = window
    begin = 0
    for number in slices:
        stride, value = one.layout.strides[number], one.layout.slice_numels[number]
        low = max(begin, first)
        high = begin + stride if last is None else min(begin + stride, last)
        numel = max(0, high - low)
        yield numel, max(0, high - max(low, begin + value)) if numel else 0
        begin += stride


def _of_slice(one: SizedUnit, number: int, wire: _Wire) -> int:
    """Bytes of a slice of a sum."""
    layout = one.layout
    stride = layout.strides[number]
    return wire.num_bytes(stride, stride - layout.slice_numels[number])


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
        sent += messages.reduces(inside.reduce, across.reduce)
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
