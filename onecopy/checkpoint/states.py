"""What one rank saves of sharded models and their optimizers, in the coordinates of checkpoints.

    <parameter or buffer>                            its values, in master precision
    optimizer.state.<parameter>.<state>              what the optimizer keeps for a parameter
    optimizer.param_groups.<number>.<setting>        settings of a group; "params" are names
    onecopy.rng.<rank>, onecopy.extra.<rank>         random states, and what the caller adds

Names are those that the plain model's state_dict() has, and those that
torch.distributed.checkpoint.state_dict gives to optimizers. With several models each name begins
with the model's, with several optimizers `optimizer.<name>.` takes the place of `optimizer.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy import handle
from onecopy.checkpoint.boxes import Box
from onecopy.checkpoint.ranges import Range, Values, memory_order, whole_tensor
from onecopy.comm.groups import host_group
from onecopy.core.tiled_linear import persistent_tensors, tiles_in
from onecopy.core.unit import UnitState
from onecopy.errors import CheckpointError, ConfigError, ShardingError

if TYPE_CHECKING:
    from onecopy.comm.groups import Group
    from onecopy.core.engine import Engine
    from onecopy.core.layout import Piece
    from onecopy.core.optimizer import Binding
    from onecopy.core.swapped import Swapped
    from onecopy.core.tiled_linear import TilePlace
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
    "States",
    "alike_in",
    "extra_states_in",
    "extra_states_of",
    "key_of",
    "meet",
    "name_all",
    "range_of_values",
    "range_to_load",
    "settle",
    "states_of",
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

    prefix: of all its names: "" or "<name>.".
    names: by id of a parameter or buffer its names, the first is the one it is stored under.
    places: by id of a tile of a parameter: which part of it the tile is. Tiles have one name.
    """

    prefix: str
    module: nn.Module
    engine: Engine
    names: dict[int, list[str]]
    places: dict[int, TilePlace]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The first name."""
        return self.names[id(tensor)][0]

    def range_like(
        self, unit: Unit, piece: Piece, key: str, dtype: torch.dtype, values: Values
    ) -> Range:
        """What a rank has of a tensor that is like a parameter: as much as its piece of that."""
        parameter = unit.parameters[piece.index]
        shape, order = tuple(parameter.shape), memory_order(parameter)
        tile = self.places.get(id(parameter))
        if tile is None:
            return Range(key, shape, dtype, piece.offset, piece.numel, values, order)
        box = Box(tile.offsets, shape, 0)
        return Range(key, tile.shape, dtype, piece.offset, piece.numel, values, order, box)


@dataclass(frozen=True)
class NamedOptimizer:
    """An attached optimizer; path: the nested keys of what it saves, `optimizer` or with a name."""

    path: Path
    binding: Binding


@dataclass(frozen=True)
class Named:
    """Everything that one call saves or loads."""

    models: dict[str, NamedModel]
    optimizers: dict[str, NamedOptimizer]

    @property
    def group(self) -> Group:
        """The ranks that share the work; a process group of its own, made at the first use."""
        owner = handle.of(next(iter(self.models.values())).module)
        if owner.checkpoint_group is None:
            owner.checkpoint_group = host_group(owner.engine.collectives.groups.world)
        found: Group = owner.checkpoint_group
        return found

    def model_of(self, parameter: torch.Tensor) -> NamedModel:
        """Which of the models has a parameter."""
        for model in self.models.values():
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


Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = (
    torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer]
    | None
)


def _by_name(given: Any) -> dict[str, Any]:
    """One thing without a name, several with their names or numbers."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {str(name): one for name, one in given.items()}
    if isinstance(given, list | tuple):
        return {str(number): one for number, one in enumerate(given)}
    return {"": given}


