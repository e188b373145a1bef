"""Whether a checkpoint is undamaged: every byte is read, and every part of every tensor is there.

onecopy's own checkpoints have a checksum of each item. In those of other programs an item that
torch.save has written is an archive with a checksum of each of its members, which torch.load does
not look at; it is compared here.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from onecopy.checkpoint.boxes import overlapping
from onecopy.checkpoint.deepspeed import DeepSpeedReader
from onecopy.checkpoint.disk import open_file
from onecopy.checkpoint.files import Reader
from onecopy.checkpoint.folder import LATEST, find_step, steps_in
from onecopy.checkpoint.manifest import MANIFEST, Manifest, checksum
from onecopy.checkpoint.source import open_source
from onecopy.errors import CheckpointError

__all__ = ["Problem", "Verification", "verify"]

BLOCK_BYTES = 1 << 20
Progress = Callable[[int, int, str], None]
# Where an item lies: file, first byte, number of bytes.
Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with an item of a file, or with all of the file if `item` is empty."""

    file: str
    item: str
    what: str

    def __str__(self) -> str:
        return ": ".join(one for one in (self.file, self.item, self.what) if one)


@dataclass(slots=True)
class Verification:
    """What was found in one checkpoint.

    checked: what was compared, in words. problems: none if all is well.
    """

    path: Path
    checked: str = ""
    num_items: int = 0
    num_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    def add(self, file: str, item: str, what: str) -> None:
        """Something is wrong."""
        self.problems.append(Problem(file, item, what))


