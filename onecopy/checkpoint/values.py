"""The values of a model one by one, from wherever they are: a checkpoint, a module, its ranks.

Nobody holds more than one of them, so a model of any size can pass through one machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy import handle
from onecopy.checkpoint.contents import contents_of
from onecopy.checkpoint.huggingface import NOT_EXPORTED, configs_of, names_left_out
from onecopy.checkpoint.manifest import UNSAVED
from onecopy.checkpoint.naming import extra_states_in, plain_name
from onecopy.checkpoint.ranges import whole_tensor
from onecopy.checkpoint.source import Source, open_source
from onecopy.core.build import has_values
from onecopy.core.tiled_linear import TilePlace, persistent_tensors, tiles_in
from onecopy.errors import CheckpointError, ConfigError, ShardingError

if TYPE_CHECKING:
    from onecopy.comm.groups import Group
    from onecopy.core.engine import Engine

__all__ = ["Model", "Value", "open_model", "read_tensor"]


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a model.

    read: gives it, on the CPU or elsewhere; a collective where the model is sharded.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model whose values can be read.

    values: under the names that files of weights shall have, tied ones once.
    configs: texts of its Hugging Face configuration, by file name.
    left_out: names of what the model has beside tensors.
    world: the ranks that must read together.
    rest: to be called when all is read.
    """

    values: list[Value]
    configs: dict[str, str]
    left_out: tuple[str, ...] = ()
    world: Group | None = None
    rest: Callable[[], None] = lambda: None


def open_model(source: str | os.PathLike[str] | nn.Module, name: str | None = None) -> Model:
    """The values of a model.

    Args:
        source: the folder of a checkpoint or of a run, or a module.
        name: of the model that is meant, in a checkpoint of several.

    Raises:
        CheckpointError: there is no such checkpoint, or no such model in it.
        ConfigError: a name is given with a module.
        ShardingError: the module has parameters without values, or whose values are not in one
            tensor (DTensors, sparse and quantized ones); or a part of it is sharded.
    """
    if not isinstance(source, nn.Module):
        return _stored_model(open_source(source), name)
    if name is not None:
        raise ConfigError(
            f"model={name!r} chooses from a checkpoint of several models: give it with the path "
            "of one, or pass the module itself"
        )
    return _module(handle.inner(source))


# Checkpoints ----------------------------------------------------------------------------------


def _stored_model(source: Source, name: str | None) -> Model:
    chosen, keys = _choose(source, name)
    manifest = source.manifest
    if manifest and manifest.models[chosen].get(UNSAVED):
        raise CheckpointError(
            f"{source.path} was saved with frozen=False, and has only what was trained: load it "
            "into the whole model, and export that one, onecopy.export(model, directory)"
        )
    # Others than onecopy have not asked the model under which names it will look.
    names = manifest.models[chosen].get(NOT_EXPORTED, ()) if manifest else source.aliases
    not_exported = set(names)
    values, left_out = [], []
    for plain, key in keys.items():
        entry = source.metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            dtype, shape = entry.properties.dtype, tuple(entry.size)
            read = partial(read_tensor, source, key)
            if plain not in not_exported:
                values.append(Value(plain_name(plain), dtype, shape, read))
        else:
            left_out.append(plain)
    configs = manifest.configs.get(chosen, {}) if manifest else {}
    return Model(values=values, configs=configs, left_out=tuple(left_out))


def _choose(source: Source, name: str | None) -> tuple[str, dict[str, str]]:
    """A model of a checkpoint: its name, and the keys of its tensors by their names."""
    models = contents_of(source).models
    if not models:
        raise CheckpointError(f"{source.path} holds no weights of a model")
    if name is None and len(models) == 1:
        return next(iter(models.items()))
    if name is None or name not in models:
        asked = "several models" if name is None else f"no model {name!r}"
        listed = ", ".join(repr(one) for one in sorted(models))
        raise CheckpointError(f"{source.path} has {asked}: choose with model=... one of {listed}")
    return name, models[name]