def name_all(model: Models, optimizer: Optimizers) -> Named:
    """Look up what was passed, and give names.

    Raises:
        ShardingError: a model is not sharded, an optimizer is not attached to one of them, or has
            parameters of another model.
        ConfigError: names of models that could be taken for one another.
    """
    models = {name: _named_model(name, one) for name, one in _by_name(model).items()}
    if not models:
        raise ShardingError("no model was passed: there is nothing to save or load")
    _check_names(list(models))
    worlds = {one.engine.collectives.groups.world.ranks for one in models.values()}
    if len(worlds) > 1:
        raise ShardingError("the models are sharded over different ranks: save each on its own")
    bindings = {
        id(binding.optimizer): binding
        for one in models.values()
        for binding in handle.of(one.module).bindings
    }
    engines = [one.engine for one in models.values()]
    optimizers = {}
    for name, one in _by_name(optimizer).items():
        binding = bindings.get(id(one))
        if binding is None:
            raise ShardingError(
                f"this {type(one).__name__} is attached to none of the models: pass the optimizer "
                "that was given to onecopy.shard(model, optimizer), itself and not a wrapper of it"
            )
        if any(engine not in engines for engine, _ in binding.engines):
            raise ShardingError(
                f"the {type(one).__name__} has parameters of another sharded model too: pass all "
                "its models, as a list or a dict"
            )
        binding.adopt_new_groups()
        optimizers[name] = NamedOptimizer(("optimizer", *([name] if name else [])), binding)
    return Named(models, optimizers)


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


def _named_model(name: str, model: nn.Module) -> NamedModel:
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
    module, prefix = handle.inner(model), f"{name}." if name else ""
    names: dict[int, list[str]] = {}
    for full_name, tensor in persistent_tensors(module):
        names.setdefault(id(tensor), []).append(prefix + plain_name(full_name))
    return NamedModel(prefix, module, engine, names, tiles_in(module))


def meet(named: Named, verb: str) -> None:
    """Go on when all ranks have called the same.

    Raises:
        DivergenceError: a rank does something else, or has ended.
        CheckpointError: an earlier save in the background has lost a rank.
    """
    owners = [handle.of(one.module) for one in named.models.values()]
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
    for one in named.models.values():
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


@dataclass
class States:
    """What this rank saves.

    objects: by key, what goes through torch.save.
    paths: by key of anything, its keys in a nested state dict.
    aliases: further names of tensors, and the first one.
    """

    ranges: list[Range] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, path: Path, value: Any) -> None:
        """Something that one rank saves whole."""
        key = key_of(path)
        self.paths[key] = path
        if type(value) is torch.Tensor:
            self.ranges.append(whole_tensor(key, value))
        else:
            self.objects[key] = value

    def merge(self, other: States) -> None:
        """Something else that this rank saves."""
        self.ranges += other.ranges
        self.objects |= other.objects
        self.paths |= other.paths
        self.aliases |= other.aliases

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(one.num_bytes for one in self.ranges)


def states_of(named: Named) -> States:
    """This rank's part of everything; ranks that hold the same slice have a part of it each."""
    states = States()
    is_first = named.group.rank == 0
    for model in named.models.values():
        for unit in model.engine.units:
            for piece in unit.slice.pieces_of_replica():
                values = range_of_values(model, unit, piece)
                states.ranges.append(values)
                states.paths[values.key] = (values.key,)
        for names in model.names.values():
            states.aliases |= dict.fromkeys(names[1:], names[0])
        if is_first:
            _add_what_is_alike(model, states)
    for optimizer in named.optimizers.values():
        _add_optimizer(named, optimizer, states)
        if is_first:
            _add_groups(named, optimizer, states)
    return states


def range_of_values(model: NamedModel, unit: Unit, piece: Piece) -> Range:
    """A piece's values, in this rank's slice of the masters."""
    found = model.range_like(
        unit,
        piece,
        model.name_of(unit.parameters[piece.index]),
        unit.dtypes.master,
        lambda start, stop: unit.slice.master_part(piece.start + start, piece.start + stop),
    )
    return found if unit.slice.disk is None else replace(found, lane=unit.slice.disk.files.lane)


def range_to_load(model: NamedModel, unit: Unit, piece: Piece) -> Range:
    """The same for new values, which go to disk by and by where the masters are there."""
    values = range_of_values(model, unit, piece)
    if unit.slice.disk is None:
        return values
    return replace(values, put=lambda at, new: unit.slice.put_part(piece.start + at, new))


def alike_in(model: NamedModel) -> dict[str, torch.Tensor]:
    """What every rank has whole: persistent buffers, and parameters without elements."""
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
    return ((model.prefix + name, module) for name, module in extra_states_in(model.module))


