"""The rows of `compare` as one SVG picture that needs nothing else: bars of steps and of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from benchmarks import report

__all__ = ["draw"]

Row = dict[str, Any]
WIDTH, LINE, GAP = 900, 18, 34
# From the left: names, bars of steps and their numbers, bars of memory and their numbers.
NAMES, STEPS, MEMORY, BAR = 130, 140, 530, 290
OURS, THEIRS, FLOOR, COMPUTE = "#2b6cb0", "#a0522d", "#8a8a8a", "#c9c9c9"
STYLE = "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.small{fill:#555}"


def draw(runs: Sequence[dict[str, Any]]) -> str:
    """One block of bars for each run; grey is what compute alone takes of a step."""
    shapes: list[str] = []
    top = 10
    for run in runs:
        shapes += _block(run, top)
        top += GAP + LINE * (len(run["rows"]) + 1)
    size = f'width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    back = f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *shapes, "</svg>", ""])


def _block(run: dict[str, Any], top: int) -> Iterator[str]:
    rows = run["rows"]
    yield _text(0, top + LINE, report.title_of(run["setting"]), "title")
    yield _text(STEPS, top + 2 * LINE, "a step, ms (grey: compute alone)", "small")
    yield _text(MEMORY, top + 2 * LINE, "peak memory per rank, MiB", "small")
    longest = max(row["total"] for row in rows)
    largest = max(row["peak"] for row in rows)
    compute = next((row["total"] for row in rows if row["name"] == "compute"), 0.0)
    for number, row in enumerate(rows):
        y = top + GAP + LINE * number + 8
        colour = _colour(row["name"])
        length, alone = (BAR * one / longest for one in (row["total"], compute))
        yield _text(NAMES, y + 11, row["name"], "", 'text-anchor="end"')
        yield _bar(STEPS, y, length, colour)
        yield _bar(STEPS, y, min(alone, length), COMPUTE)
        yield _text(STEPS + length + 4, y + 11, f"{row['total']:.0f}", "small")
        memory = BAR * row["peak"] / largest
        yield _bar(MEMORY, y, memory, colour)
        yield _text(MEMORY + memory + 4, y + 11, f"{row['peak']:.0f}", "small")


def _colour(name: str) -> str:
    if name.startswith(("compute", "floor")):
        return FLOOR
    is_ours = name.startswith("onecopy") or name in ("qwz", "qgz", "zero++")
    return OURS if is_ours else THEIRS


def _bar(x: float, y: float, length: float, colour: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(length, 0.5):.1f}" height="{LINE - 5}"'
    return f'<rect {place} fill="{colour}"/>'


def _text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" {more}>{escape(words)}</text>'
