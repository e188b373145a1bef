"""States on disk: one file per kind of state, with the units behind one another.

Reads and writes run on a few threads, past the system's cache where the file system allows it
(`direct_io`), in a folder that only this process uses (`private_folder`).

Source: ZeRO-Infinity (Rajbhandari et al. 2021), section 6.3.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from onecopy.errors import SwapError
from onecopy.memory.direct_io import (
    DirectFile,
    aligned,
    can_be_direct,
    host_memory,
    longest_piece,
)
from onecopy.memory.private_folder import SUFFIX, PrivateFolder

__all__ = ["SwapArray", "SwapFolder", "Transfer"]

LOGGER = logging.getLogger("onecopy")

NUM_THREADS = 4
# A disk that answers so late, or never, is worth a word.
SLOW_SECONDS = 30.0

LOAD = "What is on disk is not whole any more: end the run, {}, and load the last checkpoint"
REMEDIES = {
    errno.ENOSPC: LOAD.format("make room on the disk"),
    errno.EDQUOT: LOAD.format("make room in the quota"),
    errno.ESTALE: LOAD.format("see why the folder has gone"),
}
LOOK = "look at the disk (the kernel's log, dmesg, says what it reports)"
REMEDY = LOAD.format(LOOK)


class Transfer:
    """A read or a write that is under way.

    Attributes:
        num_bytes: of the elements.
        seconds: from its beginning to its end, once it has ended.
        ended: when it has, by time.perf_counter().
    """

    def __init__(self, what: str, tensor: torch.Tensor) -> None:
        self.num_bytes = tensor.numel() * tensor.itemsize
        self.seconds = self.ended = 0.0
        self._what = what
        # The memory must live until the disk has done its work.
        self._tensor: torch.Tensor | None = tensor
        self._error: BaseException | None = None
        self._left = 0
        self._begun = time.perf_counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def wait(self) -> None:
        """Until it has ended.

        Raises:
            SwapError: it has failed; names the file, the unit and the rank.
        """
        if not self._ended.wait(SLOW_SECONDS):
            LOGGER.warning("%s has taken %g s, and goes on: %s", self._what, SLOW_SECONDS, LOOK)
            self._ended.wait()
        if self._error is not None:
            reason = getattr(self._error, "strerror", None) or repr(self._error)
            remedy = REMEDIES.get(getattr(self._error, "errno", 0), REMEDY)
            raise SwapError(f"{self._what} failed: {reason}. {remedy}.") from self._error

    def start(self, pool: ThreadPoolExecutor, pieces: list[Callable[[], None]]) -> None:
        """Begin; to be called once."""
        self._left = len(pieces)
        if not pieces:
            self._end()
        for piece in pieces:
            try:
                pool.submit(self._run, piece)
            except RuntimeError:
                self._run(piece)  # the interpreter is ending, and starts no threads any more

    def _run(self, piece: Callable[[], None]) -> None:
        try:
            if self._error is None:
                piece()
        except BaseException as error:  # whatever it is, who waits must not wait for ever
            self._error = error
        finally:
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last:
                self._end()

    def _end(self) -> None:
        self.ended = time.perf_counter()
        self.seconds = self.ended - self._begun
        self._tensor = None
        self._ended.set()


@dataclass(frozen=True, slots=True, eq=False)
class SwapArray:
    """The elements of one kind of state of one unit.

    Transfers that are under way together end in any order: who writes what another one still reads
    or writes waits for that first.

    Attributes:
        name: the kind of state.
        unit: whose.
    """

    name: str
    unit: str
    numel: int
    dtype: torch.dtype
    folder: SwapFolder
    offset: int

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return self.numel * self.dtype.itemsize

    def read(self, start: int, target: torch.Tensor) -> Transfer:
        """Begin to read elements [start, start + target.numel()).

        Args:
            target: (n,) contiguous, in host memory; undefined until the transfer has ended.

        Raises:
            SwapError: the folder is closed.
        """
        return self.folder.transfer(self, "reading", start, target)

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        """Begin to write elements [start, start + source.numel()).

        Args:
            source: (n,) contiguous, in host memory; not to be changed until the transfer has ended.

        Raises:
            SwapError: the folder is closed.
        """
        return self.folder.transfer(self, "writing", start, source)


class SwapFolder:
    """The files of one process, in a folder of its own below `path`.

    The folder goes at `close`, or when the process ends; where that was killed, the next one that
    opens a folder at the same path takes it away.

    Attributes:
        num_bytes: how much is reserved on the disk.
        is_direct: files are read and written past the system's cache.

    Raises:
        SwapError: there is no folder at `path`, or it cannot be written.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.num_bytes = 0
        self._rank = rank
        try:
            self._folder = PrivateFolder(path, rank)
            self.is_direct = can_be_direct(self._folder.path)
        except OSError as error:
            raise SwapError(
                f"rank {rank} cannot keep states in {path}: {error.strerror or error}. "
                "path= is a folder that is there, and that its ranks may write to"
            ) from error
        if not self.is_direct:
            _say_buffered(path)
        self._files: dict[str, DirectFile] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS, "onecopy-swap")

    def array(self, name: str, unit: str, numel: int, dtype: torch.dtype) -> SwapArray:
        """Reserve room for elements, whose values are undefined until they are written.

        Args:
            name: the kind of state; arrays of one name share a file.

        Raises:
            SwapError: the disk has no room for them, or the folder has gone.
        """
        self._check(f"reserve {name} of unit {unit}")
        num_bytes = numel * dtype.itemsize
        try:
            file = self._files.get(name)
            if file is None:
                readable = re.sub(r"[^\w.-]", "_", name)[:100]
                path = self._folder.path / f"{len(self._files)}-{readable}{SUFFIX}"
                file = self._files[name] = DirectFile(path, is_direct=self.is_direct)
            offset = file.reserve(num_bytes)
        except OSError as error:
            raise SwapError(self._no_room(name, unit, num_bytes, error)) from error
        self.num_bytes += aligned(num_bytes)
        return SwapArray(name, unit, numel, dtype, self, offset)

    def _no_room(self, name: str, unit: str, num_bytes: int, error: OSError) -> str:
        folder = self._folder.path
        try:
            free = f"{shutil.disk_usage(folder).free:,} bytes are free"
        except OSError:
            free = "the folder is gone"
        return (
            f"rank {self._rank} cannot reserve {num_bytes:,} bytes for {name} of unit {unit} in "
            f"{folder}: {error.strerror or error}; {free}, and {self.num_bytes:,} are reserved "
            "already. Make room there, take another path, or keep less on disk"
        )

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """(n,) uint8 of host memory, n the next multiple of 4096 bytes, for direct transfers.

        It lies on a page, and is pinned where there is an accelerator. Values are undefined.
        """
        num_bytes = aligned(num_bytes)
        if torch.accelerator.is_available() and num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return host_memory(num_bytes)

    def close(self) -> None:
        """Delete the files; transfers that are under way still end."""
        self._folder.remove()
        # A file is closed when the last transfer has let go of it.
        self._files.clear()
        self._pool.shutdown(wait=False)

    def transfer(self, array: SwapArray, verb: str, start: int, tensor: torch.Tensor) -> Transfer:
        """See `SwapArray.read` and `write`."""
        stop = start + tensor.numel()
        assert 0 <= start <= stop <= array.numel, f"[{start}, {stop}) of {array.numel} elements"
        assert tensor.dtype == array.dtype, f"{tensor.dtype} for an array of {array.dtype}"
        assert tensor.is_contiguous() and tensor.device.type == "cpu", "a view of host memory"
        self._check(f"go on {verb} {array.name} of unit {array.unit}")
        file = self._files[array.name]
        transfer = Transfer(
            f"rank {self._rank}: {verb} elements {start} to {stop} of {array.name} of unit "
            f"{array.unit}, in {file.path},",
            tensor,
        )
        write = partial(file.write, ends_array=stop == array.numel)
        move = file.read if verb == "reading" else write
        transfer.start(self._pool, [partial(move, *one) for one in _segments(array, start, tensor)])
        return transfer

    def _check(self, what: str) -> None:
        if not self._folder.is_mine:
            raise SwapError(
                f"rank {self._rank} cannot {what}: its folder {self._folder.path} is closed, or "
                "belongs to the process that has forked this one"
            )


def _segments(array: SwapArray, start: int, tensor: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(address, bytes, offset in the file) of the pieces that threads move at once.

    Between them lie only ends of blocks, so that no two of them have to share one.
    """
    address, left = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    offset = array.offset + start * tensor.itemsize
    while left:
        num_bytes = min(left, longest_piece(address, offset))
        yield address, num_bytes, offset
        address, left, offset = address + num_bytes, left - num_bytes, offset + num_bytes


@cache
def _say_buffered(path: Path) -> None:
    LOGGER.warning(
        "the file system of %s does not read and write past the system's cache (O_DIRECT): states "
        "on disk go through the cache, which costs a copy and memory",
        path,
    )
