"""The layer that keeps states on disk, beside the disk's own speed.

    python -m benchmarks.swap_speed DIR [--size 512MiB] [--threads 4] [--segment 4MiB] [--rounds 5]

Contenders take turns, in one process and on files of their own: the layer (`SwapFolder`, as the
optimizer's step uses it, in chunks), and a bare loop of O_DIRECT `preadv` and `pwritev` from as
many threads, and from one. See README.md here for the columns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.report import Column
from onecopy.doctor.swap_speed import Course
from onecopy.memory import direct_io, swap_files
from onecopy.memory.direct_io import host_memory
from onecopy.memory.swap_files import SwapFolder
from onecopy.options import bytes_of

WAYS = ("write", "read", "both")
COLUMNS = (
    Column("name", "pass"),
    Column("per_disk", "layer / disk", ".2f"),
    Column("spread", "IQR", ".2f"),
    Column("per_single", "layer / one thread", ".2f"),
    Column("cpu", "CPU s / GB, layer", ".3f"),
    Column("cpu_disk", "disk", ".3f"),
)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a file: bytes per second, and seconds of CPU per billion bytes."""

    speed: float
    cpu: float


class BareLoop:
    """`threads` threads that each move one request after another through their part of a file."""

    def __init__(self, path: Path, num_bytes: int, threads: int, request: int) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        path.unlink()
        self._request = request
        starts = range(0, num_bytes // request * request, request)
        per_thread = -(-len(starts) // threads)
        self._parts = [starts[one : one + per_thread] for one in range(0, len(starts), per_thread)]
        self._memory = [host_memory(request).random_(256).numpy().data for _ in self._parts]
        self._pool = ThreadPoolExecutor(threads)

    def run(self, way: str) -> int:
        """One pass; the number of bytes moved."""
        parts = range(len(self._parts))
        return sum(self._pool.map(lambda one: self._move(self._parts[one], one, way), parts))

    def _move(self, starts: range, number: int, way: str) -> int:
        moved, memory = 0, [self._memory[number]]
        for start in starts:
            if way != "write":
                moved += os.preadv(self._handle, memory, start)
            if way != "read":
                moved += os.pwritev(self._handle, memory, start)
        return moved

    def close(self) -> None:
        """End the threads, and give the disk back."""
        self._pool.shutdown()
        os.close(self._handle)


def timed(run: Callable[[], int]) -> Pass:
    begin, cpu = time.perf_counter(), time.process_time()
    moved = run()
    seconds = time.perf_counter() - begin
    return Pass(moved / seconds, (time.process_time() - cpu) / moved * 1e9)


Contenders = dict[str, Callable[[str], int]]


@contextmanager
def contenders(options: argparse.Namespace) -> Iterator[Contenders]:
    swap_files.NUM_THREADS = options.threads
    direct_io.SEGMENT_BYTES = bytes_of(options.segment)
    num_bytes = bytes_of(options.size)
    folder = SwapFolder(options.folder, 0)
    course = Course(folder, num_bytes)
    passes = {"write": course.write, "read": course.read, "both": course.update}
    bare = {
        name: BareLoop(options.folder / f".swap-speed-{name}", num_bytes, threads, options.request)
        for name, threads in (("disk", options.threads), ("single", 1))
    }
    try:
        yield {
            "layer": lambda way: passes[way](float("inf")),
            **{name: loop.run for name, loop in bare.items()},
        }
    finally:
        folder.close()
        for loop in bare.values():
            loop.close()


def rows(found: dict[tuple[str, str], list[Pass]]) -> Iterator[dict[str, Any]]:
    for way in WAYS:
        layer, disk, single = (found[name, way] for name in ("layer", "disk", "single"))
        ratios = [one.speed / other.speed for one, other in zip(layer, disk, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        yield {
            "name": way,
            "per_disk": median(ratios),
            "spread": high - low,
            "per_single": median(
                one.speed / other.speed for one, other in zip(layer, single, strict=True)
            ),
            "cpu": median(one.cpu for one in layer),
            "cpu_disk": median(one.cpu for one in disk),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--size", default="512MiB", help="of each file")
    parser.add_argument("--threads", type=int, default=swap_files.NUM_THREADS)
    parser.add_argument("--segment", default=str(direct_io.SEGMENT_BYTES), help="of the layer")
    parser.add_argument("--request", type=bytes_of, default=8 << 20, help="of the bare loop")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", action="store_true", help="the table to paste, too")
    options = parser.parse_args()
    found: dict[tuple[str, str], list[Pass]] = {}
    with contenders(options) as all_of_them:
        for run in all_of_them.values():
            run("write")  # so that all blocks are there, and marked as written
        for number in range(options.rounds):
            # Who is first in a round is last in the next.
            order = list(all_of_them.items())[:: 1 if number % 2 else -1]
            for way in WAYS:
                for name, run in order:
                    found.setdefault((name, way), []).append(timed(partial(run, way)))
    title = f"swap files, {options.threads} threads: {report.machine()}"
    report.show(Console(width=120), title, COLUMNS, list(rows(found)), options.markdown)


if __name__ == "__main__":
    main()
