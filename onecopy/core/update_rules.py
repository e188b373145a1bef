"""What an optimizer's update rule looks at, known by the names of its classes.

Most rules are elementwise: a piece of a parameter, cut anywhere, is updated exactly as it would be
within the whole. Some look at a whole parameter (a matrix, a norm, factored moments, quantization
blocks that start at its first element): on pieces they would compute something else without a
word, so their units are cut at parameter borders. Some look at all parameters together, or deal
them out to ranks themselves: those are refused. Subclasses count as what they derive from.
"""

from __future__ import annotations

import torch

from onecopy.errors import ShardingError

__all__ = ["check_optimizer", "needs_whole_parameters"]

_WHOLE = frozenset(
    # The update of a matrix is made from the matrix.
    "muon singledevicemuon singledevicemuonwithauxadam shampoo soap soapmuon kron galoreadamw "
    "galoreadamw8bit galoreadafactor apollo "
    # Norms of a parameter, or moments factored into its rows and columns.
    "adafactor came sm3 lamb lars novograd adamp sgdp stableadamw mars "
    # States quantized in blocks (torchao, bitsandbytes), counted from a parameter's first element;
    # whether a state is quantized at all depends on the parameter's size.
    "adam8bit adamw8bit adam4bit adamw4bit adamfp8 adamwfp8 sgd8bit lion8bit rmsprop8bit "
    "pagedadam8bit pagedadamw8bit pagedlion8bit".split()
)

_ELEMENTWISE = "an elementwise optimizer (AdamW, SGD, RMSprop, ...) or a matrix one (Muon, ...)"
_ALL = (
    "makes one decision from all parameters together, and each rank would make another from those "
    f"it owns: use {_ELEMENTWISE}"
)
_ITSELF = (
    "deals parameters or states out to the ranks itself, and would do so with what each rank owns "
    "already: pass shard the plain optimizer that it wraps or stands for"
)
_REFUSED = {
    "sparseadam": "needs sparse gradients, and gradients are dense in a flat buffer: use AdamW, "
    "and embeddings with sparse=False",
    **dict.fromkeys("lbfgs prodigy dadaptadam dadaptadagrad dadaptsgd dadaptlion".split(), _ALL),
    **dict.fromkeys("zeroredundancyoptimizer muonwithauxadam distributedshampoo".split(), _ITSELF),
}


def needs_whole_parameters(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether the optimizer is known to look at whole parameters."""
    return any(kind.__name__.lower() in _WHOLE for kind in type(optimizer).__mro__)


def check_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """The same object, if it can work on what one rank owns.

    Raises:
        ShardingError: it is no torch.optim.Optimizer, needs sparse gradients or all parameters at
            once, or distributes by itself.
    """
    if isinstance(optimizer, type):
        raise ShardingError(
            f"the optimizer is the class {optimizer.__name__} itself: make one, as in optimizer = "
            f"torch.optim.{optimizer.__name__}(model.parameters(), lr=...), and pass that"
        )
    if isinstance(optimizer, int | str):
        raise ShardingError(
            f"the optimizer is {optimizer!r}: it comes second, and settings are given by name, "
            "shard(model, optimizer, stage=3)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ShardingError(
            f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer: call "
            "shard with the optimizer itself, before a trainer wraps it"
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__.lower() in _REFUSED:
            raise ShardingError(f"{kind.__name__} {_REFUSED[kind.__name__.lower()]}")
    if optimizer.defaults.get("max_grad_norm"):
        raise ShardingError(
            f"this {type(optimizer).__name__} clips by the norm of the gradients that it holds, "
            f"max_grad_norm={optimizer.defaults['max_grad_norm']}, and each rank holds others: "
            "make it with max_grad_norm=None, and clip with shard(..., max_grad_norm=...) or "
            "torch.nn.utils.clip_grad_norm_"
        )
    return optimizer
