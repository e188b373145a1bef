"""Memory-centric tiling: large linears become tiles that stage 3 gathers one after the other.

What must be in one piece of memory, the values and gradients of the largest unit, falls by the
number of tiles. See tiled_linear.py for what a tile is.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from onecopy import handle
from onecopy.core.hooks import is_hooked
from onecopy.core.layout import LARGE_LEAF_NUMEL
from onecopy.core.partition import matching
from onecopy.core.tiled_linear import TiledLinear, kind_of, weight_of
from onecopy.errors import ConfigError, ShardingError

__all__ = ["refuse_replaced", "tile_linears"]

# A module, and under which name it has a layer.
Caller = tuple[nn.Module, str]

# Parameters that tiles have taken the place of, with their names, as long as somebody has them.
_replaced = WeakTensorKeyDictionary()


def tile_linears(
    model: nn.Module,
    factor: int | None = None,
    *,
    max_bytes: int | None = None,
    modules: str | Iterable[str] | None = None,
) -> list[str]:
    """Replace large linears by tiles, in place: before the optimizer is made, and before `shard`.

    A linear of weight (outputs, inputs) becomes `factor` linears, each of which computes some of
    the outputs. Outputs, and gradients of parameters given those of the outputs, are those of the
    plain layer; the gradient of the inputs is the sum over tiles, and rounded as such. At stage 3 a
    tile is gathered, used and released before the next but one is gathered, in backward too.

    State dicts, checkpoints and files of weights keep the plain names and shapes. Parameters'
    objects are new ones, with names like `blocks.0.up.tiles.1.weight`. Works on models without
    values (`init_sharded`, the meta device).

    Layers are `nn.Linear` and the `Conv1D` of transformers. One whose weight another module has too
    (a tied head) stays as it is, with a warning.

    Args:
        model: a plain model; it may not be a linear itself.
        factor: number of tiles of a layer; of one with fewer outputs, as many.
        max_bytes: in the place of a factor: no tile's weight is larger, in the dtype that the
            parameter has now (a single output always may be).
        modules: shell patterns of names of layers; None for every linear whose weight has 100,000
            elements or more (with max_bytes: whose weight is larger than that).

    Returns:
        the names of the layers that were replaced.

    Raises:
        ConfigError: not exactly one of factor and max_bytes is given, or it is not positive; or no
            linear has such a name.
        ShardingError: the model is sharded; a layer that `modules` names cannot be replaced.

    Source: ZeRO-Infinity (Rajbhandari et al. 2021), section 5.1.3.
    """
    _check(model, factor, max_bytes)
    named = None if modules is None else [modules] if isinstance(modules, str) else list(modules)
    names = []
    for name, callers in _chosen(model, named):
        linear = model.get_submodule(name)
        sizes = _sizes(linear, factor, max_bytes)
        is_large = max_bytes is not None or weight_of(linear).numel() >= LARGE_LEAF_NUMEL
        if len(sizes) < 2 or (named is None and not is_large):
            continue
        tiled = TiledLinear(linear, sizes)
        for caller, key in callers:
            caller._modules[key] = tiled
        names.append(name)
        for key, parameter in linear._parameters.items():
            if parameter is not None:
                _replaced[parameter] = f"{name}.{key}"
    return names


def refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raises ShardingError where an optimizer was made before its parameters were tiled."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _replaced.get(parameter)
            if name is not None:
                raise ShardingError(
                    f"this {type(optimizer).__name__} holds {name} as it was before tile_linears, "
                    "which no module computes with any more: call tile_linears first, then make "
                    "the optimizer from model.parameters()"
                )


def _check(model: nn.Module, factor: int | None, max_bytes: int | None) -> None:
    given = [one for one in (factor, max_bytes) if one is not None]
    if len(given) != 1 or not isinstance(given[0], int) or given[0] < 1:
        raise ConfigError(
            f"tile_linears(factor={factor!r}, max_bytes={max_bytes!r}): give one of them, a "
            "positive whole number. factor=4 makes four tiles of a layer, max_bytes=2**28 as many "
            "as it takes for weights of at most 256 MiB"
        )
    if any(handle.find(one) is not None for one in model.modules()) or any(
        is_hooked(parameter) for parameter in model.parameters()
    ):
        raise ShardingError(
            f"this {type(model).__name__} is sharded already, and its parameters are laid out: "
            "call tile_linears before the optimizer is made and before shard (unshard makes a "
            "model plain again)"
        )
    if kind_of(model) is not None:
        raise ConfigError(
            f"the model is a {type(model).__name__} itself, which nothing can be put in the place "
            "of: call tile_linears on the module that holds it"
        )


def _chosen(model: nn.Module, patterns: list[str] | None) -> list[tuple[str, list[Caller]]]:
    """The names of the layers that are to be replaced, if they are large, and where they are.

    Not the layers, so that each one's memory is given back when it is replaced.

    Raises:
        ConfigError: no linear has such a name.
        ShardingError: one that is named cannot be replaced.
    """
    layers = {id(linear): (name, linear) for name, linear in _linears(model)}
    if patterns is not None:
        found = {id(one) for _, one in matching(model, "modules", patterns)}
        layers = {key: one for key, one in layers.items() if key in found}
        if not layers:
            raise ConfigError(
                f"modules={patterns!r} names no nn.Linear or Conv1D that is not tiled already"
            )
    holders = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    callers: dict[int, list[Caller]] = {}
    for module in model.modules():
        for key, child in module._modules.items():
            callers.setdefault(id(child), []).append((module, key))
    chosen = []
    for name, linear in layers.values():
        obstacle = _obstacle(linear, holders)
        if obstacle is None:
            chosen.append((name, callers[id(linear)]))
        elif patterns is not None:
            raise ShardingError(f"{name} cannot be tiled: {obstacle}")
        else:
            warnings.warn(f"{name} is not tiled: {obstacle}", stacklevel=3)
    return chosen


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    tiles = {
        id(tile) for one in model.modules() if isinstance(one, TiledLinear) for tile in one.tiles
    }
    for name, module in model.named_modules():
        if kind_of(module) is not None and id(module) not in tiles:
            yield name, module


def _obstacle(linear: nn.Module, holders: Counter[int]) -> str | None:
    """Why a layer cannot be replaced, with the remedy."""
    parameters = [one for one in linear._parameters.values() if one is not None]
    if linear._parameters.get("weight") is None:
        return "its weight is no parameter of its own: remove what makes it (a weight norm) first"
    if any(holders[id(one)] > 1 for one in parameters):
        return (
            "another module has its weight too (a tied head), and would be cut as well: untie them "
            "first, or leave it out"
        )
    if any(value for key, value in vars(linear).items() if key.endswith("_hooks")):
        return "it has hooks, which would be lost: register them after tile_linears"
    return None


def _sizes(linear: nn.Module, factor: int | None, max_bytes: int | None) -> list[int]:
    """The number of outputs of each tile, as equal as can be, the larger ones first."""
    kind, weight = kind_of(linear), weight_of(linear)
    assert kind is not None, "it was looked for"
    num_outputs = weight.shape[kind.dim]
    if factor is None:
        assert max_bytes is not None, "one of them is given"
        row = weight.numel() // max(num_outputs, 1) * weight.element_size()
        factor = math.ceil(num_outputs / max(max_bytes // row, 1)) if row else 1
    count = max(min(factor, num_outputs if weight.numel() else 1), 1)
    return [num_outputs // count + (number < num_outputs % count) for number in range(count)]
