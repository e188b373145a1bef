"""What an accelerator does otherwise once it knows a sharded model: saving, loading, uneven inputs.

Its own `save_state` would gather the whole model on every rank, save the optimizer states of the
first rank only, and return before the others have written. Here sharded models and their optimizers
are out of its sight meanwhile, and go into a checkpoint of onecopy within its folder: schedulers,
samplers, scalers and registered objects stay where Accelerate has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from accelerate.utils import convert_file_size_to_int
from torch import nn

from onecopy import handle
from onecopy.checkpoint.export import export
from onecopy.checkpoint.loading import load
from onecopy.checkpoint.saving import save
from onecopy.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

__all__ = ["FOLDER", "take_over"]

Object = TypeVar("Object")
_Named: TypeAlias = Object | dict[str, Object] | None

# Of the checkpoint of onecopy, within the folder of save_state.
FOLDER = "onecopy"
METHODS = ("save_state", "load_state", "save_model", "join_uneven_inputs")


def take_over(accelerator: Accelerator) -> None:
    """Put this module's methods in the place of the accelerator's own; again does nothing."""
    if isinstance(getattr(accelerator.save_state, "__self__", None), _Methods):
        return
    methods = _Methods(accelerator)
    for name in METHODS:
        setattr(accelerator, name, getattr(methods, name))


class _Methods:
    """The accelerator's methods, those of before and those in their places."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._before = {name: getattr(accelerator, name) for name in METHODS}

    def save_state(self, output_dir: str | None = None, **settings: Any) -> Path:
        """As `Accelerator.save_state`; complete for all ranks when it returns on one."""
        with self._only_others() as (models, optimizers):
            folder = Path(self._before["save_state"](output_dir, **settings))
            if models is not None:
                # Last: each rank has written its own files when all come together here.
                save(
                    folder / FOLDER,
                    models,
                    optimizers,
                    extra={"step": self._accelerator.step},
                    keep=1,
                )
        return folder

    def load_state(self, input_dir: str | None = None, **settings: Any) -> None:
        """As `Accelerator.load_state`; the number of ranks may have changed."""
        found: list[Path] = []

        def look(_: list[nn.Module], folder: str) -> None:
            found.append(Path(folder) / FOLDER)
            if models is not None and not found[0].is_dir():
                raise CheckpointError(
                    f"{folder} holds no checkpoint of sharded models: its save_state was not that "
                    "of an accelerator prepared by onecopy, or did not come to its end. Its "
                    f'weights alone are read by onecopy.load_pretrained(model, "{folder}")'
                )

        with self._only_others() as (models, optimizers):
            # Where automatic naming chooses a folder only hooks are told which.
            hook = self._accelerator.register_load_state_pre_hook(look)
            try:
                self._before["load_state"](input_dir, **settings)
            finally:
                hook.remove()
            if models is not None:
                # Accelerate's counter is in a file for each rank, which new ranks do not have.
                self._accelerator.step = load(found[0], models, optimizers).extra["step"]

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """As `Accelerator.save_model`, unit by unit: no rank holds the whole model.

        All ranks call it together; the files are there when it returns on the main process.
        """
        if handle.find(model) is None or not safe_serialization:
            self._before["save_model"](model, save_directory, max_shard_size, safe_serialization)
            return
        size = convert_file_size_to_int(max_shard_size)
        folder = Path(save_directory)
        new = folder / ".new"
        export(handle.inner(model), new, max_shard_bytes=size)
        if self._accelerator.is_main_process:
            _replace(folder, new)

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """As `Accelerator.join_uneven_inputs`, where batches are even; there it does nothing.

        Raises:
            ConfigError: they may be uneven.
        """
        is_sharded = any(isinstance(x, nn.Module) and handle.find(x) for x in joinables)
        if not is_sharded:
            inner: AbstractContextManager[Any] = self._before["join_uneven_inputs"](
                joinables, even_batches
            )
            return inner
        if self._accelerator.even_batches if even_batches is None else even_batches:
            return nullcontext()
        raise ConfigError(
            "join_uneven_inputs cannot join a sharded model: make the accelerator with "
            "DataLoaderConfiguration(even_batches=False) and write the loop as "
            "`for batch in onecopy.join(model, loader)` instead, see docs/accelerate.md"
        )

    @contextmanager
    def _only_others(
        self,
    ) -> Iterator[tuple[_Named[nn.Module], _Named[torch.optim.Optimizer]]]:
        """Take what is sharded out of the accelerator's lists; gives models and optimizers."""
        accelerator = self._accelerator
        all_models, all_optimizers = accelerator._models, accelerator._optimizers
        sharded = [one for one in all_models if handle.find(one) is not None]
        attached = {id(one.optimizer) for model in sharded for one in handle.of(model).bindings}
        bound = [one for one in all_optimizers if id(one.optimizer) in attached]
        accelerator._models = [one for one in all_models if handle.find(one) is None]
        accelerator._optimizers = [one for one in all_optimizers if one not in bound]
        try:
            yield (
                _named("model", [handle.inner(one) for one in sharded]),
                _named("optimizer", [one.optimizer for one in bound]),
            )
        finally:
            accelerator._models, accelerator._optimizers = all_models, all_optimizers


def _named(word: str, objects: list[Object]) -> _Named[Object]:
    """What `save` is given: one alone, several numbered as in the names of Accelerate's files."""
    if len(objects) < 2:
        return objects[0] if objects else None
    return {f"{word}_{number}" if number else word: one for number, one in enumerate(objects)}


def _replace(folder: Path, new: Path) -> None:
    """Move files into a folder, in the place of an earlier model, which may have had more."""
    names = {one.name for one in new.iterdir()}
    for name in names:
        (new / name).replace(folder / name)
    for old in folder.glob("model*.safetensors*"):
        if old.name not in names:
            old.unlink()
    new.rmdir()
