"""Which models and optimizers a checkpoint holds, where no model is at hand to compare it with.

onecopy's own checkpoints say so. Others nest their state dicts as they please,
`{"model": ..., "optim": ...}` or `{"app": {"model": ..., "optim": ...}}`; the metadata knows the
keys that led to each tensor, and a model is named by those in front of its tensors: `model` or
`app.model`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy.checkpoint.naming import GROUPS, STATE
from onecopy.checkpoint.source import Source

__all__ = ["Contents", "contents_of"]

# Counters that training loops put beside a model's own tensors.
COUNTERS = {"step", "steps", "global_step", "iteration", "epoch"}
OF_RUNTIME = ("onecopy.rng.", "onecopy.extra.")
OF_OPTIMIZER = re.compile(rf"(optim(?:izer)?(?:\.[^.]+)?)\.({STATE}|{GROUPS})\..*")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds.

    models: by the model's name, "" where it has none, for each tensor or object its key.
    optimizers: by name, what its keys begin with.
    others: keys of everything else.
    """

    models: dict[str, dict[str, str]] = field(default_factory=dict)
    optimizers: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def contents_of(source: Source) -> Contents:
    """Sort the keys of a checkpoint.

    Raises:
        CheckpointError: its metadata is damaged.
    """
    return _of_own(source) if source.manifest is not None else _of_others(source)


def _of_own(source: Source) -> Contents:
    assert source.manifest is not None, "it says what there is"
    models = source.manifest.models
    optimizers = {
        name: f"optimizer.{name}." if name else "optimizer." for name in source.manifest.optimizers
    }
    beside = tuple(f"{one}{part}." for one in optimizers.values() for part in (STATE, GROUPS))
    found = Contents({name: {} for name in models}, optimizers)
    for key in source.metadata.state_dict_metadata:
        if key.startswith(beside):
            continue
        owner = next((name for name in models if key.startswith(f"{name}." if name else "")), None)
        if owner is None or key.startswith(OF_RUNTIME):
            found.others.append(key)
        else:
            found.models[owner][key.removeprefix(f"{owner}.") if owner else key] = key
    return found


def _of_others(source: Source) -> Contents:
    by_prefix: dict[str, dict[str, str]] = defaultdict(dict)
    optimizers: dict[str, str] = {}
    for key, path in _paths(source):
        optimizer = _optimizer_of(path)
        if optimizer is not None:
            optimizers[optimizer] = f"{optimizer}." if optimizer else ""
        else:
            by_prefix[".".join(path[:-1])][path[-1]] = key
    models, others = {}, []
    for prefix, names in by_prefix.items():
        counters = [
            name
            for name, key in names.items()
            if name in COUNTERS and not _has_dimensions(source, key)
        ]
        others += [names.pop(name) for name in counters]
        if any(_is_weight(source, key) for key in names.values()):
            models[prefix] = names
        else:
            others += names.values()
    return Contents(models, optimizers, others)


def _paths(source: Source) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The nested keys of each tensor and object; where nobody has written them, they are one."""
    known = source.metadata.planner_data
    for key in source.metadata.state_dict_metadata:
        path = known.get(key) if isinstance(known, dict) else None
        yield key, tuple(map(str, path)) if isinstance(path, tuple | list) and path else (key,)


def _optimizer_of(path: tuple[str, ...]) -> str | None:
    """The name of the optimizer that something belongs to; None where it is of none."""
    for place, part in enumerate(path[:-1]):
        if part in (STATE, GROUPS):
            return ".".join(path[:place])
    # torch can make the dict of an optimizer flat.
    if len(path) > 1 and path[-1].startswith((f"{STATE}.", f"{GROUPS}.")):
        return ".".join(path[:-1])
    found = OF_OPTIMIZER.fullmatch(path[0]) if len(path) == 1 else None
    return found.group(1) if found else None


def _is_weight(source: Source, key: str) -> bool:
    """Random states and counters are integers, or numbers; a model has more than these."""
    entry = source.metadata.state_dict_metadata[key]
    return (
        isinstance(entry, TensorStorageMetadata)
        and entry.properties.dtype.is_floating_point
        and _has_dimensions(source, key)
    )


def _has_dimensions(source: Source, key: str) -> bool:
    entry = source.metadata.state_dict_metadata[key]
    return isinstance(entry, TensorStorageMetadata) and bool(entry.size)
