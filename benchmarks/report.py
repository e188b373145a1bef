"""From what the ranks measured to rows, and from rows to tables: rich, Markdown and JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import formula
from benchmarks.contenders import CONTENDERS, FLOORS, ONECOPY, Setting
from benchmarks.measure import LiveBytes, Steps, Turns

__all__ = [
    "Column",
    "comparison",
    "deviations",
    "machine",
    "markdown",
    "show",
    "time_row",
    "title_of",
    "words",
]

Row = dict[str, Any]
PEERS = ("ddp", "fsdp2")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: key in the rows, heading, format of a number."""

    key: str
    heading: str
    format: str = ""

    def cell(self, row: Row) -> str:
        """The text of one cell; a dash where there is no value."""
        value = row.get(self.key)
        return "-" if value is None else format(value, self.format)


TIME_COLUMNS = (
    Column("name", "contender"),
    Column("forward", "forward", ".1f"),
    Column("backward", "backward", ".1f"),
    Column("optimizer", "optimizer", ".1f"),
    Column("total", "step ms", ".1f"),
    Column("spread", "IQR", ".1f"),
    Column("cpu", "CPU ms", ".1f"),
    Column("total_per_ddp", "/ ddp", ".2f"),
    Column("total_per_fsdp2", "/ fsdp2", ".2f"),
    Column("added", "added", ".1f"),
    Column("added_per_ddp", "/ ddp's", ".2f"),
    Column("added_per_fsdp2", "/ fsdp2's", ".2f"),
    Column("added_per_deepspeed", "/ deepspeed's", ".2f"),
    Column("of_floor", "/ floor", ".2f"),
    Column("start", "start ms", ".0f"),
)
MEMORY_COLUMNS = (
    Column("name", "contender"),
    Column("peak", "peak MiB", ".0f"),
    Column("above_base", "above base", ".0f"),
    Column("steady", "after a step", ".0f"),
    Column("live_peak", "tensors, peak", ".1f"),
    Column("live", "tensors at rest", ".1f"),
    Column("states", "formula", ".1f"),
    Column("live_of_formula", "ratio", ".3f"),
    Column("sent", "MB sent", ".2f"),
    Column("least_sent", "least", ".2f"),
    Column("sent_of_least", "ratio", ".3f"),
    Column("apart", "loss apart", ".1e"),
)


def comparison(
    batches: Sequence[Mapping[str, Sequence[Turns]]],
    live: Mapping[str, Sequence[LiveBytes]],
    setting: Setting,
) -> list[Row]:
    """One row per contender: milliseconds, MiB, and megabytes per rank and step.

    A step lasts as long as on its slowest rank; rows hold medians over steps. Phases are medians
    of their own, so they need not add up to the step. Memory is that of the rank that needs most.

    Args:
        batches: turns of each rank; a contender is compared with the floors of its own batch.
        live: of each rank; empty where it was not measured.
    """
    rows: dict[str, Row] = {}
    for results in batches:
        of_batch = {
            name: {
                **time_row(name, [rank.steps for rank in ranks]),
                "start": 1e3 * max(rank.start for rank in ranks),
                **_memory(name, ranks, live.get(name, ()), setting),
                **_traffic(name, ranks, setting),
            }
            for name, ranks in results.items()
        }
        _compare_with_floors(of_batch)
        rows = {**of_batch, **rows}
    of_ranks = {
        name: [one.steps for one in ranks] for batch in batches for name, ranks in batch.items()
    }
    for name, apart in deviations(of_ranks).items():
        rows[name]["apart"] = apart
    made = [rows[name] for name in CONTENDERS if name in rows]
    _compare_with_peers(made)
    return made


def _memory(
    name: str, ranks: Sequence[Turns], live: Sequence[LiveBytes], setting: Setting
) -> dict[str, float]:
    found: dict[str, float] = {
        "peak": max(max(rank.peak) for rank in ranks) / MIB,
        "above_base": max(max(rank.peak) - rank.base for rank in ranks) / MIB,
        "steady": max(median(rank.steady) for rank in ranks) / MIB,
    }
    if live:
        found["live_peak"] = max(rank.peak for rank in live) / MIB
        found["live"] = max(rank.steady for rank in live) / MIB
        states = formula.states_at_rest(name, setting)
        if states is not None:
            found["states"] = states / MIB
            found["live_of_formula"] = found["live"] / found["states"]
    return found


