"""Whole models as files that others load: Hugging Face's safetensors, and the configuration.

Values pass through one by one, so no process ever holds a model: of a checkpoint, only the tensor
that is being written is in memory; of a sharded model, the unit that it belongs to as well.

Files get their names when all are written, and the index its last of all, so that a directory whose
export was interrupted is not taken for a model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from onecopy import handle
from onecopy.checkpoint.disk import flush_folder, write_file
from onecopy.checkpoint.huggingface import CONFIG, config_for
from onecopy.checkpoint.saving import Options, prepare
from onecopy.checkpoint.together import finish_together
from onecopy.checkpoint.values import Model, Value, open_model
from onecopy.comm.compare import gather_objects
from onecopy.core.precision import DTYPES
from onecopy.errors import CheckpointError, ConfigError
from onecopy.memory.tensor_files import FileWriter, TensorSpec
from onecopy.parallel.parts import Parts

if TYPE_CHECKING:
    from onecopy.comm.groups import Group

__all__ = ["Exported", "export"]

INDEX = "model.safetensors.index.json"
PARTIAL = ".partial"
# Floating-point values of other kinds (float8) are scaled by what is stored elsewhere.
CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHOWN = 3

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    files: in the directory, configurations included.
    num_bytes: of all tensors.
    num_elements: of all tensors.
    left_out: names of what the model has beside tensors, which these files cannot hold.
    """

    files: tuple[Path, ...]
    num_bytes: int
    num_elements: int
    left_out: tuple[str, ...]


def export(
    source: str | os.PathLike[str] | nn.Module | Parts[nn.Module],
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    model: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write a whole model as safetensors files, as Hugging Face's `save_pretrained` does.

    From a checkpoint it needs no process group and no accelerator: call it in one process. Of a
    sharded model it writes the masters: all ranks must call it together, and the first one writes.
    One that is spread over tensor or pipeline parallel ranks is saved as a checkpoint first, within
    the directory, which is removed in the end: that takes as much room again for a while.
    A plain module is written by whoever calls. `AutoModel.from_pretrained(directory)` loads the
    result where the model has a Hugging Face configuration, `onecopy.load_pretrained` and
    `safetensors.torch.load_model` always. Tied weights are written once. Buffers are written if
    they are persistent; states of optimizers are not.

    Args:
        source: the folder of a checkpoint (of onecopy, of torch.distributed.checkpoint or of
            DeepSpeed) or of a run, whose last good checkpoint is taken; or a module; or the
            `onecopy.parallel.Parts` of one that this rank has.
        directory: where to; made if need be. It must not hold other safetensors files.
        dtype: of all fp64, fp32, bf16 and fp16 tensors, "bf16" or torch.bfloat16 for example.
            None writes what is stored, so that nothing is rounded: the masters, which are fp32 in
            mixed precision. Integers and float8 stay as they are.
        max_shard_bytes: a file ends before it would become larger. A tensor is never divided.
        model: which one, where a checkpoint holds several.
        progress: told the bytes written, the bytes in all and the name after each tensor, where
            the files are written.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such model; the directory holds other
            weights or cannot be written; values are out of the range of `dtype`. On all ranks.
        ConfigError: an argument does not fit.
        ShardingError: the module has parameters without values, or whose values are not in one
            tensor (DTensors, sparse and quantized ones); or a part of it is sharded.
    """
    if isinstance(source, Parts) or _is_spread(source):
        settings = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "progress": progress}
        return _export_spread(source, Path(directory).expanduser(), settings)
    opened = open_model(source, model)
    files = _divide(opened.values, _dtype(dtype), max_shard_bytes)
    output = _Output(Path(directory).expanduser(), opened.world, progress, _num_bytes(files))
    try:
        output.attempt(output.prepare)
        output.agree()
        for file in files:
            output.attempt(output.begin, file)
            for value in file.values:
                # All ranks read, whatever has become of the file.
                output.attempt(output.write, value.read())
            output.attempt(output.finish)
            output.agree()
        output.attempt(output.publish, _configs(opened, files), _index(files))
        output.agree()
    finally:
        output.discard()
        opened.rest()
    numel = sum(math.prod(value.shape) for value in opened.values)
    return Exported(tuple(output.published), _num_bytes(files), numel, opened.left_out)


def _is_spread(source: object) -> TypeGuard[nn.Module]:
    """Whether a model has its parameters on more ranks than those of its data group."""
    owner = handle.find(source) if isinstance(source, nn.Module) else None
    return owner is not None and bool(owner.engine.collectives.groups.model)


def _export_spread(
    source: nn.Module | Parts[nn.Module], directory: Path, settings: dict[str, Any]
) -> Exported:
    """By way of a checkpoint, which knows how to put the parts together; all ranks together."""
    hidden = directory / ".checkpoint"
    named, job = prepare(hidden, source, None, Options(), "onecopy.export")
    try:
        folder = job.write(named.group)
        return finish_together(
            named.group, lambda: None, lambda _: export(folder, directory, **settings)
        )
    finally:
        if named.group.rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that is meant by a short name, or by torch's."""
    if dtype is None:
        return None
    found: Any = dtype
    if isinstance(dtype, str):
        found = DTYPES.get(dtype) or getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"dtype={dtype!r} is no floating-point dtype: give one of "
            f"{', '.join(map(repr, DTYPES))}, or torch.bfloat16 for example"
        )
    return found


