"""What a checkpoint holds, without reading its tensors, and which checkpoints a run has."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from onecopy.checkpoint.contents import Contents, contents_of
from onecopy.checkpoint.deepspeed import DeepSpeedReader, is_deepspeed
from onecopy.checkpoint.files import METADATA
from onecopy.checkpoint.folder import LATEST, find_step, step_of, unfinished_in
from onecopy.checkpoint.huggingface import NOT_EXPORTED
from onecopy.checkpoint.manifest import MANIFEST, UNSAVED, read_manifest
from onecopy.checkpoint.naming import GROUPS, STATE
from onecopy.checkpoint.source import Source, open_source
from onecopy.checkpoint.unpickle import load_object
from onecopy.errors import CheckpointError

__all__ = ["Inspection", "Step", "Tensors", "health_of", "inspect"]

COMPLETE = "complete"
UNFINISHED = "unfinished"
UNKNOWN = "not known: another program has saved it"
BEGUN = "being written, or its run has ended"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Tensors that belong together. dtypes: number of elements of each."""

    num_tensors: int = 0
    num_elements: int = 0
    num_bytes: int = 0
    dtypes: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One model; `settings` is what it was saved with: class, stage, dtypes and so on."""

    name: str
    tensors: Tensors
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerInfo:
    """One optimizer. groups: hyper-parameters of each, and the number of its parameters."""

    name: str
    tensors: Tensors
    settings: dict[str, Any]
    groups: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One checkpoint of a run. num_bytes: of its files as they are. health: a word, or a fault."""

    folder: str
    step: int | None
    time: float | None
    num_bytes: int
    health: str
    is_latest: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was found.

    path: of the checkpoint that is described. writer: the program that saved it.
    step, time, world_size: as it says; None where another program has saved and does not say.
    tied: further names of tensors, and the name that each is stored under.
    others: keys of what belongs to neither: random states, what the caller has added.
    files: bytes of each, None if it is missing.
    steps: of the run, if the folder of a run was given.
    notes: what could not be found out.
    """

    path: str
    writer: str
    step: int | None
    time: float | None
    world_size: int | None
    health: str
    models: list[ModelInfo]
    optimizers: list[OptimizerInfo]
    tied: dict[str, str]
    others: list[str]
    files: dict[str, int | None]
    steps: list[Step]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Look at a checkpoint, or at a run and the checkpoint that would be loaded from it.

    Args:
        path: as for `onecopy.load`.

    Raises:
        CheckpointError: there is none, or its metadata is damaged.
    """
    given = Path(path).expanduser()
    source = open_source(given)
    manifest, contents, run = source.manifest, contents_of(source), source.run
    notes: list[str] = []
    return Inspection(
        path=str(source.path),
        writer=_writer(source),
        step=manifest.step if manifest else run.get("global_steps", step_of(source.path)),
        time=manifest.time if manifest else None,
        world_size=manifest.world_size if manifest else run.get("dp_world_size"),
        health=health_of(source.path),
        models=list(_models(source, contents)),
        optimizers=list(_optimizers(source, contents, notes)),
        tied=dict(source.aliases),
        others=contents.others,
        files=_files(source),
        steps=_steps(given, source.path),
        notes=notes,
    )


def _writer(source: Source) -> str:
    if source.manifest is not None:
        return f"onecopy {source.manifest.version}, torch {source.manifest.torch_version}"
    version = source.run.get("ds_version")
    return f"DeepSpeed {version}" if version is not None else "another program"


def health_of(folder: Path) -> str:
    """Whether a checkpoint has all its files, in their full size; the checksums are not compared.

    Returns "complete", or what is wrong.
    """
    try:
        manifest = read_manifest(folder)
        if manifest is None and is_deepspeed(folder):
            DeepSpeedReader(folder).read_metadata()
            return COMPLETE
    except CheckpointError as error:
        return str(error).replace(f"{folder}{os.sep}", "")
    if manifest is None:
        return UNKNOWN if (folder / METADATA).is_file() else UNFINISHED
    for name, file in manifest.files.items():
        found = _size_of(folder / name)
        if found is None:
            return f"damaged: {name} is missing"
        if found != file.num_bytes:
            return f"damaged: {name} has {found} bytes, not {file.num_bytes}"
    return COMPLETE


