"""Files read and written past the system's cache, straight from and to the memory of tensors.

What goes through the cache is copied once more, and fills memory with pages that the next step
does not find there any more. O_DIRECT asks in return that file offset, address and length are
multiples of a block. Ranges that are not begin or end in small buffers of their own: the first and
the last block go there, and what lies between still goes straight.

    file     | block     | block     | block     |
    wanted        [======================]
    moved    [head block][  in place ][tail block]     one call, three pieces of memory

Python's `preadv` and `pwritev` release the interpreter while the disk works, so that a few threads
keep it busy.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

__all__ = ["ALIGNMENT", "DirectFile", "aligned", "can_be_direct", "host_memory", "longest_piece"]

# Bytes: a page, and a multiple of every block size that disks have.
ALIGNMENT = 4096
# The longest piece that one thread moves at once: straight, and by way of memory that it keeps.
SEGMENT_BYTES = 8 << 20
BOUNCE_BYTES = 512 << 10
# Where one of these comes from an O_DIRECT request that is aligned, the file system knows none.
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)

HUGE_PAGE_BYTES = 2 << 20

_PYBUF_WRITE = 0x200
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object

Vector = Callable[[int, list[memoryview], int], int]


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def longest_piece(address: int, offset: int) -> int:
    """Bytes that one thread moves at once from or to memory there and a file's `offset`."""
    is_straight = address % ALIGNMENT == offset % ALIGNMENT
    return (SEGMENT_BYTES if is_straight else BOUNCE_BYTES) - offset % ALIGNMENT


def host_memory(num_bytes: int) -> torch.Tensor:
    """(num_bytes,) uint8 on a page of its own.

    A child process does not get these pages: a read that is under way while somebody forks would
    otherwise end in the memory of only one of both (see the notes of open(2) on O_DIRECT).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def can_be_direct(folder: Path) -> bool:
    """Whether files there can be read and written past the cache: tried with one block.

    Raises:
        OSError: the folder cannot be written at all.
    """
    flag = getattr(os, "O_DIRECT", 0)
    path = folder / "try.swap"
    block = host_memory(ALIGNMENT).fill_(1)
    view = [_view(block.data_ptr(), ALIGNMENT)]
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | flag, 0o600)
    except OSError as error:
        if flag and error.errno in REFUSED:
            path.unlink(missing_ok=True)  # some file systems make the file and refuse then
            return False
        raise
    try:
        return bool(flag) and ALIGNMENT == os.pwritev(handle, view, 0) == os.preadv(handle, view, 0)
    except OSError as error:
        if error.errno in REFUSED:
            return False
        raise
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)


class DirectFile:
    """A file of whole blocks, open until nobody refers to it.

    Attributes:
        path: its name when it was made.
        num_bytes: how much was reserved, a multiple of ALIGNMENT.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, *, is_direct: bool) -> None:
        self.path = path
        self.num_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if is_direct else 0)
        self._handle = os.open(path, flags, 0o600)
        weakref.finalize(self, os.close, self._handle)
        self._is_direct = is_direct
        # Two threads that each replace a part of one block would undo each other.
        self._edges = threading.Lock()

    def reserve(self, num_bytes: int) -> int:
        """Make the file longer, with room on the disk; the offset of what was added.

        Raises:
            OSError: ENOSPC where there is no room; the file is as before then.
        """
        offset, length = self.num_bytes, aligned(num_bytes)
        if length:
            try:
                self._allocate(offset, length)
            except OSError:
                os.ftruncate(self._handle, offset)
                raise
        self.num_bytes += length
        return offset

    def _allocate(self, offset: int, length: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                return os.posix_fallocate(self._handle, offset, length)
            except OSError as error:
                if error.errno not in (*REFUSED, errno.ENOSYS):
                    raise
        free = os.fstatvfs(self._handle)
        if free.f_bavail * free.f_frsize < length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._handle, offset + length)

    def read(self, address: int, num_bytes: int, offset: int) -> None:
        """Read bytes from `offset` on to memory at `address`.

        Raises:
            OSError: the disk or the file system refuses.
        """
        if self._is_direct:
            blocks = _Blocks(address, num_bytes, offset)
            self._whole(os.preadv, blocks.memory, blocks.begin)
            blocks.copy_out()
        else:
            self._whole(os.preadv, [_view(address, num_bytes)], offset)

    def write(self, address: int, num_bytes: int, offset: int, *, ends_array: bool) -> None:
        """Write bytes to `offset` from memory at `address`.

        Args:
            ends_array: the rest of the last block belongs to nobody else.

        Raises:
            OSError: the disk or the file system refuses.
        """
        if not self._is_direct:
            self._whole(os.pwritev, [_view(address, num_bytes)], offset)
            return
        blocks = _Blocks(address, num_bytes, offset)
        shared = blocks.shared(ends_array=ends_array)
        with self._edges if shared else nullcontext():
            for begin, memory in shared:
                self._whole(os.preadv, [memory], begin)
            blocks.copy_in()
            self._whole(os.pwritev, blocks.memory, blocks.begin)

    def _whole(self, move: Vector, memory: list[memoryview], offset: int) -> None:
        """All of it, in as many calls as the system takes."""
        left = sum(map(len, memory))
        while left:
            moved = move(self._handle, memory, offset)
            if self._is_direct and moved < left:
                # The next call has to begin at a block again.
                moved = moved // ALIGNMENT * ALIGNMENT
            if moved <= 0:
                raise OSError(errno.EIO, f"the request ended {left} bytes before its end")
            offset, left = offset + moved, left - moved
            memory = _after(memory, moved)


