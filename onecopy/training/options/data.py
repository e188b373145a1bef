"""What is trained on, and how it becomes sequences of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from onecopy.errors import ConfigError
from onecopy.options import describe
from onecopy.training.options.group import OptionGroup, describe_of_run

BYTES = "bytes"
WINDOWS, DOCUMENTS = "windows", "documents"
ALL, COMPLETIONS = "all", "completions"


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """The settings of `[data]`."""

    table = "data"
    title = "data"
    # All bytes, and a token that ends documents.
    least: ClassVar[Mapping[str, float]] = {"context": 2, "train_tokenizer": 257}

    data: tuple[Path, ...] = field(
        default=(),
        metadata=describe(
            "what to train on: UTF-8 text, JSON lines (.jsonl, .json, .gz), Parquet or Arrow "
            "files, folders of them, or a folder saved by the package datasets; without it, the "
            "reference texts that Python ships for its help() command",
            metavar="PATH",
        ),
    )
    eval_data: tuple[Path, ...] = field(
        default=(),
        metadata=describe(
            "what to measure the held-out loss on, as for --data; without it, a share of --data",
            metavar="PATH",
        ),
    )
    held_out: float = field(
        default=0.05,
        metadata=describe(
            "without --eval-data: the share of --data that is not trained on; the end of each "
            "text file, and rows spread over the others",
            metavar="SHARE",
        ),
    )
    text_field: str = field(
        default="text",
        metadata=describe(
            "field of JSON lines and tables that holds the text, or a list of chat messages; a row "
            "without it is read as prompt and completion, or as messages",
            metavar="NAME",
        ),
    )
    loss_on: str = field(
        default=ALL,
        metadata=describe(
            "what the loss counts: all, or only completions and the assistant's messages",
            choices=(ALL, COMPLETIONS),
        ),
    )
    tokenizer: str | None = field(
        default=None,
        metadata=describe(
            "bytes, a folder with a tokenizer.json, or such a file; without it, that of the "
            "model's folder if it has one, else bytes",
            metavar="PATH",
        ),
    )
    train_tokenizer: int | None = field(
        default=None,
        metadata=describe_of_run(
            "train a tokenizer of so many tokens on --data: byte pair encoding", metavar="SIZE"
        ),
    )
    context: int = field(
        default=96,
        metadata=describe_of_run(
            "tokens that the model sees at once; a token is a byte unless there is a tokenizer"
        ),
    )
    packing: str = field(
        default=WINDOWS,
        metadata=describe_of_run(
            "how sequences are made: windows cut from all documents in a row, or documents, one "
            "each, filled up or cut off",
            choices=(WINDOWS, DOCUMENTS),
        ),
    )
    cache: Path | None = field(
        default=None,
        metadata=describe(
            "keep tokens in this folder, for later runs on the same data; without it, each run "
            "makes them in the system's temporary folder",
            metavar="DIR",
        ),
    )

    def check(self) -> None:
        """Raises ConfigError for settings that do not go together."""
        if not 0 < self.held_out < 1:
            raise ConfigError(
                f"--held-out is {self.held_out}: it is a share of the data, above 0 and below 1."
            )
        if self.train_tokenizer is not None and self.tokenizer is not None:
            raise ConfigError(
                f"--train-tokenizer {self.train_tokenizer} and --tokenizer {self.tokenizer} are "
                "two tokenizers: give one."
            )
