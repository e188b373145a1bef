"""The figures of a plan as lines of words, for the terminal and for pages alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from onecopy.planner.memory import KINDS
from onecopy.planner.rows import ALL_HOST
from onecopy.planner.sizes import shown
from onecopy.report.amounts import amount, unit_for

if TYPE_CHECKING:
    from onecopy.planner.plan import Plan
    from onecopy.planner.rows import Row

__all__ = ["Line", "Part", "footnotes", "heading", "label", "name_of", "parts", "unit_of"]


@dataclass(frozen=True, slots=True)
class Line:
    """One figure for every row of the plan. is_sum: of the lines above it."""

    name: str
    cells: tuple[str, ...]
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The table of one tier. title: what it is; empty for the first, that of devices."""

    title: str
    rows: tuple[Row, ...]
    lines: tuple[Line, ...]


TITLES = {
    "device": "",
    "host": 'With states in host memory (ZeRO-Offload), offload="cpu"',
    "nvme": "With states on NVMe (ZeRO-Infinity): a plan only, not in this version",
}


def heading(plan: Plan) -> str:
    """The question in one line."""
    options, batch = plan.options, plan.question.batch
    numel = plan.model.num_parameters
    name = plan.model.name
    size = name if name.endswith("parameters") else f"{name}, {shown(numel)} parameters"
    devices = "1 device" if options.devices == 1 else f"{options.devices:,} devices"
    nodes = options.devices // options.cluster.devices_per_node
    if nodes > 1:
        devices += f" in {nodes:,} nodes"
    samples = f"{batch.samples} x {batch.sequence:,} tokens at a time"
    if batch.backwards > 1:
        samples += f", {batch.backwards} times a step"
    dtype = options.policy.compute or "fp32"
    return f"{size} on {devices}: {dtype}, {options.optimizer}, {samples}"


def unit_of(plan: Plan) -> str:
    """The unit of all amounts in the table."""
    return unit_for(max(row.memory.total for row in plan.rows))


def parts(plan: Plan) -> Iterator[Part]:
    """A table for each tier that is shown."""
    for tier, title in TITLES.items():
        rows = tuple(row for row in plan.rows if row.way.tier == tier)
        if rows:
            yield Part(title, rows, tuple(_lines(plan, rows, tier)))


def _lines(plan: Plan, rows: tuple[Row, ...], tier: str) -> Iterator[Line]:
    """A table, a line for each figure."""
    unit = unit_of(plan)

    def line(name: str, cell: Callable[[Row], float | None], *, is_sum: bool = False) -> Line:
        values = [cell(row) for row in rows]
        cells = tuple("-" if value is None else amount(value, unit) for value in values)
        return Line(name, cells, is_sum)

    is_device = tier == "device"
    if is_device and any(row.paper is not None for row in rows):
        yield line("states in the ZeRO paper", lambda row: row.paper)
    yield line(
        "model states here" if is_device else "states on the device", lambda row: row.memory.states
    )
    for kind, name in KINDS.items():
        indent = "  " if kind in ("parameters", "gradients", "optimizer") else ""
        cell = partial(_part, kind=kind)
        # Of what is elsewhere nothing needs a line.
        if is_device or any(map(cell, rows)):
            yield line(indent + name, cell)
    yield line("all of it, at most", lambda row: row.memory.total, is_sum=True)
    capacity = amount(plan.options.capacity, unit).removesuffix(".0")
    yield Line(f"of {capacity} {unit}", tuple(map(_share, rows)), is_sum=True)
    if not is_device:
        place = {"host": "in host memory", "nvme": "on NVMe"}[tier]
        yield line(f"states {place}", lambda row: row.outside.rank if row.outside else None)
        node = line("all ranks of a node", lambda row: row.outside.node if row.outside else None)
        yield replace(node, is_sum=True)
        if (known := plan.options.capacity_of(tier)) is not None:
            limit = f"of {amount(known, unit).removesuffix('.0')} {unit}"
            yield Line(limit, tuple(map(_share_outside, rows)), is_sum=True)
    if tier == "host":
        yield line(
            "moved a step to and fro", lambda row: row.outside.moved if row.outside else None
        )
    if plan.options.devices > 1:
        yield line("sent a step inside nodes", lambda row: row.sent.inside)
        yield line("sent a step across nodes", lambda row: row.sent.across)
    yield Line("largest model that fits", tuple(map(_largest, rows)))


def footnotes(plan: Plan) -> Iterator[str]:
    """What the table's figures are, as far as this plan needs it said."""
    if any(row.paper is not None for row in plan.rows):
        yield (
            "The paper counts 16-bit gradients; here the optimizer reads fp32 ones, and stage 3 "
            "makes 16-bit parameters from the masters when they are gathered."
        )
    if any(row.memory.total < row.memory.sum for row in plan.rows):
        yield "All of it is less than the sum: gradients come as activations go."
    if any(row.way.recompute for row in plan.rows):
        yield "*: activations of blocks are computed again in backward."
    if any(row.way.offload == ALL_HOST for row in plan.rows):
        yield '^: with parameters="host", too: each gather brings them up.'
    if any(row.outside and row.outside.capacity is None for row in plan.rows):
        yield "How much the host has is not known: say --host-memory, which limits the model, too."
    if any(row.way.is_lean for row in plan.rows):
        yield '+: with master="bf16+16".'
    if plan.options.checkpoint_activations == "auto" and any(row.largest for row in plan.rows):
        yield "Largest model: more blocks like these, their activations computed again."
    for note in plan.notes:
        yield f"{note[0].upper()}{note[1:]}."


def label(row: Row) -> str:
    """The stage, with the marks that `footnotes` explains."""
    way = row.way
    marks = ("*" if way.recompute else "") + ("+" if way.is_lean else "")
    marks += "^" if way.offload == ALL_HOST else ""
    return f"stage {row.stage}{marks}"


def name_of(row: Row) -> str:
    """The stage and the tier in words."""
    return f"stage {row.stage}" + (" with offload" if row.way.offload else "")


def _part(row: Row, kind: str) -> int | None:
    return row.memory.by_kind()[kind]


def _share(row: Row) -> str:
    return f"{100 * row.share:.0f} %" if row.fits_device else "too much"


def _share_outside(row: Row) -> str:
    found = row.outside
    assert found is not None, "a tier of its own"
    assert found.capacity is not None, "it was asked before"
    return f"{100 * found.node / found.capacity:.0f} %" if found.fits else "too much"


def _largest(row: Row) -> str:
    return "-" if row.largest is None else shown(float(f"{row.largest:.3g}"))
