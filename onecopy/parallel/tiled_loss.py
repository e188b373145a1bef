"""The tiled loss in models of transformers as they are: logits are not made where labels are given.

Within one forward something else stands where the head is: it notes what the head would be given,
and gives logits that have a shape and no values. The loss of the model, which is the first to need
values, is the tiled one. A model that does something else with its logits is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from onecopy.errors import ShardingError
from onecopy.parallel.huggingface import arguments_of, model_of_transformers
from onecopy.parallel.tiled import tiled_cross_entropy

__all__ = ["tile_loss"]

# What may be asked of logits that have no values.
ALLOWED = {"shape", "dtype", "device", "ndim", "requires_grad", "size", "dim"}
SAME = {"float", "contiguous"}


class _NoValues(Tensor):
    """The logits that a head would give for `hidden`, without values."""

    hidden: Tensor
    head: nn.Module

    @staticmethod
    def __new__(cls, hidden: Tensor, head: nn.Module, num_outputs: int) -> _NoValues:
        """(..., num_outputs)"""
        shape = (*hidden.shape[:-1], num_outputs)
        made: _NoValues = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=hidden.dtype, device=hidden.device
        )
        made.hidden, made.head = hidden, head
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse whatever needs values."""
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name in SAME:
            return args[0]
        if name not in ALLOWED:
            raise ShardingError(
                f"the model calls {name} on its logits before they are in the loss: tile_loss is "
                "for models whose loss takes them as the head gives them. Call the inner model, "
                "and onecopy.parallel.tiled_cross_entropy on what it returns"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise ShardingError("logits of a tiled loss have no values")


class _NoHead(nn.Module):
    """Stands in the place of the head for one forward."""

    def __init__(self, head: nn.Module, num_outputs: int) -> None:
        super().__init__()
        # In a tuple: it is no part of this module.
        self.held = (head,)
        self.num_outputs = num_outputs

    def forward(self, hidden: Tensor) -> Tensor:
        return _NoValues(hidden, self.held[0], self.num_outputs)


def tile_loss(model: nn.Module, tile_tokens: int | None = None) -> None:
    """Let a causal language model of transformers compute its loss by tiled_cross_entropy.

    Where the model is given labels its loss is the same, and the logits in its output are None:
    those of one tile exist at a time. Without labels nothing is different. Before or after `shard`
    and `sequence_parallel`.

    Args:
        tile_tokens: see tiled_cross_entropy.

    Raises:
        ShardingError: it is no causal language model of transformers with the loss that most have;
            or, in forward, it changes logits before they are in the loss.
    """
    inner = model_of_transformers(model)
    plain = import_module("transformers.loss.loss_utils").ForCausalLMLoss
    head = inner.get_output_embeddings()
    name = next((key for key, one in inner._modules.items() if one is head), None)
    if inner.loss_function is not plain or name is None or head is None:
        raise ShardingError(
            f"{type(inner).__name__} has not the loss of a causal language model over one head (or "
            "is tiled already): call its inner model, and onecopy.parallel.tiled_cross_entropy on "
            "what that returns"
        )
    inner.loss_function = _tiled_loss(plain, tile_tokens)
    inner.register_forward_pre_hook(_before(name), with_kwargs=True)
    inner.register_forward_hook(_after(name), prepend=True, always_call=True)


def _tiled_loss(plain: Callable[..., Tensor], tile_tokens: int | None) -> Callable[..., Tensor]:
    @wraps(plain)
    def loss_of(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if not isinstance(logits, _NoValues):
            counts = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return plain(logits, labels, vocab_size, shift_labels=shift_labels, **counts, **others)
        targets = shift_labels
        if targets is None:
            assert labels is not None, "without labels the head is in its place"
            targets = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = tiled_cross_entropy(
            logits.hidden,
            logits.head,
            targets.to(logits.hidden.device),
            tile_tokens=tile_tokens,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    return loss_of


def _before(name: str) -> Callable[..., None]:
    """The hook that takes the head away, if there are labels."""

    def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if arguments_of(module, args, kwargs).get("labels") is not None:
            head = module._modules[name]
            width = getattr(head, "out_features", module.config.vocab_size)
            module._modules[name] = _NoHead(head, width)

    return take


def _after(name: str) -> Callable[..., Any]:
    """The hook that puts it back, also after an error, and takes empty logits out of the output."""

    def put(module: Any, args: Any, output: Any) -> Any:
        stand_in = module._modules[name]
        if not isinstance(stand_in, _NoHead):
            return None
        (module._modules[name],) = stand_in.held
        if isinstance(output, tuple):
            return tuple(None if isinstance(one, _NoValues) else one for one in output)
        if output is not None:
            output["logits"] = None
        return output

    return put
