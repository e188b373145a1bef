"""Memory that is taken once and lent again and again: contiguous memory (M_D) of ZeRO-R.

What lives long among things that live short (a checkpointed activation, a gradient slice) leaves
holes where it ends, and these are too small for the next long one. So what lives long lies in
blocks of its own, which are taken once.

Where a block is a tensor, a slot is a range of its elements; a block may also be a part of a file.

Source: ZeRO (Rajbhandari et al. 2020), section 6.3.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Arena", "Slot"]

Block = TypeVar("Block")

# Slots begin at multiples of this: vector instructions, and caches, want aligned tensors.
ALIGNMENT = 512
# A chunk has room for so many slots like the one that it is taken for: their ends, which are too
# small for another one, are a small part of it then.
SLOTS_PER_CHUNK = 8


class Slot(Generic[Block]):
    """A range of a block that is lent until nobody refers to this object any more.

    Attributes:
        block: what the arena's `make` has made.
        start, num_bytes: the range.
    """

    __slots__ = ("_length", "_returned", "block", "num_bytes", "start")

    def __init__(
        self, block: Block, start: int, num_bytes: int, length: int, returned: deque[_Range[Block]]
    ) -> None:
        self.block, self.start, self.num_bytes = block, start, num_bytes
        self._length, self._returned = length, returned

    def __del__(self) -> None:
        # From any thread, at any moment: the arena itself takes it up when it lends the next one.
        self._returned.append((self.block, self.start, self._length))


_Range = tuple[Block, int, int]


class _Holes:
    """The free ranges of one block, in order; neighbours are one."""

    def __init__(self, num_bytes: int) -> None:
        self._starts, self._ends = [0], [num_bytes]

    def take(self, length: int) -> int | None:
        """Where the first hole begins that has room; its beginning is free no longer."""
        for number, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= length:
                if end - start == length:
                    del self._starts[number], self._ends[number]
                else:
                    self._starts[number] += length
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        """It is free again."""
        end, place = start + length, bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == end:
            end = self._ends[place]
            del self._starts[place], self._ends[place]
        if place and self._ends[place - 1] == start:
            self._ends[place - 1] = end
        else:
            self._starts.insert(place, start)
            self._ends.insert(place, end)


class Arena(Generic[Block]):
    """Blocks that `make` makes, and slots in them, first fit.

    Without chunks, blocks are as long as the slots that they are taken for. When all slots have
    been given back they are let go of, and the next one is as long as the most that was ever lent
    at once: from the second round on there is one block, without a byte too much. With chunks,
    blocks stay: for what is dear to take, as pinned memory is.

    Attributes:
        num_bytes: of all blocks.
        used_bytes: of the slots that are lent.

    Args:
        make: a block of so many bytes. What it raises, `take` raises.
        chunk_bytes: the least length of a block, a power of two; 0 for none.
        alignment: slots begin at multiples of it.
    """

    def __init__(
        self, make: Callable[[int], Block], *, chunk_bytes: int = 0, alignment: int = ALIGNMENT
    ) -> None:
        self.num_bytes = self.used_bytes = 0
        self._make, self._chunk_bytes, self._alignment = make, chunk_bytes, alignment
        self._most_bytes = 0
        self._blocks: list[tuple[Block, _Holes]] = []
        self._returned: deque[_Range[Block]] = deque()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Slot[Block]:
        """A slot whose bytes are undefined."""
        length = -(-max(num_bytes, 1) // self._alignment) * self._alignment
        with self._lock:
            self.tidy()
            if not self.used_bytes and not self._chunk_bytes and len(self._blocks) > 1:
                self._blocks.clear()
                self.num_bytes = 0
            block, start = self._find(length) or self._grow(length)
            self.used_bytes += length
            self._most_bytes = max(self._most_bytes, self.used_bytes)
        return Slot(block, start, num_bytes, length, self._returned)

    def tidy(self) -> None:
        """Take up what has been given back since the last slot was lent."""
        while self._returned:
            block, start, length = self._returned.popleft()
            self.used_bytes -= length
            next(holes for one, holes in self._blocks if one is block).give_back(start, length)

    def _find(self, length: int) -> tuple[Block, int] | None:
        for block, holes in self._blocks:
            start = holes.take(length)
            if start is not None:
                return block, start
        return None

    def _grow(self, length: int) -> tuple[Block, int]:
        if self._chunk_bytes:
            wanted = 1 << (SLOTS_PER_CHUNK * length - 1).bit_length()
            num_bytes = max(self._chunk_bytes, wanted)
        else:
            num_bytes = length if self._blocks else max(length, self._most_bytes)
        block, holes = self._make(num_bytes), _Holes(num_bytes)
        self._blocks.append((block, holes))
        self.num_bytes += num_bytes
        start = holes.take(length)
        assert start is not None, "a block has room for what it was made for"
        return block, start
