"""What the ranks of tests/test_trainer.py run: Hugging Face's Trainer, with and without onecopy.

Without (`stage` is None) the Trainer wraps the model in DistributedDataParallel where there are
several ranks. transformers is imported in the functions: it takes seconds.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import onecopy.handle
from tests import models
from tests.runs import full_values


@contextmanager
def launched() -> Iterator[None]:
    """Inside, this rank looks to Accelerate as if torchrun had started it; what follows is new."""
    from accelerate.state import AcceleratorState, GradientState

    size, rank = dist.get_world_size(), dist.get_rank()
    names = {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    if size > 1:
        os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name in names:
            os.environ.pop(name, None)


class Texts(Dataset[Any]):
    """Sequences of tokens; some labels are left out, so that ranks count different numbers."""

    def __init__(self, samples: int = 32, length: int = 10) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(2, 101, (samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._tokens[index]
        labels = tokens.clone()
        labels[: index % 5] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


@contextmanager
def quiet() -> Iterator[io.StringIO]:
    """The Trainer prints what it logs."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield printed


def trainer_of(
    stage: int | None, model: Any, folder: Path, *, base: Any = None, **settings: Any
) -> Any:
    """A Trainer, or a OneCopyTrainer; settings that TrainingArguments have are theirs."""
    from transformers.trainer import Trainer
    from transformers.training_args import TrainingArguments

    from onecopy.integrations.huggingface import OneCopyTrainer

    known = set(TrainingArguments.__dataclass_fields__)
    arguments = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 3,
        "per_device_train_batch_size": 8 // dist.get_world_size(),
        "per_device_eval_batch_size": 8 // dist.get_world_size(),
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "dataloader_pin_memory": False,
    }
    settings = copy.deepcopy(settings)  # transformers writes into nested ones
    arguments |= {name: value for name, value in settings.items() if name in known}
    others = {name: value for name, value in settings.items() if name not in known}
    if stage is not None:
        others["stage"] = stage
    kind = base or (Trainer if stage is None else OneCopyTrainer)
    return kind(
        model,
        TrainingArguments(folder, **arguments),
        train_dataset=Texts(),
        eval_dataset=Texts(samples=13),
        **others,
    )


@dataclass(frozen=True)
class Run:
    """One training; settings are those of TrainingArguments, of the Trainer, or of onecopy."""

    stage: int | None
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "hf_llama"


@dataclass
class Seen:
    """What a run has logged, one number after another, and the weights in the end."""

    logs: list[float]
    values: dict[str, Tensor]


def logged(trainer: Any) -> list[float]:
    """Losses, norms and rates, without how long it took."""
    return [
        value
        for line in trainer.state.log_history
        for name, value in sorted(line.items())
        if not name.endswith(("_second", "_runtime", "_time", "total_flos"))
    ]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Full values, sharded or not; wherever an optimizer with masters has them."""
    if onecopy.handle.find(model) is not None:
        return full_values(model)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def train(run: Run, folder: Path) -> Seen:
    """Train once."""
    with launched(), quiet():
        model = models.build(run.model)
        trainer = trainer_of(run.stage, model, folder, **run.settings)
        trainer.train()
        return Seen(logged(trainer), values_of(model))


def train_all(runs: list[Run], folder: Path) -> list[Seen]:
    """One after another, in one call."""
    return [train(run, folder) for run in runs]
