"""The figures of a rank as bars and tables: memory, where its time goes, what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from onecopy.events import SENT
from onecopy.report import charts, html
from onecopy.report.amounts import amount, unit_for
from onecopy.report.html import Cells, escape
from onecopy.report.run_folder import SPLIT
from onecopy.report.summary import MEMORY, RankSummary, Summary
from onecopy.report.verdict import percent, span

__all__ = ["MEMORY_COLOURS", "MEMORY_NAMES", "memory", "ratio", "time", "traffic"]

MEMORY_NAMES = {
    "parameters": "parameters and masters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered units",
    "buffers": "gradients on their way",
}
MEMORY_COLOURS = {kind: number for number, kind in enumerate(MEMORY_NAMES)}
TIER_NAMES = {"host": "model states in host memory", "nvme": "model states on NVMe"}
PROCESS_NAMES = {"process": "whole process", "peak": "whole process, at its peak"}
TIME_NAMES = {
    "compute": "compute",
    "gather": "wait for gather",
    "reduce": "wait for reduce",
    "refresh": "wait for refresh",
    "agree": "wait for agreement",
    "optimizer": "optimizer",
    "io": "read and save",
}
# Waiting for gathers and reduces has the colours of gathered units and of gradients.
TIME_COLOURS = dict(zip(SPLIT, (0, 3, 1, 5, 4, 2, 6), strict=True))
SENT_COLOURS = {"gather": 3, "reduce": 1, "refresh": 5}
SENT_NAMES = {kind: kind for kind in SENT}
# Ranks with a bar of their own, and rows of a table.
MOST_BARS, MOST_ROWS = 16, 64


def memory(runs: Sequence[Summary]) -> str:
    """What the formulas say and what each rank had, by kind."""
    most = max((sum(one.values()) for run in runs for one in _all_memory(run)), default=0)
    unit = unit_for(most)
    rows = [bar for run in runs for bar in _grouped(run, list(_memory_bars(run, unit)), runs)]
    return "\n".join(
        [
            _legend(
                MEMORY_NAMES, MEMORY_COLOURS, [one for run in runs for one in _all_memory(run)]
            ),
            charts.bars("Memory of ranks by kind", rows, most),
            *(_memory_table(run, runs) for run in runs),
            '<p class="note">Measured: the most of each kind in any step. Activations and the '
            "software's own memory are in the whole process only, which is not estimated.</p>",
        ]
    )


def time(runs: Sequence[Summary]) -> str:
    """Where the seconds of a step go on each rank."""
    most = max((one.seconds for run in runs for one in run.ranks), default=0.0)
    rows = [bar for run in runs for bar in _grouped(run, list(_time_bars(run)), runs)]
    splits = [one.split for run in runs for one in run.ranks]
    return "\n".join(
        [
            *(f"<p>{escape(sentence)}</p>" for run in runs for sentence in _slowest(run, runs)),
            _legend(TIME_NAMES, TIME_COLOURS, splits),
            charts.bars("Seconds of a step by kind", rows, most),
            *(_time_table(run, runs) for run in runs),
            '<p class="note">Means over all steps but the first. Compute is what is left: forward, '
            "backward, data, and the loop's own code.</p>",
        ]
    )


def traffic(runs: Sequence[Summary]) -> str:
    """What a rank sends in a step, beside the formulas."""
    sides = [side for run in runs for side in run.sent()]
    most = max((sum(side.values()) for side in sides), default=0.0)
    unit = unit_for(most)
    rows = [bar for run in runs for bar in _grouped(run, list(_sent_bars(run, unit)), runs)]
    return "\n".join(
        [
            _legend(SENT_NAMES, SENT_COLOURS, sides),
            charts.bars("Bytes sent in a step by kind", rows, most),
            *(_sent_table(run, runs, unit) for run in runs),
            '<p class="note">Of the average rank in a step, all but the first. The formulas count '
            "the forwards and backwards that were made.</p>",
        ]
    )


def ratio(part: float, whole: float) -> str:
    """Measured over estimated."""
    return f"{part / whole:.3f}" if whole else "-"


def _grouped(
    run: Summary, bars: Sequence[charts.Bar], runs: Sequence[Summary]
) -> Iterator[charts.Bar]:
    """With the name of the run above its bars, where there are several."""
    for number, bar in enumerate(bars):
        group = run.name if len(runs) > 1 and number == 0 else ""
        yield charts.Bar(bar.name, bar.parts, bar.value, group)


def _legend(
    names: Mapping[str, str],
    colours: Mapping[str, int],
    present: Sequence[Mapping[str, float]],
) -> str:
    """Of the kinds of which there is something."""
    kinds = [kind for kind in names if any(one.get(kind) for one in present)]
    return charts.legend({names[kind]: colours[kind] for kind in kinds})


def _title(words: str, run: Summary, runs: Sequence[Summary]) -> str:
    return f"{words}: {run.name}" if len(runs) > 1 else words


def _few(
    ranks: Sequence[RankSummary],
    key: Callable[[RankSummary], float],
    places: tuple[str, str, str] = ("least", "middle", "most"),
) -> list[tuple[str, RankSummary]]:
    """Each with its name; of many the first, the middle one and the last by `key`."""
    if len(ranks) <= MOST_BARS:
        return [(f"rank {one.rank}", one) for one in ranks]
    ordered = sorted(ranks, key=key)
    chosen = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    return [(f"rank {one.rank}, {place}", one) for place, one in zip(places, chosen, strict=True)]


# Memory -----------------------------------------------------------------------------------------


def _of_kinds(found: Mapping[str, int]) -> dict[str, int]:
    return {kind: found.get(kind, 0) for kind in MEMORY_NAMES}


def _all_memory(run: Summary) -> list[dict[str, int]]:
    return [_of_kinds(one) for one in (run.estimated, *(rank.memory for rank in run.ranks))]


def _states(rank: RankSummary) -> int:
    return sum(_of_kinds(rank.memory).values())


def _memory_bars(run: Summary, unit: str) -> Iterator[charts.Bar]:
    text = partial(_with_unit, unit=unit)
    found = [("estimated", run.estimated)] if run.estimated else []
    found += [(name, dict(rank.memory)) for name, rank in _few(run.ranks, _states) if _states(rank)]
    for name, kinds in found:
        parts = charts.shares(_of_kinds(kinds), MEMORY_COLOURS, text, MEMORY_NAMES)
        yield charts.Bar(name, parts, text(sum(_of_kinds(kinds).values())))


def _memory_table(run: Summary, runs: Sequence[Summary]) -> str:
    most = [max(one.values(), default=0) for one in _all_memory(run)]
    unit = unit_for(max(most, default=0))
    rows = [_memory_row(run, kind, name, unit) for kind, name in MEMORY_NAMES.items()]
    rows.append(_memory_sum(run, unit))
    more = {**TIER_NAMES, **PROCESS_NAMES}
    rows += [_memory_row(run, kind, name, unit) for kind, name in more.items()]
    head = [f"{unit} per rank", "estimated", *_least_and_most(run), "ratio"]
    return html.table(
        head,
        [row for row in rows if row is not None],
        caption=_title("Memory of a rank", run, runs),
    )


def _least_and_most(run: Summary) -> list[str]:
    return ["measured"] if len(run.ranks) == 1 else ["least measured", "most measured"]


def _memory_row(run: Summary, kind: str, name: str, unit: str) -> Cells | None:
    values = [one.memory[kind] for one in run.ranks if kind in one.memory]
    estimated = run.estimated.get(kind)
    if not values and not estimated:
        return None
    return _measured(name, estimated, values, unit, len(_least_and_most(run)))


def _memory_sum(run: Summary, unit: str) -> Cells | None:
    """Of the kinds that are both estimated and measured."""
    kinds = [
        kind
        for kind in MEMORY
        if kind in run.estimated and all(kind in one.memory for one in run.ranks)
    ]
    if not kinds or not run.ranks:
        return None
    values = [sum(one.memory[kind] for kind in kinds) for one in run.ranks]
    estimated = sum(run.estimated[kind] for kind in kinds)
    return _measured(
        "sum of what both have", estimated, values, unit, len(_least_and_most(run)), is_sum=True
    )


def _measured(
    name: str,
    estimated: int | None,
    values: Sequence[int],
    unit: str,
    columns: int,
    *,
    is_sum: bool = False,
) -> Cells:
    ends = [min(values), max(values)][-columns:] if values else []
    cells = ["-" if estimated is None else amount(estimated, unit)]
    cells += [amount(value, unit) for value in ends] or ["-"] * columns
    cells.append(ratio(max(values), estimated) if values and estimated else "-")
    return Cells(name, tuple(cells), is_sum)


def _with_unit(num_bytes: float, unit: str) -> str:
    return f"{amount(num_bytes, unit)} {unit}"


# Time -------------------------------------------------------------------------------------------


def _time_bars(run: Summary) -> Iterator[charts.Bar]:
    places = ("fastest", "middle", "slowest")
    for name, rank in _few(run.ranks, lambda one: one.own, places):
        is_named = rank is run.slowest and 1 < len(run.ranks) <= MOST_BARS
        label = f"{name}, slowest" if is_named else name
        parts = charts.shares(rank.split, TIME_COLOURS, span, TIME_NAMES)
        yield charts.Bar(label, parts, span(rank.seconds))


def _slowest(run: Summary, runs: Sequence[Summary]) -> Iterator[str]:
    slowest = run.slowest
    if slowest is None or len(run.ranks) < 2:
        return
    name = f"{run.name}: rank" if len(runs) > 1 else "Rank"
    yield (
        f"{name} {slowest.rank} is the slowest: it works {span(slowest.own)} of a step itself, "
        f"{percent(run.difference)} more than {run.others}, and waits {span(slowest.waiting)}."
    )


def _time_table(run: Summary, runs: Sequence[Summary]) -> str:
    ranks = sorted(run.ranks, key=lambda one: -one.own) if _are_many(run) else run.ranks
    kinds = [kind for kind in SPLIT if any(one.split[kind] for one in run.ranks)]
    head = ["rank", *(TIME_NAMES[kind] for kind in kinds), "a step", "waiting"]
    rows = [
        Cells(
            str(one.rank),
            (
                *(span(one.split[kind]) for kind in kinds),
                span(one.seconds),
                percent(one.waiting / one.seconds) if one.seconds else "-",
            ),
        )
        for one in ranks[:MOST_ROWS]
    ]
    words = "Time of a step"
    if len(ranks) > MOST_ROWS:
        words += f", the {MOST_ROWS} slowest of {len(ranks):,} ranks"
    table = html.table(head, rows, caption=_title(words, run, runs))
    return html.fold(_title("Rank by rank", run, runs), table) if _are_many(run) else table


def _are_many(run: Summary) -> bool:
    return len(run.ranks) > MOST_BARS


# Bytes ------------------------------------------------------------------------------------------


def _sent_bars(run: Summary, unit: str) -> Iterator[charts.Bar]:
    measured, expected = run.sent()
    text = partial(_with_unit, unit=unit)
    for name, side in (("by formula", expected), ("sent", measured)):
        if side:
            known = {kind: side.get(kind, 0.0) for kind in SENT}
            parts = charts.shares(known, SENT_COLOURS, text, SENT_NAMES)
            yield charts.Bar(name, parts, text(sum(known.values())))


def _sent_table(run: Summary, runs: Sequence[Summary], unit: str) -> str:
    measured, expected = run.sent()
    rows = []
    for kind in SENT:
        if measured.get(kind) or expected.get(kind):
            rows.append(_sent_row(kind, measured.get(kind, 0.0), expected.get(kind), unit))
    if rows:
        whole = sum(expected.values()) if expected else None
        rows.append(_sent_row("all of it", sum(measured.values()), whole, unit, is_sum=True))
    head = [f"{unit} sent in a step", "by formula", "measured", "ratio"]
    return html.table(head, rows, caption=_title("Bytes of a rank", run, runs))


def _sent_row(
    name: str, measured: float, expected: float | None, unit: str, *, is_sum: bool = False
) -> Cells:
    formula = "-" if expected is None else amount(expected, unit)
    return Cells(name, (formula, amount(measured, unit), ratio(measured, expected or 0.0)), is_sum)
