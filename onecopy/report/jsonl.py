"""A sink that writes each event as one line of JSON.

This file owns the file it writes and the names in it: the fields of `onecopy.events.Event`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import TracebackType
from typing import Self

from onecopy.errors import ConfigError
from onecopy.events import Event


class JsonLines:
    """Writes every event it is called with to `path`, and closes it as a context manager.

    Overwrites an older file. Raises ConfigError where the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write events to {path}: {error.strerror}.") from error

    def __call__(self, event: Event) -> None:
        record = dataclasses.asdict(event)
        # A group or a dtype is not JSON; its name says enough.
        self._file.write(json.dumps(record, default=str) + "\n")

    def close(self) -> None:
        """Write what is buffered and close the file; later events raise."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def path_of_rank(path: Path, rank: int, world_size: int) -> Path:
    """`path` itself for one process; with several `name-rankN.ending`, so that none overwrites."""
    if world_size == 1:
        return path
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
