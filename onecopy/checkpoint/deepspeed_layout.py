"""Where DeepSpeed's ZeRO puts each parameter's elements in its flat partitions. Integers only.

ZeRO-1 and 2 lay the parameters of a group one after another and cut the whole into one partition
for each rank; ZeRO-3 cuts each parameter by itself, and a rank lays its pieces one after another.

    ZeRO-2:  a a a a a b b | b b c c c - -        ZeRO-3:  a a a b b c c | a a - b b c -
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Piece", "cut_each", "cut_together"]

# The flat buffer of ZeRO-1 and 2 is a multiple of this many elements for each rank.
ALIGNMENT = 2

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a flattened parameter, and where they are.

    rank: whose partition. at: the first one's place in it.
    """

    start: int
    stop: int
    rank: int
    at: int


def cut_together(
    shapes: Shapes, gaps: Sequence[int], world_size: int
) -> tuple[dict[str, list[Piece]], int]:
    """The pieces of ZeRO-1 and 2 by name, and the number of elements in each partition.

    Args:
        shapes: of one group's parameters, in the order in which they lie.
        gaps: elements between each parameter and the next.
    """
    starts, position = [], 0
    for shape, gap in zip(shapes.values(), gaps, strict=True):
        starts.append(position)
        position += math.prod(shape) + gap
    size = ALIGNMENT * math.ceil(position / (ALIGNMENT * world_size))
    pieces: dict[str, list[Piece]] = {}
    for (name, shape), first in zip(shapes.items(), starts, strict=True):
        last = first + math.prod(shape)
        pieces[name] = []
        for rank in range(first // size, math.ceil(last / size)) if last > first else ():
            start, stop = max(first, rank * size), min(last, (rank + 1) * size)
            pieces[name].append(Piece(start - first, stop - first, rank, start - rank * size))
    return pieces, size


def cut_each(shapes: Shapes, world_size: int) -> tuple[dict[str, list[Piece]], int]:
    """The pieces of ZeRO-3 by name, and the number of elements in each partition.

    Args:
        shapes: of one sub-group's parameters, in the order in which their pieces lie.
    """
    pieces: dict[str, list[Piece]] = {}
    position = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        size = math.ceil(numel / world_size)
        pieces[name] = [
            Piece(rank * size, min(numel, (rank + 1) * size), rank, position)
            for rank in range(world_size)
            if rank * size < numel
        ]
        position += size
    return pieces, position
