"""What a rank sends in a step, inside its node and across nodes, from the runtime's own layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What a rank sends for a unit, each hop made once.

    values: a gather or a refresh. sums: a reduce; where it is an all-reduce, one half of it.
    """

    values: Sent
    sums: Sent


def messages_of(one: SizedUnit, rank: int) -> Messages:
    """Of a unit, every message counted from its sender to its receiver.

    Values of the own slice go to the other nodes, and those of the node part then to the ranks of
    this node; a sum goes the other way, each time what is not handled, or owned, here.
    """
    cluster, layout, widths = one.cluster, one.layout, one.widths
    in_node, num_nodes, how_far = cluster.size_of_node(rank), cluster.num_nodes, one.cut.optimizer
    number = cluster.slice_of(rank, how_far)
    value, total = layout.slice_numels[number], layout.strides[number]
    if how_far == "whole":
        # Each rank sums an equal part, and sends that to all others: in one hop.
        part, others = total // cluster.devices, cluster.devices - in_node
        values, sums = NOTHING, Sent(inside=part * (in_node - 1), across=part * others)
    elif how_far == "node":
        values = Sent(inside=value * (in_node - 1), across=0)
        replicas = total // num_nodes * (num_nodes - 1)
        sums = Sent(inside=layout.gradient_numel - total, across=replicas)
    else:
        part, summed = (
            one.part_of(numels, rank) for numels in (layout.slice_numels, layout.strides)
        )
        values = Sent(inside=part * (in_node - 1), across=value * (num_nodes - 1))
        sums = Sent(inside=layout.gradient_numel - summed, across=summed - total)
    return Messages(
        values=values.times(widths.compute, widths.compute),
        sums=sums.times(widths.wire, widths.wire) if one.unit.trainable else NOTHING,
    )


def sent_by(  # noqa: PLR0913
    model: ModelShape,
    stage: AnyStage,
    cluster: Cluster,
    widths: ElementWidths,
    backwards: int,
    *,
    no_sync: bool = False,
    rank: int = 0,
) -> Sent:
    """Bytes that a rank sends per step.

    So it is on Gloo, where messages over all ranks go across nodes once, then inside. A backend's
    own collectives (NCCL) find their way themselves; as much is sent in all.
    """
    total = NOTHING
    for one in sized(model, stage, cluster, widths):
        messages = messages_of(one, rank)
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
