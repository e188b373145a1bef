"""Tensors in safetensors files: where each lies, reading any part of it, writing one by one.

A file is eight bytes, the length of the header (little endian); the header, JSON that gives each
tensor's dtype, shape and place; and the values, row by row, one tensor after the other. So a rank
that owns a part of a tensor reads the bytes of this part and no others. And who knows names, dtypes
and shapes writes the header first and then one tensor after the other, while the library of the
format wants to be given all tensors of a file at once.

Source: the format of safetensors (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from onecopy.errors import CheckpointError

__all__ = ["DTYPES", "FileWriter", "StoredTensor", "TensorSpec", "open_directory"]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Elements that are read and converted at a time.
BLOCK_NUMEL = 1 << 22
LENGTH_BYTES = 8
# The library refuses longer ones.
MAX_HEADER_BYTES = 100_000_000
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file.

    first_byte: where its values begin, from the beginning of the file.
    row_stride: elements from one row's beginning to the next one's, where it is a part of a matrix
        with wider rows; None where its elements lie side by side.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_byte: int
    row_stride: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def part(self, dim: int, first: int, count: int) -> StoredTensor:
        """Some of its rows, or of a matrix's columns, as a tensor of their own."""
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :])
        row_stride = self.row_stride
        if dim:
            assert len(shape) == 2, f"{self.name} has shape {self.shape}, and is no matrix"
            row_stride = row_stride or self.shape[1]
            first_element = first
        else:
            first_element = first * (row_stride or math.prod(self.shape[1:]))
        first_byte = self.first_byte + first_element * self.dtype.itemsize
        return replace(self, shape=shape, first_byte=first_byte, row_stride=row_stride)

    def _runs(self, target: torch.Tensor, offset: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The parts of `target` that lie side by side in the file, and the first byte of each."""
        start, itemsize = 0, self.dtype.itemsize
        while start < target.numel():
            place, count = offset + start, min(target.numel() - start, BLOCK_NUMEL)
            if self.row_stride is not None:
                row, column = divmod(place, self.shape[1])
                place = row * self.row_stride + column
                count = min(count, self.shape[1] - column)
            yield self.first_byte + place * itemsize, target[start : start + count]
            start += count

    def read_part(self, target: torch.Tensor, offset: int) -> int:
        """Fill a 1-D tensor with the elements from `offset` on, in the target's dtype.

        Returns the number of bytes that were read.

        Raises:
            CheckpointError: the file cannot be read, or ends too early.
        """
        itemsize = self.dtype.itemsize
        buffer = bytearray(min(target.numel(), BLOCK_NUMEL) * itemsize)
        try:
            with self.path.open("rb", buffering=0) as file:
                for first_byte, block in self._runs(target, offset):
                    file.seek(first_byte)
                    values = memoryview(buffer)[: block.numel() * itemsize]
                    _fill(file, values, self)
                    block.copy_(torch.frombuffer(values, dtype=torch.uint8).view(self.dtype))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return target.numel() * itemsize

    def read(self, target: torch.Tensor) -> int:
        """Fill a tensor of this shape, whatever its dtype and strides; returns the bytes read."""
        if target.is_contiguous():
            return self.read_part(target.view(-1), 0)
        rows = torch.empty(self.shape, dtype=target.dtype, device=target.device)
        num_bytes = self.read(rows)
        target.copy_(rows)
        return num_bytes


def open_directory(directory: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a directory as Hugging Face saves it, by name; their values stay in the files.

    Args:
        directory: with one .safetensors file, or several and their index; or one such file.

    Raises:
        CheckpointError: nothing is there, a file is missing, damaged or too short.
    """
    stored: dict[str, StoredTensor] = {}
    for path, names in _files(Path(directory)):
        found = {tensor.name: tensor for tensor in _read_header(path)}
        absent = [name for name in names or () if name not in found]
        if absent:
            raise CheckpointError(
                f"{path} does not contain {absent[0]}, which the index places there: the files of "
                "this directory belong to different models, or were not copied completely"
            )
        stored |= {name: found[name] for name in names or found}
    return stored


def _files(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The files, and the names that each must contain; None for all that it does."""
    if path.is_file():
        yield path, None
        return
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist. Give a directory on this machine that holds .safetensors "
            "files; huggingface_hub.snapshot_download brings one from the hub"
        )
    indices = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if not indices and len(files) == 1:
        yield files[0], None
        return
    if len(indices) != 1:
        others = ", ".join(one.name for one in sorted(path.iterdir())[:5]) or "nothing"
        raise CheckpointError(
            f"{path} must hold one .safetensors file, or several with one "
            f"model.safetensors.index.json. It holds {len(files)} and {len(indices)} of these "
            f"(there are {others}). Save with model.save_pretrained(directory), or pass one file"
        )
    for name, names in _read_index(indices[0]).items():
        if not (path / name).is_file():
            raise CheckpointError(
                f"{path / name} does not exist, but {indices[0].name} places {names[0]} and "
                f"{len(names) - 1} other tensors there: copy the directory completely"
            )
        yield path / name, names


def _read_index(path: Path) -> dict[str, list[str]]:
    """The names of the tensors in each file."""
    files: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(path.read_text())["weight_map"].items():
            files.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error!r})") from error
    return files


def _read_header(path: Path) -> Iterator[StoredTensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ends = [LENGTH_BYTES + length]
        for name, entry in header.items():
            tensor, end = _tensor(path, name, entry, LENGTH_BYTES + length)
            ends.append(end)
            yield tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or its header is damaged ({error})"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if size < max(ends):
        raise CheckpointError(
            f"{path} is cut off: it has {size} bytes, and its header promises {max(ends)}. Copy or "
            "download it again"
        )


def _tensor(path: Path, name: str, entry: dict[str, Any], values: int) -> tuple[StoredTensor, int]:
    """One tensor of a header, and where it ends in the file."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has dtype {entry['dtype']}, which torch cannot convert")
    dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    first, end = entry["data_offsets"]
    if end - first != math.prod(shape) * dtype.itemsize or first < 0:
        raise ValueError(f"{name} of shape {shape} does not fit bytes {first} to {end}")
    return StoredTensor(name, path, dtype, shape, values + first), values + end


def _fill(file: Any, values: memoryview, tensor: StoredTensor) -> None:
    """Read until `values` is full: the system may give less at a time."""
    position = 0
    while position < len(values):
        count = file.readinto(values[position:])
        if not count:
            raise CheckpointError(
                f"{tensor.path} ends within {tensor.name}: it has changed since it was opened"
            )
        position += count


# Writing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the header of a file says about one tensor.

    Raises:
        CheckpointError: there is no such dtype in these files.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in NAMES_OF_DTYPES:
            raise CheckpointError(
                f"{self.name} has dtype {self.dtype}, which safetensors files cannot hold: "
                "convert it, or leave it out of the model"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileWriter:
    """One file whose tensors are given one by one, in the order of `tensors`.

    A value is converted and written in blocks, so that no second copy of it exists. A file that is
    there already is never written to.

    Args:
        tensors: what the file will hold; those with larger elements first, so that each begins
            where its dtype may.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec]) -> None:
        self.path = path
        self.tensors = tensors
        sizes = [tensor.dtype.itemsize for tensor in tensors]
        assert sizes == sorted(sizes, reverse=True), "larger elements come first"
        self._waiting = iter(self.tensors)
        self._file = path.open("xb")
        self._file.write(_header(self.tensors))

    def write(self, value: torch.Tensor) -> TensorSpec:
        """Write the values of the next tensor, in its dtype; returns which it was.

        Raises:
            CheckpointError: the dtype cannot hold them.
            OSError: the file cannot be written.
        """
        tensor = next(self._waiting)
        if tuple(value.shape) != tensor.shape:
            raise CheckpointError(
                f"{tensor.name} has shape {tuple(value.shape)}, not {tensor.shape} as announced"
            )
        for block in value.detach().reshape(-1).split(BLOCK_NUMEL):
            if block.numel():
                _check_range(tensor, block)
                converted = block.to("cpu").to(tensor.dtype)
                self._file.write(memoryview(converted.contiguous().view(torch.uint8).numpy()))
        return tensor

    def finish(self) -> None:
        """All is written: see that it is on the disk, and close the file."""
        left = next(self._waiting, None)
        assert left is None, f"{left} of {self.path} has not been written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Close and remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _header(tensors: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": NAMES_OF_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Values begin at a multiple of the largest element.
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _check_range(tensor: TensorSpec, block: torch.Tensor) -> None:
    """Refuse finite values that a narrower dtype would make infinite, or its largest number."""
    if not (tensor.dtype.is_floating_point and block.is_floating_point()):
        return
    info = torch.finfo(tensor.dtype)
    if info.max >= torch.finfo(block.dtype).max:
        return
    # Half of the last place above the largest number: from there on, nothing rounds to it.
    limit = info.max + math.ldexp(info.eps, math.frexp(info.max)[1] - 1) / 2
    low, high = torch.aminmax(block)
    if -limit < low and high < limit:
        return
    # Something is too large, infinite, or no number; only the first is lost.
    lost = block.isfinite() & (block.abs() >= limit)
    if lost.any():
        raise CheckpointError(
            f"{tensor.name} has values up to {block[lost].abs().max().item():.3g}, and "
            f"{tensor.dtype} ends at {info.max:.3g}: choose a dtype of wider range, bf16 for one"
        )
