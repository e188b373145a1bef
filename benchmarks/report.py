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

from benchmarks.contenders import FLOORS, floor_of
from benchmarks.measure import Memory, Steps

__all__ = ["Column", "deviations", "machine", "memory_rows", "show", "time_row", "time_rows"]

Row = dict[str, Any]


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
    Column("per_ddp", "/ ddp", ".2f"),
    Column("per_fsdp2", "/ fsdp2", ".2f"),
    Column("added", "added", ".1f"),
    Column("added_per_ddp", "/ ddp's", ".2f"),
    Column("added_per_fsdp2", "/ fsdp2's", ".2f"),
    Column("over_floor", "over floor", ".1f"),
    Column("over_floor_per_ddp", "/ ddp's", ".2f"),
    Column("over_floor_per_fsdp2", "/ fsdp2's", ".2f"),
)
MEMORY_COLUMNS = (
    Column("name", "contender"),
    Column("steady", "peak MiB", ".0f"),
    Column("above_base", "above base", ".0f"),
    Column("life", "with start", ".0f"),
    Column("live", "tensors", ".0f"),
    Column("steady_per_ddp", "peak / ddp", ".2f"),
    Column("steady_per_fsdp2", "/ fsdp2", ".2f"),
    Column("live_per_ddp", "tensors / ddp", ".2f"),
    Column("live_per_fsdp2", "/ fsdp2", ".2f"),
)


def time_rows(results: Mapping[str, Sequence[Steps]]) -> list[Row]:
    """One row per contender, in milliseconds; `results` holds the steps of each rank.

    A step lasts as long as on its slowest rank; rows hold medians over steps. Phases are medians
    of their own, so they need not add up to the step.
    """
    rows = [time_row(name, ranks) for name, ranks in results.items()]
    totals = {row["name"]: row["total"] for row in rows}
    for row in rows:
        name = row["name"]
        if "compute" in totals:
            row["added"] = row["total"] - totals["compute"]
        floor = floor_of(name)
        if floor in totals and name not in FLOORS:
            row["over_floor"] = row["total"] - totals[floor]
    for peer in ("ddp", "fsdp2"):
        _divide(rows, peer, {"total": "per", "added": "added_per", "over_floor": "over_floor_per"})
    return rows


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


def memory_rows(results: Mapping[str, Sequence[Memory]]) -> list[Row]:
    """One row per contender, in MiB, of the rank that needs most."""
    rows: list[Row] = []
    for name, ranks in results.items():
        steady = max(rank.steady for rank in ranks)
        row: Row = {
            "steady": steady,
            "above_base": max(rank.steady - rank.base for rank in ranks),
            "life": max(rank.life for rank in ranks),
            "live": max(rank.live for rank in ranks),
        }
        rows.append({"name": name, **{key: value / 2**20 for key, value in row.items()}})
    for peer in ("ddp", "fsdp2"):
        _divide(rows, peer, {"steady": "steady_per", "live": "live_per"})
    return rows


def _divide(rows: Sequence[Row], peer: str, names: Mapping[str, str]) -> None:
    """Add ratios to the peer's values, where the peer took part; floors have none."""
    for base in [row for row in rows if row["name"] == peer]:
        for row in rows:
            for key, ratio in names.items():
                if row["name"] in FLOORS and key != "total":
                    continue
                if row.get(key) is not None and base.get(key):
                    row[f"{ratio}_{peer}"] = row[key] / base[key]


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
    shown = [one for one in columns if any(row.get(one.key) is not None for row in rows)]
    console.print(title, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        justify = "left" if column.key == "name" else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(column.cell(row) for column in shown))
    console.print(table)
    if in_markdown:
        console.print(_markdown(shown, rows), soft_wrap=True, highlight=False)


def _markdown(shown: Sequence[Column], rows: list[Row]) -> str:
    lines = [" | ".join(column.heading for column in shown)]
    lines.append(" | ".join("---" if column.key == "name" else "---:" for column in shown))
    lines += [" | ".join(column.cell(row) for column in shown) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
