"""What a checkpoint has for one optimizer, brought into the optimizer.

States are loaded as they were saved, into the tensors that the optimizer has for them or into new
ones, and given to the optimizer through its own `load_state_dict`, so that hooks and optimizers
that do more there see what they always see.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy.checkpoint.param_groups import NAMES, are_equal
from onecopy.checkpoint.ranges import Range, whole_tensor
from onecopy.checkpoint.states import is_cut_state
from onecopy.core.optimizer_state import COUNTERS, TAG, tag_of
from onecopy.errors import CheckpointError
from onecopy.memory.buffers import num_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from onecopy.checkpoint.matching import Names
    from onecopy.checkpoint.naming import Named, NamedOptimizer
    from onecopy.checkpoint.ranges import Put, Values
    from onecopy.core.swapped import Swapped
    from onecopy.core.unit import Unit

__all__ = ["OptimizerStates"]


class OptimizerStates:
    """One optimizer while it is loaded.

    Attributes:
        ranges: memory to read this rank's states into.
        keys: of what is read as objects: settings of groups, states that are no tensors.
    """

    def __init__(self, named: Named, optimizer: NamedOptimizer, names: Names) -> None:
        self._binding = optimizer.binding
        self._named = named
        self._names_of: Callable[[object], list[str]] = partial(names.stored_names, named)
        self._names_elsewhere = names.of_optimizer_elsewhere(named, optimizer)
        self._where = str(names.where)
        self._saved_kind = names.manifest_of(optimizer).get("kind")
        # Ranks had, or have, other parameters.
        self._is_divided = names.is_divided
        self._settings = names.settings_of(names.prefix_of(optimizer))
        self.ranges: list[Range] = []
        self.keys: list[str] = []
        # By number of the piece, by name: a tensor, or the key of an object.
        self._states: list[dict[str, Any]] = []
        # Those that are read to disk.
        self._on_disk: list[tuple[nn.Parameter, str, Swapped]] = []
        self._objects: list[tuple[dict[str, Any], str, str]] = []
        # Tensors that are read whole, by key, and who wants a copy of one.
        self._whole: dict[str, torch.Tensor] = {}
        self._copies: list[tuple[dict[str, Any], str, str]] = []
        # What belongs to whole parameters, of which this rank owns pieces.
        self._of_whole: list[tuple[str, TensorStorageMetadata]] = []
        self._saved_groups: dict[str, dict[str, Any]] = {}
        self._chosen: list[dict[str, Any]] = []
        self._load_settings(names)
        self._load_states(names.states_of(named, optimizer), names)

    def _read(self, into: dict[str, Any], name: str, key: str, names: Names) -> None:
        """Read something whole."""
        stored = names.stored(key)
        if isinstance(stored, TensorStorageMetadata) and key in self._whole:
            # The tiles of one parameter have a copy each.
            self._copies.append((into, name, key))
        elif isinstance(stored, TensorStorageMetadata):
            into[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            self._whole[key] = into[name]
            self.ranges.append(whole_tensor(key, into[name]))
        else:
            self._objects.append((into, name, key))
            self.keys.append(key)

    def _load_settings(self, names: Names) -> None:
        for group, keys in self._settings.items():
            settings = self._saved_groups[group] = {}
            for name, key in keys.items():
                self._read(settings, name, key, names)

    def _load_states(self, found: dict[int, dict[str, str]], names: Names) -> None:
        for parameter in (one for group in self._binding.parameters for one in group):
            piece = self._binding.find_piece(parameter)
            if piece is None:
                continue
            unit, index = piece
            state: dict[str, Any] = {}
            self._states.append(state)
            values = names.values_of(self._named, parameter)
            model = self._named.model_of(parameter)
            is_cut = unit.slice.place_of(index).numel < parameter.numel()
            is_part = is_cut or id(parameter) in model.places
            for name, key in found.get(id(parameter), {}).items():
                stored = names.stored(key)
                is_tensor = isinstance(stored, TensorStorageMetadata)
                if is_tensor and _is_like(values, stored, name):
                    # What had the dtype of its parameter has that of the master here.
                    dtype = stored.properties.dtype
                    is_cast = dtype == values.properties.dtype
                    dtype = unit.dtypes.master if is_cast else dtype
                    read, put = self._place_for(unit, index, dtype, name, state)
                    one = model.range_like(unit, unit.slice.place_of(index), key, dtype, read)
                    self.ranges.append(replace(one, put=put))
                    continue
                self._read(state, name, key, names)
                if is_tensor and is_part:
                    self._of_whole.append((key, stored))

    def _place_for(
        self, unit: Unit, index: int, dtype: torch.dtype, name: str, state: dict[str, Any]
    ) -> tuple[Values, Put | None]:
        """Where to read a state with a value for each element of its piece."""
        piece = unit.slice.pieces[index]
        if unit.slice.disk is None:
            present = self._binding.optimizer.state.get(piece, {}).get(name)
            flat, state[name] = _memory_for(unit, index, dtype, present)
            return partial(_between, flat), None
        chunked = self._binding.unit_steps.chunked
        found = chunked.find(piece, name)
        if found is None or found.is_joined or found.whole.dtype != dtype:
            found = chunked.make(unit, index, name, dtype)
        self._on_disk.append((piece, name, found))
        return found.part, found.put

    def _refuse_whole(self) -> None:
        for key, stored in self._of_whole:
            if stored.size.numel() == 1:
                continue
            raise CheckpointError(
                f"{key} in {self._where} has shape {tuple(stored.size)}, not that of its "
                "parameter: it belongs to the whole parameter, of which this rank owns a piece. "
                "Shard with whole_parameters=True, so that no parameter is cut"
            )

    def take_objects(self, objects: Mapping[str, Any]) -> None:
        """The objects are read, tensors not yet: find the settings of each group.

        Raises:
            CheckpointError: the groups, or the update rule, are others than those that were saved.
        """
        for into, name, key in self._objects:
            into[name] = copy.deepcopy(objects[key])
        first = 0
        for number, tiled in enumerate(self._binding.parameters):
            parameters = self._named.distinct(tiled)
            self._chosen.append(self._group_of(number, parameters, first))
            first += len(parameters)
        self._refuse_whole()
        self._refuse_other_rule()

    def _refuse_other_rule(self) -> None:
        """Another class may do the same (a fused one); not where it has other settings."""
        kind = type(self._binding.optimizer).__name__
        known = {name for saved in self._chosen for name in saved}
        lacks = sorted(self._binding.optimizer.defaults.keys() - known)
        if self._saved_kind not in (None, kind) and lacks:
            raise CheckpointError(
                f"{self._where}: the optimizer that was saved, {self._saved_kind}, has no "
                f"{lacks[0]!r}, and this one is {kind}. Make the one that was saved, or load the "
                "model alone: load(root, model)"
            )

    def finish(self) -> None:
        """All is read: give it to the optimizer."""
        for into, name, key in self._copies:
            into[name] = self._whole[key].clone()
        optimizer = self._binding.optimizer
        groups, number = [], 0
        for own, saved in zip(optimizer.param_groups, self._chosen, strict=True):
            count = len(own["params"])
            settings = {
                name: _placed_as(own.get(name), value)
                for name, value in saved.items()
                if name not in NAMES
            }
            groups.append({**own, **settings, "params": list(range(number, number + count))})
            number += count
        states = enumerate(self._states)
        state_dict = {
            "state": {place: dict(state) for place, state in states if state},
            "param_groups": groups,
            TAG: tag_of(self._binding),
        }
        optimizer.load_state_dict(state_dict)
        self._keep_dtypes()
        for piece, name, state in self._on_disk:
            # By the side of load_state_dict, which would bring all of them into memory.
            self._binding.unit_steps.chunked.keep(piece, name, state)

    def _keep_dtypes(self) -> None:
        """torch casts states to the dtype of their parameter; they continue as they were saved."""
        pieces = [
            piece for group in self._binding.optimizer.param_groups for piece in group["params"]
        ]
        for piece, state in zip(pieces, self._states, strict=True):
            own = self._binding.optimizer.state.get(piece, {})
            for name, value in state.items():
                if type(own.get(name)) is torch.Tensor and own[name].dtype != value.dtype:
                    own[name] = value.to(own[name].device)

    def _group_of(self, number: int, parameters: list[Any], first: int) -> dict[str, Any]:
        """The saved settings of the group with the same parameters.

        Args:
            first: how many parameters there are in the groups before; plain optimizers save these
                numbers in the place of names.
        """
        accepted: list[list[str]] = [self._names_of(one) for one in parameters]
        places: dict[Any, int] = {
            one: place for place, names in enumerate(accepted) for one in names
        }
        if not self._names_elsewhere:
            places |= {first + place: place for place in range(len(parameters))}
        same_number = self._saved_groups.get(str(number), {})
        for settings in (same_number, *self._saved_groups.values()):
            if self._has_just(settings, places, len(parameters)):
                return settings
        parts = self._parts_with(places, len(parameters))
        if parts:
            return parts[0]
        for name, settings in self._saved_groups.items():
            # Where settings were saved for each parameter.
            if name in places and "params" not in settings:
                return settings
        counts = [len(one.get("params", ())) for one in self._saved_groups.values()]
        example = accepted[0][0] if accepted else "none"
        raise CheckpointError(
            f"{self._where}: no group of the saved optimizer has the {len(parameters)} parameters "
            f"of this group (the first is {example}); the saved groups have {counts} parameters. "
            "Make the optimizer with the groups that it had, or load the model alone: "
            "load(root, model)"
        )

    def _has_just(self, settings: dict[str, Any], places: Mapping[Any, int], count: int) -> bool:
        """Whether a saved group has these parameters, and no others but those of other ranks."""
        saved = settings.get("params")
        if not isinstance(saved, list):
            return False
        own = [one for one in saved if one in places or one not in self._names_elsewhere]
        return {places.get(one) for one in own} == set(range(count))

    def _parts_with(self, places: Mapping[Any, int], count: int) -> list[dict[str, Any]]:
        """Saved groups that make up this one, with the same settings.

        Pipeline stages that number their groups otherwise have saved some of the whole model's.
        """
        if not self._is_divided:
            return []
        groups = [one for one in self._saved_groups.values() if isinstance(one.get("params"), list)]
        parts = [one for one in groups if any(name in places for name in one["params"])]
        found = {places.get(name) for one in parts for name in one["params"]}
        rests = [{k: v for k, v in one.items() if k not in NAMES} for one in parts]
        is_whole = found - {None} == set(range(count))
        return parts if is_whole and all(are_equal(rests[0], one) for one in rests) else []


def _between(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return flat[start:stop]


def _placed_as(own: Any, value: Any) -> Any:
    """A setting that is a tensor (a learning rate), where the one that it replaces is."""
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(own.device)
    return value


def _memory_for(
    unit: Unit, index: int, dtype: torch.dtype, present: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for a state with a value for each element of the piece, and the state itself.

    It is what the optimizer has now, where that fits: a run that goes back to a checkpoint may have
    no memory for its states once more. What something else shares is left alone.
    """
    owners_of_one = num_owners(torch.empty(1))
    is_alone = is_cut_state(unit, index, present) and num_owners(present) == owners_of_one
    if is_alone and present.dtype == dtype and present.device == unit.slice.device:
        flat = unit.slice.from_piece(index, present.detach())
        is_its_own = flat.untyped_storage().data_ptr() == present.untyped_storage().data_ptr()
        if is_its_own and flat.is_contiguous():
            return flat, present
    flat = torch.empty(unit.slice.place_of(index).numel, dtype=dtype, device=unit.slice.device)
    return flat, unit.slice.as_piece(index, flat)


def _is_like(values: TensorStorageMetadata, stored: TensorStorageMetadata, name: str) -> bool:
    """Whether a stored state has a value for each element of its parameter."""
    return stored.size == values.size and (bool(stored.size) or name not in COUNTERS)
