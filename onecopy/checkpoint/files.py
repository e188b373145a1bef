"""The files of a checkpoint: storage writer and reader of torch.distributed.checkpoint.

Each rank writes one file, `__<rank>_0.distcp`, its items one after another, as torch's own
FileSystemWriter does and its FileSystemReader reads. Here every item has a checksum as well, what
is written is flushed to the disk before it counts, and nothing that is read can run code.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from onecopy.checkpoint.disk import (
    REMEDIES,
    flush_folder,
    naming,
    open_file,
    read_file,
    write_file,
)
from onecopy.checkpoint.manifest import MANIFEST, FileItems, Manifest, checksum
from onecopy.checkpoint.stream import NewFile
from onecopy.checkpoint.unpickle import load_object, read_metadata
from onecopy.errors import CheckpointError
from onecopy.memory.torch_files import view_of_bytes

__all__ = ["METADATA", "Reader", "Writer", "file_of"]

METADATA = ".metadata"
DCP_VERSION = "1.0.0"
# What the system may have read beyond the item that is being checked and copied.
READ_AHEAD_BYTES = 1 << 27


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where an item lies, and its checksum; what a rank reports to the one that finishes."""

    info: _StorageInfo
    checksum: int


class Writer(StorageWriter):
    """Writes one checkpoint into an empty folder that all ranks see.

    Args:
        folder: where.
        manifest: what is saved; its files are filled in here.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def storage_meta(self) -> StorageMeta:
        """What names the checkpoint in its metadata."""
        return StorageMeta(checkpoint_id=self._folder.name)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Each rank learns the name of its file."""
        return [replace(plan, storage_data=file_of(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, one after another, and flush them.

        Raises:
            CheckpointError: the file cannot be written.
        """
        done: Future[list[WriteResult]] = Future()
        path = self._folder / plan.storage_data
        results = []
        if plan.items:
            with naming("written", path), _without_crc32(), NewFile(path) as file:
                for item in plan.items:
                    results.append(_write_item(file, planner.resolve_data(item), item, path.name))
                file.finish()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On one rank, when all have written: the metadata, and the manifest as the last file.

        Raises:
            CheckpointError: a file cannot be written.
        """
        storage: dict[MetadataIndex, _StorageInfo] = {}
        files: dict[str, FileItems] = {}
        for result in (one for of_rank in results for one in of_rank):
            stored: _Stored = result.storage_data
            storage[result.index] = stored.info
            name, offset, length = (
                stored.info.relative_path,
                stored.info.offset,
                stored.info.length,
            )
            items = files[name].items if name in files else []
            items.append((offset, length, stored.checksum))
            files[name] = FileItems(offset + length, items)
        for alias, name in self._manifest.aliases.items():
            # Tied weights are stored once and found under each of their names.
            found: Any = metadata.state_dict_metadata[name]
            metadata.state_dict_metadata[alias] = found
            for chunk in found.chunks:
                place = storage[MetadataIndex(name, chunk.offsets)]
                storage[MetadataIndex(alias, chunk.offsets)] = place
        metadata.storage_data = storage
        metadata.storage_meta = self.storage_meta()
        metadata.version = DCP_VERSION
        data = pickle.dumps(metadata)
        self._check_sizes(files)
        write_file(self._folder / METADATA, data)
        files[METADATA] = FileItems(len(data), [(0, len(data), checksum(data))])
        self._manifest = replace(self._manifest, files=files)
        write_file(self._folder / MANIFEST, self._manifest.to_bytes())
        flush_folder(self._folder)

    def _check_sizes(self, files: dict[str, FileItems]) -> None:
        """What other ranks have written is here, too.

        Raises:
            CheckpointError: a file is missing, or has another size.
        """
        for name, items in files.items():
            path = self._folder / name
            with naming("written", path):
                size = path.stat().st_size
            if size != items.num_bytes:
                raise CheckpointError(
                    f"{path} has {size} bytes, where a rank has written {items.num_bytes}: give a "
                    "folder on storage that shows all ranks the same"
                )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders only."""
        return "://" not in str(checkpoint_id)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.save makes no checksums: every item has one already, and one more pass is a third of
    the work. The setting is this thread's."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _write_item(file: NewFile, data: Any, item: Any, name: str) -> WriteResult:
    offset = file.tell()
    if isinstance(data, torch.Tensor):
        torch.save(data, file)  # type: ignore[arg-type]
    else:
        file.write(data.getbuffer())
    length = file.tell() - offset
    stored = _Stored(_StorageInfo(name, offset, length), file.take_checksum())
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=stored)


class Reader(StorageReader):
    """Reads a folder of a torch.distributed.checkpoint, whoever has written it.

    Args:
        folder: where.
        manifest: with it, each item's checksum is compared before the item is used.
        metadata: as it is in the folder if None.
    """

    def __init__(
        self, folder: Path, manifest: Manifest | None = None, metadata: Metadata | None = None
    ) -> None:
        self._folder = folder
        self._checksums = {
            (name, offset): item_checksum
            for name, file in (manifest.files if manifest else {}).items()
            for offset, _, item_checksum in file.items
        }
        self._metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, read without running anything of it.

        Raises:
            CheckpointError: it is missing, damaged, or names what it must not.
        """
        if self._metadata is None:
            path = self._folder / METADATA
            data = read_file(path)
            if self._checksums and checksum(data) != self._checksums.get((METADATA, 0)):
                raise _damaged(path, "the metadata")
            self._metadata = read_metadata(path, data)
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the places of the items from the metadata."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def place_of(self, index: MetadataIndex) -> _StorageInfo:
        """File, offset and length of a stored item.

        Raises:
            CheckpointError: the metadata does not say.
        """
        places = self.read_metadata().storage_data
        place = places.get(index) if isinstance(places, dict) else None
        if not isinstance(place, _StorageInfo):
            raise CheckpointError(f"{self._folder / METADATA} does not say where {index.fqn} is")
        if place.transform_descriptors:
            raise CheckpointError(
                f"{self._folder}: {index.fqn} was written through the extension "
                f"{place.transform_descriptors[0]!r} of torch.distributed.checkpoint, which "
                "onecopy does not read. Save again without extensions"
            )
        return place

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; each item once, file by file, from front to back.

        Raises:
            CheckpointError: a file is missing, cut off or damaged.
        """
        wanted: dict[tuple[str, int, int], list[ReadItem]] = {}
        for request in plan.items:
            place = self.place_of(request.storage_index)
            where = (place.relative_path, place.offset, place.length)
            wanted.setdefault(where, []).append(request)
        upcoming, num_bytes = deque(sorted(wanted)), 0
        with _OpenFile(self._folder) as file:
            for where in sorted(wanted):
                while upcoming and num_bytes < READ_AHEAD_BYTES:
                    num_bytes += upcoming[0][2]
                    file.announce(*upcoming.popleft())
                num_bytes -= where[2]
                name = wanted[where][0].storage_index.fqn
                data = self._read(file, where, name)
                self._deliver(f"{name} in {self._folder / where[0]}", data, wanted[where], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _deliver(
        self, what: str, data: memoryview, requests: list[ReadItem], planner: LoadPlanner
    ) -> None:
        """Give one item to those who asked for it, or for parts of it."""
        tensor: Any = None
        for request in requests:
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, io.BytesIO(data))
                continue
            if tensor is None:
                tensor = view_of_bytes(data)
                tensor = load_object(what, data) if tensor is None else tensor
            self._check_part(what, tensor, request.storage_index)
            part = tensor
            for dim, (start, size) in enumerate(
                zip(request.storage_offsets, request.lengths, strict=True)
            ):
                part = part.narrow(dim, start, size)
            target = planner.resolve_tensor(request)
            target.detach().copy_(part)
            planner.commit_tensor(request, target)

    def _check_part(self, what: str, tensor: Any, index: MetadataIndex) -> None:
        """A stored tensor is what the metadata says: copying would cast and broadcast others.

        Raises:
            CheckpointError: it is another.
        """
        entry: Any = self.read_metadata().state_dict_metadata[index.fqn]
        chunks = entry.chunks if index.index is None else [entry.chunks[index.index]]
        chunk = next((one for one in chunks if one.offsets == index.offset), None)
        said = f"{entry.properties.dtype} {list(chunk.sizes)}" if chunk else "something"
        found = type(tensor).__name__
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            kind = "" if tensor.layout is torch.strided else f", {tensor.layout}"
            kind += "" if tensor.device.type == "cpu" else f", {tensor.device}"
            found = f"{tensor.dtype} {list(tensor.shape)}{kind}"
        if found != said:
            raise CheckpointError(
                f"{what} is {found}, where {METADATA} says {said}: the checkpoint is damaged. "
                f"{REMEDIES['read']}"
            )

    def read_item(self, index: MetadataIndex) -> bytes:
        """The bytes of one item, compared with its checksum where there is one.

        Raises:
            CheckpointError: the file is missing, cut off or damaged.
        """
        place = self.place_of(index)
        with _OpenFile(self._folder) as file:
            where = (place.relative_path, place.offset, place.length)
            return bytes(self._read(file, where, index.fqn))

    def _read(self, file: _OpenFile, where: tuple[str, int, int], name: str) -> memoryview:
        data = file.read(*where, name)
        # Where there are checksums, what has none is not what was saved.
        if self._checksums and checksum(data) != self._checksums.get(where[:2]):
            raise _damaged(self._folder / where[0], name)
        return data

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders only."""
        return "://" not in str(checkpoint_id)


class _OpenFile:
    """One file of a folder at a time, and a buffer that is used again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name: str | None = None
        self._file: Any = None
        self._size = 0
        self._buffer = bytearray()

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def announce(self, name: str, offset: int, length: int) -> None:
        """The system may begin to read these bytes, while others are checked and copied."""
        if name == self._name and hasattr(os, "posix_fadvise"):
            with naming("read", self._folder / name):
                handle: int = self._file.fileno()
                os.posix_fadvise(handle, offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, name: str, offset: int, length: int, what: str) -> memoryview:
        """`length` bytes from `offset` on; valid until the next call.

        Raises:
            CheckpointError: the file is missing, cannot be read, or ends before.
        """
        path = self._folder / name
        with naming("read", path):
            if self._name != name:
                self.__exit__()
                self._file, self._size = open_file(path)
                self._name = name
            if offset + length > self._size:
                raise CheckpointError(
                    f"{path} is cut off: it has {self._size} bytes, and {what} should go to byte "
                    f"{offset + length}. {REMEDIES['read']}"
                )
            if len(self._buffer) < length:
                self._buffer = bytearray(length)
            view = memoryview(self._buffer)[:length]
            self._file.seek(offset)
            position = 0
            while position < length:
                count = self._file.readinto(view[position:])
                if not count:
                    raise CheckpointError(f"{path} has become shorter while it was read")
                position += count
        return view


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: the checksum of {what} is not the one that was saved. "
        f"{REMEDIES['read']}"
    )
