"""Reading what others have pickled without running any of their code.

The metadata of a torch.distributed.checkpoint is a pickle, and a pickle may name any function to be
called when it is read. Here only the classes that such metadata consists of can be named.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from onecopy.errors import CheckpointError

__all__ = ["load_object", "read_metadata"]

_ALLOWED: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp.TensorProperties,
        dcp.TensorStorageMetadata,
        dcp._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        collections.OrderedDict,
    )
}
_ALLOWED |= {
    ("torch", "Size"): torch.Size,
    # Looks a layout up by its name.
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
_ALLOWED |= {
    ("torch", name): kind for name, kind in vars(torch).items() if type(kind) is torch.dtype
}
# Where the checkpoint was saved; a name, whatever system it is from and however Python files it.
_ALLOWED |= {
    (module, name): pathlib.PurePosixPath
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
        CheckpointError: the file is damaged, is no such metadata, or names something else than
            such metadata consists of.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    # Whatever a damaged pickle leads to.
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged, or is no metadata of a torch.distributed.checkpoint: {error}. "
            "Nothing of it was run"
        ) from error
    if not isinstance(found, dcp.Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise CheckpointError(
            f"{path} is a {type(found).__name__}, not the metadata of a checkpoint"
        )
    return found


def load_object(what: str, data: bytes | memoryview) -> Any:
    """An object that was saved by torch.save: tensors, numbers, strings and containers of these.

    Args:
        what: its name and file, for messages.

    Raises:
        CheckpointError: it is damaged, or contains anything else.
    """
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        lines = str(error).splitlines() or [repr(error)]
        reason = next((line.strip() for line in lines if "global" in line.lower()), lines[0])
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
