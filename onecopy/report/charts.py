"""Bars, areas and curves as inline SVG, with their words in HTML around them.

The shapes stretch with the page and the words do not: a page on a telephone has the same size of
letters as one on a wide screen. Positions are in percent, from the left and from the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onecopy.report.html import escape, swatch

__all__ = [
    "Bar",
    "Lane",
    "Layer",
    "Mark",
    "Plot",
    "Scale",
    "bars",
    "lanes",
    "legend",
    "shares",
    "stacked",
]

# What a letter takes of a plot on a narrow page and on a wide one, in percent.
NARROW, WIDE = 2.6, 1.8
LEAST = 0.25  # percent, so that what is short is seen
MOST_TOLD = 12
SVG = '<svg xmlns="http://www.w3.org/2000/svg" role="img"'


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of stacked parts.

    parts: (colour, length, what a pointer on it is told). name and value: the words before and
    behind it. group: a heading above it, where it is the first of several.
    """

    name: str
    parts: tuple[tuple[int, float, str], ...]
    value: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """What happened when: spans (colour, from, to, what a pointer on it is told) along a scale."""

    name: str
    spans: tuple[tuple[int, float, float, str], ...]
    value: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A line down all bars or a plot, and its name below them."""

    at: float
    name: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Something drawn in a plot: a curve, a band, or an area between two curves.

    low is None for a curve along `high`. NaN in either interrupts the layer.
    """

    name: str
    colour: int
    x: Sequence[float]
    high: Sequence[float]
    low: Sequence[float] | None = None
    is_band: bool = False
    dashes: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """From a value to percent of an axis, and round values to write on it."""

    low: float
    high: float
    name: Callable[[float], str] = field(default="{:,g}".format)
    whole: bool = False  # only whole numbers are written on it

    def percent(self, value: float) -> float:
        """Where a value lies."""
        return 100 * (value - self.low) / ((self.high - self.low) or 1)

    def ticks(self, most: int = 5) -> list[float]:
        """At most so many round values within the scale."""
        span = (self.high - self.low) or 1
        size = 10.0 ** math.floor(math.log10(span / most))
        step = next(size * f for f in (1, 2, 5, 10) if span / (size * f) <= most)
        if self.whole:
            step = max(1.0, step)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Plot:
    """Layers over two scales. title: for those who cannot see it. marks: names below the plot."""

    title: str
    x: Scale
    y: Scale
    layers: Sequence[Layer]
    marks: Sequence[Mark] | None = None
    height: int = 220

    def html(self) -> str:
        """The picture, with the words of its axes."""
        tops = {tick: 100 - self.y.percent(tick) for tick in self.y.ticks()}
        names = {top: self.y.name(tick) for tick, top in tops.items()}
        ys = "".join(
            f'<span style="top:{top:.2f}%">{escape(name)}</span>' for top, name in names.items()
        )
        inside = [_line(y=top) for top in tops.values()]
        inside += [text for layer in self.layers for text in self._layer(layer)]
        marks = self.marks
        if marks is None:
            marks = [Mark(tick, self.x.name(tick)) for tick in self.x.ticks(6)]
        else:
            inside += [_line(x=self.x.percent(mark.at), title=mark.name) for mark in marks]
        # The longest name, unseen, gives the column its width.
        widest = escape(max(names.values(), key=len, default=""))
        return (
            f'<div class="plot"><div class="ys">{ys}<b aria-hidden="true">{widest}</b></div>'
            f'<div style="height:{self.height}px">{SVG} viewBox="0 0 100 100" '
            f'preserveAspectRatio="none"><title>{escape(self.title)}</title>'
            + "".join(inside)
            + '</svg></div><div class="xs">'
            + "".join(_names(marks, self.x, centred=self.marks is None))
            + "</div></div>"
        )

    def _layer(self, layer: Layer) -> Iterator[str]:
        for x, high, low in _pieces(layer):
            across = [self.x.percent(value) for value in x]
            edge = _points(across, [100 - self.y.percent(value) for value in high])
            if low is None:
                dashes = f' stroke-dasharray="{layer.dashes}"' if layer.dashes else ""
                # One point alone is drawn as a dot by its round ends.
                points = " ".join(edge if len(edge) > 1 else edge * 2)
                shape = f'<polyline class="curve c{layer.colour}" points="{points}"{dashes}>'
                end = "</polyline>"
            else:
                back = _points(across, [100 - self.y.percent(value) for value in low])
                kind = "band" if layer.is_band else "fill"
                points = " ".join([*edge, *reversed(back)])
                shape = f'<polygon class="{kind} c{layer.colour}" points="{points}">'
                end = "</polygon>"
            yield f"{shape}<title>{escape(layer.name)}</title>{end}"


def legend(names: Mapping[str, int]) -> str:
    """Names with their colours."""
    items = "".join(f"<li>{swatch(colour)}{escape(name)}</li>" for name, colour in names.items())
    return f'<ul class="legend">{items}</ul>'


