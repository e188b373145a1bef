"""load(): the states of a checkpoint into models and optimizers that may be cut otherwise."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy.checkpoint import folder as folders
from onecopy.checkpoint.counters import restore_counters
from onecopy.checkpoint.division import Division, divide
from onecopy.checkpoint.manifest import Manifest, checksum
from onecopy.checkpoint.matching import Names
from onecopy.checkpoint.naming import (
    Models,
    Named,
    Optimizers,
    alike_in,
    extra_states_of,
    name_all,
    settle,
)
from onecopy.checkpoint.naming import (
    Path as KeyPath,
)
from onecopy.checkpoint.plan import LoadRanges
from onecopy.checkpoint.random_states import restore_random_states
from onecopy.checkpoint.ranges import Range, whole_tensor
from onecopy.checkpoint.restoring import OptimizerStates
from onecopy.checkpoint.source import Source, open_source
from onecopy.checkpoint.states import range_to_load
from onecopy.checkpoint.together import errors_of_ranks, together
from onecopy.checkpoint.unpickle import load_object
from onecopy.core.dtensors import local_of
from onecopy.core.views import is_dense
from onecopy.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from onecopy.comm.groups import Group
    from onecopy.core.optimizer import Binding

__all__ = ["Loaded", "load"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` has found beside the states of models and optimizers.

    step: the checkpoint's number; where another program has saved, what it says, or 0.
    extra: what the rank of the same number gave to `save`; the first one's on ranks that there
        were not. Where the model is spread over other model groups than before, what the first
        rank of the same number in its data group gave. Of a DeepSpeed checkpoint a dict: see
        `checkpoint.deepspeed.DeepSpeedReader.run`.
    extras: of all ranks that saved, in order; one where all gave the same.
    world_size: number of ranks that saved.
    path: the checkpoint's folder.
    """

    step: int
    extra: Any
    extras: list[Any]
    world_size: int
    path: Path


def load(
    root: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    *,
    fallback: bool = False,
) -> Loaded:
    """Load a checkpoint into sharded models and their optimizers, in place.

    Each rank reads what it owns, whatever the number of ranks, stage and units were when it was
    saved. With an optimizer the run is resumed: states, counters, loss scales and the global random
    generators are those of the checkpoint. Without one only the model is loaded. All ranks must
    call it together. Checkpoints of torch.distributed.checkpoint (of FSDP2, say) and of DeepSpeed
    load as well.

    Args:
        root: the root that was given to `save`, whose latest checkpoint is meant; or one
            checkpoint.
        model, optimizer: as given to `save`, with the same names where there are several.
        fallback: where the latest checkpoint is missing a file or damaged, warn and take the newest
            of the others that is good.

    Returns:
        the step, and what else was saved.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or does not fit the model or the
            optimizer. Values may be loaded in part then.
        ShardingError: a model is not sharded, or an optimizer not attached.
    """
    named = name_all(model, optimizer)
    settle(named, "onecopy.load")
    group, division = named.group, divide(named)
    path = Path(root).expanduser()
    found = together(group, lambda: folders.candidates(path) if group.rank == 0 else [])[0]
    failures: list[CheckpointError] = []
    for number, folder in enumerate(found):
        try:
            return _load_one(folder, named, division)
        except CheckpointError as error:
            if not fallback or len(found) == 1:
                raise
            failures.append(error)
            if group.rank == 0 and number + 1 < len(found):
                warnings.warn(f"{error}. Trying {found[number + 1]} instead", stacklevel=2)
    tried = "".join(f"\n- {error}" for error in failures)
    raise CheckpointError(f"none of the checkpoints of {path} can be loaded:{tried}")


def _load_one(folder: Path, named: Named, division: Division) -> Loaded:
    group = named.group
    source = _open_together(folder, group)
    targets = _Targets(source, named, division)
    together(group, targets.plan)
    targets.read(targets.keys, [])
    together(group, targets.take_objects)
    try:
        targets.read([], targets.ranges)
    except CheckpointError:
        # All ranks are here. What a model computes with is what its masters are, in part the new.
        targets.refresh()
        raise
    targets.refresh()
    together(group, targets.finish)
    return targets.loaded()


