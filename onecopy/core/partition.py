"""Which parameters form a unit, without wrapping by the user.

One unit for each repeated block (the children of the outermost ModuleList, ModuleDict or Sequential
of alike modules), one for each tile of a linear, one for each large leaf that is left over
(embedding, head), one for the small rest at the root. A parameter that several modules use (tied
weights) goes to a unit whose module contains all of its users. Each unit is uniform in device,
dtypes, trainability and optimizer; where the optimizer needs whole parameters, each parameter of
the unit gets one owner.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy.core import build
from onecopy.core.dtensors import dimensions_cut, is_dtensor, local_of
from onecopy.core.kept import kept_parameters
from onecopy.core.layout import LARGE_LEAF_NUMEL, balance
from onecopy.core.precision import dtypes_of
from onecopy.core.tiled_linear import TiledLinear, tiles_in
from onecopy.core.unit import UnitSpec
from onecopy.core.update_rules import needs_whole_parameters
from onecopy.core.views import is_dense, is_fake
from onecopy.errors import ConfigError, ShardingError

if TYPE_CHECKING:
    from onecopy.config import Config

__all__ = ["assign_owners", "chosen_modules", "find_units", "matching"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Leaves that are always used by calling them. Others (the projection inside MultiheadAttention,
# for one) may be read by their parent behind their back, so exact types only.
CALLED_LEAVES = (nn.Embedding, nn.EmbeddingBag, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_units(
    root: nn.Module,
    config: Config,
    optimizer_of: Callable[[nn.Parameter], torch.optim.Optimizer | None],
) -> list[UnitSpec]:
    """The units of a model, the root's first, then in module order.

    Args:
        optimizer_of: what updates a parameter; parameters of one unit have the same.

    Raises:
        ConfigError: a name in config.units, config.keep_gathered or precision.keep_fp32 does not
            fit the model.
        ShardingError: a parameter cannot be laid into a flat buffer.
    """
    chosen = {id(module) for _, module in chosen_modules(root, "units", config.units)}
    staying = {id(one) for _, one in matching(root, "keep_gathered", config.keep_gathered)}
    chains = _chains(root)
    precision = config.precision_policy
    kept = kept_parameters(root, precision)
    groups: dict[tuple[int, Hashable], list[tuple[str, nn.Parameter]]] = {}
    kinds: dict[tuple[int, Hashable], UnitSpec] = {}
    places: dict[tuple[int, int], str] = {}
    unmade_device = build.device_of(root)
    tiles = tiles_in(root)
    for name, parameter in root.named_parameters():
        _check(name, parameter)
        local = local_of(parameter)
        place = (local.untyped_storage()._cdata, int(local.storage_offset()))
        if local.numel() and places.setdefault(place, name) != name:
            raise ShardingError(
                f"parameters {places[place]} and {name} share memory without being "
                "one parameter, and would be trained apart: tie them by assigning the same "
                "nn.Parameter object to both modules"
            )
        module = _unit_module(chains[id(parameter)], chosen, root)
        dtypes = dtypes_of(parameter, precision, kept=id(parameter) in kept)
        optimizer = optimizer_of(parameter)
        is_whole = config.whole_parameters or needs_whole_parameters(optimizer)
        if is_whole:
            _refuse_part(name, parameter, optimizer, is_tile=id(parameter) in tiles)
        device = unmade_device or parameter.device
        stays = any(id(one) in staying for chain in chains[id(parameter)] for one in chain)
        # Codes of a block depend on all of it: beside parts, which differ, what tensor parallel
        # ranks have alike would become another value on each of them.
        cut = () if config.quantize is None else dimensions_cut(parameter)
        kind = (device, dtypes, parameter.requires_grad, optimizer, stays, cut)
        groups.setdefault((id(module), kind), []).append((name, parameter))
        kinds[(id(module), kind)] = UnitSpec(
            name="",
            module=module,
            parameters=(),
            device=device,
            dtypes=dtypes,
            trainable=parameter.requires_grad,
            is_whole=is_whole,
            stays=stays,
        )
    return list(_specs(root, groups, kinds))


def _specs(
    root: nn.Module,
    groups: dict[tuple[int, Hashable], list[tuple[str, nn.Parameter]]],
    kinds: dict[tuple[int, Hashable], UnitSpec],
) -> Iterator[UnitSpec]:
    names = {id(module): name or "root" for name, module in root.named_modules()}
    order = {identity: number for number, identity in enumerate(names)}
    count: dict[int, int] = {}
    for key in sorted(groups, key=lambda key: order[key[0]]):
        parameters = groups[key]
        if not any(parameter.numel() for _, parameter in parameters):
            continue
        seen = count[key[0]] = count.get(key[0], 0) + 1
        name = names[key[0]] + (f"[{seen}]" if seen > 1 else "")
        yield replace(kinds[key], name=name, parameters=tuple(parameters))


def assign_owners(specs: Iterable[UnitSpec], num_slices: int) -> list[UnitSpec]:
    """The same units, with an owner for each parameter that must not be cut.

    Args:
        num_slices: number of ranks in the shard group.
    """
    assigned = list(specs)
    # Apart: frozen parameters have no states that could make up for others' states.
    for is_trainable in (True, False):
        places = [
            place
            for place, spec in enumerate(assigned)
            if spec.is_whole and spec.trainable is is_trainable
        ]
        numels = [[p.numel() for _, p in assigned[place].parameters] for place in places]
        for place, owners in zip(places, balance(numels, num_slices), strict=True):
            assigned[place] = replace(assigned[place], owners=owners)
    return assigned


def _refuse_part(
    name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None, *, is_tile: bool
) -> None:
    """Where whole parameters are asked for, no part of one will do."""
    if is_tile:
        what, part = "tile of a linear", "tile"
        remedy = (
            "Leave out the layers that it updates, tile_linears(..., modules=[...]), or use an "
            "elementwise optimizer (AdamW, SGD, ...)"
        )
    elif is_dtensor(parameter):
        what, part = "DTensor, of which each tensor-parallel rank has a part", "part"
        remedy = "Use an elementwise optimizer (AdamW, SGD, ...) for it"
    else:
        return
    rule = "whole_parameters=True" if optimizer is None else type(optimizer).__name__
    raise ShardingError(
        f"{name} is a {what}, and {rule} asks for whole parameters: an update made from a {part} "
        f"alone would be another one. {remedy}"
    )


def _check(name: str, parameter: nn.Parameter) -> None:
    is_plain = type(parameter).__torch_dispatch__ is nn.Parameter.__torch_dispatch__
    if not is_plain and not is_dtensor(parameter) and not is_fake(parameter):
        raise ShardingError(
            f"parameter {name} is a {type(parameter).__name__}, a tensor subclass that cannot be "
            "viewed as a part of a flat buffer: shard the model before it is converted (quantized, "
            "distributed), or leave this module out"
        )
    if parameter.layout is not torch.strided or not is_dense(local_of(parameter)):
        raise ShardingError(
            f"parameter {name} (layout {parameter.layout}, strides {parameter.stride()}) is sparse "
            "or not dense in memory: replace it by p.contiguous() first"
        )
    if parameter.requires_grad and parameter.is_complex():
        raise ShardingError(
            f"parameter {name} is complex and trainable: register torch.view_as_real(parameter) "
            "as the parameter and view it as complex in forward"
        )


def _chains(root: nn.Module) -> dict[int, list[list[nn.Module]]]:
    """For each parameter (by id) every way from the root to a module that holds it."""
    modules = dict(root.named_modules(remove_duplicate=False))
    chains: dict[int, list[list[nn.Module]]] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                parts = name.split(".") if name else []
                prefixes = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
                chain = [modules[prefix] for prefix in prefixes]
                chains.setdefault(id(parameter), []).append(chain)
    return chains


def _unit_module(chains: list[list[nn.Module]], chosen: set[int], root: nn.Module) -> nn.Module:
    """The outermost chosen module that contains all users of a parameter, else a leaf or root.

    A tile is always one: it would be of no use within a larger unit.
    """
    others = [{id(module) for module in chain} for chain in chains[1:]]
    common = [module for module in chains[0] if all(id(module) in other for other in others)]
    leaf = common[-1]
    if any(isinstance(module, TiledLinear) for module in common[:-1]):
        return leaf
    for module in common:
        if id(module) in chosen:
            return module
    if type(leaf) in CALLED_LEAVES and leaf is chains[0][-1]:
        numel = sum(parameter.numel() for parameter in leaf.parameters(recurse=False))
        if numel >= LARGE_LEAF_NUMEL:
            return leaf
    return root


def chosen_modules(
    root: nn.Module, setting: str, patterns: Iterable[str] | None
) -> list[tuple[str, nn.Module]]:
    """The modules that a setting names, by shell patterns; for None the repeated blocks.

    Raises:
        ConfigError: a pattern matches nothing, or something that is never called.
    """
    if patterns is None:
        names = {id(module): name for name, module in root.named_modules()}
        return [(names[id(module)], module) for module in _repeated_blocks(root)]
    chosen = list(matching(root, setting, patterns))
    for name, module in chosen:
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList):
            raise ConfigError(
                f"{setting}: {name} is a {type(module).__name__}, which is never called itself; "
                f"name its children, {name + '.*'!r}"
            )
    return chosen


def matching(
    root: nn.Module, setting: str, patterns: Iterable[str]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a setting names, by shell patterns. A tiled linear is one, not its tiles."""
    tiles = {
        id(inside)
        for module in root.modules()
        if isinstance(module, TiledLinear)
        for inside in module.tiles.modules()
    }
    modules = root.named_modules()
    names = {name: module for name, module in modules if name and id(module) not in tiles}
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise ConfigError(
                f"{setting}={pattern!r} matches no module. The model's modules are for example "
                f"{', '.join(list(names)[:8])}"
            )
        yield from ((name, names[name]) for name in found)


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Children of the outermost containers of alike modules that hold parameters."""
    # Not children(), which leaves out repetitions of one module: weights shared over all layers.
    children = [child for child in module._modules.values() if child is not None]
    if isinstance(module, CONTAINERS) and len(children) > 1:
        alike = len({type(child) for child in children}) == 1
        if alike and all(_is_called_block(child) for child in children):
            yield from children
            return
    for child in children:
        yield from _repeated_blocks(child)


def _is_called_block(module: nn.Module) -> bool:
    """A module with parameters that is used by calling it."""
    uncalled = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return not isinstance(module, uncalled) and any(True for _ in module.parameters())
