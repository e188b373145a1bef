"""The folder of a run: one folder for each checkpoint, and `latest`, which names the last good one.

    root/
      step-00000040/     a complete checkpoint
      step-00000050/
      latest             the text "step-00000050"
      .step-00000060.1f2e3d4c.new    one that is being written, or was when its run ended

A checkpoint is written under a hidden name, flushed, and then renamed, which happens as a whole or
not at all; only then `latest` is moved, likewise. So whenever a process dies, `latest` names a
complete checkpoint. Where a step is saved again, the old one is set aside under a hidden name until
the new one is in place, and found there if the run ends in between.
"""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

from onecopy.checkpoint.files import METADATA, flush_folder, naming, write_file
from onecopy.checkpoint.manifest import MANIFEST

__all__ = [
    "LATEST",
    "candidates",
    "discard",
    "find_step",
    "prepare_new",
    "publish",
    "remove_old",
    "step_of",
    "steps_in",
]

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})")
_NEW, _OLD = ".new", ".old"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The number in a checkpoint's name, hidden or not; None for other names."""
    found = _STEP.fullmatch(folder.name.removeprefix(".").removesuffix(_OLD))
    return int(found.group(1)) if found else None


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and step_of(folder) is not None


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


def candidates(path: Path) -> list[Path]:
    """Checkpoints to load from, the best first: what `latest` names, then the others, newest first.

    The path itself where it is a checkpoint.
    """
    if not path.is_dir() or (path / METADATA).is_file() or (path / MANIFEST).is_file():
        return [path]
    steps = steps_in(path)[::-1]
    named = _read_latest(path)
    if named is None:
        return steps or [path]
    number = step_of(path / named)
    first = [one for one in steps if step_of(one) == number] or [path / named]
    return [*first, *(one for one in steps if one not in first)]


def find_step(path: Path) -> Path:
    """The checkpoint that is meant by a root or by the folder of a checkpoint."""
    return candidates(path)[0]


def _read_latest(root: Path) -> str | None:
    path = root / LATEST
    if not path.is_file():
        return None
    with naming("read", path):
        name = path.read_text(errors="replace").strip()
    return name if name and Path(name).name == name else None


# Writing, on one rank --------------------------------------------------------------------------


def prepare_new(root: Path, step: int) -> Path:
    """Make the hidden folder that a checkpoint is written into; what killed runs left is removed.

    Its name is new each time: other ranks see it only if they see the same storage.

    Raises:
        CheckpointError: the root is a file, or cannot be written.
    """
    with naming("written", root):
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f".step-*{_NEW}"):
            shutil.rmtree(left, ignore_errors=True)
        folder = root / f".{_name(step)}.{secrets.token_hex(4)}{_NEW}"
        folder.mkdir()
    return folder


def publish(new: Path, step: int) -> Path:
    """A checkpoint is written and flushed: give it its name, and let `latest` name it.

    Raises:
        CheckpointError: the root cannot be written.
    """
    root, name = new.parent, _name(step)
    target, old = root / name, root / f".{name}{_OLD}"
    with naming("written", root):
        if target.exists():
            if old.exists():
                _remove(old)
            target.rename(old)
        new.rename(target)
        flush_folder(root)
        temporary = root / f".{LATEST}{_NEW}"
        write_file(temporary, f"{name}\n".encode())
        temporary.replace(root / LATEST)
        flush_folder(root)
        if old.exists():
            _remove(old)
    return target


def discard(new: Path) -> None:
    """A checkpoint could not be written: remove what there is of it."""
    shutil.rmtree(new, ignore_errors=True)


def remove_old(root: Path, current: int, keep: int | None, keep_every: int | None) -> list[Path]:
    """Remove earlier checkpoints than `current`, but for the last `keep` (with it) and each
    `keep_every`-th step. Those of later steps, from which a run went back, are left alone.

    Returns what was removed.

    Raises:
        CheckpointError: something cannot be removed.
    """
    if keep is None:
        return []
    before = [one for one in steps_in(root) if (step_of(one) or 0) < current]
    removed = []
    for folder in before[: max(0, len(before) - (keep - 1))]:
        if keep_every and (step_of(folder) or 0) % keep_every == 0:
            continue
        with naming("removed", folder):
            _remove(folder)
        removed.append(folder)
    return removed


def _remove(folder: Path) -> None:
    # Without its manifest it is no checkpoint any more, whenever the rest goes.
    (folder / MANIFEST).unlink(missing_ok=True)
    hidden = folder.with_name(f".{folder.name.removeprefix('.')}{_NEW}")
    folder.rename(hidden)
    shutil.rmtree(hidden)