def _open_together(folder: Path, group: Group) -> Source:
    """The checkpoint, opened by each rank.

    Raises:
        CheckpointError: a rank cannot open it, or sees another one.
    """
    opened: list[Source] = []

    def open_it() -> int:
        opened.append(open_source(folder))
        manifest = opened[0].manifest
        return 0 if manifest is None else checksum(manifest.to_bytes())

    digests = together(group, open_it)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckpointError(
                f"rank {group.ranks[rank]} sees another checkpoint under {folder.absolute()} than "
                f"rank {group.ranks[0]}: load from storage that all ranks share"
            )
    return opened[0]


class _Targets:
    """What this rank reads of one checkpoint, and where it goes."""

    def __init__(self, source: Source, named: Named, division: Division) -> None:
        self._source = source
        self._named = named
        self._division = division
        self.keys: list[str] = []
        self.ranges: list[Range] = []
        self._objects: dict[str, Any] = {}
        self._optimizers: list[OptimizerStates] = []
        # Tensors that are written back when all is read.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # For each module its parts by their place: a tensor, or the key of an object.
        self._extra_states: list[tuple[nn.Module, dict[KeyPath, Any]]] = []
        self._counters: list[tuple[nn.Module, dict[str, Any]]] = []
        self._num_steps: list[tuple[Binding, int]] = []
        self._extra_keys = [] if source.manifest is None else source.manifest.extras
        self._rng_key: str | None = None
        self._former = Former(0, 0)
        if source.manifest is not None:
            self._former = former_rank(source.manifest, division, named.group.rank)

    def plan(self) -> None:
        """Look everything up; nothing is changed yet.

        Raises:
            CheckpointError: the checkpoint is of another model or other optimizers.
        """
        names = Names(self._source, self._named, self._division)
        for model in self._named.models:
            for unit in model.engine.units:
                for piece in unit.slice.places:
                    self._add(names, range_to_load(model, unit, piece))
            for key, tensor in alike_in(model).items():
                place = model.places.get(id(tensor))
                self._add(names, whole_tensor(key, self._memory_for(local_of(tensor)), place))
            for key, module in extra_states_of(model):
                self._plan_extra_state(names.of_extra_state(model, key), module, names)
        for optimizer in self._named.optimizers:
            states = OptimizerStates(self._named, optimizer, names)
            self._optimizers.append(states)
            self.ranges += states.ranges
            self.keys += states.keys
        self.keys += self._extra_keys
        if self._source.manifest is not None and self._named.optimizers:
            self._plan_counters(names, self._source.manifest)
        elif self._named.optimizers:
            self._plan_run(self._source.run)

    def _add(self, names: Names, one: Range) -> None:
        key = names.of_tensor(one.key)
        if key is not None:
            self.ranges.append(replace(one, key=key))

    def _memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where to read a tensor: itself, unless its elements lie apart."""
        if is_dense(tensor):
            return tensor.detach()
        value = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._copies.append((tensor, value))
        return value

    def _plan_extra_state(self, keys: dict[KeyPath, str], module: nn.Module, names: Names) -> None:
        parts: dict[KeyPath, Any] = {}
        for path, key in keys.items():
            stored = names.stored(key)
            if isinstance(stored, TensorStorageMetadata):
                parts[path] = torch.empty(stored.size, dtype=stored.properties.dtype)
                self.ranges.append(whole_tensor(key, parts[path]))
            else:
                parts[path] = key
                self.keys.append(key)
        self._extra_states.append((module, parts))

    def _plan_counters(self, names: Names, manifest: Manifest) -> None:
        """Counters, and random states: of this rank, or the first one's where there was none."""
        for model in self._named.models:
            counters = manifest.models.get(names.saved_name_of(model.name), {})
            self._counters.append((model.module, counters))
        for optimizer in self._named.optimizers:
            saved = names.manifest_of(optimizer)
            self._num_steps.append((optimizer.binding, saved.get("num_steps", manifest.step)))
        self._rng_key = f"onecopy.rng.{self._former.rank}"
        self.keys.append(self._rng_key)

    def _plan_run(self, run: dict[str, Any]) -> None:
        """Counters of another program, as far as there are the same here."""
        if run.get("loss_scale") is not None:
            scale = {"value": run["loss_scale"], "good_steps": 0}
            self._counters += [
                (model.module, {"loss_scale": scale}) for model in self._named.models
            ]
        if "global_steps" in run:
            self._num_steps += [
                (one.binding, run["global_steps"]) for one in self._named.optimizers
            ]

    def read(self, keys: list[str], ranges: list[Range]) -> None:
        """Read objects, and tensors into their places; all ranks together.

        Raises:
            CheckpointError: on all ranks where it fails on one.
        """
        planner = LoadRanges(ranges, keys, str(self._source.path))
        for model in self._named.models:
            for unit in model.engine.units if ranges else ():
                unit.drop_secondary()
                if unit.slice.disk is None:
                    unit.slice.join_master()
        with errors_of_ranks(self._named.group):
            dcp.load(  # type: ignore[attr-defined]
                {},
                storage_reader=self._source.reader,
                planner=planner,
                process_group=self._named.group.process_group,
            )
        self._data = planner.objects

    def take_objects(self) -> None:
        """What was read as bytes becomes objects.

        Raises:
            CheckpointError: it is no plain data, or does not fit.
        """
        where = self._source.path
        self._objects = {
            key: load_object(f"{key} in {where}", data) for key, data in self._data.items()
        }
        for states in self._optimizers:
            states.take_objects(self._objects)

    @torch.no_grad()
    def refresh(self) -> None:
        """Let models compute with what is in their masters now."""
        for model in self._named.models:
            for unit in model.engine.units:
                unit.note_update()
            model.engine.refresh(model.engine.units)

    @torch.no_grad()
    def finish(self) -> None:
        """All is read: let modules, optimizers and counters continue with it.

        Raises:
            Exception: what was read does not suit them.
        """
        for tensor, value in self._copies:
            tensor.copy_(value)
        for module, parts in self._extra_states:
            values = {
                path: self._objects[one] if isinstance(one, str) else one
                for path, one in parts.items()
            }
            module.set_extra_state(_nested(values))
        for states in self._optimizers:
            states.finish()
        for binding, num_steps in self._num_steps:
            binding.num_steps = num_steps
        for model, counters in self._counters:
            restore_counters(model, counters)
        self._restore_random_states()

    def _restore_random_states(self) -> None:
        if self._rng_key is not None:
            restore_random_states(self._objects[self._rng_key], self._former.number)

    def loaded(self) -> Loaded:
        """What the caller is told."""
        manifest, path = self._source.manifest, self._source.path
        if manifest is None:
            run = self._source.run
            return Loaded(
                step=run.get("global_steps", 0),
                extra=run or None,
                extras=[run] if run else [],
                world_size=run.get("dp_world_size", 0),
                path=path,
            )
        extras = [self._objects[key] for key in self._extra_keys]
        rank = self._former.rank
        return Loaded(
            step=manifest.step,
            extra=extras[rank] if rank < len(extras) else extras[0],
            extras=extras,
            world_size=manifest.world_size,
            path=path,
        )


