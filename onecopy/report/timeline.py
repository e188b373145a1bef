"""One detailed step of one rank: memory by kind over its time, and below it what each unit did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onecopy.events import SENT
from onecopy.report import charts, html
from onecopy.report.amounts import amount, unit_for
from onecopy.report.figures import MEMORY_COLOURS, MEMORY_NAMES
from onecopy.report.html import escape
from onecopy.report.progress import size
from onecopy.report.run_folder import EventRecord, RankRun, Run
from onecopy.report.verdict import span

__all__ = ["DetailedStep", "detailed_step", "section"]

# From the bottom: what stays first, so that what comes and goes is seen on top of it.
KINDS = {kind: MEMORY_NAMES[kind] for kind in ("parameters", "optimizer", "gradients", "gathered")}
# As in the bars of memory; a rank that is blocked is purple, which stands for nothing else there.
COLOURS = {kind: MEMORY_COLOURS[kind] for kind in KINDS}
WAITING = 5
MOMENTS = 240
LANES, MOST_LANES = 24, 200
COMPUTING = 0
LANE_NAMES = {
    "gathered": COLOURS["gathered"],
    "computes": COMPUTING,
    "gradients on their way": COLOURS["gradients"],
    "the rank waits": WAITING,
}


@dataclass(frozen=True, slots=True)
class DetailedStep:
    """A step's events. begin, end: its time."""

    rank: int
    step: int
    begin: float
    end: float
    events: tuple[EventRecord, ...]

    def seconds(self, time: float) -> float:
        """Of a time of the run, since the step began; what lies outside is at its ends."""
        return min(max(time, self.begin), self.end) - self.begin


def detailed_step(run: Run) -> DetailedStep | None:
    """The last detailed step of the first rank that has one: those before may have been slower."""
    for rank in run.ranks:
        whole = {one.step for one in rank.steps}
        steps = [one.step for one in rank.events if one.step in whole]
        if steps:
            return _step(rank, max(steps))
    return None


def _step(rank: RankRun, number: int) -> DetailedStep:
    record = next(one for one in rank.steps if one.step == number)
    events = sorted((one for one in rank.events if one.step == number), key=lambda one: one.time)
    return DetailedStep(rank.rank, number, record.time - record.seconds, record.time, tuple(events))


def section(found: DetailedStep) -> str:
    """The picture, its legend, and how to read it."""
    seconds = found.end - found.begin
    marks = list(_phases(found))
    scale = charts.Scale(0, seconds, span)
    lanes = list(_lanes(found))
    ticks = [charts.Mark(at, span(at)) for at in scale.ticks(6)]
    more = ""
    if len(lanes) > LANES:
        more = html.fold(
            f"{len(lanes) - LANES} more units",
            charts.lanes("More units over the step", lanes[LANES:MOST_LANES], scale, ticks),
        )
    return "\n".join(
        [
            f"<p>Step {found.step} of rank {found.rank}, {escape(span(seconds))}. "
            "Above, what the rank holds by kind; below, what each unit does at that time.</p>",
            charts.legend({name: COLOURS[kind] for kind, name in KINDS.items()}),
            '<div class="aligned">',
            _memory(found, scale, marks),
            charts.legend(LANE_NAMES),
            charts.lanes("Units over the step", lanes[:LANES], scale, ticks),
            more,
            "</div>",
            html.fold("As numbers", _table(found)),
        ]
    )


def _memory(found: DetailedStep, scale: charts.Scale, marks: Sequence[charts.Mark]) -> str:
    events = [one for one in found.events if one.memory]
    if not events:
        return '<p class="note">Memory was not recorded at these events.</p>'
    moments = list(_highest(found, events))
    peak = max(sum(memory.values()) for _, memory in _totals(events))
    unit = unit_for(peak)
    # What an event leaves stays until the next one.
    times: list[float] = []
    held: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number, (time, memory) in enumerate(moments):
        until = moments[number + 1][0] if number + 1 < len(moments) else found.end - found.begin
        times += [time, until]
        for kind, values in held.items():
            values += [memory.get(kind, 0)] * 2
    times[0] = 0.0
    return charts.Plot(
        title=f"Memory of rank {found.rank} over step {found.step}, at most {size(peak)}",
        x=scale,
        y=charts.Scale(0, peak * 1.05, lambda value: f"{amount(value, unit)} {unit}"),
        layers=charts.stacked(
            times, {KINDS[kind]: values for kind, values in held.items()}, _named(COLOURS)
        ),
        marks=marks,
    ).html()