def verify(
    path: str | os.PathLike[str], *, every: bool = False, progress: Progress | None = None
) -> list[Verification]:
    """Read a checkpoint and compare every checksum. Nothing is raised for what is damaged.

    Args:
        path: as for `onecopy.load`.
        every: of a run, all complete checkpoints and not just the one that would be loaded.
        progress: told the bytes read, the bytes in all and the item that comes next.

    Returns:
        one entry for each checkpoint.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    told = progress or (lambda *_: None)
    given = Path(path).expanduser()
    folders = steps_in(given) if every else []
    found = [_verify(folder, told) for folder in folders or [given]]
    first = find_step(given)
    if folders and first not in folders:
        missing = Verification(first)
        missing.add(LATEST, "", "names this checkpoint, which is not there")
        found.append(missing)
    return found


def _verify(path: Path, progress: Progress) -> Verification:
    found = Verification(find_step(path))
    try:
        source = open_source(found.path)
    except CheckpointError as error:
        if not (found.path / MANIFEST).is_file():
            # Not a damaged checkpoint: none.
            raise
        found.add(MANIFEST, "", str(error))
        return found
    names: dict[Place, str] = {}
    try:
        _check_chunks(source.metadata, found)
        if isinstance(source.reader, Reader):
            names = _names_of_items(source.reader, source.metadata, found)
    except CheckpointError as error:
        found.add("", "", str(error))
        if source.manifest is None:
            return found
    if isinstance(source.reader, DeepSpeedReader):
        _compare_files(source.reader, found, progress)
    elif source.manifest is not None:
        _compare_checksums(source.path, source.manifest, names, found, progress)
    else:
        _compare_archives(source.path, names, found, progress)
    return found


# Checksums ------------------------------------------------------------------------------------


def _compare_checksums(
    folder: Path,
    manifest: Manifest,
    names: dict[Place, str],
    found: Verification,
    progress: Progress,
) -> None:
    found.checked = "all checksums, and that no part of a tensor is missing"
    known = {
        (name, offset, length): expected
        for name, file in manifest.files.items()
        for offset, length, expected in file.items
    }
    for place, item in names.items():
        if place not in known:
            found.add(place[0], item, f"{MANIFEST} has no checksum of it")
    for name, file in manifest.files.items():
        path = folder / name
        if path.is_file() and path.stat().st_size != file.num_bytes:
            found.add(name, "", f"has {path.stat().st_size} bytes, not {file.num_bytes}")
    items = {place: names.get(place, "") for place in known}
    _check_items(folder, items, found, progress, lambda place, data: _check_sum(data, known[place]))


def _names_of_items(reader: Reader, metadata: Metadata, found: Verification) -> dict[Place, str]:
    """What lies where; a tied tensor under its first name."""
    names: dict[Place, str] = {}
    for index in metadata.storage_data:
        try:
            info = reader.place_of(index)
        except CheckpointError as error:
            found.add("", _name_of(index), str(error))
            continue
        names.setdefault((info.relative_path, info.offset, info.length), _name_of(index))
    return names


def _name_of(index: MetadataIndex) -> str:
    return index.fqn + (f" from {list(index.offset)}" if index.offset else "")


def _check_sum(data: io.RawIOBase, expected: int) -> str:
    found = 0
    while block := data.read(BLOCK_BYTES):
        found = checksum(block, found)
    return "" if found == expected else "its checksum is not the one that was saved: it is damaged"


# Archives -------------------------------------------------------------------------------------


def _compare_archives(
    folder: Path, names: dict[Place, str], found: Verification, progress: Progress
) -> None:
    found.checked = "the checksums that torch.save makes, and that no part of a tensor is missing"
    unchecked: list[str] = []

    def check(place: Place, data: io.RawIOBase) -> str:
        return _check_archive(data, names[place], unchecked)

    _check_items(folder, names, found, progress, check)
    if unchecked:
        found.checked += (
            f". {len(unchecked)} items without a checksum were only found to be there, "
            f"{unchecked[0]} for one"
        )


def _check_archive(data: io.RawIOBase, name: str, unchecked: list[str]) -> str:
    try:
        with zipfile.ZipFile(data) as archive:
            bad = archive.testzip()
    except zipfile.BadZipFile as error:
        data.seek(0)
        if data.read(4) != b"PK\x03\x04":
            unchecked.append(name)
            return ""
        return f"it is damaged ({error})"
    if bad is None:
        return ""
    return (
        f"the checksum of its {bad} is wrong: it is damaged (or was saved after "
        "torch.serialization.set_crc32_options(False))"
    )


# Files ----------------------------------------------------------------------------------------


def _check_items(
    folder: Path,
    names: dict[Place, str],
    found: Verification,
    progress: Progress,
    check: Callable[[Place, io.RawIOBase], str],
) -> None:
    """Look at each item, file by file from front to back; `check` says what is wrong with one."""
    by_file: dict[str, list[Place]] = defaultdict(list)
    for place in sorted(names):
        by_file[place[0]].append(place)
    total = sum(place[2] for place in names)
    for name, places in by_file.items():
        path = folder / name
        try:
            file, length = open_file(path)
            with file:
                for place in places:
                    progress(found.num_bytes, total, names[place])
                    found.num_items += 1
                    found.num_bytes += place[2]
                    if place[1] + place[2] > length:
                        found.add(name, names[place], f"the file ends before it, at byte {length}")
                    elif fault := check(place, _Part(file, *place[1:])):
                        found.add(name, names[place], fault)
        except (OSError, CheckpointError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            found.add(name, "", f"{reason}, with {len(places)} items in it")
    progress(found.num_bytes, total, "")


class _Part(io.RawIOBase):
    """A part of a file as a file of its own, for reading."""

    def __init__(self, file: Any, first: int, length: int) -> None:
        self._file = file
        self._first = first
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._position))]
        self._file.seek(self._first + self._position)
        num_bytes: int = self._file.readinto(view)
        self._position += num_bytes
        return num_bytes


# Completeness ---------------------------------------------------------------------------------


def _check_chunks(metadata: Metadata, found: Verification) -> None:
    """The stored parts of each tensor cover it, each element once, and are said to be somewhere."""
    places = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if places and MetadataIndex(key) not in places:
                found.add("", key, "the metadata does not say where it is")
            continue
        if fault := _fault_of_chunks(entry):
            found.add("", key, fault)
        for chunk in entry.chunks:
            index = MetadataIndex(key, chunk.offsets)
            if places and index not in places:
                found.add("", _name_of(index), "the metadata does not say where it is")


def _fault_of_chunks(entry: TensorStorageMetadata) -> str:
    for chunk in entry.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            return f"a part of it has another number of dimensions than {list(entry.size)}"
        ends = [start + count for start, count in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > length for end, length in zip(ends, entry.size, strict=True)):
            return f"a part of it ends at {ends}, outside of its shape {list(entry.size)}"
    stored = sum(chunk.sizes.numel() for chunk in entry.chunks)
    if stored < entry.size.numel():
        return f"only {stored} of its {entry.size.numel()} elements are stored"
    overlap = next(overlapping(entry.chunks), None)
    if overlap is not None:
        first, second = overlap
        return f"the parts from {list(first.offsets)} and {list(second.offsets)} overlap"
    return ""


# Other formats --------------------------------------------------------------------------------


def _compare_files(reader: DeepSpeedReader, found: Verification, progress: Progress) -> None:
    """Files that torch.save has written, each for all that a rank has."""
    found.checked = "the checksums that torch.save makes, and that the files of all ranks fit"
    sizes = {path: path.stat().st_size for path in reader.files}
    for path, num_bytes in sizes.items():
        progress(found.num_bytes, sum(sizes.values()), path.name)
        found.num_items += 1
        found.num_bytes += num_bytes
        try:
            reader.check(path)
            with path.open("rb", buffering=0) as file:
                fault = _check_archive(file, path.name, [])
        except CheckpointError as error:
            fault = str(error)
        except OSError as error:
            fault = error.strerror or str(error)
        if fault:
            found.add(path.name, "", fault)
    progress(found.num_bytes, found.num_bytes, "")
