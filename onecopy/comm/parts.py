"""How slices are numbered where ranks are in nodes. Integers only: the planner counts with it, too.

Slices are numbered so that every hop moves contiguous ranges: first those of the first rank of each
node, then those of the second of each, and so on. A *node part* is such a run of slices, one of
each node: what a node gets together lies, in as many parts as the largest node has ranks, in the
order of its ranks. A smaller node has the same parts; its ranks handle several of them, and each
owns a slice in the first of its own.

    nodes (0 1 2) (3 4 5) (6 7)      part 0          part 1      part 2
    slices of ranks                  0   3   6   |   1   4   7   |   2   5
    handled in node (6 7) by         6               7               7

Source: the tensor slice reordering of ZeRO++ (Wang et al. 2023), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Part", "order_of_slices", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A node part before there are groups: which place of each node handles it, and who owns."""

    handlers: tuple[int, ...]
    is_owner: tuple[bool, ...]


def parts_of(sizes: Sequence[int]) -> list[Part]:
    """The node parts of nodes with so many ranks each."""
    num_parts = max(sizes)
    parts = []
    for part in range(num_parts):
        # Rank j of a node with n ranks handles the parts from j p / n on, and owns in the first.
        handlers = tuple(((part + 1) * size - 1) // num_parts for size in sizes)
        firsts = (one * num_parts // size for one, size in zip(handlers, sizes, strict=True))
        parts.append(Part(handlers, tuple(first == part for first in firsts)))
    return parts


def order_of_slices(nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks in the order of the slices that they own.

    Args:
        nodes: the ranks of each node.
    """
    return tuple(
        nodes[node][handler]
        for part in parts_of([len(one) for one in nodes])
        for node, handler in enumerate(part.handlers)
        if part.is_owner[node]
    )
