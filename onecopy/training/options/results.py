"""What a run shows, measures and leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from onecopy.errors import ConfigError
from onecopy.options import describe
from onecopy.training.options.group import OptionGroup

TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True, kw_only=True)
class ResultOptions(OptionGroup):
    """The settings of `[run]`."""

    table = "run"
    title = "evaluation, checkpoints and results"
    least: ClassVar[Mapping[str, float]] = {
        "evals": 1,
        "eval_every": 0,
        "sample": 0,
        "trace": 0,
        "save_every": 1,
        "keep": 1,
    }

    evals: int = field(
        default=5, metadata=describe("times the held-out loss is measured during training")
    )
    eval_every: int = field(
        default=0,
        metadata=describe(
            "measure it whenever so many steps are done, and at the end; 0: see --evals",
            metavar="STEPS",
        ),
    )
    sample: int = field(
        default=200, metadata=describe("tokens of text to write at the end; 0 writes none")
    )
    prompt: tuple[str, ...] = field(
        default=("The ",),
        metadata=describe("how the text that is written begins; several, several", metavar="TEXT"),
    )
    quiet: bool = field(default=False, metadata=describe("show only the results, no progress"))
    checkpoint: Path | None = field(
        default=None,
        metadata=describe(
            "folder for checkpoints, on storage that all processes share; a run that finds its own "
            "there goes on from the latest good one, on any number of processes",
            metavar="DIR",
        ),
    )
    save_every: int = field(
        default=50,
        metadata=describe(
            "steps between checkpoints; the last step is always saved", metavar="STEPS"
        ),
    )
    keep: int = field(
        default=2,
        metadata=describe(
            "checkpoints to keep; with one, there is none to fall back on", metavar="N"
        ),
    )
    save_model: Path | None = field(
        default=None,
        metadata=describe(
            "at the end, write the model there as safetensors files, with its tokenizer, for "
            "from_pretrained",
            metavar="DIR",
        ),
    )
    record: Path | None = field(
        default=None,
        metadata=describe(
            "record the run in this folder, a new one: where time, bytes and memory go, and the "
            "losses; `onecopy report DIR` makes a page of it. A run that is resumed goes on in its "
            "folder",
            metavar="DIR",
        ),
    )
    track: str | None = field(
        default=None,
        metadata=describe(
            "with --record: show the numbers of each step in this tracker too", choices=TRACKERS
        ),
    )
    trace: int = field(
        default=0,
        metadata=describe(
            "with --record: look closely at so many steps, from the second on, and write them as "
            "DIR/trace.json, a trace of all ranks to open at https://ui.perfetto.dev",
            metavar="N",
        ),
    )
    dry_run: bool = field(
        default=False,
        metadata={
            **describe(
                "train nothing: show the settings and where each came from, what each rank would "
                "hold and send, and whether it fits"
            ),
            "in_file": False,
        },
    )

    def check(self) -> None:
        """Raises ConfigError for settings that need or exclude one another."""
        if self.record is not None and self.record == self.checkpoint:
            raise ConfigError(
                f"--record and --checkpoint are both {self.record}: give two folders."
            )
        for name in ("trace", "track"):
            if getattr(self, name) and self.record is None:
                raise ConfigError(
                    f"--{name} is {getattr(self, name)} without --record DIR: say where the run "
                    "is to be."
                )
