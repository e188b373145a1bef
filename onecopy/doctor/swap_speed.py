"""How fast a folder is for states on disk, measured by the very code that reads and writes them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from onecopy.doctor.facts import SwapSpeed
from onecopy.doctor.files import within
from onecopy.errors import SwapError

if TYPE_CHECKING:
    from torch import Tensor

    from onecopy.memory.swap_files import SwapArray, SwapFolder, Transfer

__all__ = ["Course", "look_at_swap"]

CHUNK_BYTES = 16 << 20
# Read, updated, written.
NUM_BUFFERS = 3
# Fast disks are measured for the shorter, slow ones until the longer.
LEAST_SECONDS, MOST_SECONDS = 1.0, 5.0
PASSES = 4


def look_at_swap(folder: Path, num_bytes: int) -> SwapSpeed:
    """Measure a folder with a file of `num_bytes` bytes; 0 measures nothing."""
    path = str(folder.resolve())
    if not num_bytes:
        return SwapSpeed(path=path, not_measured="switched off")
    try:
        # A pass that has begun its last chunk when the time is over still has to end.
        return within(2 * PASSES * MOST_SECONDS, lambda: _measure(folder.resolve(), num_bytes))
    except ImportError as error:
        return SwapSpeed(path=path, not_measured=str(error))
    except (OSError, SwapError) as error:
        return SwapSpeed(path=path, not_measured=str(error).partition("\n")[0])


def _measure(path: Path, num_bytes: int) -> SwapSpeed:
    from onecopy.memory.swap_files import SwapFolder

    folder = SwapFolder(path, 0)
    try:
        course = Course(folder, num_bytes)
        # The first time blocks are also found and marked as written, which no later step does.
        course.run(course.write, least_seconds=0)
        return SwapSpeed(
            path=str(path),
            num_bytes=course.num_bytes,
            write=course.run(course.write),
            read=course.run(course.read),
            both=course.run(course.update),
            is_direct=folder.is_direct,
        )
    finally:
        folder.close()


class Course:
    """An array on disk that is gone through in chunks, as the optimizer's step does it.

    Attributes:
        num_bytes: of the array.
    """

    def __init__(self, folder: SwapFolder, num_bytes: int) -> None:
        import torch

        chunk = min(CHUNK_BYTES, num_bytes)
        self.num_bytes = num_bytes // chunk * chunk
        self._starts = range(0, self.num_bytes, chunk)
        self._array: SwapArray = folder.array("state", "disk", self.num_bytes, torch.uint8)
        self._buffers = [folder.buffer(chunk)[:chunk] for _ in range(NUM_BUFFERS)]
        for buffer in self._buffers:
            buffer.random_(256)  # some disks store zeros as nothing

    def run(self, way: Callable[[float], int], least_seconds: float = LEAST_SECONDS) -> float:
        """Bytes per second of passes over the array, as many as the time takes, one at least.

        Raises:
            SwapError: the disk has failed.
        """
        begin, moved = time.perf_counter(), 0
        while True:
            moved += way(begin + MOST_SECONDS)
            seconds = time.perf_counter() - begin
            if seconds >= least_seconds:
                return moved / seconds

    def write(self, until: float) -> int:
        """One pass, unless time is over before; the number of bytes written."""
        return self._stream(self._array.write, until)

    def read(self, until: float) -> int:
        """One pass, unless time is over before; the number of bytes read."""
        return self._stream(self._array.read, until)

    def _stream(self, begin: Callable[[int, Tensor], Transfer], until: float) -> int:
        waiting: deque[tuple[Transfer, Tensor]] = deque()
        free, moved = list(self._buffers), 0
        for start in self._starts:
            if not free:
                transfer, buffer = waiting.popleft()
                transfer.wait()
                free.append(buffer)
            if time.perf_counter() > until:
                break
            buffer = free.pop()
            waiting.append((begin(start, buffer), buffer))
            moved += buffer.numel()
        for transfer, _ in waiting:
            transfer.wait()
        return moved

    def update(self, until: float) -> int:
        """One pass that reads chunk k+1 while it writes k-1; the bytes of both together."""
        reads: deque[tuple[int, Transfer, Tensor]] = deque()
        writes: deque[tuple[Transfer, Tensor]] = deque()
        free, moved = list(self._buffers), 0
        for start in (*self._starts, None):
            is_over = start is None or time.perf_counter() > until
            if not is_over:
                if not free:
                    transfer, buffer = writes.popleft()
                    transfer.wait()
                    free.append(buffer)
                buffer = free.pop()
                reads.append((start, self._array.read(start, buffer), buffer))
            while len(reads) > (0 if is_over else 1):
                begun, transfer, buffer = reads.popleft()
                transfer.wait()
                writes.append((self._array.write(begun, buffer), buffer))
                moved += 2 * buffer.numel()
            if is_over:
                break
        for transfer, _ in writes:
            transfer.wait()
        return moved
