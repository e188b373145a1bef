"""Which of a checkpoint's names are this model's, and this optimizer's.

What onecopy saves has the names that it looks for. Others put prefixes before them, as they nested
their dicts: `model.` and `optim.`, `app.model.` and `app.optim.`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from onecopy.checkpoint.source import Source
from onecopy.checkpoint.states import (
    GROUPS,
    STATE,
    Named,
    NamedModel,
    NamedOptimizer,
    extra_states_of,
    key_of,
)
from onecopy.errors import CheckpointError

__all__ = ["Names"]

# Names in an error, before the rest is only counted.
SHOWN = 5
OPTIMIZER = "optimizer."


class Names:
    """The names of one checkpoint, looked up for models and optimizers that are to be loaded.

    Raises:
        CheckpointError: names of a model are missing, or the checkpoint has others.
    """

    def __init__(self, source: Source, named: Named) -> None:
        self.where = source.path
        self._keys = source.metadata.state_dict_metadata
        self._is_own = source.manifest is not None
        self._prefixes = {name: self._prefix_of(one) for name, one in named.models.items()}
        self._models = named.models
        # What is saved for parameters, by what stands before "state."; keys are split once.
        self._states: dict[str, dict[str, dict[str, str]]] = {}

    def stored(self, key: str) -> Any:
        """What the metadata says of a key; None where there is no such key."""
        return self._keys.get(key)

    # Models -----------------------------------------------------------------------------------

    def of_tensor(self, model: NamedModel, name: str) -> str:
        """The key of a model's tensor, given its name with the model's own prefix."""
        stored = next(p for n, p in self._prefixes.items() if self._models[n] is model)
        return stored + name.removeprefix(model.prefix)

    def _prefix_of(self, model: NamedModel) -> str:
        """What the checkpoint puts before the names of this model."""
        wanted = [
            name.removeprefix(model.prefix) for names in model.names.values() for name in names[:1]
        ]
        complete = []
        for prefix in self._prefixes_like(wanted, model.prefix):
            if all(prefix + name in self._keys for name in wanted):
                complete.append(prefix)
        if not complete:
            self._refuse_missing(model, wanted)
        if len(complete) > 1 and model.prefix not in complete:
            raise CheckpointError(
                f"{self.where} has several models that fit, under {_listed(complete)}: say which, "
                f'load(root, {{"{complete[0].rstrip(".")}": model}}, ...)'
            )
        found = model.prefix if model.prefix in complete else complete[0]
        self._refuse_unexpected(model, found)
        return found

    def _prefixes_like(self, wanted: Collection[str], own: str) -> list[str]:
        first = next(iter(wanted), "")
        others = [key.removesuffix(first) for key in self._keys if key.endswith("." + first)]
        return list(dict.fromkeys([own, "", *others]))

    def _refuse_missing(self, model: NamedModel, wanted: list[str]) -> None:
        prefixes = self._prefixes_like(wanted, model.prefix)
        best = max(prefixes, key=lambda prefix: sum(prefix + one in self._keys for one in wanted))
        missing = [best + name for name in wanted if best + name not in self._keys]
        others = [key for key in self._keys if not _is_of_runtime(key)]
        raise CheckpointError(
            f"{self.where} lacks {len(missing)} of the {len(wanted)} tensors of this "
            f"{type(model.module).__name__}: {_listed(missing)}. It has {_listed(others)}: it was "
            "saved from another model"
        )

    def _refuse_unexpected(self, model: NamedModel, prefix: str) -> None:
        """What the model does not have, where the checkpoint says what belongs to the model."""
        if not self._is_own and not prefix:
            return
        known = {prefix + one.removeprefix(model.prefix) for n in model.names.values() for one in n}
        known |= {prefix + name.removeprefix(model.prefix) for name in _extra_state_names(model)}
        unexpected = [
            key
            for key in self._keys
            if key.startswith(prefix) and key not in known and not _is_of_runtime(key)
        ]
        if unexpected:
            raise CheckpointError(
                f"{self.where} has {len(unexpected)} tensors that this "
                f"{type(model.module).__name__} has not: {_listed(unexpected)}. Build the model "
                "that was saved"
            )

    # Optimizers -------------------------------------------------------------------------------

    def states_of(self, named: Named, optimizer: NamedOptimizer) -> dict[int, dict[str, str]]:
        """For each parameter of an optimizer, by id, its states' names and their keys."""
        prefix = self.prefix_of(optimizer)
        by_parameter = self._split(prefix)
        found = {}
        for parameter in (one for group in optimizer.binding.parameters for one in group):
            for name in self.stored_names(named, parameter):
                if name in by_parameter:
                    found[id(parameter)] = by_parameter[name]
                    break
        return found

    def stored_names(self, named: Named, parameter: object) -> list[str]:
        """What an optimizer's part of the checkpoint may call a parameter."""
        for name, model in named.models.items():
            names = model.names.get(id(parameter))
            if names:
                bare = [one.removeprefix(model.prefix) for one in names]
                return [*(self._prefixes[name] + one for one in bare), *bare]
        raise CheckpointError("an optimizer has parameters of a model that was not passed")

    def prefix_of(self, optimizer: NamedOptimizer) -> str:
        """What stands before `state.` and `param_groups.` of this optimizer.

        Raises:
            CheckpointError: there is no optimizer, or several, none of which has the name.
        """
        own = key_of(optimizer.path) + "."
        found = {key.partition(f"{GROUPS}.")[0] for key in self._keys if f".{GROUPS}." in key}
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


def _extra_state_names(model: NamedModel) -> Iterator[str]:
    return (name for name, _ in extra_states_of(model))


def _is_of_runtime(key: str) -> bool:
    return key.startswith((OPTIMIZER, "onecopy."))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "nothing") + more
