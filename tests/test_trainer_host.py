"""What onecopy leans on in transformers and accelerate, and what it refuses before any work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
pytest.importorskip("accelerate", reason="accelerate is not installed: the test extra")

import onecopy
from onecopy.errors import ConfigError, ShardingError
from tests import models
from tests.trainers import launched, quiet, trainer_of, values_of

# Methods that are overridden, with the arguments that they are called with.
OVERRIDDEN = {
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_move_model_to_device": ["self", "model", "device"],
    "_wrap_model": ["self", "model", "training", "dataloader"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_load_best_model": ["self"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "evaluation_loop": None,
}
# Where the Trainer must call them, and what must stand there.
CALLS = {
    "_prepare_for_training": ["self.create_optimizer()", "self._wrap_model(self.model_wrapped)"],
    "train": ["self._load_from_checkpoint(resume_from_checkpoint)"],
    "save_model": ["self._save(output_dir)"],
    "_save_checkpoint": ["self._save_optimizer_and_scheduler(output_dir)"],
    "_finalize_training": ["self._load_best_model()"],
    "_run_epoch": [
        "self._get_grad_norm(model, grad_norm=grad_norm)",
        'plugin_kwargs.get("sync_each_batch", False)',
    ],
    "evaluation_loop": ["self._wrap_model(self.model, training=False)"],
    "_maybe_log_save_evaluate": ["if grad_norm is not None:"],
}


def test_methods_of_the_trainer_that_are_overridden() -> None:
    from transformers.trainer import Trainer

    from onecopy.integrations.huggingface import OneCopyMixin

    own = {name for name, one in vars(OneCopyMixin).items() if inspect.isfunction(one)}
    missing = own - set(OVERRIDDEN) - {name for name in own if not hasattr(Trainer, name)}
    assert missing == {"__init__"}, f"overridden, and not pinned here: {missing}"
    for name, arguments in OVERRIDDEN.items():
        method = getattr(Trainer, name, None)
        assert method is not None, f"transformers has no Trainer.{name} any more, which we override"
        found = list(inspect.signature(method).parameters)
        assert arguments is None or found == arguments, f"Trainer.{name} takes {found} now"


def test_the_trainer_calls_them_where_it_did() -> None:
    from transformers.trainer import Trainer

    for name, calls in CALLS.items():
        assert hasattr(Trainer, name), f"transformers has no Trainer.{name} any more"
        source = inspect.getsource(getattr(Trainer, name))
        for call in calls:
            assert call in source, f"Trainer.{name} does not say {call} any more: look what it does"


def test_settings_are_no_arguments_of_trainers() -> None:
    """One that is both would be taken away from its Trainer."""
    from transformers.trainer import Trainer
    from transformers.trainer_seq2seq import Seq2SeqTrainer

    for trainer in (Trainer, Seq2SeqTrainer):
        arguments = set(inspect.signature(trainer.__init__).parameters)
        both = arguments & {*onecopy.Config.__dataclass_fields__, "config"}
        assert not both, f"{trainer.__name__} has arguments that are settings of onecopy: {both}"


def make(folder: Path, model: nn.Module | None = None, **settings: Any) -> Any:
    with launched(), quiet():
        return trainer_of(3, model or models.build("hf_llama"), folder, **settings)


class _Quantized(nn.Linear):
    is_quantized = True


class _InParts(nn.Linear):
    is_distributed_loading_by_transformers = True


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "typo": ({"stagee": 2}, "Did you mean 'stage'"),
    "typo of the whole configuration": ({"confg": None}, "Did you mean 'config'"),
    "typo of the Trainer's": ({"eval_datasets": []}, "Did you mean 'eval_dataset'"),
    "bad value": ({"precision": "int8"}, "precision"),
    "no config": ({"config": {"stage": 3}}, "config is a dict"),
    "two clips": ({"settings_norm": 1.0}, "TrainingArguments(max_grad_norm=...) alone"),
    "a step in backward": ({"step_in_backward": True}, "TrainingArguments(max_grad_norm=0)"),
    "two passes": (
        {"step_in_backward": "two-pass", "config": onecopy.Config(max_grad_norm=1.0)},
        "say step_in_backward=True",
    ),
    "bf16_full_eval": ({"bf16_full_eval": True}, 'precision="bf16"'),
    "lomo": ({"optim": "lomo"}, "step_in_backward=True"),
    "layerwise": ({"optim": "galore_adamw_layerwise"}, "choose another optimizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_cannot_be_meant(tmp_path: Path, case: str) -> None:
    settings, says = REFUSED[case]
    settings = dict(settings)
    if "settings_norm" in settings:
        # Of onecopy: as a keyword it would be TrainingArguments' here.
        settings["config"] = onecopy.Config(max_grad_norm=settings.pop("settings_norm"))
    with pytest.raises(ConfigError) as error:
        make(tmp_path, **settings)
    assert says in str(error.value)
    assert " self," not in str(error.value)


def _many_devices(trainer: Any) -> None:
    trainer.args._n_gpu = 4


def _deepspeed(trainer: Any) -> None:
    trainer.is_deepspeed_enabled = True


def _fsdp(trainer: Any) -> None:
    trainer.is_fsdp_enabled = True


def _parallelism(trainer: Any) -> None:
    trainer.args.parallelism_config = SimpleNamespace(total_size=2)


def _quantized(trainer: Any) -> None:
    trainer.model = _Quantized(4, 4)


def _loaded_in_parts(trainer: Any) -> None:
    trainer.model = _InParts(4, 4)


def _device_map(trainer: Any) -> None:
    trainer.model.hf_device_map = {"model": 0, "lm_head": 1}


RIVALS: dict[Callable[[Any], None], str] = {
    _many_devices: "torchrun --nproc-per-node=4",
    _deepspeed: "leave TrainingArguments(deepspeed=...)",
    _fsdp: "leave TrainingArguments(fsdp=...)",
    _parallelism: "parallelism_config",
    _quantized: "without quantization_config",
    _loaded_in_parts: "tp_plan or distributed_config",
    _device_map: "without device_map",
}


@pytest.mark.parametrize("change", RIVALS)
def test_others_that_would_shard(tmp_path: Path, change: Callable[[Any], None]) -> None:
    """What one machine without accelerators cannot make is said to a Trainer that is made."""
    from onecopy.integrations.huggingface_checks import check_trainer

    with launched(), quiet():
        trainer = trainer_of(3, models.build("hf_llama"), tmp_path)
        change(trainer)
        with pytest.raises((ConfigError, ShardingError)) as error:
            check_trainer(trainer, trainer.onecopy_config)
    assert RIVALS[change] in str(error.value)


def test_a_mixin_behind_the_trainer_would_do_nothing() -> None:
    from transformers.trainer import Trainer

    from onecopy.integrations.huggingface import OneCopyMixin

    with pytest.raises(ConfigError, match=r"class Wrong\(OneCopyMixin, \.\.\.\)"):
        type("Wrong", (Trainer, OneCopyMixin), {})


def test_a_missing_host_names_the_extra() -> None:
    import sys

    with mock.patch.dict(sys.modules, {"transformers": None}):
        sys.modules.pop("onecopy.integrations.huggingface", None)
        with pytest.raises(ConfigError, match=r"OneCopyTrainer.*onecopy\[hf\]"):
            import onecopy.integrations.huggingface  # noqa: F401


def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path: Path) -> None:
    """As a run leaves it that was killed while it saved: the Trainer would fail at it."""
    model = models.build("hf_llama")
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with launched(), quiet():
        trainer_of(3, model, tmp_path, **settings).train()
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    with launched(), quiet():
        trainer = trainer_of(3, models.build("hf_llama", seed=9), tmp_path, **settings)
        trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in trainer.state.log_history] == [1, 2, 2]
    for name, value in values_of(model).items():
        torch.testing.assert_close(values_of(trainer.model)[name], value)


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    """A world of one, and a Config as an object; the optimizer is the Trainer's own."""
    settings = {"config": onecopy.Config(precision="bf16"), "max_steps": 1}
    with launched(), quiet() as printed:
        trainer = trainer_of(3, models.build("hf_llama"), tmp_path, **settings)
        trainer.train()
    assert "'loss'" in printed.getvalue()
    assert onecopy.config_of(trainer.model).precision_policy.compute == "bf16"
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))
