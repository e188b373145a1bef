"""The options of `onecopy report`. Free of torch, so that `--help` answers at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from onecopy.options import describe

__all__ = ["ReportOptions"]

PAGE = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What `onecopy report` can be told."""

    runs: tuple[Path, ...] = field(
        metadata=describe("folders of runs; several are shown beside each other", metavar="RUN")
    )
    output: Path | None = field(
        default=None,
        metadata=describe(
            "the page; without it report.html in the run's folder, or in the folder around several",
            metavar="FILE",
        ),
    )

    def __post_init__(self) -> None:
        # A page of several lies beside them: a shell finds it among runs/* the next time.
        folders = tuple(run for run in self.runs if run.name != PAGE or run.is_dir())
        object.__setattr__(self, "runs", folders or self.runs)

    @property
    def page(self) -> Path:
        """Where the page goes."""
        if self.output is not None:
            return self.output
        whole = [run.resolve() for run in self.runs]
        if len(set(whole)) == 1:
            return self.runs[0] / PAGE
        return Path(os.path.commonpath([run.parent for run in whole])) / PAGE
