"""Files of torch.save, read without torch.load: plain values, and where each tensor lies.

A file is an uncompressed zip archive: `data.pkl`, a pickle of the saved object in which storages
are persistent ids, and `data/<key>`, the bytes of each storage. A pickle may name any function to
be called. The unpickler here imports nothing and calls nothing but what this file defines: tensors
become `TensorInFile`, whose values stay in the file; what is no plain data becomes an `Inert`.

Source: torch.serialization (https://docs.pytorch.org/docs/stable/notes/serialization.html).
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import stat
import struct
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar

import torch

from onecopy.errors import CheckpointError
from onecopy.memory.tensor_files import StoredTensor

__all__ = [
    "Inert",
    "TensorInFile",
    "check_archive",
    "read_torch_file",
    "row_major",
    "view_of_bytes",
]

# Elements between the first and the last of a part that is scattered over its storage.
SPAN_NUMEL = 1 << 22
# A file's own header in a zip archive, and where in it the lengths of two names behind it are.
HEADER = struct.Struct("<4s22xHH")
# The end of an archive, and where in it the length of a comment behind it is.
END = struct.Struct("<20xH")
MAX_COMMENT_BYTES = (1 << 16) - 1

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_NUMBERS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b"}
_NUMBERS |= {"u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


# What pickles can get hold of has no slots: Python 3.11.2 gives frozen dataclasses with slots a
# __setstate__ of its own, which sets what it is given, in the place of the one below.
@dataclass(frozen=True)
class TensorInFile:
    """A tensor of a torch file: a window on a storage.

    storage: all of it, 1-D. first: the window's first element in it. strides: in elements.
    """

    storage: StoredTensor
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a tensor's place")

    @property
    def dtype(self) -> torch.dtype:
        """Of the values in the file."""
        return self.storage.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another, row by row."""
        return all(
            size == 1 or stride == expected
            for size, stride, expected in zip(
                self.shape, self.strides, row_major(self.shape), strict=True
            )
        )

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> TensorInFile:
        """A box of this tensor."""
        return TensorInFile(
            self.storage, self.first + _dot(offsets, self.strides), tuple(sizes), self.strides
        )

    def read(self, target: torch.Tensor) -> None:
        """Fill a tensor of this shape, whatever its dtype, strides and device.

        Elements that lie apart are read with what is between them, as far as a small buffer holds
        both.

        Raises:
            CheckpointError: the file cannot be read, or ends too early.
        """
        if not self.numel:
            return
        if self.is_contiguous and target.is_contiguous():
            self.storage.read_part(target.view(-1), self.first)
            return
        span = 1 + _dot([size - 1 for size in self.shape], self.strides)
        if span <= SPAN_NUMEL:
            values = torch.empty(span, dtype=self.dtype)
            self.storage.read_part(values, self.first)
            target.copy_(values.as_strided(self.shape, self.strides))
            return
        widest = max(range(target.dim()), key=lambda dim: (self.shape[dim] - 1) * self.strides[dim])
        middle = self.shape[widest] // 2
        for start, stop in ((0, middle), (middle, self.shape[widest])):
            offsets = [start if dim == widest else 0 for dim in range(target.dim())]
            sizes = [stop - start if dim == widest else n for dim, n in enumerate(self.shape)]
            self.part(offsets, sizes).read(target.narrow(widest, start, stop - start))


class Inert:
    """What a pickle makes of anything but plain data: it remembers, and does nothing.

    kind: full name of the class or function. arguments: what it was to be called with.
    state: what it was to be filled with, a dict of attributes as a rule.
    """

    __slots__ = ("arguments", "state")
    kind: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """As a kind of dict it would get items."""

    def append(self, item: Any) -> None:
        """As a kind of list it would get items."""

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def check_archive(path: Path) -> None:
    """See that a file is there and complete, from its end alone.

    Raises:
        CheckpointError: it is not.
    """
    _refuse_what_is_no_file(path)
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - END.size - MAX_COMMENT_BYTES))
        last = file.read()
    begin = last.rfind(b"PK\x05\x06")
    if begin >= 0 and begin + END.size <= len(last):
        (comment,) = END.unpack_from(last, begin)
        if begin + END.size + comment == len(last):
            return
    raise _cut_off(path, "it has no end")


