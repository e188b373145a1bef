"""Step time and peak memory of every stage, beside DDP, FSDP2 and compute alone.

    python -m benchmarks.step_time [--size 10m] [--nproc 2] [--rounds 10] [--isolate]
    python -m benchmarks.step_time --memory

See README.md here for what the columns mean and for the traps of such a comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from rich.console import Console

import onecopy
from benchmarks import measure, report
from benchmarks.contenders import CONTENDERS, Setting
from benchmarks.measure import Memory, Plan, Steps
from benchmarks.model import SIZES

DEFAULT = tuple(name for name in CONTENDERS if name != "zero_redundancy")
# fp32 sums of two ranks differ in the last bits only; in bf16 autocast rounds elsewhere.
TOLERANCES = {"fp32": 2e-3, "bf16": 5e-2}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 1 where the contenders did not compute the same."""
    options = _parser().parse_args(arguments)
    setting = Setting(
        size=options.size,
        nproc=options.nproc,
        dtype=options.dtype,
        micro_batch=options.micro_batch,
        context=options.context,
    )
    names = tuple(name for name in CONTENDERS if name in options.contenders)
    console = Console(width=None if sys.stdout.isatty() else 180)
    record: dict[str, Any] = {"setting": asdict(setting), "machine": report.machine()}
    console.print(f"{setting}\n{record['machine']}", highlight=False)
    run = _memory if options.memory else _time
    same = run(names, setting, options, console, record)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if same else 1


def _time(
    names: tuple[str, ...],
    setting: Setting,
    options: argparse.Namespace,
    console: Console,
    record: dict[str, Any],
) -> bool:
    plan = Plan(rounds=options.rounds, timed=options.steps)
    results: dict[str, list[Steps]] = {}
    if options.isolate:
        nproc = setting.nproc * len(names)
        for one in onecopy.launch(measure.take_turns_alone, nproc, names, setting, plan):
            for name, steps in one.items():
                results.setdefault(name, []).append(steps)
    else:
        ranks = onecopy.launch(measure.take_turns, setting.nproc, names, setting, plan)
        results = {name: [rank[name] for rank in ranks] for name in names}
    rows = report.time_rows(results)
    apart = report.deviations(results)
    record |= {
        "mode": "isolated" if options.isolate else "one process group",
        "plan": asdict(plan),
        "rows": rows,
        "deviations": apart,
        "steps": {name: [asdict(rank) for rank in ranks] for name, ranks in results.items()},
    }
    title = f"milliseconds, {record['mode']}, {plan.rounds} rounds of {plan.timed} steps"
    report.show(console, title, report.TIME_COLUMNS, rows, options.markdown)
    return _check_losses(console, apart, TOLERANCES[setting.dtype])


def _memory(
    names: tuple[str, ...],
    setting: Setting,
    options: argparse.Namespace,
    console: Console,
    record: dict[str, Any],
) -> bool:
    results: dict[str, list[Memory]] = {}
    for name in names:
        resident, tracked = (
            onecopy.launch(
                measure.measure_memory, setting.nproc, name, setting, track, options.same_allocator
            )
            for track in (False, True)
        )
        results[name] = [
            Memory(base=one.base, life=one.life, steady=one.steady, live=other.live)
            for one, other in zip(resident, tracked, strict=True)
        ]
    rows = report.memory_rows(results)
    record |= {"mode": "memory", "same_allocator": options.same_allocator, "rows": rows}
    allocator = "all return freed blocks" if options.same_allocator else "each as it comes"
    title = f"MiB per rank, {allocator}"
    report.show(console, title, report.MEMORY_COLUMNS, rows, options.markdown)
    return True


def _check_losses(console: Console, apart: dict[str, float], tolerance: float) -> bool:
    """Nobody may win by computing something else."""
    wrong = {name: far for name, far in apart.items() if not far <= tolerance}
    far = max(apart.values(), default=0.0)
    console.print(f"losses of the contenders that train together differ by at most {far:.1e}")
    if wrong:
        console.print(f"NOT THE SAME TRAINING (more than {tolerance}): {wrong}", style="bold red")
    return not wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--size", choices=SIZES, default="10m", help="parameters of the GPT (default 10m)")
    add("--nproc", type=int, default=2, help="ranks (default 2)")
    add("--dtype", choices=TOLERANCES, default="fp32")
    add("--micro-batch", type=int, default=1, help="rows per rank and step (default 1)")
    add("--context", type=int, default=128, help="tokens per row (default 128)")
    add("--rounds", type=int, default=10, help="turns of each contender (default 10)")
    add("--steps", type=int, default=2, help="timed steps per turn (default 2)")
    add("--contenders", nargs="+", choices=CONTENDERS, default=DEFAULT, metavar="NAME")
    add("--isolate", action="store_true", help="each contender in processes of its own, in turn")
    add("--memory", action="store_true", help="measure peak memory instead of time")
    add("--same-allocator", action="store_true", help="with --memory: mallopt for all, as shard()")
    add("--markdown", action="store_true", help="print the table in Markdown too")
    add("--json", type=Path, help="write everything, each step's times too, to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
