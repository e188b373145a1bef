"""The files of a DeepSpeed ZeRO checkpoint, and what they say.

    root/
      latest                                           the text "global_step100"
      global_step100/
        mp_rank_00_model_states.pt                     ZeRO-1, 2: weights in compute precision
        zero_pp_rank_0_mp_rank_00_model_states.pt      ZeRO-3: one for each rank
        bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt one for each rank: masters and states

`*_optim_states.pt` holds flat tensors without names, one for each parameter group (ZeRO-3: for each
sub-group), called *sequences* here; `*_model_states.pt` says which parameters lie in them.
Everything is read by `torch_files`: no class of DeepSpeed is needed, and no code of the files runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecopy.checkpoint.disk import naming
from onecopy.errors import CheckpointError
from onecopy.memory.torch_files import Inert, TensorInFile, check_archive, read_torch_file

__all__ = ["Files", "ModelFile", "OptimizerFile", "find_files", "is_deepspeed"]

LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
# Of experts, and of pipelines.
_OTHER = re.compile(r"(expp_rank|expert|layer)_.*\.pt")
_ANY = re.compile(r".*(optim|model)_states\.pt")


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint, by rank; of `model` there is one where the weights are whole."""

    folder: Path
    optimizer: list[Path]
    model: list[Path]

    def expect(self, num_optimizer: int, num_model: int) -> None:
        """See that there are as many files as ranks have saved.

        Raises:
            CheckpointError: one is missing, or there are more.
        """
        for found, expected in ((self.optimizer, num_optimizer), (self.model, num_model)):
            if len(found) < expected:
                raise _missing(found[-1], len(found) - 1, len(found))
            if len(found) > expected:
                raise CheckpointError(
                    f"{found[expected]} is of another run: {self.optimizer[0]} was saved by "
                    f"{num_optimizer} ranks. Remove what was there before"
                )


