"""Step time and bytes between nodes, on links of several speeds.

    python -m benchmarks.slow_network [--speeds 100 400 1000 0] [--contenders NAME ...]

Nodes are network namespaces on this machine (see network.py), so it needs Linux and the right to
make them. Contenders take turns at each speed, are built anew for the next, and must have the same
losses; those that quantize come close. The bytes are what the kernel has counted on the wire.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch.distributed as dist
from rich.console import Console

import onecopy.events
from benchmarks import report
from benchmarks.contenders import ONECOPY, Contender, Setting, build
from benchmarks.formula import num_parameters
from benchmarks.measure import Plan, Steps, train_step
from benchmarks.model import SIZES
from benchmarks.network import CannotMakeNodesError, Network, network, settled
from benchmarks.report import Column
from onecopy.memory.buffers import reuse_freed_blocks
from onecopy.planner.papers import Quantized, Zeropp

INT8, INT4 = Quantized(bits=8, block=2048), Quantized(bits=4, block=2048)
# What crosses nodes per step, as a multiple of the parameters' 16-bit bytes (ZeRO++, section 3.4).
PAPER = {
    "onecopy-3": Zeropp(),
    "hpz": Zeropp(secondary=True),
    "qwz": Zeropp(weights=INT8),
    "qgz": Zeropp(gradients=INT4),
    "zero++": Zeropp(weights=INT8, gradients=INT4, secondary=True),
}
DEFAULT = ("onecopy-3", "fsdp2", "hsdp", "mics", "hpz", "qwz", "qgz", "zero++", "auto", "hpz-auto")
CHOICES = ("fsdp2", "hsdp", *ONECOPY)
UNLIMITED = 0.0
# Losses in nats: sums of other orders, and those of decoded values.
EXACT, QUANTIZED = {"fp32": 2e-3, "bf16": 5e-2}, 0.2

COLUMNS = (
    Column("name", "contender"),
    Column("total", "step ms", ".0f"),
    Column("spread", "IQR", ".0f"),
    Column("cpu", "CPU ms", ".0f"),
    Column("speedup", "x onecopy-3", ".2f"),
    Column("speedup_fsdp2", "x fsdp2", ".2f"),
    Column("sent", "MB on the wire", ".2f"),
    Column("counted", "MB by events", ".2f"),
    Column("multiple", "in M", ".3f"),
    Column("paper", "paper", ".3f"),
    Column("apart", "loss apart", ".1e"),
)


@dataclass(slots=True, kw_only=True)
class Turns:
    """One contender at one speed, on one rank.

    sent: bytes that its node has sent in one step, without headers, of each round. counted: what
    its events say that this rank has sent to other nodes, where there are events.
    """

    steps: Steps = field(default_factory=Steps)
    sent: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 1 where the contenders did not compute the same."""
    options = _parser().parse_args(arguments)
    setting = Setting(
        size=options.size,
        nproc=sum(options.ranks),
        dtype=options.dtype,
        micro_batch=options.micro_batch,
        context=options.context,
    )
    plan = Plan(rounds=options.rounds, timed=options.steps)
    names = tuple(dict.fromkeys(options.contenders))
    console = Console(width=None if sys.stdout.isatty() else 180)
    record: dict[str, Any] = {
        "setting": asdict(setting),
        "plan": asdict(plan),
        "ranks": options.ranks,
        "machine": report.machine(),
        "speeds": {},
    }
    console.print(f"{setting}, ranks {options.ranks}\n{record['machine']}", highlight=False)
    try:
        with network(options.ranks) as nodes:
            arguments_of_ranks = nodes, names, setting, plan, tuple(options.speeds)
            of_ranks = nodes.launch(_take_turns, *arguments_of_ranks)
    except CannotMakeNodesError as reason:
        console.print(f"there can be no network of namespaces: {reason}", style="bold red")
        return 1
    same = True
    for number, speed in enumerate(options.speeds):
        results = {name: [rank[number][name] for rank in of_ranks] for name in names}
        rows = _rows(results, setting, options.ranks)
        record["speeds"][f"{speed:g}"] = {
            "rows": rows,
            "turns": {name: [asdict(one) for one in ranks] for name, ranks in results.items()},
        }
        title = f"{speed:g} Mbit/s" if speed else "as fast as the kernel moves it"
        report.show(console, f"{title}: per step", COLUMNS, rows, options.markdown)
        same &= _check_losses(console, rows, setting.dtype)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if same else 1


# In the ranks ---------------------------------------------------------------------------------


def _take_turns(
    nodes: Network,
    names: tuple[str, ...],
    setting: Setting,
    plan: Plan,
    speeds: tuple[float, ...],
) -> list[dict[str, Turns]]:
    """The turns of all contenders at each speed, in this process."""
    dist.init_process_group("gloo")
    # shard() asks glibc for this; asked for here, all contenders have it from the start.
    reuse_freed_blocks()
    results = []
    for speed in speeds:
        contenders = _build(nodes, names, setting, speed)
        turns = {name: Turns() for name in names}
        for number in range(plan.warm_rounds + plan.rounds):
            for contender in contenders:
                _turn(contender, setting, plan, number, turns[contender.name])
        results.append(turns)
        del contenders, contender
        gc.collect()
    dist.destroy_process_group()
    return results


