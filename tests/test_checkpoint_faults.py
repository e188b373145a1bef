"""Saves that fail leave everything as it was; damage is named, and older checkpoints load."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
import onecopy.checkpoint.folder
import onecopy.checkpoint.saving
from onecopy.checkpoint.verify import verify
from onecopy.errors import CheckpointError, OneCopyError
from tests import models
from tests.pool import Pool
from tests.runs import full_values

WIDTH = 64
PAGE = 4096


def made(stage: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    onecopy.shard(model, optimizer, stage=stage)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything that trains: whole parameters, and this rank's states."""
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    states = [value.clone() for piece in pieces for value in optimizer.state[piece].values()]
    return [*full_values(model).values(), *states, torch.get_rng_state()]


def are_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def error_of(action: Callable[[], Any]) -> str:
    """The message of the CheckpointError that an action raises."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError was raised")


# Saves that fail ------------------------------------------------------------------------------

Fault = Callable[[Path], Any]


@contextmanager
def full(root: Path) -> Iterator[None]:
    """Less is free than a checkpoint takes."""
    with _free(root, 40 * PAGE // 2):
        yield


@contextmanager
def full_for_metadata(root: Path) -> Iterator[None]:
    """There is room for what the ranks write, and for nothing else."""
    files = root.glob("step-00000001/*.distcp")
    with _free(root, sum(-(-file.stat().st_size // PAGE) * PAGE for file in files)):
        yield


@contextmanager
def _free(root: Path, num_bytes: int) -> Iterator[None]:
    ballast = root / "ballast"
    if dist.get_rank() == 0:
        found = os.statvfs(root)
        ballast.write_bytes(bytes(found.f_bavail * found.f_frsize - num_bytes))
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        ballast.unlink()
    dist.barrier()


@contextmanager
def read_only(root: Path) -> Iterator[None]:
    """The file system is mounted read-only, as Linux does after errors of the disk."""
    for mode in ("ro", "rw"):
        dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["mount", "-o", f"remount,{mode}", root], check=True)
        dist.barrier()
        if mode == "ro":
            yield


@contextmanager
def limited(root: Path) -> Iterator[None]:
    """One rank cannot write large files."""
    if dist.get_rank() != 1:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def no_flush(root: Path) -> Iterator[None]:
    """The disk of one rank has an error that only a flush brings out."""

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if dist.get_rank() == 1:
        with replaced(os, "fsync", fail):
            yield
    else:
        yield


@contextmanager
def no_rename(root: Path, target: str = "step-00000002") -> Iterator[None]:
    """The last thing but one fails, on the first rank: the name that makes a checkpoint one."""
    rename = os.rename

    def fail(source: Any, destination: Any, **options: Any) -> None:
        if os.path.basename(destination) == target and str(source).endswith(".new"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        rename(source, destination, **options)

    with replaced(os, "rename", fail):
        yield


@contextmanager
def no_pointer(root: Path) -> Iterator[None]:
    """The very last thing fails: `latest` cannot be moved."""

    def fail(path: Path, data: bytes) -> None:
        raise CheckpointError(f"{path} cannot be written: {os.strerror(errno.ENOSPC)}")

    with replaced(onecopy.checkpoint.folder, "write_file", fail):
        yield


@contextmanager
def other_job(root: Path) -> Iterator[None]:
    """Another job begins to save to the same root, and takes the new folder for a dead one's."""
    fsync = os.fsync

    def remove(handle: int) -> None:
        for folder in root.glob(".step-*.new"):
            shutil.rmtree(folder, ignore_errors=True)
        fsync(handle)

    with replaced(os, "fsync", remove):
        yield


@contextmanager
def lost_file(root: Path) -> Iterator[None]:
    """What one rank has written does not reach the others."""
    check = onecopy.checkpoint.files.Writer._check_sizes

    def lose(self: Any, files: Any) -> None:
        (self._folder / "__1_0.distcp").unlink()
        check(self, files)

    with replaced(onecopy.checkpoint.files.Writer, "_check_sizes", lose):
        yield


