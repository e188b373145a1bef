"""How `onecopy checkpoint` shows what was found: lines and tables. Nothing is looked up here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console

from onecopy.checkpoint.inspect import Inspection, Step, Tensors
from onecopy.checkpoint.verify import Verification
from onecopy.report.progress import count, size
from onecopy.report.tables import new_table, print_table

__all__ = ["print_inspection", "print_line", "print_verification"]

# More than these are counted, and listed with --json only.
SHOWN_FILES = 16
SHOWN_GROUPS = 6
SHOWN_NAMES = 6


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is, however long."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def print_inspection(console: Console, found: Inspection) -> None:
    """Print what was found, as tables."""
    facts = {
        "step": found.step,
        "saved": _when(found.time),
        "by": found.writer,
        "ranks": found.world_size,
        "state": found.health,
        "others": _listed(found.others),
        "tied": _listed([f"{alias} = {name}" for alias, name in found.tied.items()]),
    }
    print_line(console, found.path, "bold")
    for name, value in facts.items():
        if value not in (None, ""):
            print_line(console, f"{name}: {value}")
    for note in found.notes:
        print_line(console, f"note: {note}")
    console.print()
    for model in found.models:
        _print_tensors(console, f"Model {model.name}".strip(), model.tensors, model.settings)
    for optimizer in found.optimizers:
        heading = f"Optimizer {optimizer.name}".strip()
        _print_tensors(console, heading, optimizer.tensors, optimizer.settings)
        _print_groups(console, optimizer.groups)
    _print_files(console, found.files)
    if found.steps:
        _print_steps(console, found.steps)


def _print_files(console: Console, files: dict[str, int | None]) -> None:
    """All of them, or the largest and those that are missing."""
    names = sorted(files, key=lambda name: (files[name] is not None, -(files[name] or 0)))
    missing = sum(num_bytes is None for num_bytes in files.values())
    shown = names[: max(missing, SHOWN_FILES)]
    table = new_table("file", "size")
    for name in files:
        if name in shown:
            num_bytes = files[name]
            table.add_row(name, "missing" if num_bytes is None else size(num_bytes))
    total = size(sum(num_bytes or 0 for num_bytes in files.values()))
    rest = f"and {len(files) - len(shown)} smaller ones" if len(shown) < len(files) else ""
    print_table(console, f"Files: {len(files)}, {total}", table, rest)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _when(time: float | None) -> str:
    if time is None:
        return ""
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _print_tensors(
    console: Console, heading: str, tensors: Tensors, settings: dict[str, Any]
) -> None:
    table = new_table("dtype", "elements")
    for dtype, numel in tensors.dtypes.items():
        table.add_row(dtype, f"{numel:,}")
    said = "  ".join(f"{name} {_shown(value)}" for name, value in settings.items())
    summary = (
        f"{heading}: {tensors.num_tensors} tensors, {count(tensors.num_elements)} elements, "
        f"{size(tensors.num_bytes)}"
    )
    print_table(console, summary, table, said)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _print_groups(console: Console, groups: list[dict[str, Any]]) -> None:
    if not groups:
        return
    shown = groups[:SHOWN_GROUPS]
    table = new_table("parameter group", *(str(number) for number in range(len(shown))))
    for name in dict.fromkeys(name for group in shown for name in group):
        table.add_row(name, *(_shown(group.get(name, "")) for group in shown))
    rest = f"and {len(groups) - len(shown)} more" if len(shown) < len(groups) else ""
    print_table(console, f"Parameter groups: {len(groups)}", table, rest)


def _print_steps(console: Console, steps: list[Step]) -> None:
    table = new_table("checkpoint", "size", "saved", "state")
    for column in table.columns[2:]:
        column.justify = "left"
    table.columns[3].no_wrap = False
    for one in steps:
        mark = " (latest)" if one.is_latest else ""
        table.add_row(one.folder + mark, size(one.num_bytes), _when(one.time), one.health)
    print_table(console, "Checkpoints of this run", table)


def print_verification(console: Console, found: Verification) -> None:
    """Print what was checked and what is wrong."""
    number = len(found.problems)
    state = f"{number} problem{'s' if number > 1 else ''}" if number else "no damage"
    summary = f"{found.path}: {state}, {found.num_items} items, {size(found.num_bytes)}"
    print_line(console, summary, "bold")
    if found.checked:
        print_line(console, f"checked: {found.checked}")
    for problem in found.problems:
        print_line(console, str(problem))