def _build(
    nodes: Network, names: tuple[str, ...], setting: Setting, speed: float
) -> list[Contender]:
    """Those that measure the network are built on it, the others on a fast one: it takes less."""
    made = {}
    for megabits, measures in ((None, False), (speed or None, True)):
        if dist.get_rank() == 0:
            nodes.limit(megabits)
        dist.barrier()
        for name in names:
            if (ONECOPY.get(name, {}).get("quantize") == "auto") is measures:
                made[name] = build(name, setting)
    return [made[name] for name in names]


def _turn(contender: Contender, setting: Setting, plan: Plan, number: int, into: Turns) -> None:
    """The first step is not timed, but what it sends is counted."""
    first = number * (plan.timed + 1)
    counted: list[int] = []
    remove = _count(contender, counted)
    before = settled()
    _, loss = train_step(contender, setting, first)
    contender.settle()
    sent = settled().since(before).sent_payload
    remove()
    into.steps.losses.append(loss)
    if number >= plan.warm_rounds:
        into.sent.append(sent)
        into.counted.append(sum(counted))
    for step in range(first + 1, first + 1 + plan.timed):
        seconds, loss = train_step(contender, setting, step)
        into.steps.losses.append(loss)
        if number >= plan.warm_rounds:
            into.steps.add(seconds)
    contender.settle()
    dist.barrier()


def _count(contender: Contender, counted: list[int]) -> Callable[[], None]:
    if contender.name not in ONECOPY:
        return lambda: None
    return onecopy.events.add_sink(
        contender.model, lambda event: counted.append(event.across_bytes)
    )


# Rows -----------------------------------------------------------------------------------------


def _rows(
    results: Mapping[str, Sequence[Turns]], setting: Setting, ranks: Sequence[int]
) -> list[dict[str, Any]]:
    """One row per contender; megabytes are those of the node that sends most."""
    firsts = [sum(ranks[:node]) for node in range(len(ranks))]
    itemsize = {"fp32": 4, "bf16": 2}[setting.dtype]
    whole = num_parameters(setting) * itemsize / 1e6
    yardstick = next(iter(results.values()))
    rows = []
    for name, turns in results.items():
        row = report.time_row(name, [one.steps for one in turns])
        row["sent"] = max(median(turns[first].sent) for first in firsts) / 1e6
        if name in ONECOPY:
            of_nodes = [
                sum(median(one.counted) for one in turns[first : first + size])
                for first, size in zip(firsts, ranks, strict=True)
            ]
            row["counted"] = max(of_nodes) / 1e6
        # Of two nodes each sends one half of what the paper counts, of more a smaller share.
        row["multiple"] = row["sent"] / whole / (1 - 1 / len(ranks))
        if name in PAPER and setting.dtype == "bf16":
            row["paper"] = float(PAPER[name].across_nodes())
        row["apart"] = max(
            abs(mine - other)
            for own, base in zip(turns, yardstick, strict=True)
            for mine, other in zip(own.steps.losses, base.steps.losses, strict=True)
        )
        rows.append(row)
    for peer, key in (("onecopy-3", "speedup"), ("fsdp2", "speedup_fsdp2")):
        for base in [row for row in rows if row["name"] == peer]:
            for row in rows:
                row[key] = base["total"] / row["total"]
    return rows


def _check_losses(console: Console, rows: Sequence[dict[str, Any]], dtype: str) -> bool:
    """Nobody may win by computing something else."""
    wrong = {}
    for row in rows:
        is_exact = ONECOPY.get(row["name"], {}).get("quantize") is None
        if not row["apart"] <= (EXACT[dtype] if is_exact else QUANTIZED):
            wrong[row["name"]] = row["apart"]
    if wrong:
        console.print(f"NOT THE SAME TRAINING: losses apart by {wrong}", style="bold red")
    return not wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_network", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--speeds",
        type=float,
        nargs="+",
        default=[100.0, 400.0, 1000.0, UNLIMITED],
        metavar="MBIT",
        help="of the links, in Mbit/s, 0 for no limit (default 100 400 1000 0)",
    )
    add("--ranks", type=int, nargs="+", default=[2, 2], help="of each node (default 2 2)")
    add("--size", choices=SIZES, default="5m", help="parameters of the GPT (default 5m)")
    add("--dtype", choices=EXACT, default="bf16")
    add("--micro-batch", type=int, default=1, help="rows per rank and step (default 1)")
    add("--context", type=int, default=128, help="tokens per row (default 128)")
    add("--rounds", type=int, default=3, help="turns of each contender (default 3)")
    add("--steps", type=int, default=2, help="timed steps per turn (default 2)")
    add("--contenders", nargs="+", choices=CHOICES, default=DEFAULT, metavar="NAME")
    add("--markdown", action="store_true", help="print the tables in Markdown too")
    add("--json", type=Path, help="write everything, each step's times too, to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
