"""Names that a checkpoint gives to what is saved or loaded, and bringing it to rest before.

Names are those that the plain model's state_dict() has, and those that
torch.distributed.checkpoint.state_dict gives to optimizers. With several models each name begins
with the model's, with several optimizers `optimizer.<name>.` takes the place of `optimizer.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy import handle
from onecopy.checkpoint.boxes import Box
from onecopy.checkpoint.places import Place, places_in
from onecopy.checkpoint.ranges import Range, Values, memory_order
from onecopy.comm.compare import ranks_of_model
from onecopy.comm.groups import host_group
from onecopy.core.tiled_linear import persistent_tensors
from onecopy.core.unit import UnitState
from onecopy.errors import CheckpointError, ConfigError, ShardingError
from onecopy.parallel.parts import Parts, Rename

if TYPE_CHECKING:
    from onecopy.comm.groups import Group, Groups
    from onecopy.core.engine import Engine
    from onecopy.core.layout import Piece
    from onecopy.core.optimizer import Binding
    from onecopy.core.unit import Unit

__all__ = [
    "GROUPS",
    "STATE",
    "Models",
    "Named",
    "NamedModel",
    "NamedOptimizer",
    "Optimizers",
    "Path",
    "alike_in",
    "extra_states_in",
    "extra_states_of",
    "key_of",
    "meet",
    "name_all",
    "plain_name",
    "settle",
]

# The keys that lead to something in a nested state dict.
Path = tuple[str | int, ...]
# Under the optimizer's name: what it keeps for parameters, and the settings of its groups.
STATE, GROUPS = "state", "param_groups"
# What torch puts into the names of modules that it wraps.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def key_of(path: Path) -> str:
    """The key of something that has its place in a nested state dict."""
    return ".".join(map(str, path))


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers of torch.compile and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class NamedModel:
    """A sharded model and how a checkpoint calls its tensors.

    name: of the model, "" where it has none. Parts of one model have the same.
    names: by id of a parameter or buffer its names, the first is the one it is stored under.
    places: by id, of a parameter or buffer of which this module has a part, where that lies. Parts
        of one parameter have one name.
    rename: what becomes of a name in the module.
    """

    name: str
    module: nn.Module
    engine: Engine
    names: dict[int, list[str]]
    places: dict[int, Place]
    rename: Rename

    @property
    def prefix(self) -> str:
        """Of all its names."""
        return f"{self.name}." if self.name else ""

    def key_for(self, name: str) -> str:
        """The key of something that has this name in the module."""
        return self.prefix + self.rename(name)

    def name_of(self, tensor: torch.Tensor) -> str:
        """The first name."""
        return self.names[id(tensor)][0]

    def range_like(
        self, unit: Unit, piece: Piece, key: str, dtype: torch.dtype, values: Values
    ) -> Range:
        """What a rank has of a tensor that is like a parameter: as much as its piece of that."""
        parameter = unit.parameters[piece.index]
        local, place = unit.views[piece.index], self.places.get(id(parameter))
        shape, order = tuple(local.shape), memory_order(local)
        if place is None:
            return Range(key, shape, dtype, piece.offset, piece.numel, values, order)
        box = Box(place.offsets, shape, 0)
        return Range(key, place.shape, dtype, piece.offset, piece.numel, values, order, box)


@dataclass(frozen=True)
class NamedOptimizer:
    """An attached optimizer; path: the nested keys of what it saves, `optimizer` or with a name."""

    path: Path
    binding: Binding

    @property
    def name(self) -> str:
        """Under which the manifest has it, "" where it has none."""
        return key_of(self.path[1:])


@dataclass(frozen=True)
class Named:
    """Everything that one call saves or loads."""

    models: list[NamedModel]
    optimizers: list[NamedOptimizer]

    @property
    def groups(self) -> Groups:
        """Those that the models are trained in."""
        return self.models[0].engine.collectives.groups

    @property
    def group(self) -> Group:
        """The ranks that share the work, all that have a part of the models.

        A process group of its own, made at the first use.
        """
        owner = handle.of(self.models[0].module)
        if owner.checkpoint_group is None:
            owner.checkpoint_group = host_group(ranks_of_model(self.groups))
        found: Group = owner.checkpoint_group
        return found

    @property
    def parts(self) -> dict[str, list[NamedModel]]:
        """The models by name, each with its parts."""
        found: dict[str, list[NamedModel]] = {}
        for one in self.models:
            found.setdefault(one.name, []).append(one)
        return found

    def model_of(self, parameter: torch.Tensor) -> NamedModel:
        """Which of the models has a parameter."""
        for model in self.models:
            if id(parameter) in model.names:
                return model
        raise CheckpointError("an optimizer has parameters of a model that was not passed")

    def name_of(self, parameter: torch.Tensor) -> str:
        """The first name of a parameter of any of the models."""
        return self.model_of(parameter).name_of(parameter)

    def distinct(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters of the plain model: of the tiles of one only the first."""
        found: dict[str, torch.Tensor] = {}
        for one in parameters:
            found.setdefault(self.name_of(one), one)
        return list(found.values())


