"""Tables that put what was measured beside what the formulas say.

This file owns columns, units and rounding. It measures nothing and computes no formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class ModelStates(Protocol):
    """Bytes of model states on one rank, measured or estimated."""

    @property
    def parameters(self) -> int:
        """Bytes of parameters, in the compute dtype and as masters."""

    @property
    def gradients(self) -> int:
        """Bytes of local and of reduced gradients."""

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """One rank's model states three ways, after a backward and before the step."""

    measured: ModelStates
    formula: ModelStates
    data_parallel: ModelStates


def print_memory(console: Console, figures: MemoryFigures, heading: str) -> None:
    """Print parameters, gradients, optimizer states and their sum, in MiB, one row each.

    The last column is what was measured as a share of plain data parallel.
    """
    table = new_table("MiB per rank", "measured", "formula", "plain data parallel", "share")
    columns = [figures.measured, figures.formula, figures.data_parallel]
    rows = {
        "parameters": [states.parameters for states in columns],
        "gradients": [states.gradients for states in columns],
        "optimizer": [states.optimizer for states in columns],
    }
    for name, cells in rows.items():
        table.add_row(name, *_mebibytes(cells), _percent(cells[0], cells[2]))
    total = [sum(cells) for cells in zip(*rows.values(), strict=True)]
    table.add_row("total", *_mebibytes(total), _percent(total[0], total[2]), style="bold")
    print_table(console, heading, table)


def print_bytes_sent(
    console: Console, measured: Mapping[str, float], formula: Mapping[str, float], heading: str
) -> None:
    """Print bytes that a rank sends per step, one row for each kind of message, and their sum.

    Both mappings go from the kind of event to bytes. Kinds without bytes in either are left out.
    The last column is what was measured as a share of the formula.
    """
    table = new_table("kB per rank and step", "measured", "formula", "share")
    kinds = [kind for kind in formula if measured.get(kind) or formula[kind]]
    for kind in kinds:
        cells = (measured.get(kind, 0), formula[kind])
        table.add_row(kind, *_kilobytes(cells), _percent(*cells))
    total = (sum(measured.get(kind, 0) for kind in kinds), sum(formula[kind] for kind in kinds))
    table.add_row("total", *_kilobytes(total), _percent(*total), style="bold")
    print_table(console, heading, table, "reduce also carries one flag for each parameter")


def print_losses(console: Console, bits_per_byte: Mapping[str, float], heading: str) -> None:
    """Print held-out losses in bits per byte, one row for each model, with a bar to compare."""
    table = new_table("model", "bits/byte", "")
    table.columns[2].justify = "left"
    most = max(bits_per_byte.values())
    for name, bits in bits_per_byte.items():
        table.add_row(name, f"{bits:.2f}", "#" * round(24 * bits / most))
    print_table(console, heading, table)


def new_table(*columns: str) -> Table:
    """An empty table; the first column is of names, the others are of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def print_table(console: Console, heading: str, table: Table, footnote: str = "") -> None:
    """Print a table below its heading."""
    # rich wraps a table's own title to the width of the table, so the heading is a line of its own.
    console.print(Text(heading, style="bold"), soft_wrap=True)
    console.print(table)
    if footnote:
        console.print(Text(footnote, style="dim"), soft_wrap=True)
    console.print()


def _mebibytes(cells: Sequence[int]) -> list[str]:
    return [f"{cell / 2**20:,.2f}" for cell in cells]


def _kilobytes(cells: Sequence[float]) -> list[str]:
    return [f"{cell / 1000:,.1f}" for cell in cells]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
