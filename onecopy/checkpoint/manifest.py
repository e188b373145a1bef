"""What onecopy writes beside the files of a torch.distributed.checkpoint: onecopy.json.

It is the last file to be written, so a folder that has a good one is complete. It knows what was
saved, and a checksum of every stored item, so that damage is found before it is trained on.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from onecopy.checkpoint.disk import read_file
from onecopy.errors import CheckpointError

__all__ = ["MANIFEST", "UNSAVED", "FileItems", "Manifest", "checksum", "merged", "read_manifest"]

MANIFEST = "onecopy.json"
T = TypeVar("T")

# Of a model: names of its parameters that `save(frozen=False)` has left out.
UNSAVED = "unsaved"
FORMAT = 1
CHECKSUM = "crc32"
_SEPARATOR = f',\n"{CHECKSUM}":'


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-32 of some bytes; `before` is that of the bytes in front of them."""
    return zlib.crc32(data, before)


@dataclass(frozen=True, slots=True)
class FileItems:
    """One file of a checkpoint.

    num_bytes: its size.
    items: (offset, length, checksum) of each stored item, without gaps.
    """

    num_bytes: int
    items: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What was saved, by whom, and how to tell that it is undamaged.

    step: number of optimizer steps.
    time: when, in seconds since 1970.
    models: by name ("" for one model) its stage, dtypes, loss scale and so on.
    optimizers: by name ("" for one) its class and number of steps.
    aliases: tied names: each further name of a parameter, and the first.
    configs: by the model's name the JSON text of its Hugging Face configuration, if it has one.
    extras: keys of the items that hold `extra`, one for all ranks or one for each.
    ranks: where a model was spread over more than the data group, the place of each rank in that
        one and in the model groups.
    """

    step: int
    time: float
    version: str
    torch_version: str
    world_size: int
    models: dict[str, dict[str, Any]]
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    configs: dict[str, dict[str, str]] = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)
    files: dict[str, FileItems] = field(default_factory=dict)
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """As the file holds it: JSON whose last entry is the checksum of all that is before."""
        # Not asdict, which copies every item.
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["files"] = {
            name: {"num_bytes": file.num_bytes, "items": file.items}
            for name, file in self.files.items()
        }
        text = json.dumps(values, separators=(",", ":"))[:-1].encode()
        return text + f"{_SEPARATOR}{checksum(text)}}}\n".encode()

    @classmethod
    def from_bytes(cls, path: Path, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointError: it is damaged, or was written by a newer version.
        """
        text, _, _ = data.rpartition(_SEPARATOR.encode())
        try:
            values = json.loads(data)
            if values.pop(CHECKSUM) != checksum(text):
                raise ValueError("its checksum is another")
            if values["format"] > FORMAT:
                raise CheckpointError(
                    f"{path} was written by onecopy {values['version']}, whose format this version "
                    "does not know: update onecopy"
                )
            values["files"] = {
                name: FileItems(one["num_bytes"], [tuple(item) for item in one["items"]])
                for name, one in values["files"].items()
            }
            manifest = cls(**values)
            manifest._check()
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: {error}. Load another checkpoint of this run; "
                "load(..., fallback=True) looks for the last good one"
            ) from error

    def _check(self) -> None:
        """What others rely on without looking.

        Raises:
            TypeError, ValueError: an entry has another type, or a name leads out of the folder.
        """
        kinds: dict[type, list[Any]] = {
            int: [self.step, self.world_size, self.format],
            str: [self.version, self.torch_version, *self.extras, *self.aliases.values()],
            dict: [*self.models.values(), *self.optimizers.values(), *self.configs.values()],
            list: [self.extras, self.ranks, *self.ranks],
        }
        for kind, values in kinds.items():
            for value in values:
                if type(value) is not kind:
                    raise TypeError(f"{value!r} is no {kind.__name__}")
        for name in (*self.files, *(file for texts in self.configs.values() for file in texts)):
            if Path(name).name != name or name == "..":
                raise ValueError(f"{name!r} is no name of a file")


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """One of what the first ranks of all data groups say, each of its own part of the models."""
    first = manifests[0]
    models: dict[str, dict[str, Any]] = {}
    for name, theirs in ((n, one) for each in manifests for n, one in each.models.items()):
        found = models.setdefault(name, theirs)
        if found is not theirs:
            models[name] = {**theirs, **found, **_added(found, theirs)}
    return replace(
        first,
        models=models,
        optimizers=_first_of_each([one.optimizers for one in manifests]),
        aliases=_first_of_each([one.aliases for one in manifests]),
        configs=_first_of_each([one.configs for one in manifests]),
    )


def _added(found: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Numbers of parameters, and lists, of two parts of a model."""
    values: dict[str, Any] = {"num_parameters": found["num_parameters"] + theirs["num_parameters"]}
    for key, value in found.items():
        if isinstance(value, list):
            values[key] = list(dict.fromkeys([*value, *theirs[key]]))
    return values


def _first_of_each(dicts: Sequence[dict[str, T]]) -> dict[str, T]:
    return {key: value for one in reversed(dicts) for key, value in one.items()}


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where there is none.

    Raises:
        CheckpointError: it cannot be read; see `Manifest.from_bytes`.
    """
    path = folder / MANIFEST
    return Manifest.from_bytes(path, read_file(path)) if path.is_file() else None
