"""save(): one checkpoint of everything, written by all ranks together."""

from __future__ import annotations

import hashlib
import io
import os
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

import onecopy
from onecopy.checkpoint.counters import counters_of
from onecopy.checkpoint.division import Division, divide, refuse_strangers
from onecopy.checkpoint.files import Writer, file_of
from onecopy.checkpoint.folder import discard, prepare_new, publish, remove_old
from onecopy.checkpoint.huggingface import NOT_EXPORTED, configs_of, names_left_out
from onecopy.checkpoint.manifest import UNSAVED, Manifest, merged
from onecopy.checkpoint.naming import (
    GROUPS,
    Models,
    Named,
    NamedModel,
    Optimizers,
    name_all,
    settle,
)
from onecopy.checkpoint.param_groups import SavedGroups, groups_of, joined
from onecopy.checkpoint.plan import SaveRanges
from onecopy.checkpoint.random_states import random_states
from onecopy.checkpoint.states import States, states_of
from onecopy.checkpoint.together import finish_together, together
from onecopy.checkpoint.unpickle import load_object
from onecopy.comm.groups import Group
from onecopy.core.dtensors import local_of
from onecopy.errors import CheckpointError, ConfigError

__all__ = ["Job", "Options", "prepare", "save"]

# A shared file system may show other ranks a new folder a moment later.
SEEN_AFTER = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """What `save` is told beside what to save, and where; see there."""

    step: int | None = None
    extra: Any = None
    keep: int | None = None
    keep_every: int | None = None
    frozen: bool = True

    def check(self) -> None:
        """Raises ConfigError for numbers that cannot be meant."""
        for name, least in (("step", 0), ("keep", 1), ("keep_every", 1)):
            value = getattr(self, name)
            is_number = hasattr(value, "__index__") and not isinstance(value, bool | torch.Tensor)
            if value is not None and (not is_number or value < least):
                raise ConfigError(f"save({name}={value!r}): give a whole number, {least} or more")


@dataclass(frozen=True)
class Job:
    """One checkpoint that is to be written.

    objects: by key the bytes that this rank writes, beside the ranges of its states.
    options: see `save`; the step is settled.
    """

    root: Path
    step: int
    states: States
    objects: dict[str, bytes]
    manifest: Manifest
    options: Options

    def write(self, group: Group) -> Path:
        """Write it; all ranks of the group do so together. Returns its folder.

        Not through torch's own `save`: that one looks for the default process group and saves on
        each rank by itself where there is none, which a script that ends may have destroyed already
        while its last checkpoint is still being written.

        Raises:
            CheckpointError: on all ranks where it fails on one.
        """
        new = _make_folder(self.root, self.step, group)
        writer = Writer(new, self.manifest)
        planner = SaveRanges(self.states.ranges, self.objects, self.states.paths)

        def write_part() -> tuple[SavePlan, list[WriteResult]]:
            plan = replace(planner.create_local_plan(), storage_data=file_of(group.rank))
            return plan, writer.write_data(plan, planner).value()

        def finish(parts: list[tuple[SavePlan, list[WriteResult]]]) -> str:
            _, metadata = planner.create_global_plan([plan for plan, _ in parts])
            writer.finish(metadata, [results for _, results in parts])
            return self._publish(new)

        try:
            return self.root / finish_together(group, write_part, finish)
        except BaseException:
            if group.rank == 0:
                discard(new)
            raise

    def _publish(self, new: Path) -> str:
        folder = publish(new, self.step)
        try:
            remove_old(self.root, self.step, self.options.keep, self.options.keep_every)
        except CheckpointError as error:
            warnings.warn(f"{error}. {folder} is complete", stacklevel=2)
        return folder.name


def save(  # noqa: PLR0913
    root: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    keep_every: int | None = None,
    frozen: bool = True,
) -> Path:
    """Write a checkpoint that loads on any number of ranks, at any stage, with any units.

    It holds parameters (in master precision), persistent buffers, optimizer states and groups,
    counters, loss scales, the random states of each rank, and `extra`. All ranks must call it
    together, after `optimizer.step()`: gradients are not saved. When it returns, the checkpoint is
    complete on the disk and `root/latest` names it; until then, whatever happens, the one before
    stays as it is.

    Args:
        root: a folder on storage that all ranks share; the checkpoint becomes
            `root/step-<step>`, and replaces one of the same step.
        model: the sharded model; several as a list or a dict of names.
        optimizer: the attached optimizer, or several likewise; without it only the model is saved.
        step: its number; by default the number of steps that the first optimizer has made.
        extra: anything else that is to be resumed (schedulers, scalers, the place in the data):
            tensors, numbers, strings, and lists, tuples and dicts of these. Ranks may have
            different ones.
        keep: how many checkpoints to keep, this one included; None keeps all.
        keep_every: checkpoints whose step is a multiple of this are kept beside them.
        frozen: False leaves out parameters that do not require gradients and are in none of the
            optimizers, such as the base model under adapters. `load` leaves them as they are.

    Returns:
        the checkpoint's folder.

    Raises:
        CheckpointError: it could not be written (disk full, no permission, storage that ranks do
            not share), on all ranks; or `extra` holds what could not be read back.
        ShardingError: a model is not sharded, or an optimizer not attached.

    Source: torch.distributed.checkpoint's format, with logical coordinates (see docs/design.md).
    """
    named, job = prepare(root, model, optimizer, Options(step, extra, keep, keep_every, frozen))
    begin = time.perf_counter()
    folder = job.write(named.group)
    for one in named.models:
        one.engine.events.emit(
            "save", num_bytes=job.states.num_bytes, seconds=time.perf_counter() - begin
        )
    return folder


