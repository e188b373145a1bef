"""What Hugging Face's `from_pretrained` wants beside the weights: configurations, and which names.

Nothing here imports transformers: its models are known by what they have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = [
    "CONFIG",
    "GENERATION_CONFIG",
    "NOT_EXPORTED",
    "config_for",
    "configs_of",
    "names_left_out",
]

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# Where the manifest of a checkpoint keeps what names_left_out has said of a model.
NOT_EXPORTED = "not_exported"


def configs_of(model: nn.Module) -> dict[str, str]:
    """The text of each configuration file of a Hugging Face model, by file name.

    Empty for other models, and for adapters, whose weights no configuration of the base describes.
    """
    # Not by getattr: a wrapper may pass on the attributes of what it wraps.
    config: Any = vars(model).get("config")
    if not _has_json(config):
        return {}
    entries = json.loads(config.to_json_string())
    entries["architectures"] = [type(model).__name__]
    texts = {CONFIG: _text(entries)}
    generation: Any = vars(model).get("generation_config")
    if _has_json(generation):
        texts[GENERATION_CONFIG] = generation.to_json_string()
    return texts


def _has_json(config: Any) -> bool:
    return callable(getattr(config, "to_json_string", None))


def _text(entries: Mapping[str, Any]) -> str:
    return json.dumps(entries, indent=2, sort_keys=True) + "\n"


def config_for(text: str, dtype: torch.dtype | None) -> str:
    """A config.json that says in which dtype the weights beside it are."""
    if dtype is None:
        return text
    entries = json.loads(text)
    # Its older name; who reads the new one gives it precedence, who does not needs the old one.
    keys = ["dtype", *(["torch_dtype"] if "torch_dtype" in entries else [])]
    return _text(entries | dict.fromkeys(keys, str(dtype).removeprefix("torch.")))


def names_left_out(model: nn.Module, groups: Sequence[list[str]]) -> list[str]:
    """Names that files of weights must not hold, since loading fills them from others.

    A Hugging Face model says which of its parameters it ties, and what it never saves. What is tied
    beyond that, it would miss, so that is written under each name. Of other models the first name
    stays, as `safetensors.torch.load_model` has it.

    Args:
        groups: the names of each tensor, in the order of the modules.
    """
    if not _has_json(vars(model).get("config")):
        return [name for names in groups for name in names[1:]]
    declared = {name for names in groups for name in names if _is_declared(model, name)}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    left_out: list[str] = []
    for names in groups:
        filled = [name for name in names if name in declared and len(names) > 1]
        # Some name has to be there.
        left_out += filled if len(filled) < len(names) else filled[1:]
        left_out += [name for name in names if name in ignored]
    return left_out


def _is_declared(model: nn.Module, name: str) -> bool:
    """Whether from_pretrained gives this parameter the values of another one."""
    found = getattr(model, "all_tied_weights_keys", None)
    if found is not None:
        return name in found
    # transformers before version 5 has patterns, which hold where the configuration ties at all.
    patterns = getattr(model, "_tied_weights_keys", None) or ()
    is_tied = getattr(model.config, "tie_word_embeddings", True)
    return bool(is_tied) and any(re.search(pattern, name) for pattern in patterns)
