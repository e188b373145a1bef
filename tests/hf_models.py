"""Tiny, randomly initialised Hugging Face models; the tests skip where transformers is missing."""

from __future__ import annotations

import importlib

import pytest
from torch import nn


def _hf(kind: str, config_kind: str, **settings: object) -> nn.Module:
    """Import exactly these two classes: all of transformers is slow and prints notices."""
    folder = {"GPT2Config": "gpt2"}.get(config_kind, config_kind.removesuffix("Config").lower())
    pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
    package = f"transformers.models.{folder}"
    config_class = getattr(
        importlib.import_module(f"{package}.configuration_{folder}"), config_kind
    )
    model_class = getattr(importlib.import_module(f"{package}.modeling_{folder}"), kind)
    # Eager attention and experts: one fixed order of operations on every machine.
    model: nn.Module = model_class(config_class(attn_implementation="eager", **settings))
    return model.train()


def gpt2() -> nn.Module:
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 101, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return _hf("GPT2LMHeadModel", "GPT2Config", use_cache=False, **sizes, **dropouts, **tokens)


_LLAMA_SIZES = {
    "vocab_size": 101,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def llama() -> nn.Module:
    return _hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA_SIZES)


def tied_llama() -> nn.Module:
    return _hf("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **_LLAMA_SIZES)


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    eager = {"experts_implementation": "eager", "attention_dropout": 0.0}
    return _hf("MixtralForCausalLM", "MixtralConfig", **_LLAMA_SIZES, **experts, **eager)


def t5() -> nn.Module:
    sizes = {"vocab_size": 101, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}
    depth = {"num_layers": 2, "num_decoder_layers": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    plain = {"dropout_rate": 0.0, "use_cache": False}
    return _hf("T5ForConditionalGeneration", "T5Config", **sizes, **depth, **tokens, **plain)


def bert() -> nn.Module:
    sizes = {"vocab_size": 101, "hidden_size": 16, "intermediate_size": 24}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
    return _hf("BertForMaskedLM", "BertConfig", **sizes, **depth)
