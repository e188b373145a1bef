"""A checkpoint to read from, whoever wrote it: a storage reader, its metadata, its manifest."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from onecopy.checkpoint.deepspeed import DeepSpeedReader, is_deepspeed
from onecopy.checkpoint.disk import REMEDIES, naming
from onecopy.checkpoint.files import METADATA, Reader
from onecopy.checkpoint.folder import LATEST, find_step
from onecopy.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from onecopy.checkpoint.plan import LoadRanges
from onecopy.checkpoint.ranges import Range
from onecopy.errors import CheckpointError

__all__ = ["Source", "open_source"]

# Keys that only onecopy writes, into each of its checkpoints.
OF_ONECOPY = "onecopy.rng."


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open for reading.

    path: its folder.
    reader: reads it through torch.distributed.checkpoint.
    manifest: what onecopy wrote beside it; None where another program has saved.
    """

    path: Path
    reader: StorageReader
    manifest: Manifest | None

    @cached_property
    def metadata(self) -> Metadata:
        """Names, shapes and places of what is stored. Raises CheckpointError if damaged."""
        found = self.reader.read_metadata()
        if self.manifest is None and any(
            key.startswith(OF_ONECOPY) for key in found.state_dict_metadata
        ):
            # Without it the step, the extras and the random states would be missed silently.
            raise CheckpointError(
                f"{self.path / MANIFEST} is missing, with the step and the checksums of this "
                f"checkpoint. {REMEDIES['read']}"
            )
        return found

    def read(self, ranges: Iterable[Range], keys: Iterable[str]) -> dict[str, bytes]:
        """Read tensors into the memory of `ranges`, in this process alone.

        Returns the bytes of the objects that have these keys.

        Raises:
            CheckpointError: something is not stored completely, or damaged.
        """
        planner = LoadRanges(ranges, keys, os.fspath(self.path))
        planner.set_up_planner({}, self.metadata)
        self.reader.read_data(planner.create_local_plan(), planner).wait()
        return planner.objects

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied weights, and the first ones, where it says. Raises as `run`."""
        if self.manifest is not None:
            return self.manifest.aliases
        return self.reader.aliases if isinstance(self.reader, DeepSpeedReader) else {}

    @cached_property
    def run(self) -> dict[str, Any]:
        """What another program says of its run; see DeepSpeedReader.run. Empty where it does not.

        Raises:
            CheckpointError: it is damaged.
        """
        return self.reader.run if isinstance(self.reader, DeepSpeedReader) else {}


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint.

    Args:
        path: the folder of one checkpoint (of onecopy, of torch.distributed.checkpoint or of
            DeepSpeed), or a root with several, of which `latest` names one.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    given = Path(path).expanduser()
    with naming("read", given):
        return _open(find_step(given))


def _open(folder: Path) -> Source:
    manifest = read_manifest(folder)
    if manifest is not None:
        return Source(folder, Reader(folder, manifest), manifest)
    if (folder / METADATA).is_file():
        return Source(folder, Reader(folder), None)
    if is_deepspeed(folder):
        return Source(folder, DeepSpeedReader(folder), None)
    latest = folder.parent / LATEST
    if not folder.exists() and latest.is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint: it is not there, though {latest} may name it. "
            f"{REMEDIES['read']}"
        )
    has = (
        f"it has no {MANIFEST}, {METADATA} or *_optim_states.pt"
        if folder.exists()
        else "it is not there"
    )
    raise CheckpointError(
        f"{folder} is no checkpoint: {has}. Give the folder of one checkpoint, or the root that "
        "was given to onecopy.save"
    )
