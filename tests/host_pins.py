"""What onecopy leans on in Accelerate and Lightning beside what their documentation promises.

Each sentence says what a new release has moved, and what to look at.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from tests.accelerate_scripts import accelerator


def accelerate_has_moved() -> list[str]:
    """Sentences about what is no longer there, on two ranks."""
    from accelerate.optimizer import AcceleratedOptimizer

    with accelerator() as its:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        prepared = its.prepare_model(model, evaluation_mode=True)
        again, wrapped = its.prepare(model, optimizer)
        step = inspect.getsource(AcceleratedOptimizer.step)
        found = {
            "prepare_model(evaluation_mode=True) wraps or copies a model: see adopt": (
                prepared is model
            ),
            "prepare no longer returns a prepared model as it is: see adopt": again is model,
            "Accelerator._models is no list of prepared models: see _only_others": (
                its._models == [model]
            ),
            "Accelerator._optimizers is no list of wrappers: see _only_others": (
                its._optimizers == [wrapped] and wrapped.optimizer is optimizer
            ),
            "step_was_skipped does not read _is_overflow: see _tell_skipped_steps": (
                not wrapped.step_was_skipped and _is_skipped_with(wrapped, _is_overflow=True)
            ),
            "AcceleratedOptimizer.step does not ask _accelerate_step_called: see "
            "_tell_skipped_steps": "_accelerate_step_called" in step,
        }
    return [sentence for sentence, holds in found.items() if not holds]


def _is_skipped_with(optimizer: object, **attributes: bool) -> bool:
    vars(optimizer).update(attributes)
    return bool(optimizer.step_was_skipped)  # type: ignore[attr-defined]


def lightning_has_moved() -> list[str]:
    """Sentences about what is no longer there."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    clip = inspect.getsource(Precision.clip_grad_by_norm)
    clip += inspect.getsource(Precision.clip_grad_by_value)
    strategy = inspect.getsource(DDPStrategy.setup)
    found = {
        "precision plugins clip other parameters than main_params: see _adapted": (
            clip.count("self.main_params(optimizer)") == 2
        ),
        "MixedPrecision decides about unscaling in other places than optimizer_step and "
        "clip_gradients: see _MixedPrecision": {
            name
            for name, method in vars(MixedPrecision).items()
            if "_optimizer_handles_unscaling" in _names_in(method)
        }
        == {"optimizer_step", "clip_gradients"},
        "checkpoints are dumped without _get_lightning_module_state_dict: see leave_out_states": (
            "_get_lightning_module_state_dict" in _names_in(_CheckpointConnector.dump_checkpoint)
        ),
        "Trainer has no _checkpoint_connector: see leave_out_states": (
            "_checkpoint_connector" in _names_in(Trainer.save_checkpoint)
        ),
        "DDPStrategy.setup does other things than before: see OneCopyStrategy.setup": all(
            name in strategy
            for name in (
                "self.accelerator.setup(trainer)",
                "self._layer_sync.apply(self.model)",
                "self.precision_plugin.convert_module(self.model)",
                "self.model_to_device()",
                "self.setup_optimizers(trainer)",
                "self.setup_precision_plugin()",
            )
        ),
        "configure_model is called outside of tensor_init_context: see OneCopyStrategy": (
            "tensor_init_context" in _names_in(call._call_configure_model)
        ),
        "LightningModule toggles optimizers by other names: see TOGGLES": (
            hasattr(LightningModule, "toggle_optimizer")
            and hasattr(LightningModule, "untoggle_optimizer")
        ),
    }
    for name in ("_reset_optimizers_and_schedulers", "block_backward_sync", "pre_backward"):
        found[f"DDPStrategy has no {name}: see OneCopyStrategy"] = hasattr(DDPStrategy, name)
    made = vars(DDPStrategy())
    for name in ("_lightning_module", "_lightning_optimizers", "_layer_sync"):
        found[f"strategies have no {name}: see OneCopyStrategy"] = name in made
    return [sentence for sentence, holds in found.items() if not holds]


def _names_in(function: object) -> tuple[str, ...]:
    """Names that the code of a function uses."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return () if code is None else code.co_names
