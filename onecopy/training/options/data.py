"""What is trained on, and how it becomes sequences of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from onecopy.options import describe
from onecopy.training.options.group import OptionGroup, describe_of_run


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """The settings of `[data]`."""

    table = "data"
    title = "data"
    least: ClassVar[Mapping[str, float]] = {"context": 2}

    data: tuple[Path, ...] = field(
        default=(),
        metadata=describe(
            "UTF-8 text files, or folders of .txt files, to train on; without it, the reference "
            "texts that Python ships for its help() command",
            metavar="PATH",
        ),
    )
    context: int = field(
        default=96,
        metadata=describe_of_run("bytes of text that the model sees at once"),
    )
