"""The folder of a run: one folder for each checkpoint, and `latest`, which names the last good one.

    root/
      step-00000040/     a complete checkpoint
      step-00000050/
      latest             the text "step-00000050"
      .step-00000060.1f2e3d4c.new    one that is being written, or was when its run ended

A checkpoint is written under a hidden name, flushed, and then renamed, which happens as a whole or
not at all; only then `latest` is moved, likewise. So whenever a process dies, `latest` names a
complete checkpoint. Where a step is saved again, the old one is set aside under a hidden name until
the new one is in place, and found there if the run ends in between. What is removed is renamed
first, so that no part of it is ever taken for a checkpoint.

`latest` decides what is loaded. Where it is missing or empty, the highest step does.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from onecopy.checkpoint.disk import flush_folder, naming, write_file
from onecopy.checkpoint.files import METADATA
from onecopy.checkpoint.manifest import MANIFEST
from onecopy.errors import CheckpointError

__all__ = [
    "LATEST",
    "candidates",
    "discard",
    "find_step",
    "latest",
    "path_of",
    "prepare_new",
    "publish",
    "remove_old",
    "step_of",
    "steps_in",
    "unfinished_in",
]

LATEST = "latest"
# Longer names are in no `latest` that onecopy or DeepSpeed has written.
LATEST_BYTES = 255
_STEP = re.compile(r"step-([0-9]{8,})")
_NEW, _OLD = ".new", ".old"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def path_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is when it is complete."""
    return root / _name(step)


def step_of(folder: Path) -> int | None:
    """The number in a checkpoint's name, hidden or not; None for other names."""
    found = _STEP.fullmatch(folder.name.removeprefix(".").removesuffix(_OLD))
    return int(found.group(1)) if found else None


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and step_of(folder) is not None


def _is_checkpoint(path: Path) -> bool:
    return (path / METADATA).is_file() or (path / MANIFEST).is_file()


def _aside(folder: Path) -> Path:
    """Where a checkpoint is while a new one takes its place."""
    return folder.with_name(f".{folder.name}{_OLD}")


def steps_in(root: Path) -> list[Path]:
    """The complete checkpoints of a root, by step; one that was set aside where its place is empty.

    Raises:
        CheckpointError: the root cannot be read.
    """
    with naming("read", root):
        found = [one for one in root.iterdir() if _is_complete(one)] if root.is_dir() else []
    by_step: dict[int | None, Path] = {}
    # "." comes first: the one in place wins.
    for folder in sorted(found, key=lambda one: one.name):
        by_step[step_of(folder)] = folder
    return [by_step[step] for step in sorted(by_step, key=lambda step: step or 0)]


def unfinished_in(root: Path) -> list[Path]:
    """Hidden folders that are being written or removed, or were when their run ended."""
    return sorted(root.glob(f".step-*{_NEW}"))


def candidates(path: Path) -> list[Path]:
    """Checkpoints to load from, the best first; one at least, which may not be there.

    The path itself where it is a checkpoint. Of a root first what `latest` names, then those before
    it, newest first, and last those of later steps, from which the run may have gone back. Without
    `latest` all, newest first.

    Raises:
        CheckpointError: the root or its `latest` cannot be read.
    """
    with naming("read", path):
        if _is_checkpoint(path):
            return [path]
        if not path.is_dir():
            return [_aside(path) if _is_complete(_aside(path)) else path]
    steps = steps_in(path)[::-1]
    named = _read_latest(path)
    if named is None:
        return steps or [path]
    number = step_of(path / named)
    if number is None:
        return [path / named, *(one for one in steps if one.name != named)]
    by_number = {step_of(one) or 0: one for one in steps}
    first = by_number.pop(number, path / named)
    later = [one for step, one in by_number.items() if step > number]
    return [first, *(one for step, one in by_number.items() if step < number), *later]