# What goes where ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    """One file to be written; `values` in the order in which they lie there."""

    name: str
    tensors: list[TensorSpec]
    values: list[Value]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def _divide(values: list[Value], target: torch.dtype | None, max_bytes: int) -> list[_File]:
    """Fill one file after another, in the order of the model."""
    if max_bytes <= 0:
        raise ConfigError(f"max_shard_bytes={max_bytes}: give a positive number of bytes")
    _refuse_same_names(values)
    parts: list[list[tuple[TensorSpec, Value]]] = [[]]
    size = 0
    for value in values:
        dtype = target if target is not None and value.dtype in CONVERTED else value.dtype
        spec = TensorSpec(value.name, dtype, value.shape)
        if parts[-1] and size + spec.num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append((spec, value))
        size += spec.num_bytes
    names = ["model.safetensors"]
    if len(parts) > 1:
        count = len(parts)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    files = []
    for name, part in zip(names, parts, strict=True):
        # As large elements go first in a file; of equal ones the order stays.
        part.sort(key=lambda pair: -pair[0].dtype.itemsize)
        files.append(_File(name, [spec for spec, _ in part], [value for _, value in part]))
    return files


def _refuse_same_names(values: list[Value]) -> None:
    counts = Counter(value.name for value in values)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise CheckpointError(
            f"two tensors of the model are called {twice}, once the names that wrappers have put "
            "there are left out: rename one of its modules"
        )


def _num_bytes(files: list[_File]) -> int:
    return sum(file.num_bytes for file in files)


def _index(files: list[_File]) -> str | None:
    """The text of the index that several files need."""
    if len(files) == 1:
        return None
    places = {tensor.name: file.name for file in files for tensor in file.tensors}
    entries = {"metadata": {"total_size": _num_bytes(files)}, "weight_map": places}
    return json.dumps(entries, indent=2) + "\n"


def _configs(opened: Model, files: list[_File]) -> dict[str, str]:
    """Configurations, which say in which dtype most of the weights are."""
    numels: Counter[torch.dtype] = Counter()
    for tensor in (tensor for file in files for tensor in file.tensors):
        if tensor.dtype.is_floating_point:
            numels[tensor.dtype] += math.prod(tensor.shape)
    ((most, _),) = numels.most_common(1) or ((None, 0),)
    texts = dict(opened.configs)
    if CONFIG in texts:
        texts[CONFIG] = config_for(texts[CONFIG], most)
    return texts


