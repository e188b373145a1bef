"""A plan as HTML: the picture of a rank's memory, the table, and the recommendation.

Everything is inline, so that a notebook and a saved page need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from onecopy.planner.figures import footnotes, heading, label, lines, unit_of
from onecopy.planner.memory import KINDS
from onecopy.planner.sizes import amount

if TYPE_CHECKING:
    from onecopy.planner.plan import Plan
    from onecopy.planner.rows import Row

__all__ = ["as_html", "as_page", "as_svg"]

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = dict(zip(KINDS, "#0072b2 #e69f00 #009e73 #56b4e9 #d55e00 #cc79a7".split(), strict=True))
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 720, 84, 86, 22, 10, 52
STYLE = """\
.onecopy-plan{font:14px/1.45 system-ui,sans-serif;max-width:760px}
.onecopy-plan table{border-collapse:collapse;margin:.6em 0}
.onecopy-plan th,.onecopy-plan td{padding:2px 12px 2px 0;text-align:right}
.onecopy-plan th:first-child,.onecopy-plan td:first-child{text-align:left;white-space:pre}
.onecopy-plan thead th{border-bottom:1px solid currentColor}
.onecopy-plan .sum td{font-weight:600}
.onecopy-plan .chosen{background:rgba(0,158,115,.14)}
.onecopy-plan pre{padding:10px;overflow-x:auto;background:rgba(127,127,127,.1)}
.onecopy-plan .note{opacity:.75;margin:.1em 0}"""


def as_page(plan: Plan, *more: str) -> str:
    """A whole page; `more` are further parts of it."""
    title, body = escape(heading(plan)), "\n".join([as_html(plan), *more])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def as_html(plan: Plan) -> str:
    """A part of a page."""
    notes = "\n".join(f'<p class="note">{escape(note)}</p>' for note in footnotes(plan))
    parts = [
        f"<style>{STYLE}</style>",
        f"<p><strong>{escape(heading(plan))}</strong></p>",
        as_svg(plan),
        _table(plan),
        notes,
        *_recommended(plan),
    ]
    return '<div class="onecopy-plan">\n' + "\n".join(parts) + "\n</div>"


def as_svg(plan: Plan) -> str:
    """The memory of a rank as a bar for each row, and a line where the device ends."""
    rows = plan.rows
    capacity, unit = plan.options.capacity, unit_of(plan)
    scale = (WIDTH - LEFT - RIGHT) / max(capacity, *(row.memory.total for row in rows))
    height = TOP + len(rows) * (BAR + GAP) + 22
    limit = LEFT + capacity * scale
    inside = list(_legend())
    for number, row in enumerate(rows):
        inside += _bar(row, TOP + number * (BAR + GAP), scale, unit)
    # Above the bars, where these are longer.
    inside += [
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{TOP - 6}" y2="{height - 18}" '
        'stroke="currentColor" stroke-width="1.5" stroke-dasharray="4 3"/>',
        f'<text x="{limit:.1f}" y="{height - 5}" text-anchor="middle">'
        f"{amount(capacity, unit)} {unit}</text>",
    ]
    described = "; ".join(f"{label(row)} {amount(row.memory.total, unit)} {unit}" for row in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'style="max-width:{WIDTH}px;width:100%;font:12px system-ui,sans-serif" '
        'fill="currentColor">'
        f"<title>Memory per rank: {escape(described)}</title>" + "".join(inside) + "</svg>"
    )


def _bar(row: Row, y: int, scale: float, unit: str) -> Iterator[str]:
    middle = y + BAR * 0.7
    yield f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{escape(label(row))}</text>'
    x = float(LEFT)
    for kind, num_bytes in row.memory.by_kind().items():
        width = (num_bytes or 0) * scale
        if width:
            name = f"{KINDS[kind]}: {amount(num_bytes or 0, unit)} {unit}"
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" '
                f'fill="{COLOURS[kind]}"><title>{name}</title></rect>'
            )
        x += width
    yield f'<text x="{x + 6:.1f}" y="{middle:.1f}">{amount(row.memory.total, unit)} {unit}</text>'


def _legend() -> Iterator[str]:
    columns = len(KINDS) // 2
    for number, (kind, name) in enumerate(KINDS.items()):
        x, y = LEFT + number % columns * 180, 4 + number // columns * 18
        yield f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{x + 15}" y="{y + 9}">{name}</text>'


def _table(plan: Plan) -> str:
    chosen = None if plan.recommended is None else plan.recommended.row
    classes = [' class="chosen"' if row == chosen else "" for row in plan.rows]
    head = "".join(
        f"<th{mark}>{escape(label(row))}</th>" for mark, row in zip(classes, plan.rows, strict=True)
    )
    body = []
    for line in lines(plan):
        cells = "".join(
            f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(classes, line.cells, strict=True)
        )
        kind = ' class="sum"' if line.is_sum else ""
        body.append(f"<tr{kind}><td>{escape(line.name)}</td>{cells}</tr>")
    return (
        f"<table>\n<thead><tr><th>{unit_of(plan)} per rank</th>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(body)
        + "\n</tbody>\n</table>"
    )


def _recommended(plan: Plan) -> Iterator[str]:
    found = plan.recommended
    sentences = plan.advice if found is None else found.reasons
    title = "Nothing fits" if found is None else f"Recommended: stage {found.row.stage}"
    yield f"<p><strong>{title}</strong></p>"
    yield "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"
    if found is not None:
        yield f"<pre><code>{escape(found.code)}</code></pre>"
        yield f"<pre><code>{escape(found.toml)}</code></pre>"