def read_tensor(source: Source, key: str) -> Tensor:
    """One tensor of a checkpoint, whole, as it is stored.

    Raises:
        CheckpointError: what is stored is damaged, or does not make up the whole tensor.
    """
    entry = source.metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), f"{key} is a tensor"
    value = torch.empty(entry.size, dtype=entry.properties.dtype)
    source.read([whole_tensor(key, value)], ())
    return value


# Modules --------------------------------------------------------------------------------------


def _module(model: nn.Module) -> Model:
    owner: Any = handle.find(model)
    engine: Engine | None = owner.engine if owner is not None else None
    if engine is None:
        _refuse_parts(model)
    places = tiles_in(model)
    names = _names_of_tensors(model, places)
    left_out = set(names_left_out(model, [group for _, group in names]))
    values = []
    for parts, group in names:
        for tensor in parts:
            if engine is None or engine.find(tensor) is None:
                _refuse_strange(group[0], tensor)
        dtype, place = _stored_dtype(engine, parts[0]), places.get(id(parts[0]))
        read = partial(_read_tensor_of, engine, parts[0])
        shape = tuple(parts[0].shape)
        if place is not None:
            shape, tiles = place.shape, [(tensor, places[id(tensor)]) for tensor in parts]
            read = partial(_join_tiles_of, engine, tiles, dtype)
        values += [Value(name, dtype, shape, read) for name in group if name not in left_out]
    others = tuple(name for name, _ in extra_states_in(model))
    opened = Model(values=values, configs=configs_of(model), left_out=others)
    if engine is None:
        return opened
    engine.collectives.agreement.agree("onecopy.export")
    owner.backward.flush()
    engine.recover()
    engine.flush()
    engine.check_parameters()
    return replace(opened, world=engine.collectives.groups.world, rest=engine.rest)


def _names_of_tensors(
    model: nn.Module, places: Mapping[int, TilePlace]
) -> list[tuple[list[Tensor], list[str]]]:
    """What a state_dict would hold, each tensor once, with all its names; tiled ones as tiles."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in persistent_tensors(model):
        found.setdefault(id(tensor), (tensor, []))[1].append(plain_name(name))
    parts: dict[str | int, tuple[list[Tensor], list[str]]] = {}
    for key, (tensor, names) in found.items():
        whole = names[0] if key in places else key
        parts.setdefault(whole, ([], names))[0].append(tensor)
    return list(parts.values())


def _stored_dtype(engine: Engine | None, tensor: Tensor) -> torch.dtype:
    found = engine.find(tensor) if engine is not None else None
    return tensor.dtype if found is None else found[0].dtypes.master


@torch.no_grad()
def _read_tensor_of(engine: Engine | None, tensor: Tensor) -> Tensor:
    """The values of a tensor of a module, in master precision where it is sharded."""
    found = engine.find(tensor) if engine is not None else None
    if engine is None or found is None:
        return tensor.detach()
    unit, index = found
    engine.touch.touch([tensor], torch.Tensor.detach)
    return unit.gather_value(index)


def _join_tiles_of(
    engine: Engine | None, tiles: list[tuple[Tensor, TilePlace]], dtype: torch.dtype
) -> Tensor:
    """The plain layer's tensor, on the CPU; of the tiles, one at a time is gathered."""
    whole = torch.empty(tiles[0][1].shape, dtype=dtype)
    for tensor, place in tiles:
        place.part_of(whole).copy_(_read_tensor_of(engine, tensor))
    return whole


def _refuse_strange(name: str, tensor: Tensor) -> None:
    """Tensors whose values are nowhere, or not in one place."""
    if not has_values(tensor):
        raise ShardingError(
            f"{name} has no values yet: call onecopy.shard(model, ...) before export"
        )
    # What wrapper subclasses of torch have.
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided:
        kind = tensor.layout if type(tensor) in (Tensor, nn.Parameter) else type(tensor).__name__
        raise ShardingError(
            f"{name} is a {kind}, whose values are not in one dense tensor. Where they are on "
            "several ranks, save with torch.distributed.checkpoint and export that folder; else "
            "convert it"
        )


def _refuse_parts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if handle.find(module) is not None:
            raise ShardingError(
                f"module {name} of this {type(model).__name__} is sharded: export that module, or "
                "shard the whole model"
            )
