"""Files and folders on the disk: errors name them, and what is written there is flushed to it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onecopy.errors import CheckpointError

__all__ = ["REMEDIES", "flush_folder", "naming", "open_file", "read_file", "write_file"]

REMEDIES = {
    "written": "Checkpoints that were complete before are untouched",
    "removed": "Remove it by hand",
    "read": "Load another checkpoint of this run; load(..., fallback=True) looks for the last good "
    "one",
}


@contextmanager
def naming(verb: str, path: Path) -> Iterator[None]:
    """Errors of the system inside become errors that name the file and what to do.

    Args:
        verb: "written", "removed" or "read".

    Raises:
        CheckpointError: for any OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if verb == "written" and isinstance(error, FileNotFoundError):
            reason = "its folder has vanished; does another job save to the same root?"
        raise CheckpointError(f"{path} cannot be {verb}: {reason}. {REMEDIES[verb]}") from error


def open_file(path: Path) -> tuple[Any, int]:
    """Open a file for reading, unbuffered, and tell its size.

    Raises:
        OSError: it cannot be opened.
        CheckpointError: it is no file but a pipe or a device, from which a reader may wait forever.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is no regular file. {REMEDIES['read']}")
    file = path.open("rb", buffering=0)
    return file, os.fstat(file.fileno()).st_size


def read_file(path: Path) -> bytes:
    """Read a small file.

    Raises:
        CheckpointError: it cannot be read.
    """
    with naming("read", path):
        file, _ = open_file(path)
        with file:
            data: bytes = file.readall()
    return data


def flush_folder(folder: Path) -> None:
    """Make names that were made, changed or removed in a folder outlive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems do that by themselves, and know no such call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file, flushed to the disk.

    Raises:
        CheckpointError: it cannot be written.
    """
    with naming("written", path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
