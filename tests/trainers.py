"""What the ranks of tests/test_trainer.py run: Hugging Face's Trainer, with and without onecopy.

Without (`stage` is None) the Trainer wraps the model in DistributedDataParallel where there are
several ranks. transformers is imported in the functions: it takes seconds.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import onecopy
import onecopy.handle
from tests import models
from tests.runs import full_values


def num_ranks() -> int:
    """1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def launched() -> Iterator[None]:
    """Inside, this rank looks to Accelerate as if torchrun had started it; what follows is new."""
    from accelerate.state import AcceleratorState, GradientState

    size, rank = num_ranks(), dist.get_rank() if dist.is_initialized() else 0
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

    def __init__(self, samples: int = 32, length: int = 10, *, counts_differ: bool = True) -> None:
        self._counts_differ = counts_differ
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(2, 101, (samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._tokens[index]
        labels = tokens.clone()
        if self._counts_differ:
            labels[: index % 5] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


@contextmanager
def quiet() -> Iterator[io.StringIO]:
    """The Trainer prints what it logs."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield printed


def trainer_of(
    stage: int | None,
    model: Any,
    folder: Path,
    *,
    base: Any = None,
    arguments: Any = None,
    data: Any = None,
    **settings: Any,
) -> Any:
    """A Trainer, or a OneCopyTrainer; settings that TrainingArguments have are theirs."""
    from transformers.trainer import Trainer
    from transformers.training_args import TrainingArguments

    from onecopy.integrations.huggingface import OneCopyTrainer

    arguments = arguments or TrainingArguments
    known = set(arguments.__dataclass_fields__)
    given = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 3,
        "per_device_train_batch_size": 8 // num_ranks(),
        "per_device_eval_batch_size": 8 // num_ranks(),
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "dataloader_pin_memory": False,
    }
    # transformers writes into nested ones.
    given |= {key: copy.deepcopy(one) for key, one in settings.items() if key in known}
    others = {name: value for name, value in settings.items() if name not in known}
    if stage is not None:
        others["stage"] = stage
    kind = base or (Trainer if stage is None else OneCopyTrainer)
    return kind(
        model,
        args=arguments(folder, **given),
        train_dataset=Texts() if data is None else data,
        eval_dataset=Texts(samples=13) if data is None else data,
        **others,
    )


@dataclass
class Seen:
    """What a run has logged, one number after another, and the weights in the end, or more."""

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
    """Full values, sharded or not."""
    if onecopy.handle.find(model) is not None:
        return full_values(model)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def seen_of(trainer: Any, **others: Tensor) -> Seen:
    """What a trainer has come to."""
    return Seen(logged(trainer), {**values_of(trainer.model), **others})


# Scripts: each trains with the Trainer as it is, or with onecopy at a stage -------------------


def train(stage: int | None, folder: Path, **settings: Any) -> Seen:
    """Train once; settings are those of TrainingArguments, of the Trainer, or of onecopy."""
    trainer = trainer_of(stage, models.build("hf_llama"), folder, **settings)
    trainer.train()
    return seen_of(trainer)


def train_twice(stage: int | None, folder: Path) -> Seen:
    """The second train() goes on with the same model and optimizer."""
    trainer = trainer_of(stage, models.build("hf_llama"), folder)
    trainer.train()
    trainer.evaluate()
    trainer.train()
    return seen_of(trainer)


def evaluate_first(stage: int | None, folder: Path) -> Seen:
    """The model is evaluated before it is sharded, and looked at in the end."""
    texts = Texts(16, counts_differ=False)  # the Trainer takes means of batches
    trainer = trainer_of(stage, models.build("hf_llama"), folder, eval_strategy="steps")
    before = trainer.evaluate(texts)["eval_loss"]
    trainer.eval_dataset = texts
    trainer.train()
    found = trainer.predict(Texts(samples=7))
    return seen_of(trainer, before=torch.tensor(before), logits=torch.tensor(found.predictions))


def train_with_own_optimizer(stage: int | None, folder: Path) -> Seen:
    """One that exists before the Trainer does, and its scheduler."""
    model = models.build("hf_llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = trainer_of(stage, model, folder, optimizers=(optimizer, scheduler))
    trainer.train()
    return seen_of(trainer)


def train_from_model_init(stage: int | None, folder: Path) -> Seen:
    """A new model for each train()."""

    def model_init() -> nn.Module:
        return models.build("hf_llama")

    trainer = trainer_of(stage, None, folder, model_init=model_init)
    trainer.train()
    trainer.train()
    return seen_of(trainer)


def run_out_of_memory(stage: int | None, folder: Path) -> Seen:
    """On all ranks, in the second forward: the Trainer begins anew with half of the batch."""
    model = models.build("hf_llama")
    calls = iter(range(100))

    def fail(*_: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    trainer = trainer_of(stage, model, folder, auto_find_batch_size=True)
    trainer.model.lm_head.register_forward_hook(fail)
    trainer.train()
    return seen_of(trainer)


def generate(stage: int | None, folder: Path) -> Seen:
    """Texts of different lengths, in evaluation within training and in prediction."""
    from transformers.trainer_seq2seq import Seq2SeqTrainer
    from transformers.training_args_seq2seq import Seq2SeqTrainingArguments

    from onecopy.integrations.huggingface import OneCopyMixin

    class Translator(OneCopyMixin, Seq2SeqTrainer):
        pass

    model: Any = models.build("hf_t5")
    model.generation_config.eos_token_id = 5
    trainer = trainer_of(
        stage,
        model,
        folder,
        base=Seq2SeqTrainer if stage is None else Translator,
        arguments=Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=12,
        eval_strategy="steps",
        eval_steps=2,
        compute_metrics=lambda found: {"sum": float(found.predictions.sum())},
    )
    trainer.train()
    one = trainer.predict(Texts(samples=7)).predictions
    with warnings.catch_warnings():
        # In step with one another, without whole parameters on any rank: unit by unit.
        warnings.filterwarnings("ignore", message="the order in which units are used has changed")
        other = trainer.predict(Texts(samples=7), synced_gpus=True).predictions
    assert (one == other).all()
    return seen_of(trainer, texts=torch.tensor(one))


def train_what_is_sharded(stage: int | None, folder: Path) -> Seen:
    """The model comes sharded, without an optimizer: its settings are those of that call."""
    model = models.build("hf_llama")
    kind = None
    if stage is not None:
        from onecopy.integrations.huggingface import OneCopyTrainer as kind

        onecopy.shard(model, stage=stage)
    trainer = trainer_of(None, model, folder, base=kind)
    trainer.train()
    return seen_of(trainer)


def train_what_is_built(stage: int | None, folder: Path) -> Seen:
    """The model has no values until it is sharded, and again when it resumes."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    for resume in (None, str(folder / "built" / "checkpoint-2")):
        with onecopy.init_sharded() if stage is not None else contextlib.nullcontext():
            model = models.build("hf_llama", seed=99 if resume else 0)
        trainer = trainer_of(stage, model, folder / "built", **settings)
        trainer.train(resume_from_checkpoint=resume)
    return seen_of(trainer)


def step_in_backward(stage: int | None, folder: Path) -> Seen:
    """Without gradients there are no norms to be logged."""
    settings: dict[str, Any] = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    if stage is not None:
        settings["step_in_backward"] = True
    trainer = trainer_of(stage, models.build("hf_llama"), folder, **settings)
    trainer.train()
    for line in trainer.state.log_history:
        line.pop("grad_norm", None)
    return seen_of(trainer)


MODES: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd", "max_grad_norm": 0.0},
    "sgd, clipped": {"optim": "sgd", "max_grad_norm": 0.1},
    "adamw": {},
    "adafactor": {"optim": "adafactor"},
    "rmsprop": {"optim": "rmsprop"},
    "radam": {"optimizer_cls_and_kwargs": (torch.optim.RAdam, {"lr": 1e-2})},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2},
    "accumulated by no_sync": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}},
    },
    "tokens of each rank": {"average_tokens_across_devices": False},
    "smooth labels": {"label_smoothing_factor": 0.1},
    "checkpointed activations": {"activation_checkpointing": True},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "evaluated": {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2},
    "noise": {"neftune_noise_alpha": 5.0, "data_seed": 5},
}
SCRIPTS: dict[str, Callable[[int | None, Path], Seen]] = {
    **{name: partial(train, **mode) for name, mode in MODES.items()},
    "train twice": train_twice,
    "evaluate first": evaluate_first,
    "own optimizer": train_with_own_optimizer,
    "model_init": train_from_model_init,
    "out of memory": run_out_of_memory,
    "generate": generate,
    "sharded before": train_what_is_sharded,
    "built without values": train_what_is_built,
    "step in backward": step_in_backward,
}


def run_all(runs: list[tuple[str, int | None]], folder: Path) -> list[Seen]:
    """Scripts at stages, one after another in one call: importing transformers takes seconds."""
    found = []
    for name, stage in runs:
        torch.manual_seed(0)
        with launched(), quiet():
            found.append(SCRIPTS[name](stage, folder))
    return found