def stacked(
    x: Sequence[float], parts: Mapping[str, Sequence[float]], colours: Mapping[str, int]
) -> list[Layer]:
    """Areas on top of each other."""
    layers: list[Layer] = []
    low: list[float] = [0.0] * len(x)
    for name, values in parts.items():
        high = [below + value for below, value in zip(low, values, strict=True)]
        layers.append(Layer(name, colours[name], x, high, low))
        low = high
    return layers


def bars(title: str, rows: Sequence[Bar], most: float, limits: Sequence[Mark] = ()) -> str:
    """Bars below each other, where `most` is the whole width, and limits drawn over them."""
    return _rows(title, list(map(_as_lane, rows)), Scale(0, most or 1), limits, "limit")


def lanes(title: str, rows: Sequence[Lane], scale: Scale, ticks: Sequence[Mark] = ()) -> str:
    """Lanes below each other, and faint lines down all of them."""
    return _rows(title, rows, scale, ticks, "grid")


def shares(
    parts: Mapping[str, float],
    colours: Mapping[str, int],
    text: Callable[[float], str],
    names: Mapping[str, str],
) -> tuple[tuple[int, float, str], ...]:
    """The parts of a bar from amounts by kind; those that are nothing are left out."""
    return tuple(
        (colours[kind], value, f"{names[kind]}: {text(value)}")
        for kind, value in parts.items()
        if value
    )


def _as_lane(bar: Bar) -> Lane:
    spans, start = [], 0.0
    for colour, length, told in bar.parts:
        spans.append((colour, start, start + length, told))
        start += length
    return Lane(bar.name, tuple(spans), bar.value, bar.group)


def _rows(title: str, rows: Sequence[Lane], scale: Scale, marks: Sequence[Mark], line: str) -> str:
    content = []
    for row in rows:
        if row.group:
            content.append(f'<div class="group">{escape(row.group)}</div>')
        content.append(
            f'<div class="row"><span class="name">{escape(row.name)}</span>'
            f"{_lane(row, scale, marks, line)}"
            f'<span class="value">{escape(row.value)}</span></div>'
        )
    if marks:
        content.append(f'<div class="marks">{"".join(_names(marks, scale))}</div>')
    inside = "".join(content)
    return f'<div class="bars" role="group" aria-label="{escape(title)}">{inside}</div>'


def _lane(row: Lane, scale: Scale, marks: Sequence[Mark], line: str) -> str:
    shapes = []
    for colour, start, end, told in row.spans:
        width = max(scale.percent(end) - scale.percent(start), LEAST)
        shapes.append(
            f'<rect class="fill c{colour}" x="{scale.percent(start):.2f}%" y="0" height="100%" '
            f'width="{width:.2f}%"><title>{escape(told)}</title></rect>'
        )
    places = [f"{scale.percent(mark.at):.2f}%" for mark in marks]
    lines = [f'<line class="{line}" x1="{x}" x2="{x}" y1="-30%" y2="130%"/>' for x in places]
    drawn = "".join(lines + shapes if line == "grid" else shapes + lines)
    described = "; ".join([told for *_, told in row.spans][:MOST_TOLD]) or row.value
    return f"{SVG}><title>{escape(f'{row.name}: {described}')}</title>{drawn}</svg>"


def _names(marks: Sequence[Mark], scale: Scale, *, centred: bool = True) -> Iterator[str]:
    """Names at their places, none on another; only wide pages have room for some ("minor")."""
    free = dict.fromkeys((NARROW, WIDE), -math.inf)
    for mark in marks:
        at, half = scale.percent(mark.at), NARROW * len(mark.name) / 2
        place = "first" if at < half or not centred else ""
        if at > 100 - (half if centred else 2 * half):
            place = "last"
        fits = []
        for letter in free:
            width = letter * len(mark.name)
            start = at - {"first": 0.0, "last": width, "": width / 2}[place]
            if start >= free[letter]:
                fits.append(letter)
                free[letter] = start + width + letter
        if WIDE in fits:
            kinds = " ".join(filter(None, ("at", place, "" if NARROW in fits else "minor")))
            yield f'<span class="{kinds}" style="left:{at:.2f}%">{escape(mark.name)}</span>'


def _line(*, x: float | None = None, y: float | None = None, title: str = "") -> str:
    ends = (
        f'x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="100"'
        if x is not None
        else (f'x1="0" x2="100" y1="{y:.2f}" y2="{y:.2f}"')
    )
    told = f"<title>{escape(title)}</title>" if title else ""
    return f'<line class="grid" {ends}>{told}</line>'


def _pieces(layer: Layer) -> Iterator[tuple[list[float], list[float], list[float] | None]]:
    """The stretches of a layer in which every value is a number."""
    low = layer.high if layer.low is None else layer.low
    piece: list[tuple[float, float, float]] = []
    for point in [*zip(layer.x, layer.high, low, strict=True), (math.nan,) * 3]:
        if all(map(math.isfinite, point)):
            piece.append(point)
        elif piece:
            x, high, lower = (list(values) for values in zip(*piece, strict=True))
            yield x, high, None if layer.low is None else lower
            piece = []


def _points(x: Sequence[float], y: Sequence[float]) -> list[str]:
    return [f"{left:.2f},{top:.2f}" for left, top in zip(x, y, strict=True)]
