"""The engine's own Python per unit and step: many tiny blocks, with and without onecopy.

    python -m benchmarks.python_cost [--stage 3] [--nproc 1] [--blocks 64] [--profile]

With tensors this small nearly all of a step is Python and the dispatch of operations. What a
sharded step takes beyond the plain one, divided by the units, is what the engine costs per unit.
Time is CPU time of the main thread, where hooks and backward run too, so that neither waiting for
a peer nor other programs count. With `--nproc 2` the cost of issuing messages is in it.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onecopy
import onecopy.handle

PHASES = ("forward", "backward", "optimizer", "zero_grad")
WIDTH, BATCH = 8, 2
STEPS_PER_TURN = 5
PROFILED_STEPS = 50
# One line of a profile: seconds in the function itself, calls, place.
Line = tuple[float, int, str]


class Block(nn.Module):
    """Twelve parameters, as a block of a transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)."""
        first, second, third, fourth = self.linears
        one, other = self.norms
        x = x + second(first(one(x)))
        y: Tensor = x + fourth(third(other(x)))
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a rank is to measure."""

    stage: int
    blocks: int
    rounds: int
    profile: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one rank: seconds per step in each phase, medians; the profile's lines, slowest first."""

    plain: dict[str, float]
    sharded: dict[str, float]
    num_units: int
    lines: list[Line]


Step = Callable[[], tuple[float, ...]]


def measure(setting: Setting) -> Cost:
    """Steps of the plain and of the sharded model in turn; in a rank process."""
    plain, _ = _make(setting, None)
    sharded, model = _make(setting, setting.stage)
    num_units = len(onecopy.handle.of(model).engine.units)
    times: dict[Step, list[tuple[float, ...]]] = {plain: [], sharded: []}
    for number in range(setting.rounds + 2):
        for step, into in times.items():
            seconds = [step() for _ in range(STEPS_PER_TURN)]
            if number >= 2:  # the first turns record the schedule and warm the caches
                into += seconds
    lines = _profile(sharded) if setting.profile else []
    sums = {step: _medians(seconds) for step, seconds in times.items()}
    return Cost(plain=sums[plain], sharded=sums[sharded], num_units=num_units, lines=lines)


def _make(setting: Setting, stage: int | None) -> tuple[Step, nn.Module]:
    """A function that takes one step and returns the seconds of each phase."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(setting.blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage)
    x = torch.randn(BATCH, WIDTH)

    def step() -> tuple[float, ...]:
        if dist.is_initialized():
            dist.barrier()
        stamps = [time.thread_time()]
        loss = model(x).square().mean()
        stamps.append(time.thread_time())
        loss.backward()
        stamps.append(time.thread_time())
        optimizer.step()
        stamps.append(time.thread_time())
        optimizer.zero_grad()
        stamps.append(time.thread_time())
        return tuple(end - start for start, end in pairwise(stamps))

    return step, model


def _medians(steps: list[tuple[float, ...]]) -> dict[str, float]:
    columns = zip(*steps, strict=True)
    values = {phase: median(column) for phase, column in zip(PHASES, columns, strict=True)}
    return {**values, "step": median(map(sum, steps))}


def _profile(step: Step) -> list[Line]:
    """Where the sharded step goes, per function; the profiler itself makes calls look dearer."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(PROFILED_STEPS):
        step()
    profiler.disable()
    lines: list[Line] = []
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # not in typeshed
    for (file, line, function), (_, calls, seconds, *_) in stats.items():
        place = f"{Path(file).parent.name}/{Path(file).name}:{line}" if line else ""
        lines.append((seconds / PROFILED_STEPS, calls // PROFILED_STEPS, f"{place} {function}"))
    return sorted(lines, reverse=True)


# Output ---------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    options = _parser().parse_args(arguments)
    setting = Setting(
        stage=options.stage, blocks=options.blocks, rounds=options.rounds, profile=options.profile
    )
    cost: Cost = onecopy.launch(measure, options.nproc, setting)[0]
    console = Console(width=None if sys.stdout.isatty() else 140)
    title = (
        f"stage {options.stage}, {options.nproc} ranks, {cost.num_units} units of 12 parameters: "
        "microseconds of CPU per unit and step"
    )
    console.print(title, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "plain", "onecopy", "added"):
        table.add_column(heading, justify="right" if heading else "left")
    for phase, plain in cost.plain.items():
        cells = [plain, cost.sharded[phase], cost.sharded[phase] - plain]
        table.add_row(phase, *(f"{1e6 * cell / cost.num_units:.1f}" for cell in cells))
    console.print(table)
    if cost.lines:
        _print_profile(console, cost)
    return 0


def _print_profile(console: Console, cost: Cost) -> None:
    title = "profile of onecopy: microseconds per unit and step in the function itself"
    console.print(title, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("microseconds", "calls per unit"):
        table.add_column(heading, justify="right")
    table.add_column("function")
    for seconds, calls, place in cost.lines[:40]:
        each = 1e6 * seconds / cost.num_units
        table.add_row(f"{each:.1f}", f"{calls / cost.num_units:.1f}", place)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.python_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--stage", type=int, choices=range(4), default=3)
    add("--nproc", type=int, default=1, help="ranks (default 1: no messages)")
    add("--blocks", type=int, default=64, help="blocks, each a unit (default 64)")
    add("--rounds", type=int, default=20, help="turns of five steps for each model (default 20)")
    add("--profile", action="store_true", help="show the functions that take most")
    return parser


if __name__ == "__main__":
    sys.exit(main())