def save_with_fault(root: str, fault: Fault) -> dict[str, Any]:
    """A good save, one with a fault, and a good one again."""
    path = Path(root)
    model, optimizer = made()
    train(model, optimizer)
    onecopy.save(root, model, optimizer)
    train(model, optimizer)
    before = snapshot(model, optimizer)
    with fault(path):
        message = error_of(lambda: onecopy.save(root, model, optimizer))
        dist.barrier()
        found = sorted(one.name for one in path.iterdir() if one.name != "ballast")
        latest = (path / "latest").read_text().strip()
    is_untouched = are_equal(before, snapshot(model, optimizer))
    train(model, optimizer)
    saved = onecopy.save(root, model, optimizer)
    dist.barrier()
    problems = [str(one) for each in verify(root, every=True) for one in each.problems]
    after = snapshot(model, optimizer)
    train(model, optimizer)
    loaded = onecopy.load(root, model, optimizer)
    return {
        "message": message,
        "found": found,
        "latest": latest,
        "is_untouched": is_untouched,
        "saved": saved.name,
        "problems": problems,
        "goes_on": loaded.step == 3 and are_equal(after, snapshot(model, optimizer)),
    }


def check_fault(pool: Pool, root: Path, fault: Fault, *expected: str) -> None:
    """The error is named on all ranks, and nothing else has changed."""
    first, second = pool.run(2, save_with_fault, str(root), fault)
    assert first["message"] == second["message"]
    for words in expected:
        assert words in first["message"]
    for one in (first, second):
        assert one["latest"] == "step-00000001"
        assert set(one["found"]) <= {"latest", "step-00000001", "step-00000002"}, one["found"]
        assert one["is_untouched"]
        assert (one["saved"], one["problems"], one["goes_on"]) == ("step-00000003", [], True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a file system here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (full, ("_0.distcp cannot be written: No space left on device", "on rank ")),
        (full_for_metadata, (".metadata cannot be written: No space left on device",)),
        (read_only, ("small cannot be written: Read-only file system",)),
    ],
)
def test_real_faults_of_a_file_system(
    pool: Pool, small: Path, fault: Fault, expected: tuple[str, ...]
) -> None:
    """Full, and read-only; a root user does not feel permissions."""
    check_fault(pool, small, fault, *expected)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (limited, ("on rank 1", "__1_0.distcp cannot be written: File too large")),
        (no_flush, ("on rank 1", "__1_0.distcp cannot be written: Input/output error")),
        (no_rename, ("on rank 0", "run cannot be written: Disk quota exceeded")),
        (no_pointer, ("on rank 0", "latest.new cannot be written: No space left")),
        (other_job, ("does another job save to the same root?",)),
        (lost_file, ("on rank 0", "__1_0.distcp cannot be written: its folder has vanished")),
    ],
)
def test_faults(pool: Pool, tmp_path: Path, fault: Fault, expected: tuple[str, ...]) -> None:
    """Each on one rank only; all of them hear of it."""
    check_fault(pool, tmp_path / "run", fault, *expected)


def save_again_with_fault(root: str) -> list[Any]:
    model, optimizer = made()
    train(model, optimizer)
    onecopy.save(root, model, optimizer, extra="first")
    with no_rename(Path(root), "step-00000001"):
        message = error_of(lambda: onecopy.save(root, model, optimizer, extra="second"))
    dist.barrier()
    return [message, sorted(os.listdir(root)), onecopy.load(root, model, optimizer).extra]


def test_a_step_that_cannot_be_saved_again_is_put_back(pool: Pool, tmp_path: Path) -> None:
    """It was set aside for the new one."""
    for message, found, extra in pool.run(2, save_again_with_fault, str(tmp_path)):
        assert "Disk quota exceeded" in message
        assert found == ["latest", "step-00000001"]
        assert extra == "first"


def save_to_different_folders(folder: str) -> tuple[str, str]:
    """A relative root where ranks have different working directories, as on two machines."""
    own = Path(folder) / f"machine{dist.get_rank()}"
    own.mkdir()
    before = Path.cwd()
    model, optimizer = made()
    os.chdir(own)
    try:
        with replaced(onecopy.checkpoint.saving, "SEEN_AFTER", 0.2):
            message = error_of(lambda: onecopy.save("run", model, optimizer))
    finally:
        os.chdir(before)
    left = [str(path) for path in own.rglob("*") if path.name != "run"]
    assert left == []
    train(model, optimizer)
    return message, onecopy.save(Path(folder) / "shared", model, optimizer).name


def test_ranks_that_see_different_folders(pool: Pool, tmp_path: Path) -> None:
    """Not half a checkpoint on each machine, which is found out when it is needed."""
    for message, saved in pool.run(2, save_to_different_folders, str(tmp_path)):
        assert f"on rank 1: {tmp_path}/machine1/run is not the folder that rank 0 sees" in message
        assert "storage that all ranks share" in message
        assert saved == "step-00000001"


