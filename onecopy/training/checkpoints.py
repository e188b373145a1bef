"""Checkpoints of the trainer: when a run saves, and how it goes on from what was saved.

A run's folder holds its checkpoints, and `run.json`: what the run began with. That is read before
anything is built, so another width is answered with a sentence, not with shapes that do not fit.

The number of sequences in a step is the run's, the number of ranks is not. So on other ranks than
before, the same sequences are dealt out anew, and losses differ by the order of summation only.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

import onecopy
from onecopy.checkpoint.disk import naming, read_file, write_file
from onecopy.checkpoint.folder import latest
from onecopy.comm.values import over_ranks
from onecopy.errors import ConfigError
from onecopy.report.progress import ProgressLine, plural
from onecopy.training.data import TOKENIZER_FOLDER, Corpus
from onecopy.training.models import weights_of
from onecopy.training.options import OF_A_RUN, TrainOptions

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What stays the same in a run, on whatever ranks it goes on.

    options: those that losses depend on (`options.OF_A_RUN`).
    sequences: of all ranks together in one step.
    text: the fingerprint of what is trained on and of what is held out.
    """

    options: dict[str, Any]
    sequences: int
    text: str


def join_run(
    options: TrainOptions, rank: int, world_size: int, corpus: Corpus, device: torch.device
) -> tuple[TrainOptions, bool]:
    """The options that fit the run in `options.checkpoint`, and whether it has saved anything yet.

    Where it has not, it begins here. All ranks are told the same, though storage may show new
    files to some of them later than to others. `batch` and `accumulate` become what makes the
    run's number of sequences in a step, with at most `batch` sequences at once. All ranks call it
    together.

    Raises:
        ConfigError: the run has other options or another text, its sequences cannot be split
            evenly, or the folder is not a run's.
        CheckpointError: the folder cannot be read or written.
    """
    root = options.checkpoint
    if root is None:
        return options, False
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--checkpoint {root} is a file: give a folder, or a new name.")
    found = torch.tensor([latest(root) is not None], dtype=torch.int32, device=device)
    mine = _begun(options, world_size, corpus)
    if not over_ranks(found, maximum=True).item():
        if rank == 0:
            _write(root, mine, corpus)
        return options, False
    run = _read(root)
    _check(root, run, mine)
    batch, accumulate = split(run.sequences, world_size, options.batch)
    return dataclasses.replace(options, batch=batch, accumulate=accumulate), True


def split(sequences: int, world_size: int, most: int) -> tuple[int, int]:
    """(batch, accumulate) of each rank, so that all ranks together have `sequences` in a step.

    Of the ways with at most `most` sequences at once, that with the fewest backwards.

    Raises:
        ConfigError: they cannot be split evenly.
    """
    each, rest = divmod(sequences, world_size)
    if rest:
        numbers = [n for n in range(1, sequences + 1) if sequences % n == 0]
        near = [max(n for n in numbers if n < world_size), *[n for n in numbers if n > world_size]]
        raise ConfigError(
            f"A step of this run has {sequences} sequences, which {world_size} ranks cannot share "
            f"evenly. Resume on {' or '.join(str(n) for n in near[:2])}."
        )
    accumulate = next(n for n in range(1, each + 1) if each % n == 0 and each // n <= most)
    return each // accumulate, accumulate


class Checkpoints:
    """Saves a run every so many steps, and resumes it from the latest good checkpoint.

    parts: what belongs to the run beside model and optimizer, by name. Their states are equal on
    all ranks.
    """

    def __init__(
        self,
        options: TrainOptions,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: dict[str, Stateful],
    ) -> None:
        self._options = options
        self._model = model
        self._optimizer = optimizer
        self._parts = parts

    def resume(self, progress: ProgressLine) -> int:
        """Go on where the run ended, which has saved something; returns the number of steps done.

        Raises:
            CheckpointError: none of its checkpoints can be loaded.
        """
        options = self._options
        assert options.checkpoint is not None, "a run is resumed from its folder"
        root = options.checkpoint
        loaded = onecopy.load(root, self._model, self._optimizer, fallback=True)
        progress.note(
            f"resumed from step {loaded.step} of {options.steps} "
            f"(checkpoint {loaded.path}, saved by {plural(loaded.world_size, 'rank')})"
        )
        for name, part in self._parts.items():
            part.load_state_dict(loaded.extra[name])
        if loaded.step == options.steps:
            progress.note("all steps are done: nothing is trained, these are the run's results")
        return loaded.step

    def after_step(self, done: int, *, ends: bool = False) -> None:
        """`done` steps are done: save, if it is time to, or if the run `ends` here.

        Raises:
            CheckpointError: it cannot be written; the checkpoint before it is as it was.
        """
        options = self._options
        if options.checkpoint is None:
            return
        if ends or done % options.save_every == 0 or done == options.steps:
            onecopy.save(
                options.checkpoint,
                self._model,
                self._optimizer,
                step=done,
                extra={name: part.state_dict() for name, part in self._parts.items()},
                keep=options.keep,
                # What adapters stand beside is in the model's own files.
                frozen=not options.lora_rank or weights_of(options) is None,
            )


def _begun(options: TrainOptions, world_size: int, corpus: Corpus) -> Run:
    return Run(
        options={name: _as_json(getattr(options, name)) for name in OF_A_RUN},
        sequences=options.batch * options.accumulate * world_size,
        text=corpus.fingerprint,
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _write(root: Path, run: Run, corpus: Corpus) -> None:
    temporary = root / f".{RUN_FILE}.new"
    with naming("written", root / RUN_FILE):
        root.mkdir(parents=True, exist_ok=True)
        # A tokenizer that was trained might be another one where it is trained again.
        corpus.tokenizer.save(root / TOKENIZER_FOLDER)
        write_file(temporary, json.dumps(dataclasses.asdict(run), indent=2).encode() + b"\n")
        temporary.replace(root / RUN_FILE)


def _read(root: Path) -> Run:
    path = root / RUN_FILE
    if not path.is_file():
        raise ConfigError(
            f"{root} holds checkpoints, but no {RUN_FILE}: they are not of `onecopy train`, or "
            "this process sees another folder than others. Give the folder that an earlier run "
            "named with --checkpoint, or a new one, on storage that all processes share."
        )
    text = read_file(path)
    try:
        values: dict[str, Any] = json.loads(text)
        return Run(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}), so it cannot be told whether these options are the "
            "run's. Write it again by beginning the same run with another --checkpoint folder."
        ) from error


def _check(root: Path, run: Run, mine: Run) -> None:
    other = [name for name in OF_A_RUN if run.options.get(name) != mine.options[name]]
    if other:
        asked = ", ".join(_typed(name, mine.options[name]) for name in other)
        begun = ", ".join(_typed(name, run.options.get(name)) for name in other)
        raise ConfigError(
            f"The run in {root} began with {begun}, and cannot go on with {asked}. Give it the "
            "options that it began with, or give a new run another --checkpoint folder."
        )
    if run.text != mine.text:
        raise ConfigError(
            f"The run in {root} began with another text. Give the --data it began with (Python's "
            "own texts differ between versions of Python), or another --checkpoint folder."
        )


def _typed(name: str, value: Any) -> str:
    """As on the command line, or nearly so."""
    words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{name.replace('_', '-')} {words}"
