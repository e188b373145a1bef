"""The skeleton of every page: its style, tables, folds. Shared by plans and reports.

Pages are one file: no script, nothing fetched. They are also XML, so that tests can read them.
Colours follow the reader's light or dark setting; parts in a notebook take its own colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "Cells", "escape", "fold", "page", "part", "swatch", "table"]

# Okabe and Ito's colours, which the colour-blind can tell apart, and a grey; as classes c0 to c6.
COLOURS = "#0072b2 #e69f00 #009e73 #56b4e9 #d55e00 #cc79a7 #8a8f98".split()
# Even if a name that a page shows were not escaped, nothing could run or be fetched.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

PAGE_STYLE = """\
:root{color-scheme:light dark}
body{margin:0;background:#fff;color:#1c2127}
main{max-width:980px;margin:0 auto;padding:24px 20px 64px}
@media(prefers-color-scheme:dark){body{background:#14171b;color:#dfe3e8}}
@media print{body{background:#fff;color:#000}}"""

PART_STYLE = """\
.onecopy{font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;\
max-width:980px;overflow-wrap:anywhere;--line:rgba(128,136,146,.35);--wash:rgba(128,136,146,.12)}
.onecopy h1{font-size:24px;line-height:1.25;margin:0 0 .3em}
.onecopy h2{font-size:18px;line-height:1.3;margin:2.4em 0 .3em}
.onecopy h3{font-size:14px;margin:1.4em 0 .3em}
.onecopy p{margin:.4em 0;max-width:78ch}
.onecopy .note{opacity:.8;font-size:13px}
.onecopy figure{margin:1em 0}
.onecopy .scroll{overflow-x:auto;margin:.7em 0}
.onecopy table{border-collapse:collapse;font-variant-numeric:tabular-nums;overflow-wrap:normal}
.onecopy caption{text-align:left;font-weight:600;padding-bottom:4px}
.onecopy th,.onecopy td{padding:3px 9px;text-align:right;vertical-align:top;font-weight:400;\
white-space:nowrap}
.onecopy tr>:first-child{text-align:left;white-space:pre;padding-left:0}
.onecopy thead th{border-bottom:1px solid currentColor;font-weight:600;vertical-align:bottom}
.onecopy tbody tr+tr>*{border-top:1px solid var(--wash)}
.onecopy table.words :is(th,td){text-align:left;white-space:normal;overflow-wrap:anywhere;\
min-width:8ch}
.onecopy .sum>*{font-weight:600}
.onecopy .chosen{background:rgba(0,158,115,.16)}
.onecopy pre{padding:10px;overflow-x:auto;background:var(--wash);border-radius:6px}
.onecopy summary{cursor:pointer;padding:4px 0}
.onecopy .sw{display:inline-block;width:11px;height:11px;margin-right:6px;border-radius:2px;\
background:var(--c);vertical-align:-1px}
.onecopy .legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 8px;padding:0;list-style:none;\
font-size:13px}
.onecopy .bars{display:grid;grid-template-columns:fit-content(38%) minmax(0,1fr) max-content;\
gap:6px 10px;align-items:center;font-size:13px}
.onecopy .bars .name{text-align:right}
.onecopy .bars .value{font-variant-numeric:tabular-nums;white-space:nowrap}
.onecopy .bars .group{grid-column:1/-1;font-weight:600;margin-top:6px}
.onecopy .bars svg{display:block;width:100%;height:20px;overflow:visible}
.onecopy .marks{grid-column:2;position:relative;height:18px}
.onecopy .plot{display:grid;grid-template-columns:max-content minmax(0,1fr);column-gap:8px;\
font-size:12px;font-variant-numeric:tabular-nums;margin-right:12px}
.onecopy .plot svg{display:block;width:100%;height:100%;overflow:visible}
.onecopy .plot .ys{position:relative;text-align:right}
.onecopy .plot .ys span{position:absolute;right:0;transform:translateY(-50%);line-height:1}
.onecopy .plot .ys b{visibility:hidden;font-weight:400;display:block;height:0;overflow:hidden}
.onecopy .plot .xs{grid-column:2;position:relative;height:20px;margin-top:5px}
.onecopy .at{position:absolute;transform:translateX(-50%);white-space:nowrap;line-height:1.3}
.onecopy .at.first{transform:none}
.onecopy .at.last{transform:translateX(-100%)}
.onecopy svg *{vector-effect:non-scaling-stroke}
.onecopy svg .grid{stroke:var(--line);stroke-width:1}
.onecopy svg .limit{stroke:currentColor;stroke-width:1.5;stroke-dasharray:4 3}
.onecopy svg .curve{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round;\
stroke-linecap:round}
.onecopy svg .band{fill:var(--c);fill-opacity:.22}
.onecopy svg .fill{fill:var(--c)}
@media(max-width:600px){
.onecopy .bars{grid-template-columns:minmax(0,1fr) max-content;gap:2px 10px}
.onecopy .bars .name{grid-column:1/-1;text-align:left;margin-top:4px}
.onecopy .marks{grid-column:1}}
""" + "\n".join(f".onecopy .c{number}{{--c:{colour}}}" for number, colour in enumerate(COLOURS))


@dataclass(frozen=True, slots=True)
class Cells:
    """A row of a table: what it is about, and its cells. is_sum: of the rows above it."""

    name: str
    values: tuple[str, ...]
    is_sum: bool = False


def page(title: str, body: str, style: str = "") -> str:
    """A whole page of XML and HTML at once; `body` is made of parts, `style` is added to theirs."""
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head>\n'
        '<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>{escape(title)}</title>\n<style>{PAGE_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def part(*content: str) -> str:
    """A part of a page, with its style: what a notebook shows."""
    return f'<div class="onecopy">\n<style>{PART_STYLE}</style>\n' + "\n".join(content) + "\n</div>"


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
