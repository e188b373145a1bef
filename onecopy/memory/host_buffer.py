"""Host memory for copies of tensors, kept from one use to the next.

Memory that is taken anew costs a fault for every page, and pinning costs more than copying: whoever
copies the same states again and again keeps one buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from onecopy.memory import buffers

__all__ = ["HostBuffer", "HostTensor"]

MIN_BLOCK_BYTES = 1 << 20


class HostBuffer:
    """At least `num_bytes` bytes of host memory; their values are undefined.

    Args:
        num_bytes: how many; pinned memory has up to 1 MiB more.
        pinned: pages that stay where they are, so that an accelerator copies to them by itself.
    """

    def __init__(self, num_bytes: int, *, pinned: bool = False) -> None:
        self.num_bytes = num_bytes
        sizes = _powers_of_two(num_bytes) if pinned else [num_bytes]
        # What is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            self._blocks = [_take(size, pinned) for size in sizes]

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> HostTensor:
        """The memory from byte `start` on, a multiple of the element size, as 1-D tensor."""
        pieces = []
        stop = start + numel * dtype.itemsize
        begin = 0
        for block in self._blocks:
            first, last = max(start - begin, 0), min(stop - begin, block.numel())
            if first < last:
                pieces.append(block[first:last].view(dtype))
            begin += block.numel()
        return HostTensor(pieces or [torch.empty(0, dtype=dtype, device="cpu")])


class HostTensor:
    """A 1-D tensor that may lie in several pieces of memory."""

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self._pieces = pieces

    def write(self, start: int, values: torch.Tensor) -> None:
        """Copy 1-D values to the places from `start` on.

        From an accelerator to pinned memory the copy is only queued: wait for the stream.
        """
        for piece, first in self._between(start, start + values.numel()):
            part = values[first : first + piece.numel()]
            piece.copy_(part, non_blocking=values.device.type != "cpu")

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements between two places: a view, or a copy where they lie in several pieces."""
        found = [piece for piece, _ in self._between(start, stop)]
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else self._pieces[0][:0]

    def _between(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int]]:
        """The parts of pieces between two places, and where each begins, counted from `start`."""
        begin = 0
        for piece in self._pieces:
            first, last = max(start - begin, 0), min(stop - begin, piece.numel())
            if first < last:
                yield piece[first:last], begin + first - start
            begin += piece.numel()


def _powers_of_two(num_bytes: int) -> list[int]:
    """Sizes that make up `num_bytes`: torch rounds each pinned block up to a power of two."""
    left = -(-num_bytes // MIN_BLOCK_BYTES)
    return [MIN_BLOCK_BYTES << bit for bit in reversed(range(left.bit_length())) if left >> bit & 1]


def _take(num_bytes: int, pinned: bool) -> torch.Tensor:
    block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    if not pinned:
        # Through `grow`, which asks for huge pages; nothing of it has been touched yet.
        buffers.free(block)
        buffers.grow(block)
    return block
