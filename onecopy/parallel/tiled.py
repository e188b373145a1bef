"""Long sequences in tiles of tokens: logits, and what is inside an MLP, never exist at once.

What works on tokens one by one gives the same for a tile of them. Forward keeps a tile's inputs
alone, and backward computes each tile again, so that at any time one tile's logits, or one tile's
inner activations, are there. A head is entered once for all tiles: at stage 3 its unit is
gathered once in forward and once in backward, and its gradient reduced once.

Source: ALST (Bekman et al. 2025), sequence tiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from onecopy import handle
from onecopy.core.compiling import not_compiled
from onecopy.core.partition import matching
from onecopy.errors import ConfigError, ShardingError

__all__ = ["tile_modules", "tiled_cross_entropy"]

# Logits of a tile where nothing else is said: 64 MiB in fp32.
TILE_NUMEL = 1 << 24


@not_compiled
def tiled_cross_entropy(  # noqa: PLR0913 - those of torch's function
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    tile_tokens: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """cross_entropy(head(hidden), targets), with the logits of one tile of tokens at a time.

    In forward and in backward, which computes them again. Logits have the dtype that `head`
    gives them, and their loss is computed in fp32, as the models of transformers do. Equal to the
    plain loss but for rounding: a matrix product over some rows may round otherwise than one over
    all, and the head's gradients are sums over tiles (of an nn.Linear in fp32 and rounded once, of
    other heads in the dtype of their parameters).

    With ranks that have parts of sequences each computes the loss of its own tokens; see
    `onecopy.loss_weight` where their numbers differ.

    Args:
        hidden: (..., width) what the head is given.
        head: an nn.Linear, or any module from (tokens, width) to (tokens, vocabulary); it may be a
            part of a sharded model, and its weight that of the embedding too.
        targets: (...) int64, as many as `hidden` has tokens.
        tile_tokens: tokens of a tile; None for as many as make 2**24 logits (64 MiB in fp32). At
            the peak about four tensors of that size are there.
        ignore_index, label_smoothing, reduction: as in torch.

    Returns:
        a scalar in fp32; with reduction "none" one loss for each target.

    Raises:
        ConfigError: tile_tokens is not positive, or reduction unknown.
        ShardingError: shapes do not fit; the head's parameters are DTensors.

    Source: ALST (Bekman et al. 2025), sequence tiling.
    """
    _check_loss(hidden, targets, tile_tokens, reduction)
    tile = Tile(ignore_index, label_smoothing, tile_tokens)
    rows, of_rows = hidden.flatten(0, -2), targets.flatten()
    losses: list[Tensor] = []

    def compute(entered: Tensor) -> Tensor:
        losses.append(_token_losses(inner, plain, entered, of_rows, tile))
        return losses[0]

    inner = handle.inner(head)
    _refuse_dtensors(inner)
    with _forward_of(inner, compute) as plain:
        inner(rows)
    # Not what the head has returned: hooks of a head that is kept in fp32 would round it.
    (of_tokens,) = losses
    if reduction == "none":
        return of_tokens.view(targets.shape)
    if reduction == "sum":
        return of_tokens.sum()
    return of_tokens.sum() / (of_rows != ignore_index).sum()


def tile_modules(model: nn.Module, tile_tokens: int, *, modules: str | Iterable[str]) -> list[str]:
    """Let modules that work on tokens one by one (MLPs) compute in tiles of them, in place.

    Each tile is computed again in backward, so that what is inside of one tile is there at a time.
    Outputs are equal but for rounding (see tiled_cross_entropy); gradients of parameters are
    sums over tiles, in their dtype. Names, classes and parameters stay; before or after `shard`.

    Not for modules that look at several tokens (attention), or at how many there are (batch norms,
    routers with a capacity): what they would give cannot be told from what is right. At stage 3 a
    module inside of which there are units must get as many tiles on every rank: name it in `units`,
    or its block, where ranks have different numbers of tokens.

    Args:
        tile_tokens: tokens of a tile, those of all rows together.
        modules: shell patterns of names, such as "*.mlp". Each takes one tensor (..., width) and
            gives one of as many tokens.

    Returns:
        the names of the modules.

    Raises:
        ConfigError: tile_tokens is not positive; no module has such a name.
        ShardingError: a module's forward is not that of its class (it is tiled already). In
            forward: it has other arguments, or gives something else.

    Source: ALST (Bekman et al. 2025), sequence tiling.
    """
    _check_tile_tokens(tile_tokens)
    patterns = [modules] if isinstance(modules, str) else list(modules)
    found = dict(matching(handle.inner(model), "modules", patterns))
    for name, module in found.items():
        if "forward" in vars(module):
            raise ShardingError(
                f"the forward of {name} is not that of its class, {type(module).__name__}: it is "
                "tiled already, or something else has changed it"
            )
    for module in found.values():
        # A method, not a function: a copy of the module gets one of its own.
        module.forward = MethodType(_tiled(tile_tokens), module)
    return list(found)


@dataclass(frozen=True, slots=True)
class Tile:
    """The loss of one tile, and how tokens are dealt to tiles."""

    ignore_index: int
    label_smoothing: float
    num_tokens: int | None

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(tokens,) in fp32 at least."""
        if logits.dtype != torch.float64:
            logits = logits.float()
        return F.cross_entropy(
            logits,
            targets,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )

    def split(self, num_outputs: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Those of each tile."""
        size = self.num_tokens or max(1, TILE_NUMEL // max(1, num_outputs))
        yield from zip(*(one.split(size) for one in tensors), strict=True)


def _token_losses(
    head: nn.Module, plain: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, tile: Tile
) -> Tensor:
    """The loss of each token, as the head's hooks see it: within one forward of the head."""
    if isinstance(head, nn.Linear) and plain == MethodType(nn.Linear.forward, head):
        weight, bias = head.weight, head.bias
        found: Tensor = _LinearLosses.apply(tile, hidden, targets, weight, bias)  # type: ignore[no-untyped-call]
        return found

    def one(of_tile: Tensor, wanted: Tensor) -> Tensor:
        return tile.losses(plain(of_tile), wanted)

    # How many outputs it has is not known: as many as the largest of its parameters' sizes.
    largest = max((max(p.shape, default=1) for p in head.parameters()), default=1)
    parts = tile.split(largest, hidden, targets)
    return torch.cat([_again(one, *part) for part in parts])


def _again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Computed now, and again in backward."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    found: Tensor = checkpoint(function, *inputs, use_reentrant=False)
    return found


class _LinearLosses(torch.autograd.Function):
    """The losses of a linear head's tokens.

    In the place of a checkpoint for each tile: gradients of the weight are summed in fp32, in one
    place, and reach the parameter once.
    """

    @staticmethod
    def forward(
        ctx: Any, tile: Tile, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(hidden, targets, weight, bias)
        kind = hidden.device.type
        ctx.tile = tile
        ctx.autocast = (
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
        )
        parts = tile.split(weight.shape[0], hidden, targets)
        return torch.cat([tile.losses(F.linear(h, weight, bias), t) for h, t in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden, targets, weight, bias = ctx.saved_tensors
        needed = [ctx.needs_input_grad[number] for number in (1, 3, 4)]
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        sums: list[Tensor | None] = [None, None]
        first = 0
        for h, t, g in ctx.tile.split(weight.shape[0], hidden, targets, gradient):
            found = _tile_gradients(ctx, (h, weight, bias), t, g, needed)
            if of_hidden is not None and found[0] is not None:
                of_hidden[first : first + len(h)] = found[0]
            sums = [_add(old, new) for old, new in zip(sums, found[1:], strict=True)]
            first += len(h)
        of_weight, of_bias = (
            None if total is None else total.to(one.dtype)
            for total, one in zip(sums, (weight, bias), strict=True)
        )
        return None, of_hidden, None, of_weight, of_bias


def _tile_gradients(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    targets: Tensor,
    gradient: Tensor,
    needed: list[bool],
) -> list[Tensor | None]:
    """The gradients of one tile by hidden, weight and bias, where they are needed."""
    kind, dtype, is_enabled = ctx.autocast
    with torch.enable_grad(), torch.autocast(kind, dtype, is_enabled):
        leaves = [
            None if one is None else one.detach().requires_grad_(is_needed)
            for one, is_needed in zip(inputs, needed, strict=True)
        ]
        h, weight, bias = leaves
        assert h is not None and weight is not None, "a bias alone may be missing"
        losses = ctx.tile.losses(F.linear(h, weight, bias), targets)
        wanted = [one for one in leaves if one is not None and one.requires_grad]
        found = iter(torch.autograd.grad(losses, wanted, gradient))
    return [next(found) if one is not None and one.requires_grad else None for one in leaves]


def _add(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    """A sum in fp32 at least; in place."""
    if new is None or total is None:
        is_low = new is not None and new.dtype in (torch.bfloat16, torch.float16)
        return new.float() if is_low and new is not None else new
    return total.add_(new)


def _tiled(tile_tokens: int) -> Callable[..., Tensor]:
    """A forward that computes a module's own one tile by tile."""

    def forward(module: Any, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        if others or named or not isinstance(hidden, Tensor) or hidden.ndim < 2:
            raise ShardingError(
                f"{type(module).__name__} is tiled, and was called with more than one tensor of "
                "(..., width): tile_modules is for modules that take nothing else"
            )
        rows = hidden.flatten(0, -2)
        plain = MethodType(type(module).forward, module)
        if len(rows) <= tile_tokens:
            whole: Tensor = plain(hidden)
            return whole
        tiles = []
        for one in rows.split(tile_tokens):
            found = _again(plain, one)
            if not isinstance(found, Tensor) or found.shape[:1] != one.shape[:1]:
                raise ShardingError(
                    f"{type(module).__name__} does not give one tensor with an output for each of "
                    f"{len(one)} tokens: tile_modules is for modules that do"
                )
            tiles.append(found)
        outputs: Tensor = torch.cat(tiles).unflatten(0, hidden.shape[:-1])
        return outputs

    return forward


@contextmanager
def _forward_of(
    module: nn.Module, function: Callable[[Tensor], Tensor]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, calling a module runs its hooks around `function`; gives what its forward was."""
    before = vars(module).get("forward")
    plain = MethodType(type(module).forward, module) if before is None else before
    module.forward = function
    try:
        yield plain
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _check_loss(hidden: Tensor, targets: Tensor, tile_tokens: int | None, reduction: str) -> None:
    if tile_tokens is not None:
        _check_tile_tokens(tile_tokens)
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r}: it is one of 'mean', 'sum' and 'none'")
    if hidden.shape[:-1] != targets.shape or hidden.ndim < 2:
        raise ShardingError(
            f"hidden has shape {tuple(hidden.shape)} and targets {tuple(targets.shape)}: targets "
            "need one entry for each token, so the shape of hidden without its last dimension"
        )


def _check_tile_tokens(tile_tokens: int) -> None:
    if not isinstance(tile_tokens, int) or tile_tokens < 1:
        raise ConfigError(f"tile_tokens={tile_tokens!r}: it must be a positive whole number")


def _refuse_dtensors(head: nn.Module) -> None:
    for name, parameter in head.named_parameters():
        if isinstance(parameter, DTensor):
            raise ShardingError(
                f"the head's {name} is spread over a tensor parallel group: its logits are cut "
                "already, use torch.distributed.tensor.parallel.loss_parallel"
            )
