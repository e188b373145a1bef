"""Which of a checkpoint's names are this model's, and this optimizer's.

What onecopy saves has the names that it looks for. Others put prefixes before them, as they nested
their dicts: `model.` and `optim.`, `app.model.` and `app.optim.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy.checkpoint.division import Division
from onecopy.checkpoint.manifest import UNSAVED
from onecopy.checkpoint.naming import (
    GROUPS,
    STATE,
    Named,
    NamedModel,
    NamedOptimizer,
    Path,
    extra_states_of,
    key_of,
)
from onecopy.checkpoint.source import Source
from onecopy.errors import CheckpointError

__all__ = ["Names"]

# Names in an error, before the rest is only counted.
SHOWN = 5
OPTIMIZER = "optimizer."
FOR_A_PART = (
    "To start another model from its weights: onecopy.export(checkpoint, directory), then "
    "onecopy.load_pretrained(model, directory, strict=False)"
)
# How torch ends the name of what a module adds to a state_dict.
EXTRA = "_extra_state"


class Names:
    """The names of one checkpoint, looked up for models and optimizers that are to be loaded.

    Args:
        division: what other ranks have of the models.

    Raises:
        CheckpointError: names of a model are missing, or the checkpoint has others.
    """

    def __init__(self, source: Source, named: Named, division: Division) -> None:
        self.where = source.path
        self._division = division
        self._aliases = source.aliases
        self.is_divided = bool(division.ranks or (source.manifest and source.manifest.ranks))
        self._keys = source.metadata.state_dict_metadata
        self._paths = source.metadata.planner_data
        self._manifest = source.manifest
        # Other programs save what modules add as several items, if it is a dict.
        self._parts: dict[str, list[str]] = {}
        for key in self._keys:
            whole, is_part, _ = key.rpartition(f"{EXTRA}.")
            if is_part:
                self._parts.setdefault(whole + EXTRA, []).append(key)
        self._unsaved = {
            name
            for model in (self._manifest.models.values() if self._manifest is not None else ())
            for name in model.get(UNSAVED, ())
        }
        self._prefixes = {name: self._prefix_of(parts) for name, parts in named.parts.items()}
        self._of_tensor = {
            names[0]: next((key for key in self._under(model, names) if key in self._keys), None)
            for model in named.models
            for names in model.names.values()
        }
        # What is saved for parameters, by what stands before "state."; keys are split once.
        self._states: dict[str, dict[str, dict[str, str]]] = {}

    def stored(self, key: str) -> Any:
        """What the metadata says of a key; None where there is no such key."""
        return self._keys.get(key)

    # Models -----------------------------------------------------------------------------------

    def saved_name_of(self, model: str) -> str:
        """The name that a model was saved under, "" where it had none."""
        return self._prefixes[model].removesuffix(".")

    def of_tensor(self, name: str) -> str | None:
        """The key of a model's tensor, given its first name, with the model's own prefix.

        None where `save(frozen=False)` has left it out.
        """
        return self._of_tensor[name]

    def of_extra_state(self, model: NamedModel, extra: str) -> dict[Path, str]:
        """The keys of what a module adds, by their place in it: `()` where it is one item."""
        (key,) = self._under(model, [extra])
        if key in self._keys:
            return {(): key}
        return {self._place_in(key, part): part for part in self._parts.get(key, ())}

    def _under(self, model: NamedModel, names: Iterable[str]) -> list[str]:
        return [self._prefixes[model.name] + one for one in _without(model, names)]

    def _place_in(self, whole: str, key: str) -> Path:
        """Keys that lead to an item within something that has this key."""
        path: Path = self._paths.get(key, ()) if isinstance(self._paths, dict) else ()
        for length in range(len(path)):
            if key_of(path[:length]) == whole:
                return tuple(path[length:])
        return tuple(key.removeprefix(f"{whole}.").split("."))

    def _prefix_of(self, parts: Sequence[NamedModel]) -> str:
        """What the checkpoint puts before the names of this model."""
        model = parts[0]
        wanted = [_without(one, names) for one in parts for names in one.names.values()]
        wanted = [names for names in wanted if self._unsaved.isdisjoint(names)] or wanted
        wanted += [[name] for one in parts for name in _extra_state_names(one)]
        prefixes = self._prefixes_like(wanted[0], model.prefix)
        complete = [prefix for prefix in prefixes if not self._missing(prefix, wanted)]
        if not complete:
            self._refuse_missing(
                model, min((self._missing(one, wanted) for one in prefixes), key=len)
            )
        if len(complete) > 1 and model.prefix not in complete:
            raise CheckpointError(
                f"{self.where} has several models that fit, under {_listed(complete)}: say which, "
                f'load(root, {{"{complete[0].rstrip(".")}": model}}, ...)'
            )
        found = model.prefix if model.prefix in complete else complete[0]
        self._refuse_unexpected(parts, found)
        return found

    def _prefixes_like(self, names: Iterable[str], own: str) -> list[str]:
        others = [
            key.removesuffix(name)
            for name in names
            for key in self._keys
            if key.endswith(f".{name}") and not _is_of_runtime(key)
        ]
        return list(dict.fromkeys([own, "", *others]))

    def _missing(self, prefix: str, wanted: Iterable[Sequence[str]]) -> list[str]:
        """Of tensors that have these names, those that are not there under any of them."""
        return [
            prefix + names[0]
            for names in wanted
            if not any(prefix + one in self._keys or prefix + one in self._parts for one in names)
        ]

    def _refuse_missing(self, model: NamedModel, missing: list[str]) -> NoReturn:
        others = [key for key in self._keys if not _is_of_runtime(key)]
        raise CheckpointError(
            f"{self.where} lacks {len(missing)} of the {len(model.names)} tensors of this "
            f"{type(model.module).__name__}: {_listed(missing)}. It has {_listed(others)}: it was "
            f"saved from another model. {FOR_A_PART}"
        )

    def _refuse_unexpected(self, parts: Sequence[NamedModel], prefix: str) -> None:
        """What the model does not have.

        Where another program has put nothing before the names, other things may lie beside the
        model: then only what would belong into one of its modules.
        """
        model = parts[0]
        known = {
            prefix + name
            for one in parts
            for names in one.names.values()
            for name in _without(one, names)
        }
        known |= {prefix + name for one in parts for name in _extra_state_names(one)}
        known |= {prefix + name for name in self._division.names_elsewhere(model.name)}
        tops = {name.partition(".")[0] for name in known}
        is_apart = self._manifest is not None or bool(prefix)
        unexpected = [
            key
            for key in self._keys
            if key.startswith(prefix)
            and key not in known
            and key.rpartition(f"{EXTRA}.")[0] + EXTRA not in known
            and (not _is_of_runtime(key) if is_apart else key.partition(".")[0] in tops)
        ]
        if unexpected:
            raise CheckpointError(
                f"{self.where} has {len(unexpected)} tensors that this "
                f"{type(model.module).__name__} has not: {_listed(unexpected)}. Build the model "
                f"that was saved. {FOR_A_PART}"
            )

    # Optimizers -------------------------------------------------------------------------------

    def states_of(self, named: Named, optimizer: NamedOptimizer) -> dict[int, dict[str, str]]:
        """For each parameter of an optimizer, by id, its states' names and their keys.

        Raises:
            CheckpointError: there are states of others.
        """
        prefix = self.prefix_of(optimizer)
        left = dict(self._split(prefix))
        # A plain optimizer.state_dict() has numbers in the place of names.
        elsewhere = self.of_optimizer_elsewhere(named, optimizer)
        is_numbered = all(name.isdecimal() for name in left)
        if left and is_numbered and elsewhere:
            raise CheckpointError(
                f"{self.where} has numbers in the place of names under {prefix}{STATE}, which say "
                "nothing of a model whose parameters are on several ranks. Save with "
                "get_optimizer_state_dict, or load the model alone: load(root, model)"
            )
        by_name, found_names = {}, set(elsewhere)
        parameters = [one for group in optimizer.binding.parameters for one in group]
        for number, parameter in enumerate(named.distinct(parameters)):
            names = self.stored_names(named, parameter)
            names = [one for one in (*names, str(number) * is_numbered) if one in left]
            if names:
                by_name[named.name_of(parameter)] = left[names[0]]
                found_names.update(names)
        left = {name: states for name, states in left.items() if name not in found_names}
        if left:
            raise CheckpointError(
                f"{self.where} has states under {prefix}{STATE} of {_listed(left)}, which are no "
                f"parameters of this {type(optimizer.binding.optimizer).__name__}. Make the "
                "optimizer with the parameters that it had, or load the model alone: "
                "load(root, model)"
            )
        found = ((id(one), by_name.get(named.name_of(one))) for one in parameters)
        return {key: states for key, states in found if states is not None}

    def stored_names(self, named: Named, parameter: object) -> list[str]:
        """What an optimizer's part of the checkpoint may call a parameter."""
        for model in named.models:
            names = model.names.get(id(parameter))
            if names:
                under = self._under(model, names)
                # A part of the model may have only a further name of what is tied in the whole.
                first = [self._aliases[one] for one in under if one in self._aliases]
                return list(dict.fromkeys([*under, *_without(model, names), *first]))
        raise CheckpointError("an optimizer has parameters of a model that was not passed")

    def of_optimizer_elsewhere(self, named: Named, optimizer: NamedOptimizer) -> frozenset[str]:
        """Names of parameters that another rank's optimizer has, or another part of this one."""
        found = {
            one
            for name, prefix in self._prefixes.items()
            for plain in self._division.names_elsewhere(name)
            for one in (prefix + plain, plain)
        }
        for other in named.optimizers:
            if other is not optimizer and other.path == optimizer.path:
                for parameter in (one for group in other.binding.parameters for one in group):
                    found.update(self.stored_names(named, parameter))
        return frozenset(found)

    def values_of(self, named: Named, parameter: torch.Tensor) -> TensorStorageMetadata:
        """What the metadata says of a parameter's own values."""
        name = named.name_of(parameter)
        key = self.of_tensor(name)
        if key is None:
            raise CheckpointError(
                f"{self.where} was saved with frozen=False, without {name}, which the optimizer "
                "is to train now: freeze it, or load the model alone, load(root, model)"
            )
        stored = self.stored(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self.where} has no tensor {key}")
        return stored

    def manifest_of(self, optimizer: NamedOptimizer) -> dict[str, Any]:
        """What onecopy has written of an optimizer beside its states; nothing where others have."""
        if self._manifest is None:
            return {}
        name = self.prefix_of(optimizer).removeprefix(OPTIMIZER).removesuffix(".")
        return self._manifest.optimizers.get(name, {})

    def prefix_of(self, optimizer: NamedOptimizer) -> str:
        """What stands before `state.` and `param_groups.` of this optimizer.

        Raises:
            CheckpointError: there is no optimizer, or several, none of which has the name.
        """
        own = key_of(optimizer.path) + "."
        found = {key.partition(f"{GROUPS}.")[0] for key in self._keys if f".{GROUPS}." in f".{key}"}
        if own in found:
            return own
        if len(found) != 1:
            kind = type(optimizer.binding.optimizer).__name__
            has = f"several, {_listed(sorted(found))}" if found else "none"
            raise CheckpointError(
                f"{self.where} has no optimizer {own.rstrip('.')!r} for this {kind}, but {has}. "
                "Pass the optimizer under the name that it was saved with, or load the model "
                "alone: load(root, model)"
            )
        return found.pop()

    def _split(self, prefix: str) -> dict[str, dict[str, str]]:
        """By parameter and state, the keys of one optimizer's states."""
        if prefix not in self._states:
            states: dict[str, dict[str, str]] = {}
            begin = f"{prefix}{STATE}."
            for key in self._keys:
                if key.startswith(begin):
                    parameter, _, state = key.removeprefix(begin).rpartition(".")
                    states.setdefault(parameter, {})[state] = key
            self._states[prefix] = states
        return self._states[prefix]

    def settings_of(self, prefix: str) -> dict[str, dict[str, str]]:
        """By group (its number, or a parameter of it) the keys of its settings."""
        begin = f"{prefix}{GROUPS}."
        groups: dict[str, dict[str, str]] = {}
        for key in self._keys:
            if key.startswith(begin):
                group, _, setting = key.removeprefix(begin).rpartition(".")
                groups.setdefault(group, {})[setting] = key
        return groups


def _without(model: NamedModel, names: Iterable[str]) -> list[str]:
    return [name.removeprefix(model.prefix) for name in names]


def _extra_state_names(model: NamedModel) -> list[str]:
    return _without(model, (name for name, _ in extra_states_of(model)))


def _is_of_runtime(key: str) -> bool:
    return key.startswith((OPTIMIZER, "onecopy."))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "nothing") + more