class _Blocks:
    """The whole blocks around a range of bytes; see the picture in the module's docstring.

    Attributes:
        begin: the offset of the first one.
        memory: what to give to preadv or pwritev.
    """

    def __init__(self, address: int, num_bytes: int, offset: int) -> None:
        self.begin, end = offset // ALIGNMENT * ALIGNMENT, aligned(offset + num_bytes)
        # Bytes of others in the first and in the last block.
        self._before, self._behind = offset - self.begin, end - offset - num_bytes
        self._num_bytes = end - self.begin
        self._bounce = bounce = _bounce_memory()
        head = ALIGNMENT if self._before else 0
        tail = ALIGNMENT if self._behind else 0
        middle = self._num_bytes - head - tail
        if middle <= 0 or (address - self._before) % ALIGNMENT:
            self._last = bounce + self._num_bytes - ALIGNMENT
            self.memory = [_view(bounce, self._num_bytes)]
            # (bounce memory, the caller's memory, bytes)
            self._copies = [(bounce + self._before, address, num_bytes)]
            return
        self._last = bounce + head
        places = ((bounce, head), (address - self._before + head, middle), (self._last, tail))
        self.memory = [_view(begin, length) for begin, length in places if length]
        self._copies = []
        if head:
            self._copies.append((bounce + self._before, address, head - self._before))
        if tail:
            length = tail - self._behind
            self._copies.append((self._last, address + num_bytes - length, length))

    def shared(self, *, ends_array: bool) -> list[tuple[int, memoryview]]:
        """Offset and memory of the blocks that hold bytes of others, who want to keep them."""
        found = {}
        if self._before:
            found[self.begin] = self._bounce
        if self._behind and not ends_array:
            found[self.begin + self._num_bytes - ALIGNMENT] = self._last
        return [(offset, _view(address, ALIGNMENT)) for offset, address in found.items()]

    def copy_in(self) -> None:
        """From the caller's memory."""
        for bounce, address, num_bytes in self._copies:
            ctypes.memmove(bounce, address, num_bytes)

    def copy_out(self) -> None:
        """To the caller's memory."""
        for bounce, address, num_bytes in self._copies:
            ctypes.memmove(address, bounce, num_bytes)


_of_thread = threading.local()


def _bounce_memory() -> int:
    """The address of memory that this thread keeps: a bounce, and a block at each of its ends."""
    if not hasattr(_of_thread, "bounce"):
        _of_thread.bounce = host_memory(BOUNCE_BYTES + 2 * ALIGNMENT)
    return int(_of_thread.bounce.data_ptr())


def _view(address: int, num_bytes: int) -> memoryview:
    """Of memory that somebody else keeps alive."""
    view: memoryview = _memory_view(address, num_bytes, _PYBUF_WRITE)
    return view


def _after(memory: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of pieces of memory behind so many bytes."""
    left = []
    for one in memory:
        if num_bytes < len(one):
            left.append(one[num_bytes:])
        num_bytes = max(0, num_bytes - len(one))
    return left
