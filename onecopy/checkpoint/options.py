"""The options of `onecopy checkpoint`: records from which the command line and its help are made.

Free of torch, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from onecopy.options import bytes_of, describe

__all__ = ["ExportOptions", "InspectOptions", "VerifyOptions"]

FOLDER = (
    "a checkpoint (of onecopy, of torch.distributed.checkpoint or of DeepSpeed), or the folder of "
    "a run, whose last good checkpoint is meant"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """What `onecopy checkpoint inspect` can be told."""

    folder: Path = field(metadata=describe(FOLDER, metavar="DIR"))
    json: bool = field(default=False, metadata=describe("print JSON instead of tables"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What `onecopy checkpoint export` can be told. Raises ConfigError for what is no size."""

    folder: Path = field(metadata=describe(FOLDER, metavar="DIR"))
    output: Path = field(
        metadata=describe(
            "where the files go; made if need be, and without other safetensors files",
            metavar="OUT",
        )
    )
    dtype: str | None = field(
        default=None,
        metadata=describe(
            "convert fp64, fp32, bf16 and fp16 tensors to this floating-point dtype, bf16 for "
            "example; none writes what is stored",
            metavar="DTYPE",
        ),
    )
    max_shard_size: str = field(
        default="5GB",
        metadata=describe("a file ends before it would become larger than this", metavar="SIZE"),
    )
    model: str | None = field(
        default=None,
        metadata=describe("which one, where the checkpoint holds several models", metavar="NAME"),
    )

    def __post_init__(self) -> None:
        bytes_of(self.max_shard_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `onecopy checkpoint verify` can be told."""

    folder: Path = field(metadata=describe(FOLDER, metavar="DIR"))
    all: bool = field(
        default=False, metadata=describe("read every checkpoint of the run, not just the last")
    )
