"""What one rank saves of sharded models and their optimizers, in the coordinates of checkpoints.

    <parameter or buffer>                            its values, in master precision
    optimizer.state.<parameter>.<state>              what the optimizer keeps for a parameter
    optimizer.param_groups.<number>.<setting>        settings of a group; "params" are names
    onecopy.rng.<rank>, onecopy.extra.<rank>         random states, and what the caller adds

For the names see naming.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.checkpoint.division import Division
from onecopy.checkpoint.naming import (
    STATE,
    Named,
    NamedModel,
    NamedOptimizer,
    Path,
    alike_in,
    extra_states_of,
    key_of,
)
from onecopy.checkpoint.ranges import Range, whole_tensor
from onecopy.core.dtensors import local_of
from onecopy.errors import CheckpointError

if TYPE_CHECKING:
    from onecopy.core.layout import Piece
    from onecopy.core.optimizer import Binding
    from onecopy.core.swapped import Swapped
    from onecopy.core.unit import Unit

__all__ = ["States", "is_cut_state", "range_of_values", "range_to_load", "states_of"]


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


def states_of(named: Named, division: Division) -> States:
    """This rank's part of everything but the settings of optimizers.

    Ranks that hold the same have a part of it each, or the first of them has all.
    """
    states = States()
    for model in named.models:
        for unit in model.engine.units:
            for piece in unit.slice.pieces_of_replica():
                values = range_of_values(model, unit, piece)
                if values.key not in division.left:
                    states.ranges.append(values)
                    states.paths[values.key] = (values.key,)
        for names in model.names.values():
            states.aliases |= dict.fromkeys(names[1:], names[0])
        if named.groups.world.rank == 0:
            _add_what_is_alike(model, states, division)
    for optimizer in named.optimizers:
        _add_optimizer(named, optimizer, states, division)
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


def _add_what_is_alike(model: NamedModel, states: States, division: Division) -> None:
    """As the first rank has it."""
    for key, tensor in alike_in(model).items():
        if key not in division.left:
            place = model.places.get(id(tensor))
            states.ranges.append(whole_tensor(key, local_of(tensor).detach(), place))
            states.paths[key] = (key,)
    for key, module in extra_states_of(model):
        if key not in division.left:
            states.add((key,), module.get_extra_state())


# Optimizers -----------------------------------------------------------------------------------


def is_cut_state(unit: Unit, index: int, value: Any) -> bool:
    """Whether a state has a value for each element of the piece, so that it has ranges too."""
    if type(value) not in (torch.Tensor, nn.Parameter) or not value.dim():
        return False
    if unit.layout.is_whole:
        return bool(value.shape == unit.views[index].shape)
    return bool(value.shape == (unit.slice.place_of(index).numel,))


def _add_optimizer(
    named: Named, optimizer: NamedOptimizer, states: States, division: Division
) -> None:
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
        if model.name_of(parameter) in division.left:
            continue
        path = (*optimizer.path, STATE, model.name_of(parameter))
        states.merge(_states_of_piece(path, binding, model, unit, parts[unit][index]))


def _states_of_piece(
    path: Path, binding: Binding, model: NamedModel, unit: Unit, piece: Piece
) -> States:
    """What is kept for one parameter: ranges of what is like it, the rest by whom has its start."""
    states, index = States(), piece.index
    own = unit.slice.pieces[index]
    parameter = unit.parameters[index]
    place = model.places.get(id(parameter))
    is_part = unit.slice.place_of(index).numel < parameter.numel() or place is not None
    has_start = not piece.offset and (place is None or place.is_first)
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
                "mean nothing. Shard with whole_parameters=True, so that no parameter is cut; "
                "where tensor parallelism cuts it, train it with another optimizer"
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