def _size_of(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


# One checkpoint -------------------------------------------------------------------------------


def _models(source: Source, contents: Contents) -> Iterator[ModelInfo]:
    manifest = source.manifest
    aliases = source.aliases
    for name, keys in contents.models.items():
        settings = manifest.models[name] if manifest else {}
        shown = {
            key: value
            for key, value in settings.items()
            if _is_short(value) and key not in (NOT_EXPORTED, UNSAVED)
        }
        stored = [key for key in keys.values() if key not in aliases]
        yield ModelInfo(name=name, tensors=_tensors(source, stored), settings=shown)


def _is_short(value: Any) -> bool:
    return isinstance(value, str | int | float | list) or value is None


def _optimizers(source: Source, contents: Contents, notes: list[str]) -> Iterator[OptimizerInfo]:
    for name, prefix in contents.optimizers.items():
        keys = [
            key
            for key in source.metadata.state_dict_metadata
            if key.startswith(f"{prefix}{STATE}.")
        ]
        groups: list[dict[str, Any]] = []
        try:
            groups = _groups(source, f"{prefix}{GROUPS}")
        except CheckpointError as error:
            notes.append(str(error))
        settings = source.manifest.optimizers[name] if source.manifest else {}
        tensors = _tensors(source, keys)
        yield OptimizerInfo(name=name, tensors=tensors, settings=settings, groups=groups)


def _groups(source: Source, key: str) -> list[dict[str, Any]]:
    """Parameter groups that were saved as one object, or each setting on its own as torch does."""
    keys = [
        one
        for one, entry in source.metadata.state_dict_metadata.items()
        if (one == key or one.startswith(f"{key}.")) and isinstance(entry, BytesStorageMetadata)
    ]
    objects = source.read((), keys)
    groups: dict[str, dict[str, Any]] = {}
    for one in keys:
        value = load_object(f"{one} in {source.path}", objects[one])
        if one == key and isinstance(value, list):
            groups |= {str(number): group for number, group in enumerate(value)}
        elif one != key:
            number, _, setting = one.removeprefix(f"{key}.").partition(".")
            groups.setdefault(number, {})[setting] = value
    return [
        {str(setting): _plain(setting, value) for setting, value in group.items()}
        for group in groups.values()
        if isinstance(group, dict)
    ]


def _plain(setting: str, value: Any) -> Any:
    """A hyper-parameter as JSON has it; of the parameters their number."""
    if setting == "params" and isinstance(value, list | tuple):
        return len(value)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain("", one) for one in value]
    return value if isinstance(value, str | int | float | bool) or value is None else repr(value)


def _tensors(source: Source, keys: list[str]) -> Tensors:
    dtypes: Counter[str] = Counter()
    num_tensors = num_bytes = 0
    for key in keys:
        entry = source.metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            dtype, numel = entry.properties.dtype, entry.size.numel()
            dtypes[str(dtype).removeprefix("torch.")] += numel
            num_tensors += 1
            num_bytes += numel * dtype.itemsize
    return Tensors(
        num_tensors=num_tensors,
        num_elements=dtypes.total(),
        num_bytes=num_bytes,
        dtypes=dict(dtypes.most_common()),
    )


def _files(source: Source) -> dict[str, int | None]:
    """Those that should be there; where nobody says, those that are."""
    if source.manifest is not None:
        names = [*source.manifest.files, MANIFEST]
    else:
        names = sorted(path.name for path in source.path.iterdir() if path.is_file())
    return {name: _size_of(source.path / name) for name in names}


# A run ----------------------------------------------------------------------------------------


def _steps(root: Path, chosen: Path) -> list[Step]:
    """The checkpoints of a run, unfinished ones too; nothing where one checkpoint was given."""
    if chosen == root:
        return []
    latest = find_step(root) if (root / LATEST).is_file() else None
    begun = unfinished_in(root)
    found = [
        _step(folder, health_of(folder), folder == latest)
        for folder in sorted(root.iterdir())
        if folder.is_dir() and step_of(folder) is not None
    ]
    if latest is not None and not latest.exists():
        found.append(_step(latest, f"missing, though {LATEST} names it", True))
    found.sort(key=lambda one: (one.step or 0, one.folder))
    return [*found, *(_step(folder, BEGUN, False) for folder in begun)]


def _step(folder: Path, health: str, is_latest: bool) -> Step:
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        manifest = None
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return Step(
        folder=folder.name,
        step=step_of(folder),
        time=manifest.time if manifest else None,
        num_bytes=sum(path.stat().st_size for path in files),
        health=health.replace(UNKNOWN, f"damaged: {MANIFEST} is missing"),
        is_latest=is_latest,
    )