def read_torch_file(path: Path) -> Any:
    """The object that torch.save has written, without the values of its tensors.

    Tensors are `TensorInFile`. Dicts, lists, tuples, strings, numbers, torch.Size (as tuple) and
    dtypes are themselves; everything else is `Inert`.

    Raises:
        CheckpointError: the file is missing, cut off, damaged, or from before torch 1.6.
    """
    with _open(path) as archive:
        try:
            return _read(path, archive)
        # Whatever a damaged or hostile pickle leads to.
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read: {error or type(error).__name__}. It is damaged, or was "
                "not written by torch.save. Nothing of it was run"
            ) from error


def view_of_bytes(data: memoryview) -> torch.Tensor | None:
    """The tensor that torch.save has written into some bytes: its values are these bytes.

    None if they are anything else than one plain tensor: then torch.load may know what they are,
    or say what is wrong with them.
    """
    try:
        with zipfile.ZipFile(_Bytes(data)) as archive:
            found = _read(Path(), archive)
        if not isinstance(found, TensorInFile) or not found.numel:
            return None
        storage = found.storage
        flat = torch.frombuffer(
            data, dtype=storage.dtype, count=storage.numel, offset=storage.first_byte
        )
        return flat.as_strided(found.shape, found.strides, found.first)
    # Whatever damaged or hostile bytes lead to.
    except Exception:
        return None


class _Bytes(io.RawIOBase):
    """Bytes as a file, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}
        self._position = max(0, starts[whence] + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = None if size is None or size < 0 else self._position + size
        found = bytes(self._data[self._position : stop])
        self._position += len(found)
        return found


def _read(path: Path, archive: zipfile.ZipFile) -> Any:
    names = archive.namelist()
    pickles = [one for one in names if one.split("/")[1:] == ["data.pkl"]]
    if len(pickles) != 1 or archive.getinfo(pickles[0]).compress_type:
        raise pickle.UnpicklingError("it has no data.pkl as torch.save writes it")
    folder = pickles[0].removesuffix("data.pkl")
    order = f"{folder}byteorder"
    if order in names and _content(archive, order).decode() != sys.byteorder:
        raise pickle.UnpicklingError(f"it is not from a {sys.byteorder}-endian machine")
    return _Unpickler(path, archive, folder, _content(archive, pickles[0])).load()


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).CRC:
        return archive.read(name)  # compares it
    # torch.save was told to make none.
    first, num_bytes = _find_record(archive, name)
    assert archive.fp is not None, "the archive is open"
    archive.fp.seek(first)
    return archive.fp.read(num_bytes)


def _open(path: Path) -> zipfile.ZipFile:
    _refuse_what_is_no_file(path)
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise _cut_off(path, str(error)) from error


def _refuse_what_is_no_file(path: Path) -> None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path} cannot be read: it is no regular file")
        with path.open("rb"):
            pass
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _cut_off(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is cut off, or is no file of torch.save since torch 1.6 ({reason}). Copy it "
        "again; an older file must be loaded and saved by a newer torch first"
    )


@dataclass(frozen=True)
class _Storage:
    """A storage while the pickle is read."""

    stored: StoredTensor

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a storage's place")


@dataclass(frozen=True)
class _Call:
    """A function that pickles may call. Its attributes cannot be set."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a function")