_Model = nn.Module | Parts[nn.Module]
_Optimizer = torch.optim.Optimizer | Parts[torch.optim.Optimizer]
Models = _Model | Sequence[_Model] | Mapping[str, _Model]
Optimizers = _Optimizer | Sequence[_Optimizer] | Mapping[str, _Optimizer] | None


def _by_name(given: Any) -> Iterator[tuple[str, Any, Rename | None]]:
    """One thing without a name, several with their names or numbers; parts of one have the same."""
    if isinstance(given, Mapping):
        named = {str(name): one for name, one in given.items()}
    elif isinstance(given, list | tuple):
        named = {str(number): one for number, one in enumerate(given)}
    else:
        named = {} if given is None else {"": given}
    for name, one in named.items():
        if isinstance(one, Parts):
            yield from (
                (name, part, rename) for part, rename in zip(one.parts, one.names, strict=True)
            )
        else:
            yield name, one, None


def name_all(model: Models, optimizer: Optimizers) -> Named:
    """Look up what was passed, and give names.

    Raises:
        ShardingError: a model is not sharded, an optimizer is not attached to one of them, or has
            parameters of another model.
        ConfigError: names of models that could be taken for one another; two tensors of one rank
            would have one name.
    """
    models = [_named_model(name, one, rename) for name, one, rename in _by_name(model)]
    if not models:
        raise ShardingError("no model was passed: there is nothing to save or load")
    _check_names(list({one.name: None for one in models}))
    worlds = {one.engine.collectives.groups.world.ranks for one in models}
    if len(worlds) > 1:
        raise ShardingError("the models are sharded over different ranks: save each on its own")
    optimizers = [
        NamedOptimizer(("optimizer", *([name] if name else [])), _binding_of(one, models))
        for name, one, _ in _by_name(optimizer)
    ]
    named = Named(models, optimizers)
    for name, parts in named.parts.items():
        _refuse_same_names(name, parts)
    return named


def _binding_of(optimizer: torch.optim.Optimizer, models: Sequence[NamedModel]) -> Binding:
    bindings = [one for model in models for one in handle.of(model.module).bindings]
    binding: Binding | None = next((one for one in bindings if one.optimizer is optimizer), None)
    if binding is None:
        raise ShardingError(
            f"this {type(optimizer).__name__} is attached to none of the models: pass the "
            "optimizer that was given to onecopy.shard(model, optimizer), itself and not a wrapper "
            "of it"
        )
    engines = [one.engine for one in models]
    if any(engine not in engines for engine, _ in binding.engines):
        raise ShardingError(
            f"the {type(optimizer).__name__} has parameters of another sharded model too: pass all "
            "its models, as a list or a dict"
        )
    binding.adopt_new_groups()
    return binding


