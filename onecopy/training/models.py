"""The language model of a run: the built-in GPT, or one of Hugging Face's. Neither is ever whole.

This file owns how a model is made from the options, and how it is called. Both kinds are built
without the memory of their parameters: `onecopy.shard` makes the values, or reads them from the
model's files, unit by unit, and each rank keeps its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import onecopy
from onecopy.errors import ConfigError
from onecopy.extras import require
from onecopy.training.lora import add_adapters
from onecopy.training.model import GPT, GPTConfig
from onecopy.training.options import TrainOptions
from onecopy.training.options.model import GPT as BUILT_IN

__all__ = ["Vocabulary", "build", "construct", "logits_of", "sum_of_losses", "weights_of"]

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a model must know of the tokenizer. end: its token for the end of a text, if any."""

    size: int
    end: int | None


def build(options: TrainOptions, vocabulary: Vocabulary, device: torch.device) -> nn.Module:
    """The model of a run, in fp32, without values: `onecopy.shard` makes or reads them.

    A model with random weights gets as many tokens as the tokenizer has. One that comes with
    weights must have as many at least.

    Args:
        device: where the model will be.

    Raises:
        ConfigError: there is no such model, a package is missing, or the model does not fit the
            tokenizer or the context.
        CheckpointError: the files of its weights are not those of the model.
    """
    weights = weights_of(options)
    # What starts from files need not be initialised; adapters must be, beside them.
    reads_all = weights is not None and not options.lora_rank
    with torch.device("meta") if reads_all else onecopy.init_sharded(device):
        model = construct(options, vocabulary)
        if weights is not None:
            onecopy.load_pretrained(model, weights)
        return add_adapters(model, options) if options.lora_rank else model


def construct(options: TrainOptions, vocabulary: Vocabulary) -> nn.Module:
    """The model before it has read its weights and got its adapters, on the current device.

    Raises:
        ConfigError: as `build`.
    """
    if options.model != BUILT_IN:
        return _hugging_face(options, vocabulary)
    if options.lora_rank:
        raise ConfigError(
            "--lora-rank trains adapters beside a model that has learned already, and gpt has "
            "not: give --model a folder with weights."
        )
    sizes = GPTConfig(
        context=options.context,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        vocabulary=vocabulary.size,
    )
    return GPT(sizes)


def weights_of(options: TrainOptions) -> Path | None:
    """The folder whose safetensors files a run starts from; None for random weights."""
    path = Path(options.model).expanduser()
    if options.model == BUILT_IN or options.random_weights or not path.is_dir():
        return None
    return path if any(path.glob("*.safetensors")) else None


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """(batch, time) int64 -> (batch, time, vocabulary), for the token after each."""
    if isinstance(model, GPT):
        logits: Tensor = model(tokens)
    else:
        # A cache of keys and values is for generation; here it would only take memory.
        logits = model(input_ids=tokens, use_cache=False).logits
    return logits


def sum_of_losses(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss in nats, a scalar in fp32, summed over all targets but those of -100.

    tokens, targets: (batch, time) int64.
    """
    logits = logits_of(model, tokens).flatten(0, 1).float()
    return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def _hugging_face(options: TrainOptions, vocabulary: Vocabulary) -> nn.Module:
    require("transformers", f"--model {options.model}")
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    config = _config(Path(options.model).expanduser())
    if weights_of(options) is None:
        _fit(config, vocabulary)
    _check(config, options, vocabulary)
    try:
        # fp32, whatever the files have: `precision` says what is computed with.
        auto: Any = AutoModelForCausalLM
        model: nn.Module = auto.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(
            f"--model {options.model} is no causal language model of transformers: {error}"
        ) from error
    model.name_or_path = options.model  # type: ignore[assignment]  # a property of its own there
    return model


def _config(path: Path) -> Any:
    from transformers.models.auto.configuration_auto import AutoConfig

    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--model {path}: there is no {file}. Give {BUILT_IN}, a {CONFIG}, or the folder that "
            "save_pretrained has written; nothing is downloaded."
        )
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return AutoConfig.for_model(**entries)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} is no config of transformers: {error}") from error


def _fit(config: Any, vocabulary: Vocabulary) -> None:
    """Let a model that has yet to learn have the tokens of the tokenizer."""
    config.vocab_size = vocabulary.size
    config.bos_token_id = config.pad_token_id = None
    config.eos_token_id = vocabulary.end


def _check(config: Any, options: TrainOptions, vocabulary: Vocabulary) -> None:
    if vocabulary.size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocabulary.size:,} tokens, and {options.model} knows "
            f"{config.vocab_size:,}: give the tokenizer that belongs to the model, or "
            "--random-weights, which makes a model for this tokenizer."
        )
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and options.context > most:
        raise ConfigError(
            f"--context is {options.context}, but {options.model} is made for {most} tokens."
        )
