"""Models told from a Hugging Face config by arithmetic: parameters, units and activations.

Each family is a function from its config to a `ModelShape`, with the parameters in the order in
which transformers' model has them and in the units in which the runtime groups them; the tests
compare both with the real models. (A stack of one block is no repetition to the runtime, which
then groups by leaves: the same parameters, other padding.) `saved.py` says what blocks keep for
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onecopy.core.layout import LARGE_LEAF_NUMEL
from onecopy.errors import ConfigError
from onecopy.planner import saved
from onecopy.planner.shapes import ModelShape, Saved, Stack, TransformerShape, UnitShape

__all__ = ["Numbers", "family_of", "gpt_block", "shape_of"]

Numels = tuple[int, ...]


def family_of(config: Mapping[str, Any]) -> str | None:
    """The family whose arithmetic gives this model, or None.

    The arithmetic is that of the class that is trained to predict tokens. Other heads, and configs
    that change the architecture, are left to transformers itself.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        return None
    classes = config.get("architectures") or [FAMILIES[family].model_class]
    changed = config.get("add_cross_attention") or config.get("is_decoder")
    untied = family == "bert" and config.get("tie_word_embeddings") is False
    if classes != [FAMILIES[family].model_class] or changed or untied:
        return None
    return str(family)


def shape_of(family: str, name: str, config: Mapping[str, Any]) -> ModelShape:
    """The model of a config of a known family.

    Raises:
        ConfigError: a size in the config is no whole number of at least 1.
    """
    units, transformer = FAMILIES[family].shape(Numbers(config))
    return ModelShape(name=name, units=units, transformer=transformer)


def gpt_block(hidden: int) -> Numels:
    """Elements of the parameters of a GPT block: 12 hidden^2 + 13 hidden together."""
    return _gpt_block(hidden, 4 * hidden)


class Numbers:
    """Reads a config: keys that are absent or null have the family's default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def size(self, key: str, default: int) -> int:
        """A whole number, at least 1."""
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"the config says {key}={value!r}: give a whole number, at least 1.")
        return value

    def has(self, key: str) -> bool:
        """The key is there, though its value may be null."""
        return key in self._config

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        return default if value is None else bool(value)

    def text(self, key: str, default: str) -> str:
        return str(self._config.get(key) or default)

    def drops(self, key: str, default: float) -> bool:
        """Whether a dropout is in use."""
        value = self._config.get(key)
        return float(default if value is None else value) > 0


# Units ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A module outside of the blocks. A large leaf is a unit; all else lies at the root."""

    name: str
    numels: Numels
    is_leaf: bool = True


Model = tuple[tuple[UnitShape, ...], TransformerShape]


def _units(parts: Iterable[_Part | UnitShape]) -> tuple[UnitShape, ...]:
    """The units of a model's parts, in the model's order; the root's first."""
    found: list[UnitShape] = []
    rest: list[int] = []
    for part in parts:
        if isinstance(part, UnitShape):
            found.append(part)
        elif part.is_leaf and sum(part.numels) >= LARGE_LEAF_NUMEL:
            found.append(UnitShape(name=part.name, numels=part.numels))
        else:
            rest += part.numels
    return (UnitShape(name="root", numels=tuple(rest), surrounds=True), *found)


def _blocks(name: str, modules: Iterable[Numels], count: int) -> UnitShape:
    numels = tuple(numel for module in modules for numel in module)
    return UnitShape(name=name, numels=numels, count=count)


def _linear(rows: int, columns: int, bias: bool = False) -> Numels:
    return (rows * columns, rows) if bias else (rows * columns,)


# GPT-2 and BERT ---------------------------------------------------------------------------------


def _gpt_block(hidden: int, intermediate: int) -> Numels:
    norm = (hidden, hidden)
    return (
        *norm,
        *_linear(3 * hidden, hidden, bias=True),
        *_linear(hidden, hidden, bias=True),
        *norm,
        *_linear(intermediate, hidden, bias=True),
        *_linear(hidden, intermediate, bias=True),
    )


