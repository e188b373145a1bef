"""The options of `onecopy checkpoint`: records from which the command line and its help are made.

Free of torch, so that `--help` answers at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from onecopy.errors import ConfigError
from onecopy.options import describe

__all__ = ["ExportOptions", "InspectOptions", "VerifyOptions", "bytes_of"]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
FOLDER = (
    "a checkpoint (of onecopy, of torch.distributed.checkpoint or of DeepSpeed), or the folder of "
    "a run, whose last good checkpoint is meant"
)


def bytes_of(text: str) -> int:
    """A size for people in bytes: 5GB, 500MB, 2GiB, 1000000.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    unit = (UNITS | BINARY_UNITS).get(found.group(2)) if found else None
    if found is None or unit is None or float(found.group(1)) * unit < 1:
        raise ConfigError(f"{text!r} is no size: say 5GB, 500MB or 2GiB, for example")
    return int(float(found.group(1)) * unit)


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
