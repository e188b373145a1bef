"""The skeleton of every page: its style, tables, folds. Shared by plans and reports.

Pages are one file: no script, nothing fetched. They are also XML, so that tests can read them.
Colours follow the reader's light or dark setting; parts in a notebook take its own colours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape as escape_html
from pathlib import Path

__all__ = ["COLOURS", "Cells", "escape", "fold", "page", "part", "printable", "swatch", "table"]

# Okabe and Ito's colours, which the colour-blind can tell apart, and a grey; as classes c0 to c6.
COLOURS = "#0072b2 #e69f00 #009e73 #56b4e9 #d55e00 #cc79a7 #8a8f98".split()
LIGHTER_BLUE = "#3d9be0"
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")
# Even if a name that a page shows were not escaped, nothing could run or be fetched.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

PAGE_STYLE = """\
:root{color-scheme:light dark}
body{margin:0;background:#fff;color:#1c2127}
main{max-width:980px;margin:0 auto;padding:24px 20px 64px}
@media(prefers-color-scheme:dark){body{background:#14171b;color:#dfe3e8}}
@media print{body{background:#fff;color:#000}}"""


@dataclass(frozen=True, slots=True)
class Cells:
    """A row of a table: what it is about, and its cells. is_sum: of the rows above it."""

    name: str
    values: tuple[str, ...]
    is_sum: bool = False


def printable(text: str) -> str:
    """Text without what no page can hold and no terminal should get, such as escape sequences."""
    return UNPRINTABLE.sub("\ufffd", text.encode("utf-8", "replace").decode("utf-8"))


def escape(text: str) -> str:
    """Text as it can stand in a page, in quotes too."""
    return escape_html(printable(text))


def page(title: str, body: str) -> str:
    """A whole page, XML and HTML at once; `body` is made of parts."""
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head>\n'
        '<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>{escape(title)}</title>\n<style>{PAGE_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def part(*content: str) -> str:
    """A part of a page, with its style: what a notebook shows."""
    return f'<div class="onecopy">\n<style>{_style()}</style>\n' + "\n".join(content) + "\n</div>"


@cache
def _style() -> str:
    colours = (f".onecopy .c{number}{{--c:{colour}}}" for number, colour in enumerate(COLOURS))
    page = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    # The darkest of them can hardly be seen on a dark page.
    in_dark = f"@media(prefers-color-scheme:dark){{.onecopy .c0{{--c:{LIGHTER_BLUE}}}}}"
    return page + "\n".join([*colours, in_dark])


def table(
    head: Sequence[str],
    rows: Iterable[Cells],
    *,
    caption: str = "",
    chosen: int | None = None,
    words: bool = False,
) -> str:
    """A table of numbers, or of words; text is escaped here.

    Args:
        head: the first is of the rows' names.
        chosen: the number of a column of values to mark.
    """
    marks = ["", *(' class="chosen"' if n == chosen else "" for n in range(len(head) - 1))]
    titles = (
        f'<th scope="col"{mark}>{escape(cell)}</th>' for mark, cell in zip(marks, head, strict=True)
    )
    body = (
        ('<tr class="sum">' if row.is_sum else "<tr>")
        + f'<th scope="row">{escape(row.name)}</th>'
        + "".join(
            f"<td{mark}>{escape(cell)}</td>"
            for mark, cell in zip(marks[1:], row.values, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    label = escape(caption or head[0] or "table")
    kind = ' class="words"' if words else ""
    # Focusable, so that the keyboard scrolls what is wider than the page.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">'
        f"<table{kind}>{named}\n"
        f"<thead><tr>{''.join(titles)}</tr></thead>\n<tbody>\n"
        + "\n".join(body)
        + "\n</tbody>\n</table></div>"
    )


def fold(summary: str, *content: str) -> str:
    """What is shown on demand, without a script."""
    return f"<details><summary>{escape(summary)}</summary>\n" + "\n".join(content) + "\n</details>"


def swatch(colour: int) -> str:
    """A square in one of `COLOURS`, by its number."""
    return f'<span class="sw c{colour % len(COLOURS)}"></span>'
