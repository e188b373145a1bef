"""Who saves what where ranks have different parts of the models: tensor and pipeline parallelism.

Each data group has its own part. What several of them have (a parameter that tensor parallel ranks
hold whole, an embedding that two pipeline stages hold) the first one saves. All ranks tell each
other what they have, so the decision needs no plan of how the model was taken apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onecopy.checkpoint.boxes import Box, overlapping
from onecopy.checkpoint.naming import Named, NamedModel, alike_in, extra_states_of
from onecopy.checkpoint.together import together
from onecopy.core.dtensors import local_of
from onecopy.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from onecopy.comm.groups import Groups

__all__ = ["Division", "divide", "refuse_strangers"]

# Of a tensor that several data groups hold, so many elements are compared.
SAMPLES = 16
# Of the norm of these elements: ranks that add up in another order come to differ in the last bits.
TOLERANCE = 0.01
SHOWN = 3
REMEDY = (
    "Give the tensors of each part of the model the names that they have in the whole model: make "
    "pipeline stages from the whole model by deleting layers, or pass "
    "onecopy.parallel.Parts(stage, names=...) instead of the stage. What tensor parallel ranks "
    "hold different parts of must be a DTensor"
)


@dataclass(frozen=True)
class Division:
    """What this rank must know of the others. Without model groups there is nothing to know.

    elsewhere: by the model's name the names, without it, that only other ranks have.
    left: keys of what this data group does not save: another one does, or none.
    ranks: of each rank of the checkpoint its place in the data group, and in the model groups.
    twins: by key the data groups, each by its first rank, that hold the same part; several lists
        where there are several parts.
    """

    elsewhere: Mapping[str, frozenset[str]] = field(default_factory=dict)
    left: frozenset[str] = frozenset()
    ranks: tuple[tuple[int, ...], ...] = ()
    twins: Mapping[str, list[list[int]]] = field(default_factory=dict)

    def names_elsewhere(self, model: str) -> frozenset[str]:
        """Names, without that of the model, that only other ranks have."""
        return self.elsewhere.get(model, frozenset())


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank has of one tensor. boxes: offsets and sizes. shape: None of what is no tensor."""

    shape: tuple[int, ...] | None
    dtype: str
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others.

    first: the first rank of its data group. place: see Division.ranks.
    held: by key. names: by model. Both are told by the first rank of each data group.
    """

    first: int
    place: tuple[int, ...]
    held: dict[str, _Held]
    names: dict[str, set[str]]


def divide(named: Named) -> Division:
    """Find out what the other ranks have; a collective where there are model groups.

    Raises:
        CheckpointError: ranks hold parts that do not make up one tensor.
    """
    groups = named.groups
    if not groups.model:
        _refuse_parts_of_others(named)
        return Division()
    everyone = together(named.group, lambda: _tell(named, groups))
    first, left, twins = groups.world.ranks[0], set(), {}
    for key, holders in _holders(everyone).items():
        _check_boxes(key, holders)
        alike = _alike(holders)
        if any(first in firsts[1:] for firsts in alike):
            left.add(key)
        if _must_be_equal(holders, len(groups.pipeline)):
            twins[key] = [firsts for firsts in alike if len(firsts) > 1]
    ranks = tuple(told.place for told in everyone)
    return Division(_elsewhere(everyone, _names(named)), frozenset(left), ranks, twins)


def _alike(holders: list[tuple[_Told, _Held]]) -> list[list[int]]:
    """The data groups, by their first ranks, that hold the same part of a tensor."""
    found: dict[Any, list[int]] = {}
    for told, held in holders:
        found.setdefault(held.boxes, []).append(told.first)
    return list(found.values())


def _must_be_equal(holders: list[tuple[_Told, _Held]], num_pipelines: int) -> bool:
    """Parameters; of buffers, which may differ from rank to rank, those of pipeline stages."""
    if holders[0][1].shape is None:
        return False
    stages = {told.place[len(told.place) - num_pipelines :] for told, _ in holders}
    return len(holders) > 1 and (holders[0][1].is_parameter or len(stages) > 1)


def _elsewhere(everyone: list[_Told], own: dict[str, set[str]]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for told in everyone:
        for name, names in told.names.items():
            found.setdefault(name, set()).update(names)
    return {name: frozenset(names - own.get(name, set())) for name, names in found.items()}


def _tell(named: Named, groups: Groups) -> _Told:
    held: dict[str, _Held] = {}
    place = (groups.world.rank, *(one.rank for one in groups.model))
    if groups.world.rank:
        return _Told(groups.world.ranks[0], place, held, {})
    for model in named.models:
        held |= _held(model)
    return _Told(groups.world.ranks[0], place, held, _names(named))


def _names(named: Named) -> dict[str, set[str]]:
    """By model the names, without it, of all that this rank has."""
    found: dict[str, set[str]] = {}
    for model in named.models:
        keys = {key for one in model.names.values() for key in one}
        keys |= {key for key, _ in extra_states_of(model)}
        names = {key.removeprefix(model.prefix) for key in keys}
        found.setdefault(model.name, set()).update(names)
    return found


def _held(model: NamedModel) -> dict[str, _Held]:
    found: dict[str, _Held] = {}
    for unit in model.engine.units:
        dtype = str(unit.dtypes.master)
        for parameter in unit.parameters:
            if local_of(parameter).numel():
                key = model.name_of(parameter)
                one = _held_of(model, parameter, dtype, is_parameter=True)
                boxes = (*found[key].boxes, *one.boxes) if key in found else one.boxes
                found[key] = _Held(one.shape, dtype, boxes, is_parameter=True)
    for key, tensor in alike_in(model).items():
        if local_of(tensor).numel() or id(tensor) not in model.places:
            found[key] = _held_of(model, tensor, str(tensor.dtype))
    for key, _ in extra_states_of(model):
        found[key] = _Held(None, "object", ())
    return found


def _held_of(
    model: NamedModel, tensor: torch.Tensor, dtype: str, *, is_parameter: bool = False
) -> _Held:
    sizes, place = tuple(local_of(tensor).shape), model.places.get(id(tensor))
    shape, offsets = (sizes, (0,) * len(sizes)) if place is None else (place.shape, place.offsets)
    return _Held(shape, dtype, ((offsets, sizes),), is_parameter)


def _holders(everyone: list[_Told]) -> dict[str, list[tuple[_Told, _Held]]]:
    """By key who has it, the first ranks of data groups in order."""
    found: dict[str, list[tuple[_Told, _Held]]] = {}
    for told in everyone:
        for key, held in told.held.items():
            found.setdefault(key, []).append((told, held))
    return found


def _check_boxes(key: str, holders: list[tuple[_Told, _Held]]) -> None:
    """Raises CheckpointError where what the data groups have does not make up one tensor."""
    first, one = holders[0]
    for told, held in holders[1:]:
        if (held.shape, held.dtype) != (one.shape, one.dtype):
            raise CheckpointError(
                f"{key} has shape {one.shape} and {one.dtype} on rank {first.first}, and shape "
                f"{held.shape} and {held.dtype} on rank {told.first}: these are different "
                f"tensors. {REMEDY}"
            )
    if one.shape is None:
        return
    distinct = {held.boxes for _, held in holders}
    boxes = [Box(offsets, sizes, 0) for each in distinct for offsets, sizes in each]
    found = sum(box.numel for box in boxes)
    if found != math.prod(one.shape) or next(overlapping(boxes), None) is not None:
        ranks = [told.first for told, _ in holders]
        raise CheckpointError(
            f"{key} has shape {one.shape}, and its parts on ranks {ranks} do not make up that: "
            "pass the mesh of the whole job to onecopy.shard, with every dimension that the model "
            "is spread over"
        )


def _refuse_parts_of_others(named: Named) -> None:
    """Raises CheckpointError where there are parts of DTensors, and nobody has the others."""
    for model in named.models:
        numels: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor in (one for unit in model.engine.units for one in unit.parameters):
            place = model.places.get(id(tensor))
            if place is not None:
                key = model.name_of(tensor)
                shapes[key] = place.shape
                numels[key] = numels.get(key, 0) + local_of(tensor).numel()
        for key, shape in shapes.items():
            if numels[key] != math.prod(shape):
                raise CheckpointError(
                    f"this rank has {numels[key]} of the {math.prod(shape)} elements of {key}, and "
                    "the mesh that was given to onecopy.shard has no dimension in which the others "
                    "are: pass the mesh of the whole job, or a part of it, mesh=mesh"
                )


# Are they the same? ---------------------------------------------------------------------------


def refuse_strangers(named: Named, division: Division) -> None:
    """Compare what several data groups hold under one name; a collective where there is such.

    Raises:
        CheckpointError: the values are others, so these are not the same tensors.
    """
    if not division.twins:
        return
    first = named.groups.world.ranks[0]
    everyone = together(named.group, lambda: (first, _samples(named, division)))
    # By key and data group: of each rank what it owns.
    found: dict[str, dict[int, dict[Any, Any]]] = {}
    for one, samples in everyone:
        for key, values in samples.items():
            found.setdefault(key, {}).setdefault(one, {}).update(values)
    strange = [
        (key, firsts[0], one)
        for key, alike in division.twins.items()
        for firsts in alike
        for one in firsts[1:]
        if _differ(found[key][firsts[0]], found[key][one])
    ]
    if strange:
        key, one, other = strange[0]
        keys = list(dict.fromkeys(key for key, _, _ in strange))
        more = f" (and {len(keys) - SHOWN} more)" if len(keys) > SHOWN else ""
        raise CheckpointError(
            f"ranks {one} and {other} have different tensors under the same names, "
            f"{', '.join(keys[:SHOWN])}{more}: one would be saved in the place of the other. "
            f"{REMEDY}"
        )


def _samples(named: Named, division: Division) -> dict[str, dict[Any, Any]]:
    """Of each tensor in question some elements, as far as this rank owns them, by their places."""
    found: dict[str, dict[Any, Any]] = {}
    for model in named.models:
        for unit in model.engine.units:
            for piece in unit.slice.places:
                parameter = unit.parameters[piece.index]
                if model.name_of(parameter) not in division.twins:
                    continue
                values = found.setdefault(model.name_of(parameter), {})
                last = piece.offset + piece.numel
                for place in _chosen(local_of(parameter).numel()):
                    if piece.offset <= place < last:
                        at = piece.start + place - piece.offset
                        value = unit.slice.master_part(at, at + 1).item()
                        values[_corner(model, parameter), place] = value
        for key, tensor in alike_in(model).items():
            if key in division.twins:
                values, flat = found.setdefault(key, {}), local_of(tensor).detach().reshape(-1)
                for place in _chosen(flat.numel()):
                    values[_corner(model, tensor), place] = flat[place].item()
    return found


def _chosen(numel: int) -> list[int]:
    return sorted({number * numel // SAMPLES for number in range(SAMPLES)} if numel else ())


def _corner(model: NamedModel, tensor: torch.Tensor) -> tuple[int, ...]:
    place = model.places.get(id(tensor))
    return () if place is None else place.offsets


def _differ(values: Mapping[Any, Any], others: Mapping[Any, Any]) -> bool:
    """Whether they are not the same tensor's; what a run that has diverged has is not compared."""
    pairs = [(abs(value), abs(value - others[place])) for place, value in values.items()]
    pairs = [(size, apart) for size, apart in pairs if math.isfinite(size) and math.isfinite(apart)]
    return math.hypot(*(apart for _, apart in pairs)) > TOLERANCE * math.hypot(
        *(size for size, _ in pairs)
    )
