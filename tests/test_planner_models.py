"""Parameters, units and activations told from configs, against transformers' own models."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.config import Config
from onecopy.core.partition import find_units
from onecopy.errors import ConfigError
from onecopy.memory.live_tensors import LiveTensors
from onecopy.planner import families
from onecopy.planner.activations import Batch, activations_of
from onecopy.planner.shapes import ModelShape
from tests.pool import Pool

CLASSES = {family: one.model_class for family, one in families.FAMILIES.items()}
CONFIGS = {
    "bert": "BertConfig",
    "gpt2": "GPT2Config",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "t5": "T5Config",
}


def build(family: str, settings: dict[str, Any], device: str = "meta") -> nn.Module:
    """transformers' model of a config."""
    pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
    package = f"transformers.models.{family}"
    config = importlib.import_module(f"{package}.configuration_{family}")
    modeling = importlib.import_module(f"{package}.modeling_{family}")
    made = getattr(config, CONFIGS[family])(**settings)
    with torch.device(device):
        model: nn.Module = getattr(modeling, CLASSES[family])(made)
    return model


def flat(shape: ModelShape) -> list[tuple[int, ...]]:
    return [unit.numels for unit in shape.units for _ in range(unit.count)]


DECODER = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 2000,
}
# Each with the settings that change its architecture. The first of each family is its default.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *[(family, {}) for family in CLASSES],
    ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 100, "vocab_size": 70}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("llama", DECODER),
    ("llama", {**DECODER, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**DECODER, "head_dim": 40}),
    ("mistral", DECODER),
    ("mistral", {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2}),
    ("qwen2", DECODER),
    ("qwen2", {**DECODER, "tie_word_embeddings": True}),
    ("qwen3", DECODER),
    ("qwen3", {**DECODER, "attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 1}),
    (
        "bert",
        {
            "hidden_size": 400,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "type_vocab_size": 300,
            "max_position_embeddings": 64,
            "intermediate_size": 500,
        },
    ),
    ("t5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2, "d_kv": 16}),
    ("t5", {"num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}),
]


@pytest.mark.parametrize(
    ("family", "settings"), SETTINGS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(SETTINGS)]
)
def test_parameters_and_units_are_those_of_the_model(family: str, settings: dict[str, Any]) -> None:
    model = build(family, settings)
    shape = families.shape_of(family, family, settings)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    units = find_units(model, Config(), lambda _: None)
    assert flat(shape) == [tuple(p.numel() for _, p in unit.parameters) for unit in units]
    names = {unit.name for unit in units}
    assert {unit.name for unit in shape.units} <= names
    # A config as save_pretrained writes it says the same.
    written = {**model.config.to_dict(), "architectures": [CLASSES[family]]}
    assert families.family_of(written) == family
    assert families.shape_of(family, family, written) == shape


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3"},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "bert", "tie_word_embeddings": False},
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "gpt2", "add_cross_attention": True},
        {},
    ],
)
def test_other_architectures_are_left_to_transformers(config: dict[str, Any]) -> None:
    assert families.family_of(config) is None


@pytest.mark.parametrize("value", [0, -3, "many", 2.5, True])
def test_sizes_that_are_none(value: object) -> None:
    with pytest.raises(ConfigError, match=r"hidden_size=.*whole number"):
        families.shape_of("llama", "x", {"hidden_size": value})


TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 8,
        "vocab_size": 300,
        "use_cache": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **TOKENS,
    },
    "bert": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 256,
        "vocab_size": 300,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "t5": {
        "d_model": 64,
        "d_kv": 8,
        "d_ff": 256,
        "num_heads": 8,
        "num_layers": 3,
        "dropout_rate": 0.0,
        "use_cache": False,
        "vocab_size": 300,
        **TOKENS,
        "decoder_start_token_id": 0,
    },
}
for _family in ("llama", "mistral", "qwen2", "qwen3", "mixtral"):
    SMALL[_family] = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "use_cache": False,
        **TOKENS,
    }
SAMPLES, SEQUENCE = 2, 96


def peak_of_activations(family: str, settings: dict[str, Any], dtype: str, again: bool) -> int:
    """Live bytes at the peak of forward and backward, without parameters and gradients."""
    torch.manual_seed(0)
    settings = {**settings, "attn_implementation": "sdpa"}
    model = build(family, settings, "cpu").to(getattr(torch, dtype)).train()
    if again:
        model.activation_checkpointing_enable()

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    ids = torch.randint(2, 300, (SAMPLES, SEQUENCE))
    with LiveTensors() as live:
        outputs = model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        return live.peak_bytes


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("vocabulary", [300, 4000])
@pytest.mark.parametrize("family", list(SMALL))
def test_activations_are_those_that_are_held(
    family: str, vocabulary: int, dtype: str, again: bool
) -> None:
    settings = {**SMALL[family], "vocab_size": vocabulary}
    transformer = families.shape_of(family, family, settings).transformer
    assert transformer is not None
    batch = Batch(samples=SAMPLES, sequence=SEQUENCE)
    width = 2 if dtype == "bfloat16" else 4
    planned = activations_of(transformer, batch, width, recompute=again).most
    found = peak_of_activations(family, settings, dtype, again)
    # Mostly within 2 percent; more where little is kept, and for attention that is not fused.
    assert 0.9 < planned / found < 1.25


class PlainConfig:
    """What a plan asks of a config object."""

    def __init__(self, family: str, settings: dict[str, Any]) -> None:
        self.model_type, self.settings = family, settings

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, **self.settings}


def peak_of_a_step(family: str, stage: int, world: int, again: bool) -> tuple[int, int]:
    """Live bytes at the peak of a whole step of a sharded model, and what was planned."""
    settings = {**SMALL[family], "vocab_size": 1000}
    planned = onecopy.plan(
        PlainConfig(family, settings),
        devices=world,
        sequence=SEQUENCE,
        micro_batch=SAMPLES,
        stage=stage,
        checkpoint_activations="on" if again else "off",
    )
    with LiveTensors() as live:
        model = build(family, {**settings, "attn_implementation": "sdpa"}, "cpu").train()
        if again:
            model.activation_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        onecopy.shard(model, optimizer, stage=stage, precision="bf16")
        ids = torch.randint(2, 300, (SAMPLES, SEQUENCE))
        for step in range(3):
            if step == 2:
                live.reset_peak()
            outputs = model(input_ids=ids, labels=ids)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del outputs
        # Buffers of the model are not planned.
        buffers = sum(one.nbytes for one in model.buffers())
        return live.peak_bytes - buffers, planned.rows[0].memory.total


@pytest.mark.sampled(
    "family, stage, again",
    list(itertools.product(SMALL, (0, 1, 2, 3), (False, True))),
    8,
    always=[
        *(("gpt2", 1, False), ("gpt2", 3, True), ("llama", 2, True), ("llama", 3, False)),
        *(("bert", 2, False), ("mixtral", 2, False)),
    ],
)
def test_the_peak_of_a_step(pool: Pool, family: str, stage: int, again: bool) -> None:
    for found, planned in pool.run(2, peak_of_a_step, family, stage, 2, again):
        # Mostly within a percent. The most, 1.24, is at stage 0, where all transfers of a small
        # model's largest unit are counted beside its activations, which are gone by then.
        assert 1 <= planned / found < 1.25
