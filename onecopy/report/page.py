"""Runs as one page: verdicts first, then what they rest on.

The order of the page is the order in which one asks: did it work, what limits it, what was set,
does memory fit the plan, where do bytes and seconds go, how do runs differ, on what did it run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from onecopy.report import curves, figures, html, timeline
from onecopy.report.differences import differences, settings_of, written
from onecopy.report.html import Cells, escape
from onecopy.report.progress import count, duration, plural, size
from onecopy.report.run_folder import Setting
from onecopy.report.summary import Summary
from onecopy.report.verdict import advice, number, percent, shorten, span, verdict

__all__ = ["report_page"]


def report_page(runs: Sequence[Summary]) -> str:
    """The page of one run, or of several over and beside each other."""
    several = len(runs) > 1
    title = f"{len(runs)} runs" if several else runs[0].name
    sections = list(_sections(runs))
    links = "".join(
        f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, content in sections if content
    )
    body = html.part(
        '<p class="above">onecopy report</p>',
        f"<h1>{escape(title)}{'' if several else _chip(runs[0])}</h1>",
        *([] if several else [f"<p>{escape(_subject(runs[0]))}</p>"]),
        *(_card(run, number, with_name=several) for number, run in enumerate(runs)),
        f'<nav aria-label="Sections">{links}</nav>',
        *(
            f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>\n{content}\n</section>'
            for name, content in sections
            if content
        ),
    )
    names = ", ".join(run.name for run in runs)
    return html.page(f"{names} - onecopy report", body)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _sections(runs: Sequence[Summary]) -> Iterator[tuple[str, str]]:
    """Names and contents; what has nothing to show is empty."""
    with_steps = [run for run in runs if run.ranks]
    yield "Settings", "\n".join(_settings(run, runs) for run in runs)
    yield "Memory", figures.memory(with_steps) if with_steps else ""
    yield "A step in detail", _timelines(runs)
    yield "Loss and speed", curves.section(with_steps) if with_steps else ""
    yield "Where the time goes", figures.time(with_steps) if with_steps else ""
    yield "Bytes sent", figures.traffic(with_steps) if with_steps else ""
    if len(runs) > 1:
        yield "Differences", _differences(runs)
    yield "Environment", "\n".join(_environment(run, runs) for run in runs)


def _chip(run: Summary) -> str:
    words = {"running": "running or killed"}.get(run.run.status, run.run.status)
    failed = " failed" if run.run.status == "failed" else ""
    return f'<span class="status{failed}">{escape(words)}</span>'


def _subject(run: Summary) -> str:
    """What was trained where."""
    models = ", ".join(
        f"{one.kind} with {count(one.num_parameters)} parameters" for one in run.run.models
    )
    ranks = f"{run.run.world_size:,} rank{'' if run.run.world_size == 1 else 's'}"
    return f"{models or 'No model'} on {ranks}, begun {_date(run.run.started)}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _card(run: Summary, colour: int, *, with_name: bool) -> str:
    """A run's verdict, its main figures, and advice."""
    name = f"<h2>{escape(run.name)}{_chip(run)}</h2>\n" if with_name else ""
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(run)
    )
    advised = "".join(f"<li>{escape(sentence)}</li>" for sentence in advice(run))
    return (
        f'<section class="run c{colour % len(html.COLOURS)}">\n{name}'
        f'<p class="verdict">{escape(verdict(run))}</p>\n<dl class="facts">{facts}</dl>'
        + _error(run)
        + (f"\n<h3>What may help</h3>\n<ul>{advised}</ul>" if advised else "")
        + "\n</section>"
    )


def _error(run: Summary) -> str:
    """All of an error of which the verdict has the beginning only."""
    error = (run.run.error or "").strip()
    if shorten(error) == error:
        return ""
    return html.fold("The whole error", f"<pre>{escape(error)}</pre>")


def _facts(run: Summary) -> Iterator[tuple[str, str]]:
    yield "steps", f"{len(run.steps):,}"
    if run.loss is not None:
        yield f"last {run.loss.name}", number(run.loss.means()[-1])
    if run.step_seconds is not None:
        yield "a step, median", span(run.step_seconds)
    if run.shares:
        yield "waiting for others", percent(run.waiting)
    peak = run.peak()
    if peak is not None:
        yield "most memory of a process", size(peak)
    yield "ranks", f"{run.run.world_size:,}"


def _settings(run: Summary, runs: Sequence[Summary]) -> str:
    """Those that differ from their defaults, and the stage; all of them are folded."""
    every = settings_of(run)
    chosen = {name: one for name, one in every.items() if not one.is_default or name == "stage"}
    title = f"Chosen: {run.name}" if len(runs) > 1 else "Chosen"
    parts = (
        [_settings_table(chosen, title)] if chosen else [f"<p>{escape(run.name)}: defaults.</p>"]
    )
    if len(every) > len(chosen):
        parts.append(html.fold(f"All {len(every)} settings", _settings_table(every, "Settings")))
    return "\n".join(parts)


def _settings_table(settings: Mapping[str, Setting], caption: str) -> str:
    rows = [Cells(name, (written(one.value), one.origin)) for name, one in settings.items()]
    return html.table(["setting", "value", "from"], rows, caption=caption, words=True)


def _timelines(runs: Sequence[Summary]) -> str:
    parts = []
    for run in runs:
        found = timeline.detailed_step(run.run)
        if found is not None:
            name = f"<h3>{escape(run.name)}</h3>\n" if len(runs) > 1 else ""
            parts.append(name + timeline.section(found))
    return "\n".join(parts)


def _differences(runs: Sequence[Summary]) -> str:
    rows = [Cells(name, values) for name, values in differences(runs)]
    head = ["", *(run.name for run in runs)]
    return html.table(head, rows, caption="Settings that differ, and results", words=True)


def _environment(run: Summary, runs: Sequence[Summary]) -> str:
    found = run.run
    rows = [
        ("began", _date(found.started)),
        ("took", duration(found.seconds)),
        ("command", " ".join(found.command)),
        ("folder", str(found.path)),
        ("ranks", f"{found.world_size:,} on {_hosts(found.hosts)}"),
        ("devices", ", ".join(sorted({one.device for one in found.ranks if one.device})) or "-"),
        *(
            (
                "model",
                f"{one.name} {one.kind}, {count(one.num_parameters)} parameters in "
                f"{plural(len(one.units), 'unit')}".strip(),
            )
            for one in found.models
        ),
        *sorted(found.versions.items()),
        *sorted(found.environment.items()),
    ]
    begun = max((one.num_begins for one in found.ranks), default=1)
    if begun > 1:
        rows.insert(2, ("processes", f"{begun} after each other"))
    cells = [Cells(name, (value,)) for name, value in rows]
    table = html.table(["", ""], cells, caption=run.name, words=True)
    title = (
        f"Environment and versions of {run.name}" if len(runs) > 1 else "Environment and versions"
    )
    return html.fold(title, table)


def _hosts(hosts: Iterable[str]) -> str:
    """Each machine once, with its number of ranks."""
    counts: dict[str, int] = {}
    for host in hosts:
        counts[host] = counts.get(host, 0) + 1
    names = [f"{host} ({number})" if len(counts) > 1 else host for host, number in counts.items()]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
