"""Time, memory, bytes sent and start-up of every stage, beside what a user would pick instead.

    python -m benchmarks.compare [--output DIR]
    python -m benchmarks.compare --size 10m 50m 125m --nproc 2 4 --dtype fp32 bf16 --micro-batch 1 4

Several sizes, ranks, dtypes or micro-batches make one run of each combination. Contenders take
turns, each in processes of its own. DIR gets compare.json with everything, the tables as compare.md
and a picture of them, compare.svg. See README.md here for the columns and the traps of such a
comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from rich.console import Console

import onecopy
from benchmarks import aims, measure, picture, report, with_deepspeed
from benchmarks.contenders import CONTENDERS, FLOORS, Setting
from benchmarks.formula import num_parameters
from benchmarks.measure import LiveBytes, Plan, Turns
from benchmarks.model import SIZES
from benchmarks.network import CannotMakeNodesError, Network, network

DTYPES, NEIGHBOURS = ("fp32", "bf16"), ("read", "send")
# Of each process: what Python and torch take; and per parameter, with what is under way.
BASE_BYTES, BYTES_PER_PARAMETER = 350 << 20, 22
MOST_OF_MEMORY = 0.8
DEFAULT = tuple(name for name in CONTENDERS if name not in ("qwz", "qgz", "zero++"))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 1 where a comparison was none."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    names = _present(options.contenders, console)
    plan = Plan(rounds=options.rounds, timed=options.steps, same_allocator=options.same_allocator)
    runs, is_sound = [], True
    with tempfile.TemporaryDirectory(dir=options.disk) as disk:
        for setting in _settings(options, disk):
            run = _compare(names, setting, plan, options.live_tensors, console)
            is_sound &= not run["broken"]
            runs.append(run)
            if options.output:
                # After each, so that a long table that is ended early is not lost.
                _write(options.output, runs)
    return 0 if is_sound else 1


def _settings(options: argparse.Namespace, disk: str) -> Iterator[Setting]:
    kinds = (options.size, options.nproc, options.dtype, options.micro_batch)
    for size, nproc, dtype, rows in itertools.product(*kinds):
        yield Setting(
            size=size,
            nproc=nproc,
            dtype=dtype,
            micro_batch=rows,
            context=options.context,
            disk=disk,
            neighbours=options.neighbours,
        )


def _present(wanted: Sequence[str], console: Console) -> tuple[str, ...]:
    """Those that can take part here, in the order of the tables."""
    missing: dict[str, str] = {}
    theirs = [name for name in wanted if name.startswith("deepspeed")]
    if theirs and not with_deepspeed.is_installed():
        missing = dict.fromkeys(theirs, "DeepSpeed is not installed")
    elif "deepspeed-3-nvme" in theirs:
        reason = with_deepspeed.reason_against_nvme()
        missing = {"deepspeed-3-nvme": reason} if reason else {}
    for name, reason in missing.items():
        console.print(f"without {name}: {reason}", highlight=False)
    present = tuple(name for name in CONTENDERS if name in wanted and name not in missing)
    for name in present:
        if name in theirs:
            # What must be compiled is, once, before there are ranks that would wait for it.
            with_deepspeed.prepare(name)
    return present


def _compare(
    names: tuple[str, ...], setting: Setting, plan: Plan, live_tensors: bool, console: Console
) -> dict[str, Any]:
    """One setting: everything that was measured, and its rows."""
    run: dict[str, Any] = {
        "setting": {**asdict(setting), "disk": ""},
        "plan": asdict(plan),
        "machine": report.machine(),
    }
    console.print(f"\n{setting}\n{run['machine']}", highlight=False)
    batches, is_alone = [], True
    for batch in _batches(names, setting):
        with _network(setting.nproc * len(batch), console) as nodes:
            batches.append(_take_turns(batch, setting, plan, nodes))
            is_alone &= nodes is not None
    live: dict[str, list[LiveBytes]] = {}
    for name in names if live_tensors else ():
        if name not in FLOORS:
            live[name] = onecopy.launch(measure.measure_live_tensors, setting.nproc, name, setting)
    rows = report.comparison(batches, live, setting)
    run |= {
        "rows": rows,
        "aims": aims.reached(rows),
        "broken": aims.broken(rows, setting.dtype, is_alone=is_alone),
        "turns": [
            {name: [asdict(rank) for rank in ranks] for name, ranks in batch.items()}
            for batch in batches
        ],
    }
    for title, columns, of in _tables(run):
        report.show(console, title, columns, of, in_markdown=False)
    for line in run["broken"]:
        console.print(f"NOT A COMPARISON: {line}", style="bold red", highlight=False)
    return run


def _take_turns(
    names: tuple[str, ...], setting: Setting, plan: Plan, nodes: Network | None
) -> dict[str, list[Turns]]:
    arguments = measure.take_turns, names, setting, plan
    if nodes is not None:
        of_ranks = nodes.launch(*arguments)
    else:
        fn, *others = arguments
        of_ranks = onecopy.launch(fn, setting.nproc * len(names), *others)
    results: dict[str, list[Turns]] = {}
    for name, turns in of_ranks:
        results.setdefault(name, []).append(turns)
    return results


@contextlib.contextmanager
def _network(num_ranks: int, console: Console) -> Iterator[Network | None]:
    """A loopback interface of their own; None where the system does not allow it."""
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(network(ranks=(num_ranks,)))
        except CannotMakeNodesError as reason:
            console.print(
                f"bytes sent contain what other programs send over lo: {reason}", highlight=False
            )
            nodes = None
        yield nodes


def _batches(names: tuple[str, ...], setting: Setting) -> list[tuple[str, ...]]:
    """Contenders that fit into memory together; each batch has floors of its own."""
    floors = tuple(name for name in names if name in FLOORS)
    others = [name for name in names if name not in FLOORS]
    each = setting.nproc * (BASE_BYTES + BYTES_PER_PARAMETER * num_parameters(setting))
    room = int(MOST_OF_MEMORY * _available_bytes() // each) - len(floors)
    room = max(1, room)
    if not others:
        return [floors]
    return [(*floors, *others[first : first + room]) for first in range(0, len(others), room)]


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise LookupError("no MemAvailable in /proc/meminfo")


# Output ---------------------------------------------------------------------------------------


def _tables(run: dict[str, Any]) -> Iterator[tuple[str, Sequence[report.Column], list[Any]]]:
    plan = run["plan"]
    yield (
        f"milliseconds, {plan['rounds']} rounds of {plan['timed']} steps",
        report.TIME_COLUMNS,
        run["rows"],
    )
    yield "memory and bytes per rank", report.MEMORY_COLUMNS, run["rows"]
    if run["aims"]:
        yield "aims", aims.COLUMNS, run["aims"]


def _write(folder: Path, runs: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(runs, indent=1) + "\n")
    parts = []
    for run in runs:
        parts.append(f"## {report.title_of(run['setting'])}\n\n{report.words(run['machine'])}")
        for title, columns, rows in _tables(run):
            parts.append(f"### {title}\n\n{report.markdown(columns, rows)}")
        parts += [f"**Not a comparison**: {line}" for line in run["broken"]]
    (folder / "compare.md").write_text("\n\n".join(parts) + "\n")
    (folder / "compare.svg").write_text(picture.draw(runs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--size", nargs="+", choices=SIZES, default=["10m"], help="parameters (default 10m)")
    add("--nproc", nargs="+", type=int, default=[2], help="ranks (default 2)")
    add("--dtype", nargs="+", choices=DTYPES, default=["fp32"])
    add("--micro-batch", nargs="+", type=int, default=[1], help="rows per rank (default 1)")
    add("--context", type=int, default=128, help="tokens per row (default 128)")
    add("--rounds", type=int, default=10, help="turns of each contender (default 10)")
    add("--steps", type=int, default=2, help="timed steps per turn (default 2)")
    add("--contenders", nargs="+", choices=CONTENDERS, default=DEFAULT, metavar="NAME")
    add("--neighbours", choices=NEIGHBOURS, default="read", help="how ours get bytes to peers")
    add("--disk", type=Path, help="folder on the drive for states on disk (default: the system's)")
    add("--same-allocator", action="store_true", help="mallopt for all, as shard() does it")
    add(
        "--no-live-tensors",
        dest="live_tensors",
        action="store_false",
        help="leave out the second pass, which follows every tensor",
    )
    add("--output", type=Path, metavar="DIR", help="write compare.json, compare.md, compare.svg")
    return parser


if __name__ == "__main__":
    sys.exit(main())
