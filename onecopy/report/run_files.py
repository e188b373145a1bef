"""Writes a run's folder so that no trouble with it ever stops the training.

Lines are kept for a moment and written together, without waiting for the disk. What cannot be
written is told once, in a warning of the logger "onecopy"; nothing more is written then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["LineFile", "as_json", "write_whole"]

LOGGER = logging.getLogger("onecopy")
FLUSH_AFTER = 1.0
FLUSH_BYTES = 1 << 20


class LineFile:
    """A file of JSON lines that one process appends to.

    Made with `fresh`, an older file of that name is an error (FileExistsError); else a line that an
    older process has left half-written is closed.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_EXCL if fresh else 0)
        self._file: int | None = os.open(path, flags, 0o666)
        self._lines: list[str] = []
        self._num_bytes = 0
        self._written = time.monotonic()
        if not fresh and _is_cut(path):
            self._lines.append("")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line, on the disk a second later at most if lines go on coming."""
        if self._file is None:
            return
        text = as_json(line)
        self._lines.append(text)
        self._num_bytes += len(text)
        if self._num_bytes > FLUSH_BYTES or time.monotonic() - self._written > FLUSH_AFTER:
            self.flush()

    def flush(self) -> None:
        """Give what there is to the system."""
        if self._file is None:
            return
        data = "".join(line + "\n" for line in self._lines).encode()
        self._lines.clear()
        self._num_bytes, self._written = 0, time.monotonic()
        try:
            if os.fstat(self._file).st_nlink == 0:
                raise FileNotFoundError(2, "it was removed")
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _give_up(self, error: OSError) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        warn_of(self.path, error)


def warn_of(path: Path, error: OSError) -> None:
    """Say that something cannot be written, and that training goes on."""
    LOGGER.warning(
        "%s cannot be written any more (%s): training goes on without it", path, error.strerror
    )


def write_whole(path: Path, found: Mapping[str, Any]) -> None:
    """Write a file of JSON anew; who reads it sees the old or the new one.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(as_json(found, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def as_json(found: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON, in which numbers that it does not know are strings: "nan", "inf", "-inf"."""
    try:
        return _dumped(found, indent)
    except ValueError:
        return _dumped(_finite(found), indent)


def _dumped(found: Any, indent: int | None) -> str:
    separators = (",", ":") if indent is None else None
    return json.dumps(found, allow_nan=False, indent=indent, separators=separators, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _is_cut(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
