"""What was logged, over the steps: curves of all runs over each other, and a table.

A page stays small however long a run is: neighbouring steps become one point, the curve is their
mean, and the band around it reaches from the lowest to the highest value of any rank and step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from onecopy.report import charts, html
from onecopy.report.html import Cells, escape
from onecopy.report.summary import COUNTS, Series, Summary, mean
from onecopy.report.verdict import number

__all__ = ["DASHES", "Sampled", "sampled", "section"]

POINTS = 240
MOST_METRICS = 24
# Runs differ by more than their colour.
DASHES = ("", "7 4", "2 4", "9 3 2 3")
# Where the highest value is so many times the lowest, a curve is drawn over its logarithm.
FAR = 1e4
LARGEST = 1e300  # beyond it differences are infinite, and so is a value here
PERIODS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


@dataclass(frozen=True, slots=True)
class Sampled:
    """A series in at most so many points; where no value is a number, a point is nan."""

    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def sampled(series: Series, points: int = POINTS) -> Sampled:
    """Neighbouring steps as one point each."""
    length = -(-len(series.steps) // points) or 1
    found = Sampled([], [], [], [])
    for start in range(0, len(series.steps), length):
        values = [value for ranks in series.values[start : start + length] for value in ranks]
        finite = [value for value in values if abs(value) < LARGEST]
        found.steps.append(fmean(series.steps[start : start + length]))
        found.mean.append(mean(finite) if finite else math.nan)
        found.low.append(min(finite, default=math.nan))
        found.high.append(max(finite, default=math.nan))
    return found


def section(runs: Sequence[Summary]) -> str:
    """The curves and the table of everything that was logged."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    drawn = [name for name in names if name not in COUNTS]
    shown = drawn[:MOST_METRICS]
    plots = [_plot(name, [run.metrics.get(name) for run in runs], runs) for name in shown]
    plots[1:1] = _rates(runs)
    parts = []
    if len(runs) > 1:
        parts.append(charts.legend({run.name: colour for colour, run in enumerate(runs)}))
    parts.append(f'<div class="plots">{"".join(plots)}</div>')
    parts.append(
        '<p class="note">Curves are means over ranks and over the steps of a point; bands reach '
        "from the lowest to the highest value of any of them.</p>"
    )
    if len(drawn) > len(shown):
        parts.append(
            f'<p class="note">{len(drawn) - len(shown)} more metrics are in the table only.</p>'
        )
    if names:
        head = ["metric", "first", "lowest", "highest", "last", "not a number"]
        rows = [row for run in runs for row in _rows(run, len(runs) > 1)]
        parts.append(html.table(head, rows, caption="Logged, as means over ranks"))
    return "\n".join(parts)


def _rates(runs: Sequence[Summary]) -> Iterator[str]:
    """Steps in a second, a minute or an hour, and what is counted, of all ranks together."""
    longest = max((run.step_seconds or 0.0 for run in runs), default=0.0)
    if longest:
        period = next((name for name, size in PERIODS.items() if size >= longest), "hour")
        steps = [run.per_second() for run in runs]
        yield _plot(f"steps per {period}", [_times(one, PERIODS[period]) for one in steps], runs)
    for name in COUNTS:
        counted = [run.per_second(name) for run in runs]
        if any(counted):
            yield _plot(f"{name} per second, all ranks", counted, runs)


def _times(series: Series | None, factor: float) -> Series | None:
    if series is None:
        return None
    values = tuple(tuple(factor * value for value in ranks) for ranks in series.values)
    return Series(series.name, series.steps, values)


def _plot(title: str, series: Sequence[Series | None], runs: Sequence[Summary]) -> str:
    found = [None if one is None else sampled(one) for one in series]
    scale, is_log = _scale([one for one in found if one is not None])
    layers = [
        layer
        for colour, (one, run) in enumerate(zip(found, runs, strict=True))
        if one is not None
        for layer in _layers(one, run.name, colour, is_log)
    ]
    # The same for all, though some are logged now and then only.
    first, last = min(run.steps[0] for run in runs), max(run.steps[-1] for run in runs)
    plot = charts.Plot(
        title=f"{title} over the steps",
        x=charts.Scale(first, max(last, first + 1), whole=True),
        y=scale,
        layers=layers,
        height=190,
    )
    note = " (logarithmic)" if is_log else ""
    return f"<figure><figcaption>{escape(title)}{note}</figcaption>{plot.html()}</figure>"


def _layers(one: Sampled, name: str, colour: int, is_log: bool) -> Iterator[charts.Layer]:
    mean, low, high = (
        [math.log10(value) for value in values] if is_log else values
        for values in (one.mean, one.low, one.high)
    )
    colour %= len(html.COLOURS)
    dashes = DASHES[colour % len(DASHES)]
    if low != high:
        yield charts.Layer(f"{name}: lowest to highest", colour, one.steps, high, low, is_band=True)
    yield charts.Layer(name, colour, one.steps, mean, dashes=dashes)


def _scale(found: Sequence[Sampled]) -> tuple[charts.Scale, bool]:
    """Around all values; over the logarithm where they are far apart."""
    values = [
        value for one in found for ends in (one.low, one.high) for value in ends if value == value
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if 0 < low < high / FAR:
        ends = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return charts.Scale(*ends, lambda value: number(10.0**value), whole=True), True
    if 0 <= low < 0.4 * high:
        low = 0.0
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    below = low if low == 0 else low - margin
    return charts.Scale(below, high + margin, number), False


def _rows(run: Summary, with_name: bool) -> Iterator[Cells]:
    for name, series in run.metrics.items():
        means = series.means()
        finite = [value for value in means if math.isfinite(value)]
        cells = (
            means[0],
            min(finite, default=math.nan),
            max(finite, default=math.nan),
            means[-1],
        )
        bad = len(series.not_numbers())
        yield Cells(
            f"{name} ({run.name})" if with_name else name,
            (*map(number, cells), f"{bad} of {len(means)}" if bad else "-"),
        )
