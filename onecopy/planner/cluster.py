"""The ranks of a plan and the nodes that they are in: integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from onecopy.comm.parts import order_of_slices, parts_of

__all__ = ["Cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How many ranks there are, and how many of them share a node.

    devices: ranks, one node's after another's. devices_per_node: in the largest node.
    node_sizes: ranks of each node; without it all are full but the last, which has what is left.
    """

    devices: int
    devices_per_node: int
    node_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.node_sizes:
            full, rest = divmod(self.devices, self.devices_per_node)
            sizes = (self.devices_per_node,) * full + ((rest,) if rest else ())
            object.__setattr__(self, "node_sizes", sizes)

    @classmethod
    def of_nodes(cls, sizes: Sequence[int]) -> Cluster:
        """Nodes with so many ranks each."""
        return cls(devices=sum(sizes), devices_per_node=max(sizes), node_sizes=tuple(sizes))

    def of_size(self, devices: int) -> Cluster:
        """More, or fewer, of the same nodes."""
        return Cluster(devices=devices, devices_per_node=self.devices_per_node)

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.node_sizes)

    def num_owners(self, cut: str) -> int:
        """Over how many ranks a state is shared out that is cut so far."""
        return {"whole": 1, "node": self.devices_per_node, "world": self.devices}[cut]

    def node_of(self, rank: int) -> range:
        """The ranks of the node that a rank is in."""
        node, place = _places(self.node_sizes)[rank]
        return range(rank - place, rank - place + self.node_sizes[node])

    def slice_of(self, rank: int, cut: str) -> int:
        """The number of the slice that a rank owns of a state that is cut so far."""
        if cut == "world":
            return _order(self.node_sizes).index(rank)
        return 0 if cut == "whole" else _places(self.node_sizes)[rank][1]

    def handled(self, rank: int) -> range:
        """The numbers of the world's slices that a rank has for its node: of its node parts."""
        node, place = _places(self.node_sizes)[rank]
        return _handled(self.node_sizes)[node][place]


@cache
def _places(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Of each rank its node, and its place there."""
    return [(node, place) for node, size in enumerate(sizes) for place in range(size)]


@cache
def _order(sizes: tuple[int, ...]) -> tuple[int, ...]:
    ends = [sum(sizes[: node + 1]) for node in range(len(sizes))]
    return order_of_slices([range(end - size, end) for end, size in zip(ends, sizes, strict=True)])


@cache
def _handled(sizes: tuple[int, ...]) -> list[list[range]]:
    """Of each node, which slices each of its ranks handles."""
    parts = parts_of(sizes)
    ends = [0, *accumulate(sum(part.is_owner) for part in parts)]
    found = []
    for node, size in enumerate(sizes):
        of_ranks = [
            [p for p, one in enumerate(parts) if one.handlers[node] == place]
            for place in range(size)
        ]
        found.append([range(ends[own[0]], ends[own[-1] + 1]) for own in of_ranks])
    return found