def find_step(path: Path) -> Path:
    """The checkpoint that is meant by a root or by the folder of a checkpoint."""
    return candidates(path)[0]


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that `onecopy.load(root, ...)` tries first; None where nothing was saved yet.

    So a run knows whether it begins or goes on: `if latest("run"): onecopy.load("run", ...)`. A
    checkpoint that `root/latest` names and that is gone is no beginning: load will say so.

    Raises:
        CheckpointError: the root cannot be read.
    """
    path = Path(root).expanduser()
    if not path.exists():
        return None
    found = find_step(path)
    return None if found == path and path.is_dir() and not _is_checkpoint(path) else found


def _read_latest(root: Path) -> str | None:
    path = root / LATEST
    if not path.is_file():
        return None
    with naming("read", path), path.open("rb") as file:
        name = file.read(LATEST_BYTES).decode(errors="replace").strip()
    # A name, and no path that leads elsewhere.
    is_name = name not in ("", "..") and Path(name).name == name and "\0" not in name
    return name if is_name else None


# Writing, on one rank --------------------------------------------------------------------------


def prepare_new(root: Path, step: int) -> Path:
    """Make the hidden folder that a checkpoint is written into, and tidy up after killed runs.

    Its name is new each time: other ranks see it only if they see the same storage.

    Raises:
        CheckpointError: the root is a file or a checkpoint, or cannot be written.
    """
    if _is_checkpoint(root):
        raise CheckpointError(
            f"{root} is a checkpoint itself, and those saved in it would not be found. Give the "
            f"folder that holds it, {root.parent}, or another one"
        )
    with naming("written", root):
        if root.exists() and not root.is_dir():
            raise CheckpointError(f"{root} is a file: give a folder to save checkpoints in")
        _make(root)
        for left in unfinished_in(root):
            shutil.rmtree(left, ignore_errors=True)
        for aside in root.glob(f".step-*{_OLD}"):
            place = root / _name(step_of(aside) or 0)
            if _is_complete(aside) and not place.exists():
                aside.rename(place)
        folder = root / f".{_name(step)}.{secrets.token_hex(4)}{_NEW}"
        folder.mkdir()
    return folder


def _make(root: Path) -> None:
    """Make a folder and those above it; their names are on the disk afterwards."""
    missing = [one for one in (root, *root.parents) if not one.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        flush_folder(folder.parent)


def publish(new: Path, step: int) -> Path:
    """A checkpoint is written and flushed: give it its name, and let `latest` name it.

    Raises:
        CheckpointError: the root cannot be written.
    """
    root, name = new.parent, _name(step)
    target = root / name
    with naming("written", root):
        if _is_complete(target):
            if _aside(target).exists():
                _remove(_aside(target))
            target.rename(_aside(target))
        elif target.exists():
            _remove(target)
        try:
            new.rename(target)
        except OSError:
            if _is_complete(_aside(target)):
                _aside(target).rename(target)
            raise
        flush_folder(root)
        temporary = root / f".{LATEST}{_NEW}"
        write_file(temporary, f"{name}\n".encode())
        temporary.replace(root / LATEST)
        flush_folder(root)
    return target


def discard(new: Path) -> None:
    """A checkpoint could not be written: remove what there is of it."""
    shutil.rmtree(new, ignore_errors=True)


def remove_old(root: Path, current: int, keep: int | None, keep_every: int | None) -> list[Path]:
    """Remove earlier checkpoints than `current`, but for the last `keep` (with it) and each
    `keep_every`-th step. Those of later steps, from which a run went back, are left alone.

    What was set aside for another of the same step goes in any case.

    Returns what was removed.

    Raises:
        CheckpointError: something cannot be removed; the rest is.
    """
    unwanted = [
        one for one in root.glob(f".step-*{_OLD}") if _is_complete(root / _name(step_of(one) or 0))
    ]
    before = [one for one in steps_in(root) if (step_of(one) or 0) < current]
    for folder in before[: max(0, len(before) - (keep - 1))] if keep is not None else ():
        if not keep_every or (step_of(folder) or 0) % keep_every:
            unwanted.append(folder)
    failures = []
    for folder in unwanted:
        try:
            with naming("removed", folder):
                _remove(folder)
        except CheckpointError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return unwanted


def _remove(folder: Path) -> None:
    # Under a name of what is not complete, before any part of it goes.
    hidden = folder.with_name(f".{folder.name.removeprefix('.')}.{secrets.token_hex(4)}{_NEW}")
    folder.rename(hidden)
    flush_folder(folder.parent)
    if hidden.is_symlink():
        hidden.unlink()
    else:
        shutil.rmtree(hidden)