class _Unpickler(pickle.Unpickler):
    """Makes plain values, `TensorInFile` and `Inert`."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, folder: str, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._archive = archive
        self._folder = folder
        self._storages: dict[tuple[str, torch.dtype], _Storage] = {}
        self._kinds: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        # Not getattr: torch would import some of its modules for it.
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        return _PLAIN.get((module, name)) or self._kind(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, _, numel = pid
        if pid[0] != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("it refers to something that is no storage")
        if (key, dtype) not in self._storages:
            first, num_bytes = _find_record(self._archive, f"{self._folder}data/{key}")
            if num_bytes != numel * dtype.itemsize:
                raise pickle.UnpicklingError(
                    f"storage {key} has {num_bytes} bytes, not {numel} elements of {dtype}"
                )
            stored = StoredTensor(f"data/{key}", self._path, dtype, (numel,), first)
            self._storages[key, dtype] = _Storage(stored)
        return self._storages[key, dtype]

    def _kind(self, name: str) -> type[Inert]:
        if name not in self._kinds:
            self._kinds[name] = type("Inert", (Inert,), {"__slots__": (), "kind": name})
        return self._kinds[name]


def _find_record(archive: zipfile.ZipFile, name: str) -> tuple[int, int]:
    """First byte and number of bytes of an uncompressed file in an archive."""
    info = archive.getinfo(name)
    file = archive.fp
    assert file is not None, "the archive is open"
    first = info.header_offset + HEADER.size + sum(_header(file, info.header_offset))
    size = file.seek(0, io.SEEK_END)
    if info.compress_type != zipfile.ZIP_STORED or first + info.file_size > size:
        raise pickle.UnpicklingError(f"{name} is compressed or cut off")
    return first, info.file_size


def _header(file: IO[bytes], offset: int) -> tuple[int, int]:
    file.seek(offset)
    magic, name_length, extra_length = HEADER.unpack(file.read(HEADER.size))
    if magic != b"PK\x03\x04":
        raise pickle.UnpicklingError("the archive's directory points to no file")
    return name_length, extra_length


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))


# What pickles may call ---------------------------------------------------------------------------


def _tensor(storage: Any, first: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """For torch._utils._rebuild_tensor and _v2: behind the strides come requires_grad, hooks, and
    whether the values are conjugated or negated."""
    if any(rest[2:]):
        return Inert(storage, rest)
    integers = (first, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(n) is int for n in integers):
        raise pickle.UnpicklingError("a tensor has no storage, shape or strides")
    window = TensorInFile(storage.stored, first, tuple(shape), tuple(strides))
    last = first + _dot([size - 1 for size in shape], strides)
    if min(integers) < 0 or (window.numel and last >= storage.stored.numel):
        raise pickle.UnpicklingError(f"a tensor of shape {tuple(shape)} is larger than its storage")
    return window


def _tensor_with_dtype(*arguments: Any) -> Any:
    """For _rebuild_tensor_v3: as `_tensor`, of a storage of bytes, with the dtype after hooks."""
    storage, dtype = arguments[0], arguments[6]
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("a tensor has no storage or dtype")
    stored = storage.stored
    numel = stored.numel * stored.dtype.itemsize // dtype.itemsize
    cast = _Storage(replace(stored, dtype=dtype, shape=(numel,)))
    return _tensor(cast, *arguments[1:6], *arguments[7:])


def _first(value: Any, *_: Any) -> Any:
    """For what makes a parameter of a tensor."""
    return value


def _tensor_with_attributes(make: Any, _: Any, arguments: Any, *rest: Any) -> Any:
    """For torch._tensor._rebuild_from_type_v2: (function, class, its arguments, attributes)."""
    if make not in (_REBUILD, _REBUILD_WITH_DTYPE, _REBUILD_PARAMETER):
        return Inert(make, arguments, *rest)
    return make(*arguments)


def _number(dtype: Any, data: Any) -> Any:
    """For numpy's scalar: (dtype, bytes)."""
    code = dtype.arguments[0] if isinstance(dtype, Inert) and dtype.arguments else None
    if code not in _NUMBERS or not isinstance(data, bytes):
        return Inert(dtype, data)
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    return struct.unpack(("<" if order in "<|" else ">") + _NUMBERS[code], data)[0]


def _bytes(text: Any, *_: Any) -> bytes:
    """For _codecs.encode, by which older protocols write bytes."""
    return str.encode(text, "latin-1")


def _attribute(of: Any, name: Any, *_: Any) -> Any:
    """For getattr, by which members of enumerations and inner classes are found."""
    kind = getattr(of, "kind", "") if isinstance(of, type) and issubclass(of, Inert) else ""
    return type("Inert", (Inert,), {"__slots__": (), "kind": f"{kind}.{name}"})


_REBUILD = _Call(_tensor)
_REBUILD_WITH_DTYPE = _Call(_tensor_with_dtype)
_REBUILD_PARAMETER = _Call(_first)
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _REBUILD,
    ("torch._utils", "_rebuild_tensor_v2"): _REBUILD,
    ("torch._utils", "_rebuild_tensor_v3"): _REBUILD_WITH_DTYPE,
    ("torch._utils", "_rebuild_parameter"): _REBUILD_PARAMETER,
    ("torch._utils", "_rebuild_parameter_with_state"): _REBUILD_PARAMETER,
    ("torch._tensor", "_rebuild_from_type_v2"): _Call(_tensor_with_attributes),
    ("numpy.core.multiarray", "scalar"): _Call(_number),
    ("numpy._core.multiarray", "scalar"): _Call(_number),
    ("_codecs", "encode"): _Call(_bytes),
    ("__builtin__", "getattr"): _Call(_attribute),
    ("builtins", "getattr"): _Call(_attribute),
}