def _traffic(name: str, ranks: Sequence[Turns], setting: Setting) -> dict[str, float]:
    """The counter has seen all ranks; other programs can only add to it."""
    found = {"sent": min(ranks[0].sent) / setting.nproc / 1e6}
    least = formula.least_bytes_sent(name, setting)
    if least:
        found["least_sent"] = least / 1e6
        # What is read from a neighbour's memory never comes to an interface.
        if setting.neighbours == "send" or name not in ONECOPY:
            found["sent_of_least"] = found["sent"] * 1e6 / least
    return found


def _compare_with_floors(by_name: Mapping[str, Row]) -> None:
    """What each adds to compute, and its step over that of its floor."""
    for name, row in by_name.items():
        if "compute" in by_name:
            row["added"] = row["total"] - by_name["compute"]["total"]
        floor = None if name in FLOORS else by_name.get(formula.floor_of(name))
        if floor is not None:
            row["of_floor"] = row["total"] / floor["total"]


def _compare_with_peers(rows: Sequence[Row]) -> None:
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        name = row["name"]
        for peer in PEERS:
            _divide(row, "total", peer, by_name)
            if name != "compute":
                _divide(row, "added", peer, by_name)
        if name not in FLOORS:
            _divide(row, "added", f"deepspeed-{formula.cut_of(name)}", by_name, "deepspeed")


def _divide(row: Row, key: str, peer: str, by_name: Mapping[str, Row], called: str = "") -> None:
    base = by_name.get(peer, {}).get(key)
    if base and row.get(key) is not None:
        row[f"{key}_per_{called or peer}"] = row[key] / base


def time_row(name: str, ranks: Sequence[Steps]) -> Row:
    """A contender's medians in milliseconds, and the spread of its steps."""
    phases = {
        phase: [1e3 * max(step) for step in zip(*(getattr(r, phase) for r in ranks), strict=True)]
        for phase in ("forward", "backward", "optimizer", "cpu")
    }
    of_ranks = [list(zip(r.forward, r.backward, r.optimizer, strict=True)) for r in ranks]
    totals = [1e3 * max(map(sum, step)) for step in zip(*of_ranks, strict=True)]
    low, _, high = quantiles(totals, n=4) if len(totals) > 1 else (0.0, 0.0, 0.0)
    return {
        "name": name,
        **{phase: median(values) for phase, values in phases.items()},
        "total": median(totals),
        "spread": high - low,
    }


def deviations(results: Mapping[str, Sequence[Steps]]) -> dict[str, float]:
    """How far each contender's losses are from the first one's, at most, over steps and ranks.

    The floors train on other data, so they have no place here.
    """
    trained = {name: ranks for name, ranks in results.items() if name not in FLOORS}
    if not trained:
        return {}
    yardstick = next(iter(trained.values()))
    return {
        name: max(
            abs(mine - theirs)
            for own, other in zip(ranks, yardstick, strict=True)
            for mine, theirs in zip(own.losses, other.losses, strict=True)
        )
        for name, ranks in trained.items()
    }


def title_of(setting: Mapping[str, Any]) -> str:
    """A setting in one line."""
    rows = f"micro-batch {setting['micro_batch']} of {setting['context']} tokens"
    return f"{setting['size']} parameters, {setting['nproc']} ranks, {setting['dtype']}, {rows}"


def words(values: Mapping[str, Any]) -> str:
    """Names and values in one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def machine() -> dict[str, Any]:
    """Where the numbers come from, and how busy it was."""
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def show(
    console: Console, title: str, columns: Sequence[Column], rows: list[Row], in_markdown: bool
) -> None:
    """A table for people, in Markdown too if asked for; columns without a value are left out."""
    shown = _with_values(columns, rows)
    console.print(title, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        justify = "left" if column.key == "name" else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(column.cell(row) for column in shown))
    console.print(table)
    if in_markdown:
        console.print(markdown(columns, rows), soft_wrap=True, highlight=False)


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table to paste; columns without a value are left out."""
    shown = _with_values(columns, rows)
    lines = [" | ".join(column.heading for column in shown)]
    lines.append(" | ".join("---" if column.key == "name" else "---:" for column in shown))
    lines += [" | ".join(column.cell(row) for column in shown) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _with_values(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    return [one for one in columns if any(row.get(one.key) is not None for row in rows)]
