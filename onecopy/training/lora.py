"""Low-rank adapters (LoRA, Hu et al. 2021) by PEFT: little that learns beside a frozen base.

The base is sharded without gradients and optimizer states. Saved are the adapters alone, in the
files that PEFT writes, so that `PeftModel.from_pretrained(base, folder)` finds them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from onecopy.errors import ConfigError
from onecopy.extras import require
from onecopy.training.options import TrainOptions

__all__ = ["add_adapters", "has_adapters", "save_adapters"]


def add_adapters(model: nn.Module, options: TrainOptions) -> nn.Module:
    """The model with adapters, which alone are trained.

    Raises:
        ConfigError: PEFT is missing, or the model has none of the modules that are named.
    """
    peft: Any = require("peft", "--lora-rank")
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=list(options.lora_targets) or "all-linear",
    )
    # PEFT writes this down for who loads the adapters, from whatever folder.
    base: Any = model
    base.name_or_path = str(Path(options.model).expanduser().resolve())
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5 by an older name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        try:
            adapted: nn.Module = peft.get_peft_model(model, settings)
        except ValueError as error:
            linears = {name for name, one in model.named_modules() if not any(one.children())}
            last = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(
                f"--lora-targets: {error} Modules of this model are called {', '.join(last)}."
            ) from error
    return adapted


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` has made it."""
    return hasattr(model, "peft_config")


def save_adapters(model: Any, folder: Path, *, writes: bool) -> None:
    """Write the adapters and their configuration. All ranks call it, and one `writes`."""
    # Each is gathered for itself: the base stays cut.
    values = {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if writes:
        # Embeddings do not learn here; PEFT would look for them on the Hub.
        model.save_pretrained(folder, state_dict=values, save_embedding_layers=False)
