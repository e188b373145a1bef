"""`onecopy.record`: a training loop inside of it writes what it does into a run's folder.

What is written where is told in `onecopy/report/run_folder.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from onecopy import handle
from onecopy.errors import ConfigError, RunError, ShardingError
from onecopy.recording.description import describe_run
from onecopy.recording.folder import claim
from onecopy.recording.recorder import Recorder, Wishes
from onecopy.report.trackers import log_of

if TYPE_CHECKING:
    from onecopy.core.engine import Engine

__all__ = ["Recording", "record"]

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
LONGEST_ERROR = 4000


def record(  # noqa: PLR0913
    folder: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    *,
    trackers: Iterable[Any] = (),
    trace: int = 0,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Recording:
    """Record a training loop into `folder`: `with onecopy.record("runs/first", model) as run:`.

    Every rank writes its steps (seconds and where they went, bytes sent, memory, what was logged)
    and, of a few steps, every event; the first rank writes what ran and with which settings. All
    ranks enter together. `onecopy report FOLDER` shows it, while it runs too.

    A step ends when the first optimizer's `step` returns. Trouble with the folder (a full disk)
    never stops the training: it is told once, by the logger "onecopy".

    Args:
        folder: of this run alone; made where it does not exist. Where ranks do not share storage,
            each one's files are on its own machine.
        model: the sharded model; several as a list or a dict of names.
        optimizer: the attached optimizer, several as a list, of which the first counts the steps;
            by default those that are attached. A model without any makes a step of each `log`.
        trackers: objects with `log(step, numbers)` or `log(numbers, step=...)` (wandb, trackio, a
            `onecopy.report.tensorboard.TensorBoard`), called on the first rank, one step later:
            see `onecopy.report.trackers` for what they are told.
        trace: look closely at so many steps, from the second on, instead of at a few, and write
            them as FOLDER/trace.json, to be opened at https://ui.perfetto.dev.
        resume: go on in the folder where it holds a run (one that goes on from a checkpoint);
            steps that are made again take the place of the old ones.
        settings: the program's own options, to be shown with the run: values, or
            `onecopy.report.run_folder.Setting` with where they came from.

    Raises:
        ShardingError: a model is not sharded, or an optimizer is not attached.
        ConfigError: an argument does not fit.
        RunError: on entering, on all ranks: the folder holds another run, or cannot be written.
        DivergenceError: on entering: some ranks do something else.
    """
    models = _named(model)
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    trackers = tuple(trackers)
    for one in trackers:
        log_of(one)
    if trace < 0:
        raise ConfigError(f"trace={trace}: give a number of steps")
    attached = list(
        {
            id(binding.optimizer): binding.optimizer
            for one in models.values()
            for binding in handle.of(one).bindings
        }.values()
    )
    for one in given:
        if not any(one is other for other in attached):
            raise ShardingError(
                f"this {type(one).__name__} is not attached to the model that is recorded: call "
                "onecopy.shard(model, optimizer) first"
            )
    return Recording(
        # The loop may change the current folder, and some files are written at the end only.
        Path(folder).absolute(),
        models,
        given or attached,
        Wishes(trackers=trackers, trace=trace, resume=resume, settings=settings or {}),
    )


class Recording:
    """A loop that is being recorded; made by `record`, and entered once."""

    def __init__(
        self,
        folder: Path,
        models: dict[str, nn.Module],
        optimizers: list[torch.optim.Optimizer],
        wishes: Wishes,
    ) -> None:
        self.folder = folder
        self._models = models
        self._optimizers = optimizers
        self._wishes = wishes
        self._recorder: Recorder | None = None

    def __enter__(self) -> Self:
        engine: Engine = handle.of(next(iter(self._models.values()))).engine
        collectives = engine.collectives
        describe = partial(describe_run, self._models, self._wishes.settings)
        files = claim(
            self.folder,
            self._wishes.resume,
            collectives.groups.world,
            collectives.agreement,
            describe,
        )
        self._recorder = Recorder(files, self._models, self._optimizers, self._wishes)
        return self

    def log(self, **numbers: Any) -> None:
        """Keep numbers of the step just made: numbers, and tensors of one element.

        Call it after `optimizer.step()`. A tensor on an accelerator is read one step later, without
        a stall. A name that is used again in the same step takes the later value.

        Raises:
            ConfigError: a value is no number.
            RunError: outside of the `with` block.
        """
        if self._recorder is None:
            raise RunError(
                "log() outside of the recording: call it inside of `with onecopy.record(...) as "
                "run:`"
            )
        self._recorder.log(numbers)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if ended_well or kind is None:
            recorder.close("finished", None)
        else:
            text = f"{kind.__name__}: {error}".removesuffix(": ")  # Ctrl-C says nothing
            recorder.close("failed", text[:LONGEST_ERROR])


def _named(model: Models) -> dict[str, nn.Module]:
    """Models by their names in the run; all of them sharded."""
    if isinstance(model, nn.Module):
        found = {"": model}
    elif isinstance(model, Mapping):
        found = {str(name): one for name, one in model.items()}
    else:
        found = {str(number): one for number, one in enumerate(model)}
    if not found:
        raise ConfigError("record() got no model: pass the model that was given to shard")
    found = {name: handle.inner(one) for name, one in found.items()}
    for one in found.values():
        handle.of(one)
    return found
