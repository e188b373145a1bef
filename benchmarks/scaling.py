"""What a rank holds, sends and calls in a step, in worlds of up to 1024 ranks that are not there.

    python -m benchmarks.scaling [--size 125m] [--worlds 2 8 64 256 1024] [--markdown]

The real engine runs one rank's step on tensors without memory (onecopy/simulator), in a world whose
backend has collectives of its own, as NCCL has. Beside what it held and sent stand the closed
formulas. Calls are those of our own Python functions: what of the engine's cost grows with the
world. No time is measured, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks import formula, report
from benchmarks.contenders import Setting, adamw
from benchmarks.guard import Calls
from benchmarks.model import GPT, SIZES
from benchmarks.report import Column
from onecopy.comm.groups import ImaginedWorld
from onecopy.simulator.simulate import simulate

WORLDS = (2, 8, 64, 256, 1024)
# What looks on, and is not there in a real step.
WITHOUT = ("simulator/", "report/", "memory/live_tensors.py")

COLUMNS = (
    Column("name", "stage"),
    Column("world", "ranks"),
    Column("states", "states MiB, formula", ".1f"),
    Column("held", "at the peak", ".1f"),
    Column("peak", "with activations", ".1f"),
    Column("least_sent", "MB sent, formula", ".1f"),
    Column("sent", "sent", ".1f"),
    Column("sent_of_least", "ratio", ".4f"),
    Column("transfers", "transfers", "d"),
    Column("calls", "Python calls", "d"),
    Column("calls_per_unit", "per unit", ".0f"),
)


def measure(stage: int, world: int, setting: Setting) -> dict[str, Any]:
    """A row: bytes in MiB and MB, per rank and step."""
    counted, num_steps = Calls(WITHOUT), 0
    # Of models of earlier rows, which a step would still ask whether they are its own.
    gc.collect()

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 1:  # the first step records the schedule
            counted.start()
        result: Tensor = model(tokens)
        return result

    try:
        simulation = simulate(
            lambda: GPT(SIZES[setting.size], setting.context),
            lambda: torch.zeros(setting.micro_batch, setting.context + 1, dtype=torch.long),
            ImaginedWorld(world, native=True),
            optimizer=lambda parameters: adamw(list(parameters)),
            loss=loss,
            stage=stage,
            precision=setting.dtype,
        )
    finally:
        counted.stop()
    calls = counted.calls.total()
    transfers = [event for event in simulation.events if event.num_bytes and event.group]
    sent = sum(event.num_bytes for event in transfers) / 1e6
    name = f"onecopy-{stage}"
    states, least = formula.states_at_rest(name, setting), formula.least_bytes_sent(name, setting)
    assert states is not None and least is not None, "stages 0 to 3 have formulas"
    peak = simulation.peak
    return {
        "name": str(stage),
        "world": world,
        "states": states / 2**20,
        "held": (peak.total - peak.rest) / 2**20,
        "peak": peak.total / 2**20,
        "least_sent": least / 1e6,
        "sent": sent,
        "sent_of_least": sent * 1e6 / least,
        "transfers": len(transfers),
        "calls": calls,
        "calls_per_unit": calls / len({event.unit for event in transfers}),
        "by_function": dict(counted.calls.most_common()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print."""
    options = _parser().parse_args(arguments)
    rows = []
    for stage in options.stages:
        for world in options.worlds:
            setting = Setting(
                size=options.size, nproc=world, dtype=options.dtype, micro_batch=1, context=128
            )
            rows.append(measure(stage, world, setting))
    console = Console(width=None if sys.stdout.isatty() else 180)
    title = f"{options.size} parameters, {options.dtype}, micro-batch 1, context 128"
    report.show(console, title, COLUMNS, rows, options.markdown)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--size", choices=SIZES, default="125m", help="parameters of the GPT (default 125m)")
    add("--dtype", choices=("fp32", "bf16"), default="bf16")
    add("--worlds", type=int, nargs="+", default=WORLDS, metavar="N", help="numbers of ranks")
    add("--stages", type=int, nargs="+", choices=range(4), default=range(4))
    add("--markdown", action="store_true", help="print the table in Markdown too")
    add("--json", type=Path, help="write the rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
