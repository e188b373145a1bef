"""`onecopy report`: runs are read, the page is written, and what it says first is printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from onecopy.errors import ConfigError
from onecopy.report.html import printable
from onecopy.report.options import ReportOptions
from onecopy.report.page import report_page
from onecopy.report.run_folder import read_run
from onecopy.report.summary import Summary, summarise
from onecopy.report.trace import TRACE_FILE
from onecopy.report.verdict import advice, verdict

__all__ = ["report"]


def report(options: ReportOptions) -> None:
    """Write the page, and print verdicts and advice.

    Raises:
        RunError: a folder is none of a run, or is damaged.
        ConfigError: the page cannot be written.
    """
    runs = summarise([read_run(path) for path in options.runs])
    try:
        options.page.write_text(report_page(runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.page} cannot be written: {error.strerror}") from error
    console = Console()
    for run in runs:
        for line, style in _lines(run, with_name=len(runs) > 1):
            console.print(Text(printable(line), style=style), soft_wrap=True)
    console.print(Text(f"The page: {options.page}"), soft_wrap=True)
    for path in options.runs:
        if (trace := Path(path) / TRACE_FILE).exists():
            console.print(Text(f"The trace, for https://ui.perfetto.dev: {trace}"), soft_wrap=True)


def _lines(run: Summary, *, with_name: bool) -> Iterator[tuple[str, str]]:
    """Lines and their styles."""
    name = f"{run.name}: " if with_name else ""
    yield name + verdict(run), "bold"
    for sentence in advice(run):
        yield f"- {sentence}", ""
