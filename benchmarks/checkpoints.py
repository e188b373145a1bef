"""Time and memory of saving and loading, beside DDP, FSDP2 and the disk itself.

    python -m benchmarks.checkpoints [--size 125m] [--nproc 2] [--rounds 7] [--directory DIR]

See README.md here for how it is measured and for what the columns mean.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch.distributed as dist
from rich.console import Console

import onecopy
from benchmarks import report
from benchmarks.checkpoint_ways import FLOORS, WAYS, Way, make
from benchmarks.contenders import Contender, Setting
from benchmarks.measure import Alone, reset_peak, resident, train_step
from benchmarks.model import SIZES
from benchmarks.report import Column

TRAINED_STEPS = 2  # the first makes the optimizer's states, and shows wrong ones in the second
COLUMNS = {
    "saving": (
        Column("name", "contender"),
        Column("save", "save s", ".2f"),
        Column("save_spread", "IQR", ".2f"),
        Column("save_cpu", "CPU s", ".2f"),
        Column("save_of_disk", "of disk", ".2f"),
        Column("save_of_disk-early", "of disk-early", ".2f"),
        Column("save_per_ddp", "/ ddp", ".2f"),
        Column("save_per_fsdp2", "/ fsdp2", ".2f"),
        Column("written", "MiB written", ".0f"),
        Column("save_memory", "MiB above rest", ".0f"),
    ),
    "saving in the background": (
        Column("name", "contender"),
        Column("stall", "stall s", ".3f"),
        Column("stall_spread", "IQR", ".3f"),
        Column("stall_per_save", "/ its save", ".3f"),
        Column("stall_per_fsdp2", "/ fsdp2", ".2f"),
        Column("background", "on disk after s", ".2f"),
        Column("background_per_fsdp2", "/ fsdp2", ".2f"),
        Column("background_memory", "MiB above rest", ".0f"),
    ),
    "loading": (
        Column("name", "contender"),
        Column("load", "load s", ".2f"),
        Column("load_spread", "IQR", ".2f"),
        Column("load_cpu", "CPU s", ".2f"),
        Column("load_of_disk", "of disk", ".2f"),
        Column("load_per_ddp", "/ ddp", ".2f"),
        Column("load_per_fsdp2", "/ fsdp2", ".2f"),
        Column("load_memory", "MiB above rest", ".0f"),
        Column("cached", "in cache", ".0%"),
    ),
}


@dataclass(slots=True, kw_only=True)
class Measured:
    """One kind of call on one rank, each list by round.

    memory: bytes, the most that was resident above what was before the call.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Results:
    """One contender on one rank.

    stall: seconds of `background` before its call returned. On rank 0 only, written: bytes of a
    checkpoint, and cached: the part of them that was in the page cache when a load began.
    losses: of the same steps after saving, after loading, and after loading what was saved in the
    background.
    """

    save: Measured = field(default_factory=Measured)
    load: Measured = field(default_factory=Measured)
    background: Measured = field(default_factory=Measured)
    stall: list[float] = field(default_factory=list)
    written: int = 0
    cached: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    def forget_times(self) -> None:
        """The first round counts for memory alone."""
        for one in (self.save, self.load, self.background):
            one.seconds.clear()
            one.cpu.clear()
        self.stall.clear()


# In the rank processes ------------------------------------------------------------------------


def measure(
    names: tuple[str, ...], setting: Setting, rounds: int, root: Path
) -> dict[str, Results]:
    """One contender in this process, in a group with its own kind; all take turns."""
    alone = Alone(names, setting.nproc)
    way, folders = make(alone.name, setting), root / alone.name
    if way.contender is not None:
        _train(way.contender, setting, 0)
    results = Results()
    for number in range(rounds + 1):
        with alone.turn(number):
            with _folders(folders) as (folder, other):
                _turn(way, folder, other, results)
            if number == 0:
                # What is made and found once was made and found now; memory that stays is memory.
                results.forget_times()
                with _folders(folders) as (folder, other):
                    results.losses = _check(way, setting, folder, other)
    dist.destroy_process_group()
    return {alone.name: results}


