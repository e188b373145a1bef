"""Hugging Face's Trainer, with onecopy in the place of DistributedDataParallel.

    trainer = OneCopyTrainer(model, args, train_dataset=dataset, stage=3)

`OneCopyMixin` does the same for any class that derives from Trainer:

    class Finetuner(OneCopyMixin, SFTTrainer): ...

The Trainer asks one method to wrap the model, `_wrap_model`: there the model is sharded, together
with the optimizer that has been made by then. Saving and loading is done by all ranks together.
Whatever else the Trainer does to model and optimizer has its plain meaning on sharded ones, so
nothing more is overridden.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy import handle
from onecopy.api import config_of, full_parameters, shard
from onecopy.checkpoint.loading import load
from onecopy.checkpoint.naming import name_all
from onecopy.checkpoint.random_states import random_states, restore_random_states
from onecopy.checkpoint.saving import save
from onecopy.checkpoint.together import together
from onecopy.core import build
from onecopy.core.stages import stage_of
from onecopy.core.state_dict import whole_state_dict
from onecopy.errors import ConfigError
from onecopy.extras import require
from onecopy.integrations import huggingface_checks as checks
from onecopy.integrations.accelerate import adopt, plain

require("transformers", "OneCopyTrainer")

from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, Trainer  # noqa: E402

# Of a mixin: whichever Trainer stands behind it.
Host: Any = Trainer if TYPE_CHECKING else object

__all__ = ["OneCopyMixin", "OneCopyTrainer"]

# Within the Trainer's checkpoint-<step>: what `onecopy.save` writes.
FOLDER = "onecopy"


class OneCopyMixin(Host):  # type: ignore[misc]
    """What makes a Trainer shard its model: put it before the Trainer among the bases.

    Keyword arguments that are settings of `onecopy.Config` are taken out of the constructor's, and
    so is `config`, a whole `onecopy.Config`; all others are the Trainer's. `TrainingArguments` keep
    their meaning. Every method of the Trainer that all ranks of a launch call is called by all.

    Raises:
        ConfigError: a setting is unknown or does not fit, or an argument of the Trainer asks for
            another way to shard.
        ShardingError: the model has been sharded by another library, or is quantized.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(OneCopyMixin):
            raise ConfigError(
                f"OneCopyMixin stands behind the Trainer in {cls.__name__}, whose methods would be "
                f"used instead of its own: class {cls.__name__}(OneCopyMixin, ...)"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.onecopy_config, kwargs = checks.take_settings(type(self), kwargs)
        super().__init__(*args, **kwargs)
        checks.check_trainer(self, self.onecopy_config)

    # Training ---------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """True resumes from the last checkpoint that is complete; a killed run may leave another.

        See the Trainer's own method for the rest.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """A model without values yet gets them where it will lie, when it is sharded."""
        if not any(build.unmade(model)):
            super()._move_model_to_device(model, device)

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Shard the model; with the optimizer, where it is to be trained."""
        if training:
            self._shard_for_training()
        elif any(build.unmade(self.model)):
            shard(self.model, config=self.onecopy_config)
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
        return adopt(self.accelerator, wrapped) if training and wrapped is self.model else wrapped

    def _shard_for_training(self) -> None:
        owner = handle.find(self.model)
        optimizer = plain(self.optimizer)
        if owner is None or all(one.optimizer is not optimizer for one in owner.bindings):
            # One that is sharded already has its settings.
            config = self.onecopy_config if owner is None else None
            shard(self.model, optimizer, config=config)
        asked = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        config = config_of(self.model)
        cuts_gradients = stage_of(config.chosen_stage).cut_gradients
        if cuts_gradients and not config.step_in_backward and "sync_each_batch" not in asked:
            # The Trainer would accumulate under no_sync, which keeps whole gradients on each rank.
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """None, which is not logged, where backward has stepped and left no gradients."""
        if config_of(self.model).step_in_backward:
            return None
        return super()._get_grad_norm(model, grad_norm)

    # Evaluation -------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """With the parameters gathered once where ranks generate: their texts differ in length."""
        with self._gathered_to_generate():
            return super().evaluation_loop(*args, **kwargs)

    def _gathered_to_generate(self) -> AbstractContextManager[Any]:
        generates = getattr(self.args, "predict_with_generate", False)
        is_synced = getattr(self, "_gen_kwargs", {}).get("synced_gpus", False)
        if not generates or is_synced or handle.find(self.model) is None:
            return nullcontext()
        if callable(getattr(self.optimizer, "eval", None)):
            # The loop would call it inside, where parameters must not change.
            self.optimizer.eval()
        return full_parameters(self.model)

    # Checkpoints ------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Gather the model, which takes all ranks; those that save write it."""
        write = super()._save
        if handle.find(self.model) is None:
            write(output_dir, state_dict)
            return
        if state_dict is None:
            state_dict = whole_state_dict(
                self.model, keep=self.args.should_save, wanted=saved_names(self.model)
            )
        together(name_all(self.model, None).group, lambda: write(output_dir, state_dict))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """One checkpoint for any number of ranks; the scheduler's file as ever."""
        if handle.find(self.model) is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer = plain(self.optimizer)
        save(
            Path(output_dir, FOLDER),
            self.model,
            optimizer,
            step=self.state.global_step,
            frozen=not adapters_of(self.model),
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The model comes with the optimizer, where onecopy has saved both."""
        if not Path(resume_from_checkpoint, FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Model, optimizer and scheduler, as they were saved by any number of ranks."""
        if checkpoint is None or not Path(checkpoint, FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # The Trainer restores random states itself, once it has found its place in the data.
        states = random_states()
        load(Path(checkpoint, FOLDER), self.model, plain(self.optimizer))
        restore_random_states(states)
        path = os.path.join(checkpoint, SCHEDULER_NAME)
        self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))

    def _load_best_model(self) -> None:
        """Each rank reads what it owns."""
        folder = Path(self.state.best_model_checkpoint, FOLDER)
        if folder.is_dir():
            load(folder, self.model)
        else:
            super()._load_best_model()


class OneCopyTrainer(OneCopyMixin, Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer that shards: `OneCopyTrainer(model, args, ..., stage=3)`."""


def last_complete(folder: str) -> str | None:
    """The Trainer's last checkpoint whose state, which is written last, is there; None for none."""
    found = [one.parent for one in Path(folder).glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    steps = {one: one.name.rpartition("-")[2] for one in found}
    complete = [one for one, step in steps.items() if step.isdecimal()]
    return str(max(complete, key=lambda one: int(steps[one]))) if complete else None


def adapters_of(model: nn.Module) -> list[str]:
    """Names of PEFT's adapters: their base model is in no checkpoint of the Trainer."""
    return list(getattr(handle.inner(model), "peft_config", None) or ())


def saved_names(model: nn.Module) -> Callable[[str], bool]:
    """Tells which tensors of a state_dict() go into the files of `save_pretrained`.

    Of a model with adapters these, what trains, and embeddings, which PEFT saves where they have
    been resized.
    """
    adapters = adapters_of(model)
    if not adapters:
        return lambda name: True
    getters = ("get_input_embeddings", "get_output_embeddings")
    embeddings = [getattr(model, name)() for name in getters if hasattr(model, name)]
    kept = {id(one) for module in embeddings if module is not None for one in module.parameters()}
    left_out = {
        name
        for name, one in model.named_parameters(remove_duplicate=False)
        if not one.requires_grad and id(one) not in kept
        if not any(adapter in name.split(".") for adapter in adapters)
    }
    return lambda name: name not in left_out
