"""Sequence parallelism for models of transformers as they are: by their registry of attention."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from onecopy import handle
from onecopy.comm.exchange import group_of
from onecopy.errors import ShardingError
from onecopy.parallel.sequence import attention, position_ids, split_sequence

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SequenceParallel", "arguments_of", "model_of_transformers", "sequence_parallel"]

# Inputs with one entry for each token.
TOKENS = ("input_ids", "inputs_embeds")
CUT = (*TOKENS, "position_ids", "token_type_ids", "labels", "shift_labels")
# Those that attention needs whole, and the ranks' common numbers.
WHOLE = ("attention_mask", "num_items_in_batch")
CACHES = ("cache", "past_key_values")
IGNORE = -100

_numbers = itertools.count()


@dataclass(slots=True)
class SequenceParallel:
    """What `sequence_parallel` has changed in a model; `remove` changes it back."""

    _model: nn.Module
    _before: str
    _handle: Any

    def remove(self) -> None:
        """Let the model compute whole sequences again, to generate for example."""
        self._handle.remove()
        self._model.set_attn_implementation(self._before)  # type: ignore[operator]


def sequence_parallel(model: nn.Module, group: DeviceMesh | dist.ProcessGroup) -> SequenceParallel:
    """Let each rank compute a part of every sequence, in an unmodified model of transformers.

        onecopy.shard(model, optimizer, mesh=mesh)
        onecopy.parallel.sequence_parallel(model, mesh["sp"])

    The loop stays as it is: every rank of the group calls the model with the same whole batch
    (`input_ids`, `labels`, `attention_mask`, `position_ids`, ...), and the model cuts it. What it
    returns is this rank's part: logits of its tokens, and a loss whose mean over the ranks is the
    loss of the whole batch, however its labels are spread. Gradients are that mean, as always.

    Before or after `shard`; also for a model that is wrapped (peft). Attention runs through torch's
    scaled_dot_product_attention, with dropout, padding masks, sliding windows and shared key and
    value heads. What a model sums up over tokens beside its loss (the balance of experts) is
    that of a rank's own tokens.

    Args:
        group: the ranks of one sequence, as a mesh (of one dimension, or with one that is named
            "sp", "cp", "seq" or "context") or a process group.

    Returns:
        something with a method `remove()`.

    Raises:
        ShardingError: not a model of transformers that chooses its attention by name; it has an
            encoder and a decoder. In forward: the number of tokens or of heads does not fit, or an
            input is none that can be cut.
        MismatchError: in forward: ranks were given different batches.

    Source: DeepSpeed-Ulysses (Jacobs et al. 2023), section 3.
    """
    ranks = group_of(group)
    inner = model_of_transformers(model)
    _check_attention(inner)
    # Of the parts that forwards have had: what has another length has not been cut.
    lengths: set[int] = set()
    attend = _attention(group, weakref.ref(model), lengths)
    name = f"onecopy-sequence-{next(_numbers)}"
    attentions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attentions.register(name, attend)
    masks = import_module("transformers.masking_utils")
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(name, _whole_mask(masks.sdpa_mask, ranks.size))
    before: str = inner.config._attn_implementation
    inner.set_attn_implementation(name)
    cut = _cutting(group, ranks.size, lengths)
    hook = inner.register_forward_pre_hook(cut, with_kwargs=True)
    return SequenceParallel(inner, before, hook)


def model_of_transformers(model: nn.Module) -> Any:
    """The outermost model of transformers in it.

    Raises:
        ShardingError: there is none, or not transformers.
    """
    remedy = (
        "In a model of your own call onecopy.parallel.attention in the place of torch's "
        "scaled_dot_product_attention, cut its inputs with onecopy.parallel.split_sequence, and "
        "compute its loss by onecopy.parallel.tiled_cross_entropy"
    )
    try:
        kind: Any = import_module("transformers").PreTrainedModel
    except ImportError as error:
        raise ShardingError(f"transformers is not installed. {remedy}") from error
    inner = next((one for one in handle.inner(model).modules() if isinstance(one, kind)), None)
    if inner is None:
        raise ShardingError(f"{type(model).__name__} is no model of transformers. {remedy}")
    return inner


def _check_attention(inner: Any) -> None:
    if inner.config.is_encoder_decoder:
        raise ShardingError(
            f"{type(inner).__name__} has an encoder and a decoder, whose sequences are not cut "
            "alike: sequence_parallel is for models with one sequence"
        )
    if not (inner._supports_sdpa and inner._can_set_attn_implementation()):
        raise ShardingError(
            f"{type(inner).__name__} does not compute its attention by torch's "
            "scaled_dot_product_attention, or not by a function that can be chosen by name"
        )


def _attention(
    group: DeviceMesh | dist.ProcessGroup, model: weakref.ref[nn.Module], lengths: set[int]
) -> Callable[..., Any]:
    """What the attention modules of transformers call."""

    def attend(  # noqa: PLR0913 - those of the interface
        module: nn.Module,
        query: Tensor,  # (batch, heads, own part of the sequence, head dimension), as the others
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for name in ("position_bias", "softcap", "s_aux", "output_attentions"):
            if others.get(name):
                raise ShardingError(
                    f"{type(module).__name__} wants {name}, which sequence_parallel cannot give"
                )
        if query.shape[2] not in lengths:
            raise ShardingError(
                f"{type(module).__name__} was reached with {query.shape[2]} tokens that have not "
                "been cut: call the model that sequence_parallel was given, or give it the one "
                "that you call"
            )
        owner = model()
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mixed = attention(
            query,
            key,
            value,
            attention_mask,
            dropout,
            causal and attention_mask is None,
            scaling,
            enable_gqa=True,
            group=group,
            model=owner if owner is not None and handle.find(owner) is not None else None,
        )
        return mixed.transpose(1, 2).contiguous(), None

    return attend


def _whole_mask(make: Callable[..., Tensor | None], size: int) -> Callable[..., Tensor | None]:
    """Masks are made for whole sequences, though a rank's own part is what a model sees."""

    def whole(*, q_length: int, kv_length: int, **others: Any) -> Tensor | None:
        return make(q_length=q_length * size, kv_length=q_length * size, **others)

    return whole