def _add_what_is_alike(model: NamedModel, states: States) -> None:
    """As the first rank has it."""
    for name, tensor in alike_in(model).items():
        states.add((name,), tensor.detach())
    for name, module in extra_states_of(model):
        states.add((name,), module.get_extra_state())


# Optimizers -----------------------------------------------------------------------------------


def is_cut_state(unit: Unit, index: int, value: Any) -> bool:
    """Whether a state has a value for each element of the piece, so that it has ranges too."""
    if type(value) not in (torch.Tensor, nn.Parameter) or not value.dim():
        return False
    if unit.layout.is_whole:
        return bool(value.shape == unit.parameters[index].shape)
    return bool(value.shape == (unit.slice.place_of(index).numel,))


def _add_optimizer(named: Named, optimizer: NamedOptimizer, states: States) -> None:
    binding = optimizer.binding
    parts = {
        unit: {piece.index: piece for piece in unit.slice.pieces_of_replica()}
        for unit in binding.units
    }
    for parameter in (one for group in binding.parameters for one in group):
        found = binding.find_piece(parameter)
        if found is None or found[1] not in parts[found[0]]:
            continue
        unit, index = found
        model = named.model_of(parameter)
        path = (*optimizer.path, STATE, model.name_of(parameter))
        states.merge(_states_of_piece(path, binding, model, unit, parts[unit][index]))


def _states_of_piece(
    path: Path, binding: Binding, model: NamedModel, unit: Unit, piece: Piece
) -> States:
    """What is kept for one parameter: ranges of what is like it, the rest by whom has its start."""
    states, index = States(), piece.index
    own = unit.slice.pieces[index]
    tile = model.places.get(id(unit.parameters[index]))
    is_part = unit.slice.place_of(index).numel < unit.parameters[index].numel() or tile is not None
    has_start = not piece.offset and (tile is None or not tile.first)
    skipped = piece.offset - unit.slice.place_of(index).offset
    for name, value in binding.optimizer.state.get(own, {}).items():
        full_path = (*path, str(name))
        states.paths[key_of(full_path)] = full_path
        on_disk = binding.unit_steps.chunked.find(own, name)
        if on_disk is not None or is_cut_state(unit, index, value):
            whole = on_disk or _InMemory(unit.slice.from_piece(index, value.detach()))
            values = partial(_between, whole, skipped)
            found = model.range_like(unit, piece, key_of(full_path), value.dtype, values)
            lane = None if on_disk is None else on_disk.lane
            states.ranges.append(replace(found, lane=lane))
            continue
        if is_part and _is_larger(value):
            kind = type(value).__name__
            raise CheckpointError(
                f"{key_of(full_path)} is a {kind} that belongs to this rank's piece of the "
                "parameter, without a value for each of its elements: on other pieces it would "
                "mean nothing. Shard with whole_parameters=True, so that no parameter is cut"
            )
        if has_start:
            states.add(full_path, value)
    return states


def _is_larger(value: Any) -> bool:
    """Whether there is a tensor in it of more than one number."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    if isinstance(value, Mapping):
        return any(map(_is_larger, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_larger, value))


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A state of which parts can be had, as of one on disk."""

    flat: torch.Tensor

    def part(self, start: int, stop: int) -> torch.Tensor:
        return self.flat[start:stop]


def _between(whole: Swapped | _InMemory, skipped: int, start: int, stop: int) -> torch.Tensor:
    return whole.part(skipped + start, skipped + stop)


def _add_groups(named: Named, optimizer: NamedOptimizer, states: States) -> None:
    """The param_groups, with names in the place of parameters."""
    binding = optimizer.binding
    groups = binding.optimizer.param_groups
    for number, (group, parameters) in enumerate(zip(groups, binding.parameters, strict=True)):
        settings = {key: value for key, value in group.items() if key != "param_names"}
        names = [named.name_of(parameter) for parameter in parameters]
        settings["params"] = list(dict.fromkeys(names))
        given = binding.names[number]
        if given is not None:
            # All of them, where the group itself has those of this rank's pieces.
            settings["param_names"] = [
                given[names.index(name)] if names.count(name) == 1 else name
                for name in settings["params"]
            ]
        for key, value in settings.items():
            states.add((*optimizer.path, GROUPS, number, str(key)), value)