def _gpt2(config: Numbers) -> Model:
    hidden, layers = config.size("n_embd", 768), config.size("n_layer", 12)
    heads, vocabulary = config.size("n_head", 12), config.size("vocab_size", 50257)
    intermediate = config.size("n_inner", 4 * hidden)
    context = config.size("n_positions", 1024)
    is_tied = config.flag("tie_word_embeddings", True)
    parts: list[_Part | UnitShape] = [
        _Part("transformer.wte", (vocabulary * hidden,), is_leaf=not is_tied),
        _Part("transformer.wpe", (context * hidden,)),
        _blocks("transformer.h.0", [_gpt_block(hidden, intermediate)], layers),
        _Part("transformer.ln_f", (hidden, hidden), is_leaf=False),
        *([] if is_tied else [_Part("lm_head", (vocabulary * hidden,))]),
    ]
    block = (
        saved.layer_norm(hidden)
        + saved.layer_norm(hidden)
        + saved.attention(hidden, hidden, heads)
        + saved.mlp(intermediate, config.text("activation_function", "gelu_new"))
        + saved.dropout(2 * hidden, config.drops("resid_pdrop", 0.1))
    )
    stack = Stack(count=layers, hidden=hidden, widest=intermediate, saved=block)
    return _units(parts), TransformerShape(
        stacks=(stack,),
        outside=saved.layer_norm(hidden),
        vocabulary=vocabulary,
        context=context,
    )


def _bert(config: Numbers) -> Model:
    hidden, layers = config.size("hidden_size", 768), config.size("num_hidden_layers", 12)
    heads, vocabulary = config.size("num_attention_heads", 12), config.size("vocab_size", 30522)
    intermediate = config.size("intermediate_size", 3072)
    context = config.size("max_position_embeddings", 512)
    square, norm = _linear(hidden, hidden, bias=True), (hidden, hidden)
    block = (
        *(square, square, square, square, norm),
        _linear(intermediate, hidden, bias=True),
        _linear(hidden, intermediate, bias=True),
        norm,
    )
    parts: list[_Part | UnitShape] = [
        _Part("bert.embeddings.word_embeddings", (vocabulary * hidden,), is_leaf=False),
        _Part("bert.embeddings.position_embeddings", (context * hidden,)),
        _Part(
            "bert.embeddings.token_type_embeddings", (config.size("type_vocab_size", 2) * hidden,)
        ),
        _Part("bert.embeddings.LayerNorm", norm, is_leaf=False),
        _blocks("bert.encoder.layer.0", block, layers),
        _Part("cls.predictions.bias", (vocabulary,), is_leaf=False),
        _Part("cls.predictions.transform.dense", square),
        _Part("cls.predictions.transform.LayerNorm", norm, is_leaf=False),
    ]
    kept = (
        saved.layer_norm(hidden)
        + saved.layer_norm(hidden)
        + saved.attention(hidden, hidden, heads)
        + saved.mlp(intermediate, config.text("hidden_act", "gelu"))
        + saved.dropout(2 * hidden, config.drops("hidden_dropout_prob", 0.1))
    )
    stack = Stack(count=layers, hidden=hidden, widest=intermediate, saved=kept)
    return _units(parts), TransformerShape(
        stacks=(stack,),
        # The norm of the embeddings, and the layer before the head.
        outside=Saved(compute=5 * hidden),
        vocabulary=vocabulary,
        upcasts_logits=False,
        context=context,
    )


# Llama and what follows it ----------------------------------------------------------------------


