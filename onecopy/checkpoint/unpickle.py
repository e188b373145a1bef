"""Reading what others have pickled without running any of their code.

The metadata of a torch.distributed.checkpoint is a pickle, and a pickle may name any function to be
called when it is read. Here it can name only what such metadata consists of, and of that only
stand-ins: a pickle may also set attributes of what it has named, and so change torch's own classes
for the whole program.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from onecopy.errors import CheckpointError

__all__ = ["load_object", "read_metadata"]


class _Sealed(type):
    """The class of stand-ins: they can be called, and nothing else."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it changes {cls.__name__}.{name}")


def _stand_in(kind: type) -> _Sealed:
    """Makes empty objects of a class; a pickle then fills in their attributes."""

    def new(_: type, *arguments: Any) -> Any:
        if arguments:
            raise pickle.UnpicklingError(f"it calls {kind.__name__}")
        return object.__new__(kind)

    return _Sealed(kind.__name__, (), {"__new__": new, "__slots__": ()})


def _joined(_: type, *parts: str) -> str:
    """In the place of a path: it says where a checkpoint was saved, and is not used."""
    return "/".join(parts)


_LAYOUTS = {str(one): one for one in vars(torch).values() if type(one) is torch.layout}
# Types of the interpreter and of torch's C++ code, instances and bound methods of them cannot be
# changed either.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): _Sealed(
        "_MEM_FORMAT_ENCODING",
        (),
        {"__new__": lambda _, value: dcp._MEM_FORMAT_ENCODING(value), "__slots__": ()},
    ),
}
_ALLOWED |= {
    (kind.__module__, kind.__name__): _stand_in(kind)
    for kind in (
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp.TensorProperties,
        dcp.TensorStorageMetadata,
        filesystem._StorageInfo,
    )
}
_ALLOWED |= {
    ("torch", name): kind for name, kind in vars(torch).items() if type(kind) is torch.dtype
}
# Whatever system the path is from, and however Python files it.
_ALLOWED |= {
    (module, name): _Sealed("Path", (), {"__new__": _joined, "__slots__": ()})
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def read_metadata(path: Path, data: bytes) -> dcp.Metadata:
    """The metadata of a torch.distributed.checkpoint.

    Args:
        path: of the file, for messages. data: its bytes.

    Raises:
        CheckpointError: the file is damaged, is no such metadata, names something else than such
            metadata consists of, or points outside of its folder.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        if type(found) is not dcp.Metadata:
            raise TypeError(f"it is a {type(found).__name__}")
        for key, entry in found.state_dict_metadata.items():
            _check_entry(key, entry)
        if found.storage_data is not None:
            _check_places(found.storage_data)
    # Whatever a damaged pickle leads to.
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged, or is no metadata of a torch.distributed.checkpoint: "
            f"{str(error) or type(error).__name__}. Nothing of it was run"
        ) from error
    return found


def _check_entry(key: Any, entry: Any) -> None:
    """What is said of a tensor or an object has the types that it should have."""
    if type(key) is not str:
        raise TypeError(f"{key!r} is no name")
    if type(entry) is dcp.BytesStorageMetadata:
        return
    if type(entry) is not dcp.TensorStorageMetadata:
        raise TypeError(f"{key} is a {type(entry).__name__}")
    if type(entry.properties.dtype) is not torch.dtype:
        raise TypeError(f"{key} has no dtype")
    _check_size(key, entry.size)
    for chunk in entry.chunks:
        _check_size(key, chunk.offsets)
        _check_size(key, chunk.sizes)
        if not len(entry.size) == len(chunk.offsets) == len(chunk.sizes):
            raise ValueError(f"a part of {key} has another number of dimensions")


def _check_size(key: str, size: Any) -> None:
    if type(size) is not torch.Size or (size and min(size) < 0):
        raise ValueError(f"{key} has the size {size!r}")


def _check_places(places: Any) -> None:
    """Items lie in the files of the folder; links that are there are followed."""
    names = set()
    for index, place in places.items():
        if type(index) is not dcp.MetadataIndex or type(place) is not filesystem._StorageInfo:
            raise TypeError(f"it does not say where {index!r} is")
        if not (type(place.offset) is type(place.length) is int and type(index.fqn) is str):
            raise TypeError(f"{index!r} is at {place!r}")
        if place.offset < 0 or place.length < 0:
            raise ValueError(f"{index!r} is at {place!r}")
        names.add(place.relative_path)
    for name in names:
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it points outside of its folder, to {name!r}")


def load_object(what: str, data: bytes | memoryview) -> Any:
    """An object that was saved by torch.save: tensors, numbers, strings and containers of these.

    Args:
        what: its name and file, for messages.

    Raises:
        CheckpointError: it is damaged, or contains anything else.
    """
    stream = io.BytesIO(data)
    try:
        with zipfile.ZipFile(stream) as archive:
            # torch.save compresses nothing, and a little that is compressed can become very much.
            if sum(member.file_size for member in archive.infolist()) > len(data):
                raise ValueError("it is compressed")
        stream.seek(0)
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        lines = str(error).splitlines() or [repr(error)]
        # torch's own advice, to trust the class, is left out.
        refused = re.search(r"unsupported (?:global: )?GLOBAL (\S+)", str(error), re.IGNORECASE)
        reason = next((line.strip() for line in lines if "global" in line.lower()), lines[0])
        if refused is not None:
            reason = f"it has a {refused.group(1)}"
        raise CheckpointError(
            f"{what} cannot be read as plain data ({reason}). Only tensors, numbers, strings, "
            "and lists, tuples and dicts of these are read, so that a checkpoint never runs code"
        ) from error


def _numpy_globals() -> list[Any]:
    """What plain numpy arrays consist of, where numpy is there: they hold random states."""
    try:
        import numpy
    except ImportError:
        return []
    kinds = {type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdFD"}
    reconstruct = numpy.zeros(1).__reduce__()[0]
    scalar = numpy.float64(0).__reduce__()[0]
    return [reconstruct, scalar, numpy.ndarray, numpy.dtype, *kinds]