def save_where_folders_are_seen_late(root: str) -> list[str]:
    """As on NFS, where a name may be unknown to another client for a moment."""
    model, optimizer = made()
    is_dir, asked = Path.is_dir, []

    def seen_late(path: Path) -> bool:
        if path.suffix == ".new":
            asked.append(path)
        return is_dir(path) and (len(asked) > 3 or path.suffix != ".new")

    def no_such_call(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(handle)

    fsync = os.fsync
    with replaced(Path, "is_dir", seen_late), replaced(os, "fsync", no_such_call):
        onecopy.save(root, model, optimizer)
    assert len(asked) == 4
    return sorted(os.listdir(root))


def test_network_file_systems(pool: Pool, tmp_path: Path) -> None:
    """Folders that are seen a moment later, and that cannot be flushed by a call of their own."""
    for found in pool.run(2, save_where_folders_are_seen_late, str(tmp_path)):
        assert found == ["latest", "step-00000000"]


def save_differently(folder: str) -> list[str]:
    rank = dist.get_rank()
    model, optimizer = made()
    (Path(folder) / "file").touch()
    good = onecopy.save(f"{folder}/good", model, optimizer)
    bad = error_of if rank else 0
    found = [
        error_of(lambda: onecopy.save(f"{folder}/{rank}", model, optimizer)),
        error_of(lambda: onecopy.save(f"{folder}/run", model, optimizer, step=rank)),
        error_of(lambda: onecopy.save(f"{folder}/run", model, optimizer, extra=bad)),
        error_of(lambda: onecopy.save(f"{folder}/file", model, optimizer)),
        error_of(lambda: onecopy.save(f"{folder}/file/run", model, optimizer)),
        error_of(lambda: onecopy.save(good, model, optimizer)),
        error_of(lambda: onecopy.save(f"{folder}/run", model, optimizer, step=10**300)),
    ]
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["file", "good", "run"]
    assert os.listdir(f"{folder}/run") == []
    return found


def test_what_cannot_be_meant_is_refused(pool: Pool, tmp_path: Path) -> None:
    """On all ranks with the same words, whichever rank has seen it."""
    first, second = pool.run(2, save_differently, str(tmp_path))
    assert first == second
    expected = [
        "rank 1 step 0 to " + str(tmp_path / "1"),
        "rank 1 step 1 to ",
        "on rank 1: extra (function) cannot be saved",
        "file is a file: give a folder",
        "file/run cannot be written: Not a directory",
        f"step-00000000 is a checkpoint itself, and those saved in it would not be found. Give the "
        f"folder that holds it, {tmp_path}/good",
        "run cannot be written: File name too long",
    ]
    for message, words in zip(first, expected, strict=True):
        assert words in message


# Damage ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Place:
    """What a loop may keep in an object of its own."""

    epoch: int = 1


def pass_wrong_things(folder: str) -> list[str]:
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    calls: list[Callable[[], Any]] = [
        lambda: onecopy.save(model, folder),  # type: ignore[arg-type]
        lambda: onecopy.load(folder, optimizer, model),  # type: ignore[arg-type]
        lambda: onecopy.save(folder, {"model": model, "optimizer": optimizer}),  # type: ignore[dict-item]
        lambda: onecopy.save(folder, model, extra=scheduler),
        lambda: onecopy.save(folder, model, extra={"places": [1, {"now": Place()}]}),
        lambda: onecopy.save(folder, model, step=True),
    ]
    found = []
    for call in calls:
        with pytest.raises(OneCopyError) as caught:
            call()
        found.append(str(caught.value))
    assert os.listdir(folder) == []
    step: Any = numpy.int64(7)
    assert onecopy.save(folder, model, step=step).name == "step-00000007"
    return found


def test_what_is_passed_by_mistake(pool: Pool, tmp_path: Path) -> None:
    """The message says what was meant to be there."""
    for said in pool.run(2, pass_wrong_things, str(tmp_path)):
        for message, words in zip(
            said,
            [
                "the model is of class str, which is no module. The folder comes first",
                "the model is of class AdamW",
                "the model 'optimizer' is of class AdamW",
                "extra (ConstantLR) cannot be saved so that it is read back without running code. "
                "Save its state_dict()",
                "extra['places'][1]['now'] (Place) cannot be saved",
                "save(step=True): give a whole number",
            ],
            strict=True,
        ):
            assert words in message
            assert "add_safe_globals" not in message


def missing(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flipped(place: float) -> Callable[[Path], None]:
    """One bit is another, there: 0 is the begin of the file and 1 its end."""
    return _Flip(place)


class _Flip:
    def __init__(self, place: float) -> None:
        self._place = place

    def __call__(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(self._place * (len(data) - 1))] ^= 1
        path.write_bytes(data)


DAMAGE = [
    (file, harm)
    for file in ("__0_0.distcp", "__1_0.distcp", ".metadata", "onecopy.json")
    for harm in (missing, cut, empty, flipped(0), flipped(0.5), flipped(0.9), flipped(1))
]


def load_damaged(root: str, stage: int, file: str, harm: Callable[[Path], None]) -> dict[str, Any]:
    """Two saves, the later one damaged: load it, and then with a fallback."""
    model, optimizer = made(stage)
    train(model, optimizer)
    onecopy.save(root, model, optimizer, extra="older")
    older = snapshot(model, optimizer)
    train(model, optimizer)
    latest = onecopy.save(root, model, optimizer, extra="newer")
    train(model, optimizer)
    if dist.get_rank() == 0:
        harm(latest / file)
    dist.barrier()
    message = error_of(lambda: onecopy.load(root, model, optimizer))
    loaded = onecopy.load(root, model, optimizer, fallback=True)
    is_older = loaded.extra == "older" and are_equal(older, snapshot(model, optimizer))
    train(model, optimizer)
    if dist.get_rank() == 0:
        harm(loaded.path / file)
    dist.barrier()
    both = error_of(lambda: onecopy.load(root, model, optimizer, fallback=True))
    # Whatever it has loaded in part, training works, and so does the next save.
    train(model, optimizer)
    onecopy.save(root, model, optimizer)
    return {"message": message, "is_older": is_older, "both": both}


@pytest.mark.sampled(("file", "harm"), DAMAGE, 12, always=DAMAGE[:1])
def test_damage_is_named_and_the_older_one_loads(
    pool: Pool, tmp_path: Path, file: str, harm: Callable[[Path], None]
) -> None:
    """Also where the damaged one was loaded in part before."""
    ranks = pool.run(2, load_damaged, str(tmp_path), 2, file, harm, record_warnings=True)
    warned = [str(one) for warnings in pool.warnings for one in warnings]
    # Without its manifest a folder is no checkpoint, and only asked for where `latest` names it.
    is_none = (file, harm) == ("onecopy.json", missing)
    assert len(warned) == 2 - is_none, "each fallback warns once, on one rank"
    newer, older = (str(tmp_path / f"step-0000000{step}" / file) for step in (2, 1))
    assert newer in warned[0]
    assert f"Trying {tmp_path}/step-00000001 instead" in warned[0]
    for one in ranks:
        assert newer in one["message"]
        assert "fallback=True" in one["message"]
        assert one["is_older"]
        assert newer in one["both"]
        assert older in one["both"] or is_none


class _Picky(nn.Linear):
    """Saves something of its own, and takes it back on one rank only."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such state")


def load_where_one_rank_fails(root: str) -> str:
    model = nn.Sequential(_Picky(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer)
    onecopy.save(root, model, optimizer)
    message = error_of(lambda: onecopy.load(root, model, optimizer))
    onecopy.save(root, model, optimizer, step=1)
    return message


def test_what_one_rank_cannot_take_is_an_error_on_all(pool: Pool, tmp_path: Path) -> None:
    """The others would go on with what they have loaded."""
    for message in pool.run(2, load_where_one_rank_fails, str(tmp_path)):
        assert message == "on rank 1: ValueError: no such state"


def load_interrupted(root: str) -> None:
    model, optimizer = made()
    onecopy.save(root, model, optimizer)

    def interrupt(self: Any, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return read_data(self, plan, planner)

    read_data = onecopy.checkpoint.files.Reader.read_data
    with replaced(onecopy.checkpoint.files.Reader, "read_data", interrupt):
        onecopy.load(root, model, optimizer, fallback=True)


def test_an_interrupt_is_no_reason_to_load_another(pool: Pool, tmp_path: Path) -> None:
    """The rank that was interrupted ends; the others say which one it was."""
    first, second = pool.run(2, load_interrupted, str(tmp_path), expect_failures=True)
    assert second.type_name == "KeyboardInterrupt"
    assert first.type_name == "CheckpointError"
    assert "on rank 1: KeyboardInterrupt" in first.message


def load_by_pointer(root: str, pointer: str | None) -> tuple[Any, ...]:
    """Steps 1, 2 and 9, of which `latest` names 2 as the run went back; then it is damaged."""
    model, optimizer = made()
    for step in (1, 9, 2):
        onecopy.save(root, model, optimizer, step=step)
    latest = Path(root) / "latest"
    before = onecopy.load(root, model, optimizer).step
    dist.barrier()
    if dist.get_rank() == 0:
        if pointer is None:
            latest.unlink()
        else:
            latest.write_text(pointer)
    dist.barrier()
    try:
        plain: Any = onecopy.load(root, model, optimizer).step
    except CheckpointError as error:
        plain = str(error)
    return before, plain, onecopy.load(root, model, optimizer, fallback=True).step


@pytest.mark.parametrize(
    ("pointer", "plain", "fallback"),
    [
        # Without a pointer the highest step counts.
        (None, 9, 9),
        ("", 9, 9),
        ("\n", 9, 9),
        ("../elsewhere", 9, 9),
        ("step-00000001", 1, 1),
        # What it names has gone: an error, and then what was before it.
        ("step-00000005\n", "step-00000005 is no checkpoint: it is not there, though", 2),
        ("step-00000000\n", "step-00000000 is no checkpoint", 9),
        ("stap-00000002\n", "stap-00000002 is no checkpoint", 9),
        ("x" * 5000, " cannot be read: File name too long", 9),
    ],
)
def test_the_pointer_decides(
    pool: Pool, tmp_path: Path, pointer: str | None, plain: Any, fallback: int
) -> None:
    """What is loaded where `latest` is missing, empty, or names what is not there."""
    for found in pool.run(2, load_by_pointer, str(tmp_path), pointer, record_warnings=True):
        assert found[0] == 2
        assert found[2] == fallback
        if isinstance(plain, int):
            assert found[1] == plain
        else:
            assert plain in found[1]


# Folders --------------------------------------------------------------------------------------


def keep_some(root: str) -> list[list[str]]:
    model, optimizer = made()
    found = []

    def save(step: int, **options: Any) -> None:
        onecopy.save(root, model, optimizer, step=step, **options)
        dist.barrier()
        found.append(sorted(path.name[-2:] for path in Path(root).glob("step-*")))
        dist.barrier()

    for step in range(1, 9):
        save(step, keep=2, keep_every=3)
    save(4, keep=2, keep_every=3)
    save(9, keep=1)
    save(10)
    return found


def test_keep(pool: Pool, tmp_path: Path) -> None:
    """The last ones, each n-th beside them; nothing of later steps, from which a run went back."""
    (found, _) = pool.run(2, keep_some, str(tmp_path))
    assert found == [
        ["01"],
        ["01", "02"],
        ["02", "03"],
        ["03", "04"],
        ["03", "04", "05"],
        ["03", "05", "06"],
        ["03", "06", "07"],
        ["03", "06", "07", "08"],
        ["03", "04", "06", "07", "08"],
        ["09"],
        ["09", "10"],
    ]


def save_while_nothing_can_be_removed(root: str) -> tuple[str, list[str]]:
    model, optimizer = made()
    onecopy.save(root, model, optimizer, step=1)

    def fail(path: Any, **options: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with replaced(shutil, "rmtree", fail):
        saved = onecopy.save(root, model, optimizer, step=2, keep=1)
    during = sorted(os.listdir(root))
    dist.barrier()
    onecopy.save(root, model, optimizer, step=3, keep=2)
    assert onecopy.load(root, model, optimizer).step == 3
    return saved.name, [during, sorted(os.listdir(root))]


def test_what_cannot_be_removed_is_a_warning(pool: Pool, tmp_path: Path) -> None:
    """The new checkpoint is complete; what is left of the old one goes with the next save."""
    root = str(tmp_path)
    for saved, (during, after) in pool.run(
        2, save_while_nothing_can_be_removed, root, record_warnings=True
    ):
        assert saved == "step-00000002"
        assert [name for name in during if not name.startswith(".")] == ["latest", "step-00000002"]
        assert after == ["latest", "step-00000002", "step-00000003"]
    (warned,), none = pool.warnings
    assert none == []
    assert "step-00000001 cannot be removed: Device or resource busy" in str(warned)


def use_odd_roots(folder: str) -> None:
    """Each is saved to and loaded from as it is."""
    model, optimizer = made()
    home = Path(folder) / "home"
    (home / "real").mkdir(parents=True)
    (home / "link").symlink_to(home / "real")
    before = os.environ["HOME"], os.getcwd()
    os.environ["HOME"] = str(home)
    os.chdir(home)
    try:
        for number, (root, place) in enumerate(
            [
                ("~/tilde", "tilde"),
                ("relative/../relative/deep", "relative/deep"),
                (Path("a b/\u00e4\u4e2d"), "a b/\u00e4\u4e2d"),
                (home / "link", "real"),
                # A root in another one, and one whose name is that of a checkpoint.
                (home / "link" / "inner", "real/inner"),
                ("step-00000007", "step-00000007"),
            ]
        ):
            saved = onecopy.save(root, model, optimizer, step=number, extra=str(root))
            assert saved.is_absolute()
            assert (home / place / f"step-{number:08d}" / "onecopy.json").is_file()
            for given in (root, str(root), saved, f"{root}/step-{number:08d}"):
                assert onecopy.load(given, model, optimizer).extra == str(root)
        huge = 12_345_678_901_234_567_890
        onecopy.save("huge", model, optimizer, step=huge, keep=1)
        assert onecopy.load("huge", model, optimizer).step == huge
    finally:
        os.environ["HOME"] = before[0]
        os.chdir(before[1])


def test_odd_roots(pool: Pool, tmp_path: Path) -> None:
    """`~`, relative ones, links, spaces and other letters, roots in roots."""
    pool.run(1, use_odd_roots, str(tmp_path))


def load_what_was_set_aside(root: str) -> list[Any]:
    """As it is when a run has ended between the two renames of saving a step again."""
    model, optimizer = made()
    saved = onecopy.save(root, model, optimizer, step=5, extra="aside")
    saved.rename(saved.with_name(".step-00000005.old"))
    found = [onecopy.load(one, model, optimizer).extra for one in (root, saved)]
    onecopy.save(root, model, optimizer, step=6)
    found.append(onecopy.load(saved, model, optimizer).extra)
    onecopy.save(root, model, optimizer, step=5, extra="again")
    return [*found, onecopy.load(root, model, optimizer).extra, sorted(os.listdir(root))]


def test_what_was_set_aside_is_found(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(1, load_what_was_set_aside, str(tmp_path))
    assert found == [*["aside"] * 3, "again", ["latest", "step-00000005", "step-00000006"]]


def see_other_checkpoints(folder: str) -> str:
    own = Path(folder) / str(dist.get_rank())
    model, optimizer = made()
    saved = onecopy.save(Path(folder) / "shared", model, optimizer)
    shutil.copytree(saved.parent, own / "run")
    manifest = own / "run" / saved.name / "onecopy.json"
    before = os.getcwd()
    if dist.get_rank() == 1:
        text = json.loads(manifest.read_text())
        text["time"] += 1
        del text["crc32"]
        fresh = onecopy.checkpoint.manifest.Manifest(**{**text, "files": {}})
        manifest.write_bytes(fresh.to_bytes())
    os.chdir(own)
    try:
        return error_of(lambda: onecopy.load("run", model, optimizer))
    finally:
        os.chdir(before)


def test_ranks_that_see_different_checkpoints(pool: Pool, tmp_path: Path) -> None:
    """Each rank would load a part of another run."""
    for message in pool.run(2, see_other_checkpoints, str(tmp_path)):
        assert "rank 1 sees another checkpoint" in message


def save_half_way(root: str) -> list[str]:
    """What is said of a save between two backwards of a step, and of one after it."""
    model = models.build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=2)
    said = []
    for save in (onecopy.save, onecopy.async_save):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with onecopy.no_sync(model):
                models.loss(model, models.batch("gpt", 0, 0)).backward()
            pending = save(root, model, optimizer)
            models.loss(model, models.batch("gpt", 0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            save(root, model, optimizer)
            if hasattr(pending, "wait"):
                pending.wait()
        said += [str(one.message) for one in caught]
    return said


def test_a_save_within_an_accumulation_says_what_is_missing(pool: Pool, tmp_path: Path) -> None:
    """On the first rank; the loop goes on as it was."""
    first, second = pool.run(2, save_half_way, str(tmp_path))
    assert [text.split(":")[0] for text in first] == [
        "onecopy.save in the midst of an accumulation",
        "onecopy.async_save in the midst of an accumulation",
    ]
    assert second == []
