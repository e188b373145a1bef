"""What a rehearsal has shown: as text, as a part of a page, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from onecopy.events import SENT
from onecopy.planner.sizes import shown
from onecopy.report import charts, html
from onecopy.report.amounts import amount, unit_for
from onecopy.report.figures import MEMORY_NAMES

if TYPE_CHECKING:
    from rich.console import Console

    from onecopy.simulator.rehearsal import Rehearsal
    from onecopy.simulator.simulate import MemoryAt, Simulation

__all__ = ["as_html", "print_rehearsal", "to_json"]

KINDS = {kind: MEMORY_NAMES[kind] for kind in ("parameters", "gradients", "optimizer")}
KINDS["rest"] = "activations and temporaries"
# As in the bars of a plan.
COLOURS = {"parameters": 0, "gradients": 1, "optimizer": 2, "rest": 5}
MOMENTS, BAR = 24, 40


def _title(rehearsal: Rehearsal) -> str:
    found, way = rehearsal.simulation, rehearsal.row.way
    again = ", activations computed again" if way.recompute else ""
    return (
        f"Simulated: {way.name}{again}, one rank of {found.world_size:,}, "
        f"{shown(found.num_parameters)} parameters"
    )


def _moment(at: MemoryAt) -> str:
    unit = f" of {at.unit}" if at.unit else ""
    return f"in {at.phase}, after the {at.what}{unit}"


def _transfers(found: Simulation) -> Iterator[tuple[str, int, int]]:
    """Kind, number of messages, bytes that the rank sends."""
    counts, sent = Counter[str](), Counter[str]()
    for event in found.events:
        counts[event.kind] += 1
        sent[event.kind] += event.num_bytes
    return ((kind, counts[kind], sent[kind]) for kind in SENT if counts[kind])


def print_rehearsal(console: Console, rehearsal: Rehearsal) -> None:
    """Print the peak and what it is made of, what was sent, and the memory along the step."""
    found, peak = rehearsal.simulation, rehearsal.simulation.peak
    unit = unit_for(peak.total)
    console.print()
    console.print(Text(_title(rehearsal), style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(f"{unit} at the peak", no_wrap=True)
    table.add_column("", justify="right")
    for kind, name in KINDS.items():
        table.add_row(name, amount(getattr(peak, kind), unit))
    verdict = "" if rehearsal.fits else ", more than the device has"
    table.add_row(f"all of it{verdict}", amount(peak.total, unit), style="bold")
    for kind, count, num_bytes in _transfers(found):
        table.add_row(f"sent by {count} x {kind}", amount(num_bytes, unit))
    console.print(table)
    console.print(f"The peak is {_moment(peak)}.", soft_wrap=True)
    console.print(Text("Along the step", style="bold"))
    for at in _sampled(found.timeline):
        bar = "#" * max(1, round(BAR * at.total / peak.total))
        line = f"{bar:<{BAR}} {amount(at.total, unit):>9}  {at.phase}: {at.what} {at.unit}"
        console.print(Text(line.rstrip()), soft_wrap=True)
    console.print(
        Text(
            f"By the real engine, on tensors without memory, in {found.seconds:.0f} s", style="dim"
        )
    )


def _sampled(timeline: list[MemoryAt]) -> list[MemoryAt]:
    """Of each of so many stretches the moment with the most."""
    moments = [at for at in timeline if at.unit or at.what == "step"]
    length = -(-len(moments) // MOMENTS) if moments else 1
    return [
        max(moments[start : start + length], key=lambda at: at.total)
        for start in range(0, len(moments), length)
    ]


def to_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """All of it, in bytes."""
    found = rehearsal.simulation
    return {
        "stage": rehearsal.row.stage,
        "recompute": rehearsal.row.way.recompute,
        "world_size": found.world_size,
        "num_parameters": found.num_parameters,
        "fits": rehearsal.fits,
        "peak": {**asdict(found.peak), "total": found.peak.total},
        "timeline": [{**asdict(at), "total": at.total} for at in found.timeline],
        "collectives": [
            {"kind": one.kind, "unit": one.unit, "phase": one.phase, "num_bytes": one.num_bytes}
            for one in found.events
            if one.kind in SENT
        ],
        "seconds": found.seconds,
    }


def as_html(rehearsal: Rehearsal) -> str:
    """A part of a page: the peak in words, and the memory along the step as a picture."""
    found = rehearsal.simulation
    unit = unit_for(found.peak.total)
    rows = [(name, amount(getattr(found.peak, kind), unit)) for kind, name in KINDS.items()]
    rows.append(("all of it", amount(found.peak.total, unit)))
    rows += [
        (f"sent by {count} x {kind}", amount(num_bytes, unit))
        for kind, count, num_bytes in _transfers(found)
    ]
    return html.part(
        f"<h2>{html.escape(_title(rehearsal))}</h2>",
        charts.legend({name: COLOURS[kind] for kind, name in KINDS.items()}),
        _plot(found, unit).html(),
        html.table([f"{unit} at the peak", ""], [html.Cells(name, (cell,)) for name, cell in rows]),
        f'<p class="note">The peak is {html.escape(_moment(found.peak))}.</p>',
    )


def _plot(found: Simulation, unit: str) -> charts.Plot:
    """Memory at each event of the step, its kinds on top of each other."""
    moments = found.timeline
    parts = {KINDS[kind]: [getattr(at, kind) for at in moments] for kind in KINDS}
    colours = {name: COLOURS[kind] for kind, name in KINDS.items()}
    return charts.Plot(
        title="Memory of the rank along one training step",
        x=charts.Scale(0, max(1, len(moments) - 1)),
        y=charts.Scale(0, found.peak.total, lambda value: f"{amount(value, unit)} {unit}"),
        layers=charts.stacked(range(len(moments)), parts, colours),
        marks=list(_phases(moments)),
    )


def _phases(moments: list[MemoryAt]) -> Iterator[charts.Mark]:
    """Where forward, backward and the optimizer's step begin."""
    last = ""
    for number, at in enumerate(moments):
        if at.phase != last:
            last = at.phase
            yield charts.Mark(number, at.phase)