def _refuse_same_names(name: str, parts: Sequence[NamedModel]) -> None:
    """Raises ConfigError where parts of one model, in one process, have a name in common."""
    seen: dict[str, NamedModel] = {}
    for part in parts:
        for key in (key for keys in part.names.values() for key in keys):
            if seen.setdefault(key, part) is not part:
                raise ConfigError(
                    f"two parts of the model{f' {name!r}' if name else ''} have a tensor {key}: "
                    "give each the names that it has in the whole model, Parts(..., names=[...])"
                )


def _check_names(names: list[str]) -> None:
    """Raises ConfigError where keys of two models, or of a model and the rest, could be equal."""
    for one in names:
        if one in ("optimizer", "onecopy"):
            raise ConfigError(f"a model is called {one!r}, which has its own place: rename it")
        for other in names:
            if one != other and (not one or other.startswith(f"{one}.")):
                raise ConfigError(
                    f"a model is called {one!r} and another {other!r}: the second one would look "
                    "like a part of the first. Give names of which none begins with another"
                )


def _named_model(name: str, model: nn.Module, rename: Rename | None) -> NamedModel:
    if not isinstance(model, nn.Module):
        called = f" {name!r}" if name else ""
        raise ShardingError(
            f"the model{called} is of class {type(model).__name__}, which is no module. The folder "
            "comes first, then the model or models, then the optimizer or optimizers: "
            "onecopy.save(root, model, optimizer)"
        )
    engine: Engine = handle.of(model).engine
    if engine.is_held:
        raise ShardingError(
            "checkpoints inside full_parameters: what is changed there reaches the masters at the "
            "end of the block. Save and load outside of it"
        )
    module = handle.inner(model)
    found = NamedModel(name, module, engine, {}, places_in(module), rename or str)
    for full_name, tensor in persistent_tensors(module):
        found.names.setdefault(id(tensor), []).append(found.key_for(plain_name(full_name)))
    return found


def meet(named: Named, verb: str) -> None:
    """Go on when all ranks have called the same.

    Raises:
        DivergenceError: a rank does something else, or has ended.
        CheckpointError: an earlier save in the background has lost a rank.
    """
    owners = [handle.of(one.module) for one in named.models]
    for owner in owners:
        if owner.pending_save is not None:
            owner.pending_save.raise_if_lost()
    owners[0].engine.collectives.agreement.agree(verb)


def settle(named: Named, verb: str) -> None:
    """Bring models to rest, between two steps, with all changes in the masters.

    Args:
        verb: what all ranks have called; one that has not is named, instead of waited for.

    Raises:
        DivergenceError: a rank does something else.
        CheckpointError: an earlier save in the background has failed, and nobody was told yet.
    """
    meet(named, verb)
    for one in named.models:
        owner = handle.of(one.module)
        if owner.pending_save is not None:
            owner.pending_save.settle()
        owner.backward.recover()
        one.engine.recover()
        one.engine.flush()
        for unit in one.engine.units:
            if unit.state is UnitState.GATHERED:
                # Also what was written in ways that torch does not count.
                unit.expect_writes()
        one.engine.check_parameters()
        one.engine.rest()


def alike_in(model: NamedModel) -> dict[str, torch.Tensor]:
    """What no rank has a slice of: persistent buffers, and parameters without elements."""
    return {
        model.name_of(tensor): tensor
        for _, tensor in persistent_tensors(model.module)
        if not isinstance(tensor, nn.Parameter) or not tensor.numel()
    }


def extra_states_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that add something of their own to a state_dict, by the key it has there."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield plain_name(f"{path}._extra_state" if path else "_extra_state"), module


def extra_states_of(model: NamedModel) -> Iterator[tuple[str, nn.Module]]:
    """The same by the keys of the checkpoint."""
    found = extra_states_in(model.module)
    return ((model.key_for(name), module) for name, module in found)