class _Decoder:
    """What Llama, Mistral, Qwen and Mixtral share; a family says where it differs."""

    def __init__(
        self, config: Numbers, *, kv_heads: int | None = None, head_dim: int | None = None
    ) -> None:
        self.config = config
        self.hidden = config.size("hidden_size", 4096)
        self.layers = config.size("num_hidden_layers", 32)
        self.heads = config.size("num_attention_heads", 32)
        # Null means as many as heads, no key the family's default.
        is_default = kv_heads is not None and not config.has("num_key_value_heads")
        default = kv_heads if is_default and kv_heads is not None else self.heads
        self.kv_heads = config.size("num_key_value_heads", default)
        self.head_dim = config.size("head_dim", head_dim or max(1, self.hidden // self.heads))
        self.query, self.key = self.heads * self.head_dim, self.kv_heads * self.head_dim

    def projections(self, *, bias: bool = False, output_bias: bool = False) -> tuple[Numels, ...]:
        key = _linear(self.key, self.hidden, bias)
        query = _linear(self.query, self.hidden, bias)
        return (query, key, key, _linear(self.hidden, self.query, output_bias))

    def gated(self, intermediate: int, bias: bool = False) -> tuple[Numels, ...]:
        up = _linear(intermediate, self.hidden, bias)
        return (up, up, _linear(self.hidden, intermediate, bias))

    def model(
        self, parts: tuple[Numels, ...], kept: Saved, widest: int, defaults: tuple[int, int]
    ) -> Model:
        """The model of blocks of `parts`, in which `kept` is saved beside norms and attention.

        Args:
            defaults: the family's vocabulary and context.
        """
        vocabulary, context = defaults
        norm = (self.hidden,)
        vocabulary = self.config.size("vocab_size", vocabulary)
        is_tied = self.config.flag("tie_word_embeddings", False)
        weight = (vocabulary * self.hidden,)
        model: list[_Part | UnitShape] = [
            _Part("model.embed_tokens", weight, is_leaf=not is_tied),
            _blocks("model.layers.0", (*parts, norm, norm), self.layers),
            _Part("model.norm", norm, is_leaf=False),
            *([] if is_tied else [_Part("lm_head", weight)]),
        ]
        kept = (
            saved.rms_norm(self.hidden)
            + saved.rms_norm(self.hidden)
            + saved.attention(self.query, self.key, self.heads)
            + kept
        )
        stack = Stack(count=self.layers, hidden=self.hidden, widest=widest, saved=kept)
        context = self.config.size("max_position_embeddings", context)
        return _units(model), TransformerShape(
            stacks=(stack,),
            outside=saved.rms_norm(self.hidden),
            vocabulary=vocabulary,
            context=context,
        )


def _llama(config: Numbers) -> Model:
    shape = _Decoder(config)
    width = config.size("intermediate_size", 11008)
    bias = config.flag("attention_bias", False)
    projections = shape.projections(bias=bias, output_bias=bias)
    parts = (*projections, *shape.gated(width, config.flag("mlp_bias", False)))
    return shape.model(parts, saved.gated_mlp(width), width, (32000, 2048))


def _mistral(config: Numbers) -> Model:
    shape = _Decoder(config, kv_heads=8)
    width = config.size("intermediate_size", 14336)
    parts = (*shape.projections(), *shape.gated(width))
    return shape.model(parts, saved.gated_mlp(width), width, (32000, 131_072))


def _qwen2(config: Numbers) -> Model:
    shape = _Decoder(config, kv_heads=32)
    width = config.size("intermediate_size", 22016)
    parts = (*shape.projections(bias=True), *shape.gated(width))
    return shape.model(parts, saved.gated_mlp(width), width, (151936, 32768))


def _qwen3(config: Numbers) -> Model:
    shape = _Decoder(config, kv_heads=32, head_dim=128)
    width = config.size("intermediate_size", 22016)
    bias = config.flag("attention_bias", False)
    norms = ((shape.head_dim,), (shape.head_dim,))
    projections = shape.projections(bias=bias, output_bias=bias)
    # Norms of queries and keys; their results are rotated before anything keeps them.
    both = shape.query + shape.key
    rotated = Saved(compute=both, fp32=both + shape.heads + shape.kv_heads)
    parts = (*projections, *norms, *shape.gated(width))
    units, transformer = shape.model(
        parts, saved.gated_mlp(width) + rotated, width, (151936, 32768)
    )
    stack = replace(transformer.stacks[0], normed=shape.query)
    return units, replace(transformer, stacks=(stack,))


def _mixtral(config: Numbers) -> Model:
    shape = _Decoder(config, kv_heads=8)
    width = config.size("intermediate_size", 14336)
    experts = config.size("num_local_experts", 8)
    chosen = config.size("num_experts_per_tok", 2)
    parts = (
        *shape.projections(),
        (experts * shape.hidden,),
        (experts * 2 * width * shape.hidden,),
        (experts * shape.hidden * width,),
    )
    kept = saved.experts(shape.hidden, width, experts, chosen)
    return shape.model(parts, kept, chosen * width, (32000, 131_072))


# T5 ---------------------------------------------------------------------------------------------


def _t5(config: Numbers) -> Model:
    hidden, inner = config.size("d_model", 512), config.size("d_kv", 64)
    heads, width = config.size("num_heads", 8), config.size("d_ff", 2048)
    vocabulary = config.size("vocab_size", 32128)
    layers = config.size("num_layers", 6)
    act = config.text("feed_forward_proj", "relu")
    is_gated, act = act.startswith("gated-"), act.removeprefix("gated-")
    query = heads * inner
    projections = (*(_linear(query, hidden) * 3), *_linear(hidden, query))
    # The first block of each stack has the positions that all of it uses.
    bias = (config.size("relative_attention_num_buckets", 32) * heads,)
    feed = (*(_linear(width, hidden) * (1 + is_gated)), *_linear(hidden, width), hidden)
    cross = (*projections, hidden)

    def stack(name: str, count: int, middle: Numels) -> list[UnitShape]:
        first = _blocks(f"{name}.block.0", [projections, bias, (hidden,), middle, feed], 1)
        more = _blocks(f"{name}.block.1", [projections, (hidden,), middle, feed], count - 1)
        return [first, more] if count > 1 else [first]

    decoder_layers = config.size("num_decoder_layers", layers)
    parts: list[_Part | UnitShape] = [
        _Part("shared", (vocabulary * hidden,), is_leaf=False),
        *stack("encoder", layers, ()),
        _Part("encoder.final_layer_norm", (hidden,), is_leaf=False),
        *stack("decoder", decoder_layers, cross),
        _Part("decoder.final_layer_norm", (hidden,), is_leaf=False),
    ]
    drops = config.drops("dropout_rate", 0.1)
    # "gated-gelu" is the tanh approximation, written out.
    kept = saved.t5_feed_forward(hidden, width, "gelu_new" if act == "gelu" else act, is_gated)
    kept += saved.t5_attention(hidden, query, heads) + saved.dropout(2 * hidden + width, drops)
    crossed = saved.rms_norm(hidden) + saved.attention(query, query, heads)
    crossed += saved.dropout(hidden, drops)
    stacks = (
        Stack(count=layers, hidden=hidden, widest=width, saved=kept),
        Stack(count=decoder_layers, hidden=hidden, widest=width, saved=kept + crossed),
    )
    return _units(parts), TransformerShape(
        stacks=stacks,
        outside=saved.rms_norm(hidden) + saved.rms_norm(hidden),
        vocabulary=vocabulary,
        upcasts_logits=False,
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """The class whose parameters the arithmetic counts, and the arithmetic."""

    model_class: str
    shape: Callable[[Numbers], Model]


FAMILIES: dict[str, _Family] = {
    "bert": _Family("BertForMaskedLM", _bert),
    "gpt2": _Family("GPT2LMHeadModel", _gpt2),
    "llama": _Family("LlamaForCausalLM", _llama),
    "mistral": _Family("MistralForCausalLM", _mistral),
    "mixtral": _Family("MixtralForCausalLM", _mixtral),
    "qwen2": _Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": _Family("Qwen3ForCausalLM", _qwen3),
    "t5": _Family("T5ForConditionalGeneration", _t5),
}