def prepare(
    root: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers,
    options: Options,
    verb: str = "onecopy.save",
) -> tuple[Named, Job]:
    """Check the arguments and collect what this rank saves, without copying tensors.

    Raises: see `save`.
    """
    options.check()
    named = name_all(model, optimizer)
    settle(named, verb)
    _warn_of_gradients(named, verb)
    step = _step_of(named, options)
    division = divide(named)
    refuse_strangers(named, division)
    unsaved = frozenset() if options.frozen else _frozen_names(named)
    division = replace(division, left=division.left | unsaved)
    group, packed = named.group, _Packed(named, division, unsaved)
    everyone = together(group, lambda: (step, str(root), packed.collect(options.extra)))
    _refuse_others(group, [one[:2] for one in everyone])
    told = [one[2] for one in everyone]
    if group.rank == 0:
        packed.add_groups(joined(one.groups for one in told))
    states, objects = packed.states, packed.objects
    is_alike = len({one.extra for one in told}) == 1
    extras = [f"onecopy.extra.{rank}" for rank in range(1 if is_alike else group.size)]
    if group.rank < len(extras):
        objects[extras[group.rank]] = packed.extra
    states.paths |= {key: (key,) for key in objects if key not in states.paths}
    manifest = replace(
        merged([one.manifest for one in told if one.manifest is not None]),
        step=step,
        extras=extras,
    )
    # Whatever becomes of the working directory until it is written.
    absolute = Path(root).expanduser().absolute()
    return named, Job(absolute, step, states, objects, manifest, options)


def _frozen_names(named: Named) -> frozenset[str]:
    """Keys of parameters that nothing trains."""
    trained = {
        id(parameter)
        for one in named.optimizers
        for group in one.binding.parameters
        for parameter in group
    }
    return frozenset(
        model.name_of(parameter)
        for model in named.models
        for unit in model.engine.units
        for parameter in unit.parameters
        if not parameter.requires_grad and id(parameter) not in trained
    )


def _step_of(named: Named, options: Options) -> int:
    if options.step is not None:
        return int(options.step)
    steps = [one.binding.num_steps for one in named.optimizers]
    return steps[0] if steps else 0


def _refuse_others(group: Group, everyone: list[tuple[int, str]]) -> None:
    """Raises CheckpointError where ranks want to save another step, or to another root."""
    first, its_root = everyone[0]
    for rank, (step, root) in zip(group.ranks, everyone, strict=True):
        if (step, root) != everyone[0]:
            raise CheckpointError(
                f"ranks want to save different checkpoints: rank {group.ranks[0]} step {first} to "
                f"{its_root}, rank {rank} step {step} to {root}. Pass the same root and step on "
                "all ranks"
            )