def _named(colours: dict[str, int]) -> dict[str, int]:
    return {KINDS[kind]: colour for kind, colour in colours.items()}


def _totals(events: Sequence[EventRecord]) -> Iterator[tuple[float, dict[str, int]]]:
    for one in events:
        yield one.time, {kind: one.memory.get(kind, 0) for kind in KINDS}


def _highest(
    found: DetailedStep, events: Sequence[EventRecord]
) -> Iterator[tuple[float, dict[str, int]]]:
    """Of each stretch of events the moment with the most."""
    length = -(-len(events) // MOMENTS)
    every = list(_totals(events))
    for start in range(0, len(every), length):
        stretch = every[start : start + length]
        time, memory = max(stretch, key=lambda one: sum(one[1].values()))
        yield found.seconds(stretch[0][0] if length > 1 else time), memory


def _table(found: DetailedStep) -> str:
    """What the lanes show, in seconds and bytes."""
    rows = []
    for name, events in _by_unit(found).items():
        gathered = [end - begin for _, begin, end, _ in _gathered(found, events)]
        computing = [end - begin for _, begin, end, _ in _computing(found, events)]
        waits = [one.seconds for one in events if one.kind == "wait"]
        cells = (
            f"{len(gathered)} x" if gathered else "-",
            *(span(sum(times)) if times else "-" for times in (gathered, computing, waits)),
            size(_sent(events)),
        )
        rows.append(html.Cells(name, cells))
    head = ["unit", "gathered", "for", "computes", "waits", "sent"]
    return html.table(head, rows[:MOST_LANES], caption=f"Units in step {found.step}")


def _phases(found: DetailedStep) -> Iterator[charts.Mark]:
    """Where forward, backward and the optimizer's step begin."""
    last = ""
    for one in found.events:
        if one.phase != last and one.phase != "api":
            last = one.phase
            yield charts.Mark(found.seconds(one.time - one.seconds), one.phase)


def _by_unit(found: DetailedStep) -> dict[str, list[EventRecord]]:
    """Events of each unit, in the order of its first use."""
    units: dict[str, list[EventRecord]] = {}
    for one in found.events:
        if one.unit:
            name = f"{one.model}: {one.unit}" if one.model else one.unit
            units.setdefault(name, []).append(one)
    return units


def _lanes(found: DetailedStep) -> Iterator[charts.Lane]:
    for name, events in _by_unit(found).items():
        sent = _sent(events)
        # What is drawn later lies above.
        spans = (*_gathered(found, events), *_computing(found, events), *_moments(found, events))
        yield charts.Lane(name, spans, f"{size(sent)} sent" if sent else "")


def _sent(events: Sequence[EventRecord]) -> int:
    return sum(one.num_bytes for one in events if one.kind in SENT)


def _gathered(
    found: DetailedStep, events: Sequence[EventRecord]
) -> Iterator[tuple[int, float, float, str]]:
    since: float | None = 0.0 if _is_gathered_before(events) else None
    for one in events:
        if one.kind == "gather" and since is None:
            since = found.seconds(one.time)
        elif one.kind == "release" and since is not None:
            until = found.seconds(one.time)
            yield COLOURS["gathered"], since, until, f"gathered for {span(until - since)}"
            since = None
    if since is not None:
        yield COLOURS["gathered"], since, found.end - found.begin, "gathered until the end"


def _computing(
    found: DetailedStep, events: Sequence[EventRecord]
) -> Iterator[tuple[int, float, float, str]]:
    since: float | None = None
    for one in events:
        if one.kind == "enter":
            since = found.seconds(one.time)
        elif one.kind == "leave" and since is not None:
            until = found.seconds(one.time)
            yield COMPUTING, since, until, f"{one.phase}, {span(until - since)}"
            since = None


def _is_gathered_before(events: Sequence[EventRecord]) -> bool:
    first = next((one.kind for one in events if one.kind in ("gather", "release")), "")
    return first == "release"


def _moments(
    found: DetailedStep, events: Sequence[EventRecord]
) -> Iterator[tuple[int, float, float, str]]:
    begun: float | None = None
    for one in events:
        at = found.seconds(one.time)
        start = found.seconds(one.time - one.seconds)
        if one.kind == "reduce":
            begun = at
            yield COLOURS["gradients"], at, at, f"reduce of {size(one.num_bytes)} begins"
        elif one.kind == "wait":
            if one.what == "reduce" and begun is not None:
                yield COLOURS["gradients"], begun, start, f"reduced for {span(at - begun)}"
                begun = None
            yield WAITING, start, at, f"waits {span(one.seconds)} for {one.what or 'it'}"
