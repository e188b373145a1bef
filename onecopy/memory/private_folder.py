"""Folders that a process has for itself, and that nobody has to clean up.

A folder holds a lock file, which its owner keeps locked for as long as it lives. The system undoes
the lock when a process ends, however it ends: a folder whose lock is free belongs to nobody any
more, and the next process that makes one beside it takes it away.

Processes that begin at once may meet while one has made its folder and not locked it yet. So the
one that sweeps takes the lock before it deletes, and the one that makes a folder looks, when it
has the lock, whether this is still the file that the folder has.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
import time
import weakref
from pathlib import Path

__all__ = ["SUFFIX", "PrivateFolder"]

SUFFIX = ".swap"
LOCK = "lock"
NAME = re.compile(r"onecopy-swap-(?P<host>.+)-(?P<pid>\d+)-rank\d+-[a-z0-9_]+")
# How often a folder is made anew when another process has swept it in the moment of its making.
ATTEMPTS = 100
# Locks do not reach across hosts on every network file system: there a folder has to be old, too.
FOREIGN_SECONDS = 24 * 3600


class PrivateFolder:
    """A new folder below `parent`, there until `remove`, or until this object or process ends.

    Attributes:
        path: the folder.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path, rank: int) -> None:
        _sweep(parent)
        for _ in range(ATTEMPTS):
            self.path = _make(parent, rank)
            lock = _lock(self.path)
            if lock is not None:
                break
        else:
            raise BlockingIOError(f"every folder made in {parent} was taken by another process")
        self._lock = lock
        self._owner = os.getpid()
        self._removal = weakref.finalize(self, _remove, self.path, lock, self._owner)
        _locks.add(self)

    @property
    def is_mine(self) -> bool:
        """Not that of a process which has forked this one, and not removed."""
        return self._removal.alive and self._owner == os.getpid()

    def remove(self) -> None:
        """Delete the folder; nothing happens the second time, or in a forked process."""
        _locks.discard(self)
        self._removal()

    def let_go_of_lock(self) -> None:
        """In a forked process: the lock lasts as long as the owner, not as its children."""
        os.close(self._lock)


_locks: weakref.WeakSet[PrivateFolder] = weakref.WeakSet()


def _in_child() -> None:
    for folder in list(_locks):
        folder.let_go_of_lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _make(parent: Path, rank: int) -> Path:
    prefix = f"onecopy-swap-{_host()}-{os.getpid()}-rank{rank}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "host"


def _lock(folder: Path) -> int | None:
    """The handle of a folder's lock file, locked; None where another process has it, or had."""
    import fcntl  # here, because Windows has none, and imports this file too

    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(folder / LOCK, follow_symlinks=False)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _sweep(parent: Path) -> None:
    """Delete the folders whose owners are dead."""
    for folder in parent.iterdir():
        match = NAME.fullmatch(folder.name)
        if match is None or not _may_sweep(folder, match["host"]):
            continue
        # What somebody else may not delete, or has deleted meanwhile, stays or is gone.
        with contextlib.suppress(OSError):
            lock = _lock(folder)
            if lock is not None:
                _remove(folder, lock, os.getpid())


def _may_sweep(folder: Path, host: str) -> bool:
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        if host == _host():
            return True
        last = max(one.lstat().st_mtime for one in (folder, *folder.iterdir()))
        return time.time() - last > FOREIGN_SECONDS
    except OSError:
        return False


def _remove(folder: Path, lock: int, owner: int) -> None:
    """Delete what is ours in a folder, and the folder where that was all."""
    if os.getpid() != owner:
        return
    # The lock goes last: as long as it is there, nobody else looks into the folder.
    with contextlib.suppress(OSError):
        for path in [*folder.glob(f"*{SUFFIX}"), folder / LOCK]:
            path.unlink(missing_ok=True)
        folder.rmdir()
    os.close(lock)