def _warn_of_gradients(named: Named, verb: str) -> None:
    """Where a step is half made, a run that goes on from there makes it with less."""
    local = [
        gradients.unit.names[0]
        for one in named.models
        for gradients in one.engine.gradients
        if gradients.has_local
    ]
    if local and named.group.rank == 0:
        warnings.warn(
            f"{verb} in the midst of an accumulation: gradients are not saved, so what no_sync has "
            f"kept so far (of {local[0]} and others) would be missing in the first step of a run "
            "that goes on from this checkpoint. Save after optimizer.step()",
            stacklevel=4,
        )


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of what it saves.

    extra: a digest of `extra`, by which ranks see whether theirs are alike.
    groups, manifest: told by the first rank of each data group.
    """

    extra: bytes
    groups: SavedGroups
    manifest: Manifest | None


class _Packed:
    """What this rank saves; collecting it can fail on one rank alone."""

    states: States
    objects: dict[str, bytes]
    extra: bytes

    def __init__(self, named: Named, division: Division, unsaved: frozenset[str]) -> None:
        self._named = named
        self._division = division
        self._unsaved = unsaved

    def collect(self, extra: Any) -> _Told:
        """Collect it."""
        named = self._named
        self.states = states_of(named, self._division)
        aliases = self.states.aliases
        self.states.aliases = {
            name: first for name, first in aliases.items() if first not in self._unsaved
        }
        self.extra = _packed("extra", extra)
        self.objects = {key: _packed(key, value) for key, value in self.states.objects.items()}
        rng_key = f"onecopy.rng.{named.group.rank}"
        self.objects[rng_key] = _packed("random states", random_states())
        digest = hashlib.sha256(self.extra).digest()
        if named.groups.world.rank:
            return _Told(digest, {}, None)
        groups = groups_of(named)
        _packed("param_groups", groups)
        aliases = self.states.aliases
        manifest = _manifest(named, self._division, aliases, self._unsaved)
        return _Told(digest, groups, manifest)

    def add_groups(self, groups: SavedGroups) -> None:
        """The settings of the groups of all ranks, which the first one saves."""
        settings = States()
        for path, of_optimizer in groups.items():
            for number, group in enumerate(of_optimizer):
                for key, value in group.items():
                    settings.add((*path, GROUPS, number, str(key)), value)
        self.objects |= {key: _packed(key, value) for key, value in settings.objects.items()}
        self.states.merge(settings)


def _packed(what: str, value: Any) -> bytes:
    """What torch.save makes of it.

    Raises:
        CheckpointError: it could not be read back as plain data; names the place within it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        data = stream.getvalue()
        load_object(what, data)
    # Pickling fails in as many ways as there are types.
    except Exception as error:
        place = _place_of_trouble(what, value)
        raise CheckpointError(
            f"{place} cannot be saved so that it is read back without running code. Save its "
            "state_dict(), or plain values: dataclasses.asdict(...), str(path), "
            f"generator.get_state() ({error})"
        ) from error
    return data


def _place_of_trouble(what: str, value: Any) -> str:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, one in items:
        try:
            _packed(f"{what}[{key!r}]", one)
        except CheckpointError:
            return _place_of_trouble(f"{what}[{key!r}]", one)
    return f"{what} ({type(value).__name__})"


def _manifest(
    named: Named, division: Division, aliases: dict[str, str], unsaved: frozenset[str]
) -> Manifest:
    """What this rank can say; of the whole model, where all ranks have the same."""
    return Manifest(
        step=0,
        time=time.time(),
        version=onecopy.__version__,
        torch_version=torch.__version__,
        world_size=named.group.size,
        models={
            name: {
                "kind": type(parts[0].module).__name__,
                "stage": parts[0].engine.config.chosen_stage,
                "num_parameters": sum(_num_saved(one, division) for one in parts),
                "dtypes": sorted({text for one in parts for text in _dtypes(one)}),
                NOT_EXPORTED: [text for one in parts for text in _not_exported(one)],
                UNSAVED: sorted({text for one in parts for text in _unsaved_in(one, unsaved)}),
                **counters_of(parts[0].module),
            }
            for name, parts in named.parts.items()
        },
        optimizers={
            one.name: {
                "kind": type(one.binding.optimizer).__name__,
                "num_steps": one.binding.num_steps,
            }
            for one in named.optimizers
        },
        aliases=aliases,
        configs={one.name: found for one in named.models if (found := configs_of(one.module))},
        ranks=[list(place) for place in division.ranks],
    )


def _num_saved(model: NamedModel, division: Division) -> int:
    """Elements of the parameters that this data group saves."""
    return sum(
        local_of(parameter).numel()
        for unit in model.engine.units
        for parameter in unit.parameters
        if model.name_of(parameter) not in division.left
    )


def _dtypes(model: NamedModel) -> list[str]:
    return [
        f"{unit.dtypes.compute} computed, {unit.dtypes.master} kept".replace("torch.", "")
        for unit in model.engine.units
    ]


def _not_exported(model: NamedModel) -> list[str]:
    """Names that files for others shall not hold, without the model's prefix."""
    names = [[name.removeprefix(model.prefix) for name in one] for one in model.names.values()]
    return names_left_out(model.module, names)


def _unsaved_in(model: NamedModel, unsaved: frozenset[str]) -> list[str]:
    """All names of parameters that are left out, without the model's prefix."""
    found = (names for names in model.names.values() if names[0] in unsaved)
    return [name.removeprefix(model.prefix) for names in found for name in names]


def _make_folder(root: Path, step: int, group: Group) -> Path:
    """The folder to write into, made by the first rank and seen by all.

    Raises:
        CheckpointError: it cannot be made, or a rank does not see it.
    """
    name = together(group, lambda: prepare_new(root, step).name if group.rank == 0 else "")[0]
    new = root / name

    def look() -> None:
        deadline = time.monotonic() + SEEN_AFTER
        while not new.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{root.absolute()} is not the folder that rank {group.ranks[0]} sees under "
                    "this name: its new checkpoint is not there. Give a folder on storage that all "
                    "ranks share (NFS, Lustre, a mounted bucket)"
                )
            time.sleep(0.05)

    try:
        together(group, look)
    except BaseException:
        if group.rank == 0:
            discard(new)
        raise
    return new
