"""Checkpoints of Lightning's trainer, as checkpoints of onecopy.

A checkpoint is a folder of `onecopy.save`. What Lightning would put beside the states into its file
(loops, callbacks, schedulers, hyperparameters) is its `extra`, as the bytes of that file: so both
appear together, or neither.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from onecopy.checkpoint.contents import contents_of
from onecopy.checkpoint.loading import load
from onecopy.checkpoint.saving import save
from onecopy.checkpoint.source import Source, open_source
from onecopy.checkpoint.unpickle import load_object
from onecopy.checkpoint.values import read_tensor
from onecopy.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["consolidate", "is_folder", "leave_out_states", "local_path", "read", "write"]

# In `extra`, the bytes of what Lightning saves; what it saves of states is elsewhere.
KEY = "lightning"
STATES = ("state_dict", "optimizer_states")


def leave_out_states(trainer: Trainer) -> None:
    """Let a checkpoint be dumped without gathering the model on each rank, only to leave it out.

    `strategy.lightning_module_state_dict()`, which the dump would call, gives users the whole.
    """
    trainer._checkpoint_connector._get_lightning_module_state_dict = dict  # type: ignore[method-assign]


def local_path(path: str | os.PathLike[str], storage_options: Any) -> Path:
    """Where to write.

    Raises:
        ConfigError: not into a file system, or with options of a remote one.
    """
    if storage_options is not None or "://" in str(path):
        raise ConfigError(
            f"a checkpoint of all ranks cannot be written to {path} with storage options "
            f"{storage_options}: give a folder on storage that all ranks share (NFS, Lustre, a "
            "mounted bucket)"
        )
    return Path(path)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint is one of all ranks, not a file of Lightning."""
    return "://" not in str(path) and Path(path).is_dir()


def write(
    path: Path, checkpoint: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Write what Lightning has dumped, and the states from where they are; all ranks together."""
    stream = io.BytesIO()
    torch.save({key: checkpoint[key] for key in checkpoint if key not in STATES}, stream)
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, written by another strategy: save under another name, or delete it"
        )
    save(
        path,
        model,
        _one_or_all(optimizers),
        step=int(checkpoint["global_step"]),
        # Of the first rank, as in Lightning's file; the others would save their own.
        extra={KEY: torch.frombuffer(stream.getbuffer(), dtype=torch.uint8).clone()},
        keep=1,
    )


def read(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load the states; returns what Lightning has dumped. All ranks together."""
    source = open_source(path)
    has_optimizer = bool(contents_of(source).optimizers)
    loaded = load(path, model, _one_or_all(optimizers) if has_optimizer else None)
    return _dumped(loaded.extras[0], path, weights_only) | {"state_dict": {}}


def consolidate(
    folder: str | os.PathLike[str], file: str | os.PathLike[str], *, weights_only: bool = True
) -> None:
    """Make one file of a checkpoint of `strategy="onecopy"`, for `load_from_checkpoint`.

    It has the whole weights, in master precision, and what Lightning keeps beside them, but no
    states of optimizers. In one process, without a process group; the model must fit into memory.

    Args:
        folder: the checkpoint that a trainer has saved.
        file: to be written.
        weights_only: as in `torch.load`, of what Lightning keeps beside the weights.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    source = open_source(folder)
    checkpoint = _dumped(_extra_of(source), folder, weights_only)
    ((_, keys),) = contents_of(source).models.items()
    stored = source.metadata.state_dict_metadata
    values = {
        name: read_tensor(source, key)
        for name, key in keys.items()
        if isinstance(stored[key], TensorStorageMetadata)
    }
    for name, first in source.aliases.items():
        values[name] = values[first]
    target = Path(file)
    new = target.with_name(f"{target.name}.new")
    torch.save({**checkpoint, "state_dict": values}, new)
    new.replace(target)


def _extra_of(source: Source) -> Any:
    names = source.manifest.extras if source.manifest is not None else []
    if not names:
        return None
    return load_object(names[0], source.read((), names[:1])[names[0]])


def _dumped(extra: Any, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
    if not isinstance(extra, dict) or KEY not in extra:
        raise CheckpointError(
            f'{path} was not saved by a trainer with strategy="onecopy": load its states with '
            "onecopy.load"
        )
    stream = io.BytesIO(extra[KEY].numpy().tobytes())
    dumped: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=weights_only)
    return dumped


def _one_or_all(optimizers: Sequence[Optimizer]) -> Any:
    return optimizers[0] if len(optimizers) == 1 else list(optimizers) or None
