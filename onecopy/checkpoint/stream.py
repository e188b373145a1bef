"""A new file that is written once, from front to back, with checksums of what passes.

Large blocks go to the system as they come, without a copy in this process. Every few blocks the
system is told that they will not be read again: it sends them to the disk at once, while the next
ones are being written, and takes their pages back. Otherwise it would gather gigabytes before the
disk begins to work, and take as much memory from whatever else is cached. Measured: docs/design.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from onecopy.checkpoint.manifest import checksum

__all__ = ["NewFile"]

# What the checksum has read is still in the processor's cache when the system copies it.
BLOCK_BYTES = 1 << 20
SMALL_BYTES = 1 << 16
SENT_TOGETHER_BYTES = 1 << 23


class NewFile:
    """The file; as much of a stream as torch.save needs.

    A write that fails is not told to torch.save, which would report something else in its place,
    but by whatever is called after it.

    Args:
        path: must not exist.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._small = bytearray()
        self._written = 0
        self._sent = 0
        self._checksum = 0
        self._failure: OSError | None = None

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def tell(self) -> int:
        """Bytes so far."""
        return self._written + len(self._small)

    def take_checksum(self) -> int:
        """Of what was written since the last call.

        Raises:
            OSError: it could not be written.
        """
        self._check()
        found, self._checksum = self._checksum, 0
        return found

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes; returns how many."""
        view = memoryview(data).cast("B")
        try:
            if self._failure is None:
                self._append(view)
        except OSError as error:
            self._failure = error
        return len(view)

    def flush(self) -> None:
        """For torch.save: what is small stays here until more comes, or `finish`."""

    def finish(self) -> None:
        """Return when all of it is on the disk.

        Raises:
            OSError: it could not be written.
        """
        self._check()
        self._write_small()
        os.fsync(self._handle)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _append(self, view: memoryview) -> None:
        if len(view) < SMALL_BYTES:
            self._checksum = checksum(view, self._checksum)
            self._small += view
            if len(self._small) >= BLOCK_BYTES:
                self._write_small()
            return
        self._write_small()
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self._checksum = checksum(block, self._checksum)
            self._write_all(block)

    def _write_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._write_all(memoryview(small))

    def _write_all(self, view: memoryview) -> None:
        while view:
            count = os.write(self._handle, view)
            self._written += count
            view = view[count:]
        length = self._written - self._sent
        if length >= SENT_TOGETHER_BYTES and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # it is only advice
                os.posix_fadvise(self._handle, self._sent, length, os.POSIX_FADV_DONTNEED)
            self._sent = self._written
