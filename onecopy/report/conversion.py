"""What becomes of a configuration of DeepSpeed, as a table."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, is_dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onecopy.deepspeed_config import Conversion
from onecopy.report.announce import announce

__all__ = ["print_conversion", "tell", "to_json"]

WIDTH = 120
LONGEST = 30
CODE_HINT = "`onecopy config from-deepspeed FILE` prints the code for what is left to you"
STYLES = {"mapped": "green", "left to you": "yellow", "ignored": "dim", "refused": "bold red"}


def print_conversion(console: Console, found: Conversion) -> None:
    """The table of answers, and the code to paste."""
    if not console.is_terminal:
        # A file has no width of its own.
        console.width = max(console.width, WIDTH)
    console.print(Text(_heading(found), style="bold"), soft_wrap=True)
    console.print()
    console.print(_table(found))
    if found.code:
        console.print()
        console.print(Text("In the script, around your model and loader:", style="bold"))
        console.print()
        console.print(Text(found.code.rstrip()), soft_wrap=True)


def to_json(found: Conversion) -> dict[str, Any]:
    """The same for programs: answers in their order, settings, and the code."""
    keys = ("key", "value", "fate", "text")
    return {
        "source": found.source,
        "keys": [{key: getattr(one, key) for key in keys} for one in found.answers],
        "settings": {name: _plain(value) for name, value in found.settings.items()},
        "code": found.code,
    }


def tell(found: Conversion, *, world_size: int, is_first: bool) -> None:
    """Check the batch sizes, and show the answers once, on the first rank.

    Raises:
        ConfigError: batch sizes are right for other ranks than there are.
    """
    found.check_world(world_size)
    if found.is_told:
        return
    found.is_told = True
    if is_first:
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(_table(found))
        file = console.file
        assert isinstance(file, io.StringIO), "it was made above"
        lines = [line.rstrip() for line in file.getvalue().splitlines()]
        announce("\n".join([_heading(found), *lines, CODE_HINT]), is_first=True)


def _heading(found: Conversion) -> str:
    counts = [
        f"{number} {fate}"
        for fate in STYLES
        if (number := sum(one.fate == fate for one in found.answers))
    ]
    return f"{found.source}, read as a configuration of DeepSpeed: {', '.join(counts)}"


def _table(found: Conversion) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("key", overflow="fold")
    table.add_column("becomes", no_wrap=True)
    table.add_column("what, or why", overflow="fold")
    before: list[str] = []
    for one in found.answers:
        *sections, name = one.key.split(".")
        for depth, section in enumerate(sections):
            if before[: depth + 1] != sections[: depth + 1]:
                table.add_row(Text(f"{'  ' * depth}{section}", style="bold"))
        before = sections
        key = f"{'  ' * len(sections)}{name} = {_shown(one.value)}"
        table.add_row(Text(key), Text(one.fate, style=STYLES[one.fate]), Text(one.text))
    return table


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and value >= 1000:
        value = int(value)  # 5e8 is how many write whole numbers
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