# Writing --------------------------------------------------------------------------------------


class _Output:
    """The directory, as the rank that writes sees it. On the other ranks nothing is done.

    Args:
        world: the ranks that read together, the first of which writes; None for this one alone.
    """

    def __init__(
        self,
        directory: Path,
        world: Group | None,
        progress: Progress | None,
        total_bytes: int,
    ) -> None:
        self.published: list[Path] = []
        self._directory = directory
        self._world = world
        self._progress = progress
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._failure: Exception | None = None
        self._written: list[FileWriter] = []
        self._is_complete = False

    @property
    def _writes(self) -> bool:
        return self._world is None or self._world.rank == 0

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do a part of the work, unless one before has failed.

        Raises:
            Exception: the part has failed, and no other rank waits for this one.
        """
        if not self._writes or self._failure is not None:
            return
        try:
            action(*arguments)
        except OSError as error:
            self._failure = CheckpointError(
                f"{self._directory} cannot be written: {error.strerror or error}. Make room or "
                "choose another directory, and export again; no part of this export stays there"
            )
            self._failure.__cause__ = error
        except Exception as error:
            self._failure = error
        if self._world is None:
            self.agree()

    def agree(self) -> None:
        """Go on together, or fail together.

        Raises:
            Exception: what has failed here.
            CheckpointError: something has failed on the rank that writes.
        """
        failures = [self._failure and f"{type(self._failure).__name__}: {self._failure}"]
        if self._world is not None:
            failures = gather_objects(self._world, failures[0])
        if self._failure is not None:
            raise self._failure
        if self._world is not None and failures[0]:
            raise CheckpointError(f"rank {self._world.ranks[0]} cannot export. {failures[0]}")

    def prepare(self) -> None:
        """Make the directory, and see that no other weights are there."""
        self._directory.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in self._directory.iterdir())
        others = [name for name in names if name.endswith((".safetensors", INDEX))]
        if others:
            raise CheckpointError(
                f"{self._directory} holds other weights already ({', '.join(others[:SHOWN])}), "
                "which would be mixed with these. Export to another directory, or delete them"
            )
        begun = [name for name in names if name.endswith(f".safetensors{PARTIAL}")]
        if begun:
            raise self._begun(begun[0])

    def _begun(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"another export is writing to {self._directory}, or was killed there ({name}). Call "
            "export in one process only, unless the model is sharded; or delete that file"
        )

    def begin(self, file: _File) -> None:
        """Begin a file, under a name that nobody takes for weights."""
        path = self._directory / f"{file.name}{PARTIAL}"
        try:
            self._written.append(FileWriter(path, file.tensors))
        except FileExistsError as error:
            raise self._begun(path.name) from error

    def write(self, value: torch.Tensor) -> None:
        """Write the next tensor."""
        tensor = self._written[-1].write(value)
        self._num_bytes += tensor.num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes, self._total_bytes, tensor.name)

    def finish(self) -> None:
        """The file is complete."""
        self._written[-1].finish()

    def publish(self, configs: dict[str, str], index: str | None) -> None:
        """Give the files their names: weights after the configuration, the index last."""
        for name, text in configs.items():
            self._write_text(name, text)
        for writer in self._written:
            target = writer.path.with_name(writer.path.name.removesuffix(PARTIAL))
            writer.path.rename(target)
            self.published.append(target)
        if index is not None:
            self._write_text(INDEX, index)
        flush_folder(self._directory)
        self._is_complete = True

    def _write_text(self, name: str, text: str) -> None:
        temporary = self._directory / f"{name}{PARTIAL}"
        write_file(temporary, text.encode())
        temporary.rename(self._directory / name)
        self.published.append(self._directory / name)

    def discard(self) -> None:
        """Remove what was written, unless all of it was."""
        if self._is_complete:
            return
        for writer in self._written:
            writer.discard()
        for path in self.published:
            path.unlink(missing_ok=True)
