"""A checkpoint to read from, whoever wrote it: a storage reader, its metadata, its manifest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from onecopy.checkpoint.disk import read_file
from onecopy.checkpoint.files import METADATA, Reader
from onecopy.checkpoint.folder import find_step
from onecopy.checkpoint.manifest import MANIFEST, Manifest
from onecopy.errors import CheckpointError

__all__ = ["Source", "open_source"]


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
        return self.reader.read_metadata()


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint.

    Args:
        path: the folder of one checkpoint (of onecopy, of torch.distributed.checkpoint or of
            DeepSpeed), or a root with several, of which `latest` names one.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = find_step(Path(path))
    manifest_path = folder / MANIFEST
    if manifest_path.is_file():
        manifest = Manifest.from_bytes(manifest_path, read_file(manifest_path))
        return Source(folder, Reader(folder, manifest), manifest)
    if (folder / METADATA).is_file():
        return Source(folder, Reader(folder), None)
    raise CheckpointError(
        f"{folder} is no checkpoint: it has neither {MANIFEST} nor {METADATA}. Give the folder of "
        "one checkpoint, or the root that was given to onecopy.save"
    )
