"""A plan as text: a table, what was assumed, and the recommendation."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from onecopy.planner import largest
from onecopy.planner.figures import footnotes, heading, label, name_of, parts, unit_of

if TYPE_CHECKING:
    from onecopy.planner.figures import Part
    from onecopy.planner.largest import Largest
    from onecopy.planner.plan import Plan
    from onecopy.planner.recommend import Recommendation

__all__ = ["as_text", "print_largest", "print_plan"]


WIDTH = 100


def print_plan(console: Console, plan: Plan, *, with_code: bool = True) -> None:
    """Print all of a plan; without the code, for who has a program."""
    if not console.is_terminal:
        # A file has no width of its own.
        console.width = max(console.width, WIDTH)
    console.print(Text(heading(plan), style="bold"), soft_wrap=True)
    console.print()
    for part in parts(plan):
        if part.title:
            console.print()
            console.print(Text(part.title, style="bold"), soft_wrap=True)
            console.print()
        console.print(_table(plan, part))
    for line in footnotes(plan):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print()
    if plan.recommended is None:
        console.print(Text("Nothing fits", style="bold red"))
        _print_list(console, plan.advice)
    else:
        _print_recommended(console, plan.recommended, with_code)


def print_largest(console: Console, settings: Mapping[str, Any], found: Sequence[Largest]) -> None:
    """Print the largest model for each strategy."""
    console.print(Text(largest.heading(settings), style="bold"), soft_wrap=True)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(largest.HEADER):
        table.add_column(name, no_wrap=True, justify="right" if number in (1, 2) else "left")
    for cells in largest.table(found):
        table.add_row(*cells)
    console.print(table)
    for note in largest.NOTES:
        console.print(Text(note, style="dim"), soft_wrap=True)


def as_text(plan: Plan) -> str:
    """The same as a string, without colours."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    print_plan(console, plan)
    assert isinstance(console.file, io.StringIO), "it was made here"
    return console.file.getvalue().rstrip()


def _table(plan: Plan, part: Part) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(f"{unit_of(plan)} per rank", no_wrap=True)
    chosen = None if plan.recommended is None else plan.recommended.row
    for row in part.rows:
        style = "green" if row == chosen else "" if row.fits else "dim"
        table.add_column(label(row), justify="right", no_wrap=True, style=style)
    for line in part.lines:
        table.add_row(line.name, *line.cells, style="bold" if line.is_sum else "")
    return table


def _print_recommended(console: Console, found: Recommendation, with_code: bool) -> None:
    console.print(Text(f"Recommended: {name_of(found.row)}", style="bold"))
    _print_list(console, found.reasons)
    if not with_code:
        return
    console.print()
    _print_code(console, found.code, "python")
    console.print()
    console.print(Text("The same for onecopy.Config.from_toml:", style="dim"))
    _print_code(console, found.toml, "toml")


def _print_list(console: Console, sentences: Sequence[str]) -> None:
    for sentence in sentences:
        console.print(Text(f"- {sentence}"), soft_wrap=True)


def _print_code(console: Console, code: str, language: str) -> None:
    # Ready to paste: no frame, and lines end where they end.
    if console.is_terminal:
        syntax = Syntax(code.rstrip(), language, background_color="default", theme="ansi_dark")
        console.print(syntax, soft_wrap=True)
    else:
        console.print(Text(code.rstrip()), soft_wrap=True)
