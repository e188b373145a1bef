"""Storage that is given back and taken again while views of it stay alive.

A unit's flat buffer is one tensor whose parameters are views. Releasing it resizes the *storage*
to nothing and gathering grows it again: views, and whatever autograd saved of them, follow. (To
re-point the parameters instead would leave saved views on the old memory, alive and stale.)

On Linux two things are done so that memory comes and goes cheaply. glibc is told to serve blocks
below 32 MiB from a heap that it keeps, so that units, gradients and activations take turns in the
same pages: returning each block to the system costs a fault for every page that is taken again.
Larger buffers come from the system and go back to it; they ask for huge pages, which makes their
faults several times cheaper. What this costs and saves was measured: docs/design.md.

The heap that is kept is larger than what is in use: torch asks for aligned blocks, and a hole that
a block has left is a little too small for the next one of its size. Who has states on disk because
memory is short has each block come from the system, and go back to it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch

__all__ = [
    "free",
    "grow",
    "is_freed",
    "num_owners",
    "num_references",
    "reuse_freed_blocks",
    "want_huge_pages",
]

# glibc takes no larger threshold. The heap is trimmed when this much lies free at its end.
MMAP_THRESHOLD_BYTES = 32 << 20
TRIM_THRESHOLD_BYTES = 256 << 20
# Blocks of this size and more come from the system where they are to go back to it.
RETURNED_BYTES = 256 << 10
HUGE_PAGE_BYTES = 2 << 20
# Of memory that comes fresh from the system, what is larger than this asks for huge pages.
_fresh_from = [MMAP_THRESHOLD_BYTES]
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, MADV_HUGEPAGE = -1, -3, 14


@cache
def _libc() -> Any | None:
    """glibc, or None where the process runs on something else."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "madvise"):
        return None
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def reuse_freed_blocks() -> None:
    """From now on, freed blocks below 32 MiB are kept for the next ones (glibc; whole process)."""
    library = _libc()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
        _fresh_from[0] = MMAP_THRESHOLD_BYTES


def return_freed_blocks() -> None:
    """From now on, freed blocks of 256 KiB and more go back at once (glibc; whole process)."""
    library = _libc()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, 2 * RETURNED_BYTES)
        library.malloc_trim(0)
        _fresh_from[0] = 2 * HUGE_PAGE_BYTES


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the storage of `tensor` holds no bytes."""
    return tensor.untyped_storage().nbytes() == 0


def grow(tensor: torch.Tensor) -> None:
    """Give the storage under `tensor`, which starts at its beginning, its bytes (undefined)."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
    want_huge_pages(tensor)


def want_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that nobody has touched yet: if it is large and in host memory, on huge pages."""
    is_real = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    if tensor.nbytes >= _fresh_from[0] and is_real:
        library, address = _libc(), tensor.data_ptr()
        if library is not None:
            start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            length = (address + tensor.nbytes - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            library.madvise(start, length, MADV_HUGEPAGE)
    return tensor


def free(tensor: torch.Tensor) -> None:
    """Give the bytes of the storage under `tensor` back; all its views are empty-handed now."""
    tensor.untyped_storage().resize_(0)


def num_owners(tensor: torch.Tensor) -> int:
    """How many tensors (and other owners, numpy arrays among them) share this storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def num_references(tensor: torch.Tensor) -> int:
    """How many references Python has to this storage as an object, those made here included."""
    return sys.getrefcount(tensor.untyped_storage())