def _train(contender: Contender, setting: Setting, first: int) -> list[float]:
    steps = range(first, first + TRAINED_STEPS)
    losses = [train_step(contender, setting, step)[1] for step in steps]
    contender.settle()
    return losses


def _check(way: Way, setting: Setting, folder: Path, other: Path) -> list[list[float]]:
    """Losses of the same steps after saving and after loading."""
    way.save(folder)
    dist.barrier()
    if way.contender is None:
        return []
    losses = [_train(way.contender, setting, TRAINED_STEPS)]
    way.load(folder)
    if way.start_save is not None:
        # Training goes on while this is being written.
        wait = way.start_save(other)
        losses.append(_train(way.contender, setting, TRAINED_STEPS))
        wait()
        dist.barrier()
        way.load(other)
    losses.append(_train(way.contender, setting, TRAINED_STEPS))
    return losses


def _turn(way: Way, folder: Path, other: Path, results: Results) -> None:
    with _measuring(results.save):
        way.save(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        files = [path for path in folder.rglob("*") if path.is_file()]
        results.written = sum(path.stat().st_size for path in files)
        _drop_from_cache(files)
        results.cached.append(_share_in_cache(files))
    with _measuring(results.load):
        way.load(folder)
    if way.start_save is not None:
        with _measuring(results.background):
            start = time.perf_counter()
            wait = way.start_save(other)
            results.stall.append(time.perf_counter() - start)
            wait()


@contextmanager
def _measuring(into: Measured) -> Iterator[None]:
    """All ranks begin together; what was freed before goes back to the system first."""
    gc.collect()
    _return_freed_blocks()
    rest = resident("VmRSS")
    reset_peak()
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    yield
    into.seconds.append(time.perf_counter() - start)
    into.cpu.append(time.process_time() - cpu)
    into.memory.append(resident("VmHWM") - rest)


def _return_freed_blocks() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextmanager
def _folders(root: Path) -> Iterator[tuple[Path, Path]]:
    """Two new folders; afterwards nothing of them is left for the disk to do."""
    folders = root / "first", root / "second"
    if dist.get_rank() == 0:
        for folder in folders:
            folder.mkdir(parents=True)
    dist.barrier()
    yield folders
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
        os.sync()
    dist.barrier()


def _drop_from_cache(files: Iterable[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _share_in_cache(files: Iterable[Path]) -> float:
    """Which part of the files is read without the disk; looking does not change it."""
    pages, found = 0, 0
    for path in files:
        with path.open("rb") as file:
            # Never written to: only a writable mapping tells ctypes its address.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        first = ctypes.c_char.from_buffer(mapped)
        each = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        length = ctypes.c_size_t(len(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.byref(first), length, each) == 0, "it is mapped"
        pages, found = pages + len(each), found + sum(one & 1 for one in each)
        del first
        mapped.close()
    return found / pages


# Output ---------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 1 where something else was loaded than had been saved."""
    options = _parser().parse_args(arguments)
    setting = Setting(
        size=options.size, nproc=options.nproc, dtype="fp32", micro_batch=1, context=options.context
    )
    names = tuple(name for name in WAYS if name in options.contenders)
    console = Console(width=None if sys.stdout.isatty() else 180)
    record: dict[str, Any] = {"setting": asdict(setting), "machine": report.machine()}
    results: dict[str, list[Results]] = {}
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.directory) as folder:
        root, nproc = Path(folder), setting.nproc * len(names)
        record["machine"]["file system"] = _file_system(root)
        console.print(f"{setting}\n{record['machine']}", highlight=False)
        for one in onecopy.launch(measure, nproc, names, setting, options.rounds, root):
            for name, of_rank in one.items():
                results.setdefault(name, []).append(of_rank)
    rows = make_rows(results)
    for title, columns in COLUMNS.items():
        shown = [row for row in rows if row.get(columns[1].key) is not None]
        if shown:
            title = f"{title}, {options.rounds} rounds"
            report.show(console, title, columns, shown, options.markdown)
    raw = {name: [asdict(rank) for rank in ranks] for name, ranks in results.items()}
    record |= {"rounds": options.rounds, "rows": rows, "results": raw}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if _all_restored(console, results) else 1


def make_rows(results: dict[str, list[Results]]) -> list[dict[str, Any]]:
    """One row per contender: seconds, medians over rounds, of the rank that was slowest in each."""
    rows = [_row(name, ranks) for name, ranks in results.items()]
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        if row.get("stall") is not None:
            row["stall_per_save"] = row["stall"] / row["save"]
        for kind in ("save", "load", "stall", "background"):
            for peer in ("ddp", "fsdp2"):
                _divide(row, by_name.get(peer, {}), kind, f"{kind}_per_{peer}", lambda a, b: a / b)
            for floor in FLOORS:
                _divide(row, by_name.get(floor, {}), kind, f"{kind}_of_{floor}", lambda a, b: b / a)
    return rows


def _divide(
    row: dict[str, Any],
    other: dict[str, Any],
    kind: str,
    name: str,
    ratio: Callable[[float, float], float],
) -> None:
    if row.get(kind) and other.get(kind):
        row[name] = ratio(row[kind], other[kind])


def _row(name: str, ranks: list[Results]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "written": ranks[0].written / 2**20}
    row["cached"] = fmean(ranks[0].cached)
    row |= _times("stall", [rank.stall for rank in ranks])
    for kind in ("save", "load", "background"):
        of_ranks: list[Measured] = [getattr(rank, kind) for rank in ranks]
        row |= _times(kind, [rank.seconds for rank in of_ranks])
        if kind in row:
            row[f"{kind}_cpu"] = median(_slowest(rank.cpu for rank in of_ranks))
            row[f"{kind}_memory"] = max(max(rank.memory) for rank in of_ranks) / 2**20
    return row


def _times(kind: str, of_ranks: list[list[float]]) -> dict[str, float]:
    seconds = _slowest(of_ranks)
    if not seconds:
        return {}
    low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (0.0, 0.0, 0.0)
    return {kind: median(seconds), f"{kind}_spread": high - low}


def _slowest(of_ranks: Iterable[list[float]]) -> list[float]:
    return [max(one) for one in zip(*of_ranks, strict=True)]


def _all_restored(console: Console, results: dict[str, list[Results]]) -> bool:
    """Nobody may win by loading something else."""
    right = True
    for name, ranks in results.items():
        for number, rank in enumerate(ranks):
            if any(losses != rank.losses[0] for losses in rank.losses):
                console.print(f"NOT RESTORED: {name}, rank {number}: {rank.losses}", style="red")
                right = False
    if right:
        console.print("all went on from what they loaded as from what they saved, bit for bit")
    return right


def _file_system(path: Path) -> str:
    """Its type, as /proc/self/mountinfo has it."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[2] == wanted:
            return line.partition(" - ")[2].split()[0]
    return "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--size", choices=SIZES, default="125m", help="parameters of the GPT (default 125m)")
    add("--nproc", type=int, default=2, help="ranks (default 2)")
    add("--context", type=int, default=128, help="tokens per row (default 128)")
    add("--rounds", type=int, default=7, help="turns of each contender that count (default 7)")
    add("--contenders", nargs="+", choices=WAYS, default=WAYS, metavar="NAME")
    add("--directory", type=Path, help="on the disk to write to (default: the temporary one)")
    add("--markdown", action="store_true", help="print the tables in Markdown too")
    add("--json", type=Path, help="write everything, each round's times too, to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