def is_deepspeed(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a DeepSpeed checkpoint, or a root whose `latest` names one.

    Complete or not: what is missing is said when it is read.
    """
    try:
        return any(_ANY.fullmatch(name) for name in os.listdir(_folder_of(Path(path))))
    except OSError:
        return False


def find_files(path: Path) -> Files:
    """The files of a checkpoint; each is there, and complete as far as its end shows.

    Raises:
        CheckpointError: there is none, a file is missing or cut off, or it is of a kind that is not
            read: model parallel, pipeline parallel, or with experts.
    """
    folder = _folder_of(path)
    with naming("read", folder):
        names = sorted(os.listdir(folder))
    optimizer = [found for name in names if (found := _OPTIMIZER.fullmatch(name))]
    model = [found for name in names if (found := _MODEL.fullmatch(name))]
    parallel = [one[0] for one in (*optimizer, *model) if int(one[one.re.groups])]
    parallel += [name for name in names if _OTHER.fullmatch(name)]
    if parallel:
        raise CheckpointError(
            f"{folder} has {parallel[0]}: it was saved with tensor, pipeline or expert "
            "parallelism, and onecopy reads what data parallel ranks have saved. Load it into "
            "DeepSpeed without this parallelism and save it again"
        )
    for kind in (optimizer, model):
        if len({one[0].split("_pp_rank_")[0] for one in kind}) > 1:
            raise CheckpointError(
                f"{folder} has files of two runs: {kind[0][0]} and {kind[-1][0]}. Remove those of "
                "one run"
            )
    files = Files(
        folder,
        _by_rank(folder, {int(one[1]): one[0] for one in optimizer}, "optim_states"),
        _by_rank(folder, {int(one[1] or 0): one[0] for one in model}, "model_states"),
    )
    for file in (*files.optimizer, *files.model):
        check_archive(file)
    return files


def _folder_of(path: Path) -> Path:
    """The folder of one checkpoint, from itself or from its root."""
    latest = path / LATEST
    if not latest.is_file() or any(_ANY.fullmatch(name) for name in os.listdir(path)):
        return path
    with naming("read", latest):
        tag = latest.read_text(errors="replace").strip()
    return path / tag


def _by_rank(folder: Path, found: Mapping[int, str], kind: str) -> list[Path]:
    if not found:
        raise CheckpointError(
            f"{folder} has no *_{kind}.pt: it is no ZeRO checkpoint of DeepSpeed, or was not "
            "copied completely. Give the root that was given to save_checkpoint, or the folder of "
            "one step"
        )
    last = max(found)
    for rank in range(last):
        if rank not in found:
            raise _missing(folder / found[last], last, rank)
    return [folder / found[rank] for rank in sorted(found)]


def _missing(there: Path, rank: int, missing: int) -> CheckpointError:
    """The error that one rank's file is not there, as another's is."""
    name = there.name.replace(f"_pp_rank_{rank}_", f"_pp_rank_{missing}_")
    return CheckpointError(
        f"{there.with_name(name)} is missing. Each rank has saved a file of its own, on its own "
        "machine where there is no shared storage: copy them all into one folder"
    )


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Whatever is not as it should be becomes an error that names the file."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path} is not what DeepSpeed writes for ZeRO-1, 2 or 3 ({error!r}). It may be from a "
            "version or optimizer that onecopy does not know, or from a run without ZeRO"
        ) from error


@dataclass(frozen=True)
class OptimizerFile:
    """What one rank has saved of masters and optimizer states.

    each: whether each parameter was cut by itself (ZeRO-3).
    partitions: by sequence, the masters. states: by sequence and name; tensors and plain values.
    paddings: by sequence, how many of the last elements may have been left out.
    gaps: by sequence, elements behind each parameter; None if none.
    groups: hyperparameters of each group; "params" are numbers of sequences.
    step: of all, where the states do not have it. loss_scale: if it adapts, its value.
    """

    path: Path
    each: bool
    partition_count: int
    partitions: list[TensorInFile]
    states: list[dict[str, Any]]
    paddings: list[int]
    gaps: list[list[int]] | None
    groups: list[dict[str, Any]]
    step: int | None
    loss_scale: float | None

    @classmethod
    def read(cls, path: Path) -> OptimizerFile:
        """Read all but the values of tensors.

        Raises:
            CheckpointError: the file cannot be read or is of another kind.
        """
        content = read_torch_file(path)
        with _parsing(path):
            saved = content["optimizer_state_dict"]
            each = "fp32_flat_groups" in saved
            partitions = saved["fp32_flat_groups" if each else "single_partition_of_fp32_groups"]
            base = saved["optimizer_state_dict" if each else "base_optimizer_state"]
            if "ds_zero_partition_groups" in saved:
                raise ValueError("experts are cut over groups of their own")
            if not all(isinstance(one, TensorInFile) for one in partitions):
                raise ValueError("the masters are no tensors")
            if isinstance(base, list):  # the elastic form has no hyperparameters
                states = base
                groups = [{"params": [number]} for number in range(len(base))]
            else:
                states = [base["state"].get(number, {}) for number in range(len(partitions))]
                groups = [dict(group) for group in base["param_groups"]]
            numbers = [number for group in groups for number in group["params"]]
            if numbers != list(range(len(partitions))) or len(states) != len(partitions):
                raise ValueError(f"{len(partitions)} partitions, and states of {numbers}")
            return cls(
                path,
                each,
                _count(saved["partition_count"]),
                list(partitions),
                [dict(state) for state in states],
                [0] * len(partitions) if each else list(saved["group_paddings"]),
                saved.get("param_alignment_paddings"),
                groups,
                saved.get("base_optimizer_state_step"),
                _loss_scale(saved),
            )


def _count(counts: Any) -> int:
    found = set(counts) if isinstance(counts, list) else {counts}
    if len(found) != 1 or type(min(found)) is not int:
        raise ValueError(f"partition_count is {counts}: experts have groups of their own")
    return int(min(found))


def _loss_scale(saved: Mapping[str, Any]) -> float | None:
    scaler = saved.get("loss_scaler") if saved.get("dynamic_loss_scale") else None
    state = scaler.state if isinstance(scaler, Inert) else None
    scale = state.get("cur_scale") if isinstance(state, dict) else None
    return float(scale) if isinstance(scale, int | float) else None


@dataclass(frozen=True)
class ModelFile:
    """What one rank has saved of the model and of the run.

    shapes: by sequence, the trained parameters in the order in which they lie.
    tensors: weights in compute precision and buffers; in ZeRO-3 empty ones in place of weights.
    frozen: the frozen parameters, or in ZeRO-3 this rank's pieces. frozen_shapes: of all of each.
    shared: other names of parameters, and the name under which each is stored; None if unknown.
    others: what else is in the file.
    """

    path: Path
    shapes: list[dict[str, tuple[int, ...]]]
    tensors: dict[str, TensorInFile]
    buffers: list[str]
    frozen: dict[str, TensorInFile]
    frozen_shapes: dict[str, tuple[int, ...]]
    shared: dict[str, str] | None
    others: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ModelFile:
        """Read all but the values of tensors.

        Raises:
            CheckpointError: the file cannot be read or is of another kind.
        """
        content = read_torch_file(path)
        with _parsing(path):
            others = dict(content)
            if others.get("mp_world_size") not in (None, 1):
                raise ValueError(f"mp_world_size is {others['mp_world_size']}: tensor parallelism")
            for key in ("ds_autoep_layers", "autoep_layers"):
                if key in others:
                    raise ValueError(f"it has {key}: expert parallelism")
            return cls(
                path,
                [_shapes(group) for group in others.pop("param_shapes")],
                _tensors(others.pop("module")),
                [str(name) for name in others.pop("buffer_names")],
                _tensors(others.pop("frozen_param_fragments", None) or {}),
                _shapes(others.pop("frozen_param_shapes", None) or {}),
                _names(others.pop("shared_params", None)),
                others,
            )


def _shapes(saved: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    found = {str(name): tuple(shape) for name, shape in saved.items()}
    for name, shape in found.items():
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name} has shape {shape}")
    return found


def _tensors(saved: Mapping[Any, Any]) -> dict[str, TensorInFile]:
    return {str(name): one for name, one in saved.items() if isinstance(one, TensorInFile)}


def _names(saved: Any) -> dict[str, str] | None:
    return None if saved is None else {str(other): str(name) for other, name in saved.items()}
