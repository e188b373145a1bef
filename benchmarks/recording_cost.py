"""What `onecopy.record` adds to a step: the same training with it and without it, in turn.

    python -m benchmarks.recording_cost [--size 10m] [--stage 3] [--nproc 2] [--steps 60]

Two equal models train in the same processes, a step of one, a step of the other; one of them is
recorded from begin to end, with what is written by default, and logs its loss. The wall time of a
step is that of its slowest rank. CPU time, of the thread that trains, is what recording really
costs where a machine is too busy for wall times to tell; the last column is what was added of it
as a share of the whole step. Steps that are looked at closely (two at the beginning, then at every
doubling of a thousand) are apart: a model of its own is looked at in every step.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

import onecopy
from benchmarks.contenders import Contender, Setting, build
from benchmarks.model import SIZES, batch
from benchmarks.report import machine
from onecopy.recording.record import Recording

# The first ones record the order of use and are looked at closely.
WARM_STEPS = 5
WAYS = ("not recorded", "recorded", "every event")


@dataclass(slots=True)
class Times:
    """Seconds of each timed step of one rank."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def measure(setting: Setting, stage: int, num_steps: int, folder: str) -> dict[str, Times]:
    """Steps of each way in turn; in a rank process."""
    dist.init_process_group("gloo")
    times = {way: Times() for way in WAYS}
    with ExitStack() as stack:
        contenders: dict[str, tuple[Contender, Recording | None]] = {}
        for way in WAYS:
            one, run = build(f"onecopy-{stage}", setting), None
            if way != "not recorded":
                trace = WARM_STEPS + num_steps if way == "every event" else 0
                made = onecopy.record(Path(folder) / way, one.model, one.optimizer, trace=trace)
                run = stack.enter_context(made)
            contenders[way] = one, run
        for step in range(WARM_STEPS + num_steps):
            for way, (one, run) in contenders.items():
                wall, cpu = _step(one, run, setting, step)
                if step >= WARM_STEPS:
                    times[way].wall.append(wall)
                    times[way].cpu.append(cpu)
    dist.destroy_process_group()
    return times


def _step(
    one: Contender, run: Recording | None, setting: Setting, step: int
) -> tuple[float, float]:
    shape = (setting.micro_batch, setting.context)
    tokens = batch(SIZES[setting.size], shape, step, dist.get_rank())
    one.settle()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    loss = one.forward(tokens)
    loss.backward()
    one.step()
    one.zero_grad()
    if run is not None:
        run.log(loss=loss)
    return time.perf_counter() - wall, time.thread_time() - cpu


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    options = _parser().parse_args(arguments)
    setting = Setting(
        size=options.size,
        nproc=options.nproc,
        dtype="fp32",
        micro_batch=options.micro_batch,
        context=options.context,
    )
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[dict[str, Times]] = onecopy.launch(
            measure, options.nproc, setting, options.stage, options.steps, folder
        )
        sizes = [
            one.stat().st_size for one in (Path(folder) / "recorded").glob("rank-*[0-9].jsonl")
        ]
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"{options.size}, stage {options.stage}, {options.nproc} ranks, medians of {options.steps} "
        f"steps in turn; load of the machine {machine()['load']}",
        highlight=False,
    )
    console.print(_table(ranks))
    lines = max(sizes) / (WARM_STEPS + options.steps)
    console.print(f"{lines:.0f} bytes per step and rank, beside the close looks", highlight=False)
    return 0


def _table(ranks: list[dict[str, Times]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "step ms", "ratio", "CPU ms", "added CPU ms", "of a step"):
        table.add_column(heading, justify="right" if heading else "left")
    walls = {way: _wall(ranks, way) for way in WAYS}
    cpus = {way: [median(rank[way].cpu) for rank in ranks] for way in WAYS}
    plain = median(walls[WAYS[0]])
    for way in WAYS:
        # Of neighbouring steps, so that a slow minute meets both.
        pairs = zip(walls[way], walls[WAYS[0]], strict=True)
        ratio = median(one / other for one, other in pairs)
        added = max(one - other for one, other in zip(cpus[way], cpus[WAYS[0]], strict=True))
        table.add_row(
            way,
            f"{1e3 * median(walls[way]):.1f}",
            f"{ratio:.3f}",
            f"{1e3 * max(cpus[way]):.2f}",
            f"{1e3 * added:.2f}",
            f"{100 * added / plain:.2f} %",
        )
    return table


def _wall(ranks: list[dict[str, Times]], way: str) -> list[float]:
    """Each step as long as on its slowest rank."""
    return [max(step) for step in zip(*(rank[way].wall for rank in ranks), strict=True)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recording_cost", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--size", choices=SIZES, default="10m")
    add("--stage", type=int, choices=range(4), default=3)
    add("--nproc", type=int, default=2, help="ranks (default 2)")
    add("--micro-batch", type=int, default=4)
    add("--context", type=int, default=128)
    add("--steps", type=int, default=60, help="timed steps of each way (default 60)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
