"""A folder of files that is made once: by one rank for all, and for later runs, or not at all.

It is made under another name and then renamed, so that who finds it finds it whole, whatever
happened to who made it. Where nothing is to be kept, it goes as soon as all ranks have mapped it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from onecopy.checkpoint.disk import flush_folder
from onecopy.comm.compare import first_decides, gather_objects
from onecopy.comm.once import do_while_others_wait, world
from onecopy.errors import ConfigError
from onecopy.launcher import local_place

__all__ = ["made_once"]

T = TypeVar("T")
LEFT_OVER_SECONDS = 24 * 3600.0


def made_once(
    root: Path | None, key: str, make: Callable[[Path], None], read: Callable[[Path], T]
) -> T:
    """What `read` makes of the folder `root / key`, which `make` fills if it is not there.

    Without a root, of a temporary one, which is gone when this returns: `read` must have opened
    the files. The first rank makes it, and where others do not see it, on other machines, the
    first there. All ranks call it together.

    Raises:
        ConfigError: the folder cannot be made, or is not there after it was made.
    """
    group = world()
    name = first_decides(group, None, lambda _: uuid.uuid4().hex)
    folder = Path(tempfile.gettempdir()) / f"onecopy-{name}" if root is None else root / key
    for makes in (group.rank == 0, local_place()[0] == 0):
        do_while_others_wait(group, makes, lambda: _make(folder, make))
    if not folder.is_dir():
        raise ConfigError(
            f"rank {group.ranks[group.rank]} does not see {folder}, which the first rank of its "
            "machine has made. Give --cache a folder that all processes of a machine share."
        )
    result = read(folder)
    if root is None:
        gather_objects(group, None)  # all have opened it
        if local_place()[0] == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    if folder.is_dir():
        return
    unfinished = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(folder)
        unfinished.mkdir(mode=0o700)
        make(unfinished)
        flush_folder(unfinished)
        _rename(unfinished, folder)
    except OSError as error:
        raise ConfigError(
            f"The tokens cannot be written to {error.filename or folder}: "
            f"{error.strerror or error}. Give --cache a folder on a disk with room."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        # Another run was faster with the same: its folder is as good.
        if not folder.is_dir():
            raise
        return
    flush_folder(folder.parent)


def _remove_left_over(folder: Path) -> None:
    """What a process that was killed left behind of the same; not what another run now makes."""
    for other in folder.parent.glob(f".{folder.name}.*"):
        try:
            newest = max(one.stat().st_mtime for one in [other, *other.rglob("*")])
        except FileNotFoundError:
            continue  # it was just finished, or removed
        if time.time() - newest > LEFT_OVER_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