def _cutting(
    group: DeviceMesh | dist.ProcessGroup, size: int, lengths: set[int]
) -> Callable[..., Any]:
    """The hook before the model's forward: it takes whole sequences and passes on a part."""

    def cut(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = inspect.signature(module.forward)
        given = arguments_of(module, args, kwargs)
        _check_inputs(given)
        if given.get("labels") is not None:
            _set_labels(module, given, size)
        parts = {name: one for name, one in given.items() if name in CUT and one is not None}
        tokens = next((name for name in TOKENS if name in parts), None)
        if tokens is None:
            raise ShardingError(f"the model was given neither {TOKENS[0]} nor {TOKENS[1]}")
        # Positions may be the same for all rows, and are cut along their last dimension.
        positions = parts.pop("position_ids", None)
        given |= split_sequence(parts, group)
        lengths.add(given[tokens].shape[1])
        if positions is not None:
            given["position_ids"] = split_sequence(positions, group, dim=-1, check=False)
        elif "position_ids" in signature.parameters:
            given["position_ids"] = position_ids(given[tokens], group)
        if "use_cache" in signature.parameters:
            # Nothing could read one: it would hold a part of the keys.
            given["use_cache"] = False
        return (), given

    return cut


def arguments_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What a forward is called with, by name; those of its **kwargs among them."""
    signature = inspect.signature(module.forward)
    flat: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        flat |= value if is_rest else {name: value}
    return flat


def _check_inputs(given: dict[str, Any]) -> None:
    keep = given.get("logits_to_keep", 0)
    is_last = isinstance(keep, Tensor) or keep != 0
    if is_last or any(given.get(name) is not None for name in CACHES):
        raise ShardingError(
            "the model was called with logits_to_keep, or with a cache of keys and values, as "
            "generate does, and its ranks have parts of sequences: call remove() on what "
            "sequence_parallel has returned, and generate then"
        )
    for name, value in given.items():
        if isinstance(value, Tensor) and name not in CUT and name not in WHOLE:
            raise ShardingError(
                f"the model was given {name}, of shape {tuple(value.shape)}, and sequence_parallel "
                f"does not know how to cut it: it knows {', '.join((*CUT, *WHOLE))}"
            )
    positions = given.get("position_ids")
    if positions is not None and given.get("attention_mask") is None:
        find = import_module("transformers.masking_utils").find_packed_sequence_indices
        if find(positions) is not None:
            raise ShardingError(
                "position_ids start anew within a row: several sequences are packed into it, whose "
                "mask a rank with a part of them cannot make. Pass attention_mask, of 4 dimensions "
                "(batch, 1, tokens, tokens), True where a token sees another"
            )


def _set_labels(module: Any, given: dict[str, Any], size: int) -> None:
    """Labels are moved by one before they are cut, and the mean is over those of all ranks.

    The loss of a rank is its sum, divided by the whole number of labels over the number of ranks:
    the mean over the ranks is then the sum over the number.
    """
    losses = import_module("transformers.loss.loss_utils")
    # That of tile_loss says that it stands for it.
    if inspect.unwrap(module.loss_function) is not losses.ForCausalLMLoss:
        raise ShardingError(
            f"{type(module).__name__} does not compute the loss of a causal language model: leave "
            "out the labels, and compute the loss of this rank's logits with "
            "onecopy.parallel.split_sequence(labels, group)"
        )
    targets = given.get("shift_labels")
    if targets is None:
        targets = pad(given["labels"], (0, 1), value=IGNORE)[..., 1:]
    count = given.get("num_items_in_batch")
    if count is None:
        count = (targets != IGNORE).sum()
    given |= {"shift_labels": targets, "num_items_in_batch": count / size}
