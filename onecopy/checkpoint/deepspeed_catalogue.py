"""What a DeepSpeed ZeRO checkpoint contains: tensors by name, each with the places of its pieces.

Rank 0's files say what there is; those of other ranks are opened when something of them is needed,
and are then compared with what rank 0's have promised.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from onecopy.checkpoint.boxes import Box, boxes_of_range, whole_box
from onecopy.checkpoint.deepspeed_files import Files, ModelFile, OptimizerFile
from onecopy.checkpoint.deepspeed_layout import Piece, cut_each, cut_together
from onecopy.errors import CheckpointError
from onecopy.memory.torch_files import TensorInFile, row_major

__all__ = ["Catalogue", "Entry", "path_of"]

_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."
# What DeepSpeed puts into the model's file for itself; the rest is the user's client state.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "ds_version")
_INTERNAL = {
    *_COUNTERS,
    "checkpoint_parallel_dimensions",
    "data_sampler",
    "ds_config",
    "lr_scheduler",
    "mp_world_size",
    "optimizer",
    "random_ltd",
    "sparse_tensor_module_names",
}


class Entry(Protocol):
    """A tensor of the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""

    @property
    def dtype(self) -> torch.dtype:
        """As it is stored."""

    def boxes(self) -> list[Box]:
        """What is stored together."""

    def read(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Fill `target` with the elements at `offsets`, all within one box."""


@dataclass(frozen=True)
class _Cut:
    """A tensor in pieces, in order. flat: by rank, what the pieces are places in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]
    flat: Callable[[int], TensorInFile]

    def boxes(self) -> list[Box]:
        return [
            box
            for piece in self.pieces
            for box in boxes_of_range(self.shape, piece.start, piece.stop)
        ]

    def read(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        if not target.numel():
            return
        strides = row_major(self.shape)
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        piece = self.pieces[bisect_right(self.pieces, first, key=lambda one: one.start) - 1]
        flat = self.flat(piece.rank)
        if piece.at + piece.stop - piece.start > flat.numel:
            raise CheckpointError(
                f"{flat.storage.path} has less padding than it says: it is damaged"
            )
        where = flat.first + piece.at + first - piece.start
        TensorInFile(flat.storage, where, tuple(target.shape), strides).read(target)


@dataclass(frozen=True)
class _Whole:
    """A tensor in one place."""

    tensor: TensorInFile

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def boxes(self) -> list[Box]:
        return [whole_box(self.shape)]

    def read(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        self.tensor.part(offsets, target.shape).read(target)


@dataclass(frozen=True)
class _Number:
    """A number, as torch's optimizers keep it: a tensor without dimensions."""

    value: float
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def boxes(self) -> list[Box]:
        return [whole_box(())]

    def read(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        target.fill_(self.value)


class Catalogue:
    """All that a checkpoint contains.

    tensors, objects: by key. aliases: further names of tied weights, and the first ones.
    run: what is known of the run besides (see `DeepSpeedReader.run`).

    Raises:
        CheckpointError: files are missing, of several runs, or not what they should be.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        first = OptimizerFile.read(files.optimizer[0])
        self._ranks = first.partition_count
        files.expect(self._ranks, self._ranks if first.each else 1)
        model = ModelFile.read(files.model[0])
        if len(model.shapes) != len(first.partitions):
            raise _of_different_runs(model.path, len(model.shapes), first)
        self._optimizers = {0: first}
        self._models = {0: model}
        self._sizes: list[int] = []
        pieces: dict[str, list[Piece]] = {}
        for number, shapes in enumerate(model.shapes):
            cut, size = _cut(shapes, first, number)
            pieces |= cut
            self._sizes.append(size)
        self._compare(first)
        self.tensors: dict[str, Entry] = {}
        self._add_trained(first, model, pieces)
        self._add_rest(model)
        self.aliases = {
            other: name for other, name in _shared(model).items() if name in self.tensors
        }
        self.tensors |= {other: self.tensors[name] for other, name in self.aliases.items()}
        self.objects = {
            f"{_GROUPS}{number}.{setting}": value
            for number, group in enumerate(first.groups)
            for setting, value in _settings(group, model.shapes).items()
        }
        self.run = _run(first, model)

    def _add_trained(
        self, first: OptimizerFile, model: ModelFile, pieces: dict[str, list[Piece]]
    ) -> None:
        left_out: set[str] = set()
        for number, shapes in enumerate(model.shapes):
            dtype = first.partitions[number].dtype
            states = dict(self._states_of(first, number, left_out))
            for name, shape in shapes.items():
                flat = partial(self._partition, number)
                self.tensors[name] = _Cut(shape, dtype, pieces[name], flat)
                for state, found in states.items():
                    if isinstance(found, TensorInFile):
                        flat = partial(self._state, number, state)
                        found = _Cut(shape, found.dtype, pieces[name], flat)
                    self.tensors[_state_key(name, state)] = found
        if left_out:
            warnings.warn(
                f"{first.path}: {', '.join(sorted(left_out))} of the optimizer's states have no "
                "value for each element of a parameter, nor one for all. They are not loaded",
                stacklevel=2,
            )

    def _states_of(
        self, first: OptimizerFile, number: int, left_out: set[str]
    ) -> Iterator[tuple[str, TensorInFile | Entry]]:
        """The states of one sequence: flat as the masters are, or one value for all."""
        state = dict(first.states[number])
        if "step" not in state:
            (group,) = (one for one in first.groups if number in one["params"])
            state["step"] = group.get("step", first.step)
        for name, value in state.items():
            flat = isinstance(value, TensorInFile) and self._fits(value, first, number)
            found = value if flat else _for_all(value)
            if found is not None:
                yield name, found
            elif value is not None:
                left_out.add(name)

    def _fits(self, flat: TensorInFile, file: OptimizerFile, number: int) -> bool:
        """Whether it is a partition of a sequence, with or without the padding at its end."""
        size = self._sizes[number]
        sizes = (size, size - file.paddings[number])
        return len(flat.shape) == 1 and flat.numel in sizes and flat.is_contiguous

    def _compare(self, file: OptimizerFile) -> None:
        """See that a rank's partitions are as long as the shapes in the model's file say.

        Raises:
            CheckpointError: they are not.
        """
        first = self._optimizers[0]
        if len(file.partitions) != len(first.partitions):
            raise _of_different_runs(file.path, len(file.partitions), first)
        for number, partition in enumerate(file.partitions):
            flats: dict[str, Any] = {"masters": partition}
            for name, value in first.states[number].items():
                if isinstance(value, TensorInFile) and self._fits(value, first, number):
                    flats[name] = file.states[number].get(name)
            for name, flat in flats.items():
                if not isinstance(flat, TensorInFile) or not self._fits(flat, file, number):
                    there = flat.numel if isinstance(flat, TensorInFile) else "no"
                    raise CheckpointError(
                        f"{file.path} has {there} elements of {name} in group {number}, and "
                        f"{self._sizes[number]} should be there for {self._ranks} ranks. The files "
                        "are of different runs, or the values were offloaded to NVMe, where "
                        "DeepSpeed saves them apart: load the checkpoint into DeepSpeed without "
                        "this offload and save it again"
                    )

    def _optimizer(self, rank: int) -> OptimizerFile:
        if rank not in self._optimizers:
            file = OptimizerFile.read(self._files.optimizer[rank])
            self._compare(file)
            self._optimizers[rank] = file
        return self._optimizers[rank]

    def _partition(self, number: int, rank: int) -> TensorInFile:
        return self._optimizer(rank).partitions[number]

    def _state(self, number: int, name: str, rank: int) -> TensorInFile:
        found: TensorInFile = self._optimizer(rank).states[number][name]
        return found

    def _add_rest(self, model: ModelFile) -> None:
        """What was not trained: frozen parameters and buffers."""
        each = self._optimizers[0].each
        for name, tensor in model.frozen.items():
            shape = model.frozen_shapes.get(name, tensor.shape)
            if tensor.shape == shape:
                self.tensors.setdefault(name, _Whole(tensor))
            else:
                pieces, _ = cut_each({name: shape}, self._ranks)
                frozen = partial(self._frozen, name)
                self.tensors.setdefault(name, _Cut(shape, tensor.dtype, pieces[name], frozen))
        shared = model.shared or {}
        for name, tensor in model.tensors.items():
            # ZeRO-3 leaves empty tensors in the places of parameters.
            if name not in shared and (tensor.numel or not each or name in model.buffers):
                self.tensors.setdefault(name, _Whole(tensor))

    def _frozen(self, name: str, rank: int) -> TensorInFile:
        if rank not in self._models:
            self._models[rank] = ModelFile.read(self._files.model[rank])
        file = self._models[rank]
        if name not in file.frozen:
            raise CheckpointError(f"{file.path} has no piece of {name}: it is of another run")
        return file.frozen[name]

    @property
    def files(self) -> list[Path]:
        """All files."""
        return [*self._files.model, *self._files.optimizer]

    def check(self, path: Path) -> None:
        """Open one of the files and compare it with rank 0's, but for the values.

        Raises:
            CheckpointError: it is damaged or of another run.
        """
        if path in self._files.optimizer:
            self._optimizer(self._files.optimizer.index(path))
        else:
            rank = self._files.model.index(path)
            for name, tensor in self._models[0].frozen.items():
                if self._frozen(name, rank).numel != tensor.numel:
                    raise CheckpointError(f"{path} has another part of {name} than it should")


def _cut(
    shapes: dict[str, tuple[int, ...]], file: OptimizerFile, number: int
) -> tuple[dict[str, list[Piece]], int]:
    if file.each:
        return cut_each(shapes, file.partition_count)
    gaps = file.gaps[number] if file.gaps else [0] * len(shapes)
    return cut_together(shapes, gaps, file.partition_count)


def path_of(key: str) -> tuple[str | int, ...]:
    """The keys that lead to something in a nested state dict."""
    if key.startswith(_STATE):
        name, _, state = key.removeprefix(_STATE).rpartition(".")
        return ("optimizer", "state", name, state)
    if key.startswith(_GROUPS):
        number, _, setting = key.removeprefix(_GROUPS).partition(".")
        return ("optimizer", "param_groups", int(number), setting)
    return (key,)


def _state_key(name: str, state: str) -> str:
    return f"{_STATE}{name}.{state}"


def _of_different_runs(path: Path, num_groups: int, first: OptimizerFile) -> CheckpointError:
    return CheckpointError(
        f"{path} has {num_groups} groups of parameters, and {first.path} has "
        f"{len(first.partitions)}: the files are of different runs"
    )


def _for_all(value: Any) -> Entry | None:
    """One value for all parameters of a sequence."""
    if isinstance(value, TensorInFile) and value.numel == 1:
        return _Whole(TensorInFile(value.storage, value.first, (), ()))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _Number(float(value))
    return None


def _shared(model: ModelFile) -> dict[str, str]:
    """Other names of trained parameters, and their first ones.

    Where the file does not say (before DeepSpeed 0.9.3), they are those that lie in one place.
    """
    if model.shared is not None:
        return model.shared
    trained = [name for shapes in model.shapes for name in shapes]
    places = {_place(model.tensors[name]): name for name in trained if name in model.tensors}
    return {
        name: places[_place(tensor)]
        for name, tensor in model.tensors.items()
        if tensor.numel and name not in trained and _place(tensor) in places
    }


def _place(tensor: TensorInFile) -> tuple[int, int, tuple[int, ...]]:
    return tensor.storage.first_byte, tensor.first, tensor.shape


def _settings(group: dict[str, Any], shapes: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of a group, with the names of its parameters.

    Its step is one of the states.
    """
    names = [name for number in group["params"] for name in shapes[number]]
    rest = {key: value for key, value in group.items() if key not in ("params", "step")}
    values = {}
    for key, value in rest.items():
        if isinstance(value, TensorInFile) and value.numel == 1:  # as optimizers on a GPU may have
            values[key] = torch.empty(value.shape, dtype=value.dtype)
            value.read(values[key])
    return {"params": names, **_plain(rest), **values}


def _run(first: OptimizerFile, model: ModelFile) -> dict[str, Any]:
    others = model.others
    found = {key: others[key] for key in (*_COUNTERS, "lr_scheduler") if key in others}
    found["loss_scale"] = first.loss_scale
    found["client_state"] = {key: one for key, one in others.items() if key not in _INTERNAL}
    return _plain(found)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What of a dict is plain data; values that contain anything else are left out as a whole."""
    found = {}
    for key, value in values.items():
        inner = _plain(value) if isinstance(value, dict) else value
        if _is_plain(inner):
            found[key] = inner
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    return value is None or isinstance(value, int | float | complex | str | bytes | torch.dtype)
