"""A plan as HTML: the picture of a rank's memory, the table, and the recommendation.

Everything is inline, so that a notebook and a saved page need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from onecopy.planner import largest
from onecopy.planner.figures import footnotes, heading, label, name_of, parts, unit_of
from onecopy.planner.memory import KINDS
from onecopy.report import charts, html
from onecopy.report.amounts import amount
from onecopy.report.html import Cells, escape

if TYPE_CHECKING:
    from onecopy.planner.figures import Part
    from onecopy.planner.largest import Largest
    from onecopy.planner.plan import Plan
    from onecopy.planner.rows import Row

__all__ = ["as_bars", "as_html", "as_page", "as_page_of_largest"]

COLOURS = {kind: number for number, kind in enumerate(KINDS)}


def as_page(plan: Plan, *more: str) -> str:
    """A whole page; `more` are further parts of it."""
    return html.page(heading(plan), "\n".join([as_html(plan), *more]))


def as_page_of_largest(settings: Mapping[str, Any], found: Sequence[Largest]) -> str:
    """A page with the largest model for each strategy."""
    title = largest.heading(settings)
    rows = [Cells(name, tuple(cells)) for name, *cells in largest.table(found)]
    notes = (f'<p class="note">{escape(note)}</p>' for note in largest.NOTES)
    body = html.part(f"<h1>{escape(title)}</h1>", html.table(largest.HEADER, rows), *notes)
    return html.page(title, body)


def as_html(plan: Plan) -> str:
    """A part of a page."""
    return html.part(
        f"<h1>{escape(heading(plan))}</h1>",
        as_bars(plan),
        *(_table(plan, part) for part in parts(plan)),
        *(f'<p class="note">{escape(note)}</p>' for note in footnotes(plan)),
        *_recommended(plan),
    )


def as_bars(plan: Plan) -> str:
    """The memory of a rank as a bar for each row, and a line where the device ends."""
    capacity, unit = plan.options.capacity, unit_of(plan)
    most = max(row.memory.total for row in plan.rows)
    # Beside a device that is many times as large, no bar could be seen.
    near = capacity <= 8 * most
    limit = [charts.Mark(capacity, _with_unit(capacity, unit))] if near else []
    return charts.legend({KINDS[kind]: colour for kind, colour in COLOURS.items()}) + charts.bars(
        "Memory per rank",
        [_bar(row, unit) for row in plan.rows],
        max(most, capacity) if near else most,
        limit,
    )


def _bar(row: Row, unit: str) -> charts.Bar:
    text = partial(_with_unit, unit=unit)
    tier = "" if row.way.tier == "device" else f", {row.way.tier}"
    kinds = charts.shares(row.memory.at_peak, COLOURS, text, KINDS)
    return charts.Bar(label(row) + tier, kinds, text(row.memory.total))


def _with_unit(num_bytes: float, unit: str) -> str:
    return f"{amount(num_bytes, unit)} {unit}"


def _table(plan: Plan, part: Part) -> str:
    found = plan.recommended
    is_here = found is not None and found.row in part.rows
    return html.table(
        [f"{unit_of(plan)} per rank", *map(label, part.rows)],
        [Cells(line.name, line.cells, line.is_sum) for line in part.lines],
        chosen=part.rows.index(found.row) if found is not None and is_here else None,
        caption=part.title,
    )


def _recommended(plan: Plan) -> Iterator[str]:
    found = plan.recommended
    sentences = plan.advice if found is None else found.reasons
    title = "Nothing fits" if found is None else f"Recommended: {name_of(found.row)}"
    yield f"<h2>{title}</h2>"
    yield "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"
    if found is not None:
        yield f"<pre><code>{escape(found.code)}</code></pre>"
        yield f"<pre><code>{escape(found.toml)}</code></pre>"