@dataclass(frozen=True, slots=True)
class Former:
    """Whose random states and `extra` a rank goes on with.

    rank: that saved them. number: 0, or what makes random states of its own of them.
    """

    rank: int
    number: int


def former_rank(manifest: Manifest, division: Division, rank: int) -> Former:
    """The same rank, where the model is spread over ranks as it was.

    Else the first of those that had the same part of the data: tensor parallel ranks must draw the
    same numbers, if they began so.
    """
    saved = [tuple(one) for one in manifest.ranks] or [(n,) for n in range(manifest.world_size)]
    if division.ranks and list(division.ranks) == saved:
        return Former(rank, 0)
    data_rank = division.ranks[rank][0] if division.ranks else rank
    same = [number for number, place in enumerate(saved) if place[0] == data_rank]
    return Former(same[0], 0) if same else Former(0, data_rank)


def _nested(values: Mapping[KeyPath, Any]) -> Any:
    """What has these values at these places: dicts, lists where a key is a number."""
    if () in values:
        return values[()]
    within: dict[str | int, dict[KeyPath, Any]] = {}
    for path, value in values.items():
        within.setdefault(path[0], {})[path[1:]] = value
    found = {key: _nested(one) for key, one in within.items()}
    if found and all(isinstance(key, int) for key in found):
        return [found[key] for key in sorted(found)]
    return found
