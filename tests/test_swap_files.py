"""Swap files: ranges against a copy in memory, disks that fail, and folders whose owners die."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.errors import SwapError
from onecopy.memory import direct_io, private_folder, swap_files
from onecopy.memory.swap_files import SwapArray, SwapFolder, Transfer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no preadv")

BLOCK = direct_io.ALIGNMENT
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
# Elements: around blocks, and beyond a segment.
NUMELS = (1, 5, 1023, 1024, 1025, 4096, 3_000_001)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SwapFolder]:
    one = SwapFolder(tmp_path, 3)
    yield one
    one.close()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT."""
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **names: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more, **names)

    monkeypatch.setattr(os, "open", refuse)
    swap_files._say_buffered.cache_clear()


def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 100, (numel,)).to(dtype)


def placed(folder: SwapFolder, numel: int, dtype: torch.dtype, shift: int) -> torch.Tensor:
    """(numel,) `shift` elements behind a page, in memory that is 7 everywhere."""
    memory = folder.buffer((numel + shift + 9) * dtype.itemsize).view(dtype).fill_(7)
    return memory[shift : shift + numel]


def around(tensor: torch.Tensor) -> torch.Tensor:
    """The rest of the memory in which `placed` has put it."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    begin = tensor.storage_offset()
    return torch.cat([whole[:begin], whole[begin + tensor.numel() :]])


def any_range(chance: random.Random, numel: int) -> tuple[int, int]:
    start = chance.choice([0, chance.randrange(numel), numel // 2 // BLOCK * BLOCK])
    length = chance.choice([1, 10, 2048, 5000, numel])
    return start, chance.choice([numel, min(numel, start + length)])


# Ranges ---------------------------------------------------------------------------------------


def check_ranges(folder: SwapFolder, chance: random.Random, rounds: int) -> None:
    arrays: dict[SwapArray, torch.Tensor] = {}
    for number, numel in enumerate(NUMELS):
        for dtype in DTYPES:
            array = folder.array(f"kind of {dtype}", f"unit {number}", numel, dtype)
            arrays[array] = values(numel, dtype)
            array.write(0, arrays[array]).wait()
    for _ in range(rounds):
        array, copy = chance.choice(list(arrays.items()))
        start, stop = any_range(chance, array.numel)
        tensor = placed(folder, stop - start, array.dtype, chance.choice([0, 0, 1, 3]))
        if chance.random() < 0.5:
            copy[start:stop] = tensor.copy_(values(stop - start, array.dtype))
            array.write(start, tensor).wait()
        else:
            array.read(start, tensor).wait()
            assert torch.equal(tensor, copy[start:stop]), f"{array}: [{start}, {stop})"
            assert (around(tensor) == 7).all(), f"{array}: [{start}, {stop}) went beyond its end"
    for array, copy in arrays.items():
        whole = torch.empty_like(copy)
        array.read(0, whole).wait()
        assert torch.equal(whole, copy), f"{array}: a write to a neighbour changed it"


def test_any_range_of_any_tensor(folder: SwapFolder, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.option.seed
    check_ranges(folder, random.Random(seed), 3000 if pytestconfig.option.all else 300)


@pytest.mark.usefixtures("refused")
def test_a_file_system_without_direct_io(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    with caplog.at_level(logging.WARNING, "onecopy"):
        folders = [SwapFolder(tmp_path, rank) for rank in range(2)]
    assert [one.message for one in caplog.records if "O_DIRECT" in one.message][1:] == []
    assert "go through the cache" in caplog.text
    check_ranges(folders[0], random.Random(pytestconfig.option.seed), 100)
    for one in folders:
        one.close()


def test_a_file_system_that_refuses_the_first_direct_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, handles = os.pwritev, []

    def refuse(handle: int, memory: Sequence[memoryview], offset: int) -> int:
        handles.append(handle)
        if len(handles) == 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(handle, memory, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    swap_files._say_buffered.cache_clear()
    folder = SwapFolder(tmp_path, 0)
    assert "go through the cache" in caplog.text
    array = folder.array("master", "unit", 5000, torch.float32)
    array.write(3, torch.arange(100.0)).wait()
    found = torch.empty(100)
    array.read(3, found).wait()
    assert torch.equal(found, torch.arange(100.0))
    folder.close()


def test_many_transfers_at_once(folder: SwapFolder) -> None:
    """Ranges that meet inside blocks: what one writes, no other may undo."""
    array = folder.array("master", "unit", 50_000, torch.float32)
    copy = torch.arange(50_000.0)
    cuts = sorted({0, 50_000, *random.Random(1).sample(range(50_000), 300)})
    for _ in range(3):
        copy += 1
        writes = [
            array.write(low, copy[low:high].clone()) for low, high in itertools.pairwise(cuts)
        ]
        for one in writes:
            one.wait()
        found = torch.empty(50_000)
        array.read(0, found).wait()
        assert torch.equal(found, copy)


def test_a_transfer_keeps_its_memory_until_it_ends_and_no_longer(folder: SwapFolder) -> None:
    array = folder.array("master", "unit", 1 << 20, torch.float32)
    source = torch.full((1 << 20,), 3.0)
    held = sys.getrefcount(source)
    transfer = array.write(0, source)
    transfer.wait()
    assert sys.getrefcount(source) == held
    assert transfer.num_bytes == 4 << 20
    assert transfer.seconds > 0
    del source, transfer
    # Nobody else refers to the sources, and transfers of one folder may overtake one another.
    arrays = [folder.array("master", f"unit {one}", 1 << 20, torch.float32) for one in range(3)]
    writes = [one.write(0, torch.full((1 << 20,), float(i))) for i, one in enumerate(arrays)]
    for value, (array, write) in enumerate(zip(arrays, writes, strict=True)):
        write.wait()
        found = torch.empty(1 << 20)
        array.read(0, found).wait()
        assert found.unique().tolist() == [value]


def test_buffers_lie_on_pages(folder: SwapFolder) -> None:
    for num_bytes in (1, BLOCK, 3 * BLOCK + 1, 3 << 20):
        memory = folder.buffer(num_bytes)
        assert memory.dtype == torch.uint8
        assert memory.numel() == direct_io.aligned(num_bytes)
        assert memory.data_ptr() % BLOCK == 0
    assert folder.buffer(0).numel() == 0


def test_nothing_is_copied_where_all_is_aligned(
    folder: SwapFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "memmove", None)
    array = folder.array("master", "unit", 3 << 20, torch.float32)
    memory = folder.buffer(array.nbytes).view(torch.float32).fill_(5)
    array.write(0, memory).wait()
    array.read(BLOCK, memory[BLOCK:]).wait()


def test_space_is_reserved(folder: SwapFolder, tmp_path: Path) -> None:
    folder.array("master", "a", 1_000_000, torch.float32)
    folder.array("master", "b", 1, torch.float32)
    folder.array("exp/avg", "b", 0, torch.float32)
    assert folder.num_bytes == direct_io.aligned(4_000_000) + BLOCK
    files = sorted(tmp_path.glob("*/*.swap"))
    assert [one.name for one in files] == ["0-master.swap", "1-exp_avg.swap"]
    assert files[0].stat().st_blocks * 512 >= folder.num_bytes
    empty = folder.array("master", "c", 0, torch.float32)
    empty.read(0, torch.empty(0)).wait()


# Disks that fail ------------------------------------------------------------------------------


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def short(real: Callable[..., int], num_bytes: int) -> Callable[..., int]:
    """At most so many bytes each time."""

    def move(handle: int, memory: Sequence[memoryview], offset: int) -> int:
        return real(handle, [memory[0][:num_bytes]], offset)

    return move


@pytest.mark.parametrize("num_bytes", [BLOCK, 5 * BLOCK])
def test_short_transfers_go_on(
    folder: SwapFolder, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    array = folder.array("master", "unit", 50_000, torch.float32)
    monkeypatch.setattr(os, "preadv", short(os.preadv, num_bytes))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev, num_bytes))
    array.write(7, torch.arange(40_000.0)).wait()
    found = torch.empty(40_000)
    array.read(7, found).wait()
    assert torch.equal(found, torch.arange(40_000.0))


@pytest.mark.parametrize(
    ("function", "fault", "words"),
    [
        ("preadv", failing(errno.EIO), "Input/output error"),
        ("preadv", lambda *_: 0, "ended 40960 bytes before its end"),
        ("pwritev", failing(errno.ENOSPC), "make room on the disk"),
        ("pwritev", failing(errno.EIO), "look at the disk"),
        ("pwritev", lambda *_: 100, "before its end"),
        ("preadv", failing(errno.ESTALE), "see why the folder has gone"),
    ],
)
def test_faults_name_file_unit_rank_and_remedy(
    folder: SwapFolder,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    fault: Callable[..., int],
    words: str,
) -> None:
    array = folder.array("exp_avg", "layers.3", 10_240, torch.float32)
    monkeypatch.setattr(os, function, fault)
    move = array.read if function == "preadv" else array.write
    transfer = move(0, folder.buffer(40_960).view(torch.float32))
    for _ in range(2):
        with pytest.raises(SwapError, match=words) as failed:
            transfer.wait()
    for word in (
        "rank 3",
        "0-exp_avg.swap",
        "exp_avg of unit layers.3",
        "load the last checkpoint",
    ):
        assert word in str(failed.value)


def test_a_disk_that_does_not_answer_is_named(
    folder: SwapFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    array = folder.array("exp_avg", "layers.3", 1024, torch.float32)
    real, is_said = os.preadv, threading.Event()

    def late(handle: int, memory: Sequence[memoryview], offset: int) -> int:
        is_said.wait(120)
        return real(handle, memory, offset)

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_said.set()

    said = Said()
    swap_files.LOGGER.addHandler(said)
    monkeypatch.setattr(swap_files, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(os, "preadv", late)
    array.read(0, torch.empty(1024)).wait()
    swap_files.LOGGER.removeHandler(said)
    assert "exp_avg of unit layers.3" in caplog.text
    assert "dmesg" in caplog.text


def test_the_others_go_on_when_one_fails(
    folder: SwapFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [folder.array(f"kind {one}", "unit", 4 << 20, torch.float32) for one in range(3)]
    real = os.pwritev

    def fail(handle: int, memory: Sequence[memoryview], offset: int) -> int:
        # The second segment of the second file.
        if offset and memory[0][0] == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(handle, memory, offset)

    monkeypatch.setattr(os, "pwritev", fail)
    sources = [torch.full((16 << 20,), one, dtype=torch.uint8) for one in range(3)]
    writes = [
        array.write(0, one.view(torch.float32)) for array, one in zip(arrays, sources, strict=True)
    ]
    assert [ends_well(one) for one in writes] == [True, False, True]
    found = torch.empty(4 << 20)
    arrays[2].read(0, found).wait()
    assert torch.equal(found.view(torch.uint8), sources[2])


def ends_well(transfer: Transfer) -> bool:
    try:
        transfer.wait()
    except SwapError:
        return False
    return True


def test_no_room(folder: SwapFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder.array("master", "first", 1024, torch.float32)
    with pytest.raises(SwapError) as failed:
        folder.array("master", "blocks.1", 1 << 50, torch.float32)
    words = ("rank 3", "4,503,599,627,370,496 bytes", "blocks.1", "bytes are free", str(tmp_path))
    for word in words:
        assert word in str(failed.value)
    assert folder.num_bytes == BLOCK
    assert next(tmp_path.glob("*/*.swap")).stat().st_size == BLOCK
    # A file system that cannot reserve is asked how much is free.
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    with pytest.raises(SwapError, match="No space left"):
        folder.array("master", "blocks.1", 1 << 50, torch.float32)
    array = folder.array("master", "blocks.2", 1024, torch.float32)
    array.write(0, torch.ones(1024)).wait()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount here")
    try:
        folder = SwapFolder(tmp_path, 0)
        array = folder.array("master", "a", 500_000, torch.float32)
        with pytest.raises(SwapError, match="No space left"):
            folder.array("exp_avg", "a", 1_000_000, torch.float32)
        array.write(0, torch.ones(500_000)).wait()
        folder.array("exp_avg", "a", 400_000, torch.float32)
        folder.close()
        assert list(tmp_path.iterdir()) == []
        del array
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"rank 1 cannot keep states in .*missing: No such file"):
        SwapFolder(tmp_path / "missing", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(SwapError, match="Not a directory"):
        SwapFolder(tmp_path / "file", 0)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SwapError, match="Permission denied"):
        SwapFolder(tmp_path, 0)
    tmp_path.chmod(0o700)


def test_a_folder_that_vanishes(folder: SwapFolder, tmp_path: Path) -> None:
    """What is open stays there; what would have to be made is an error."""
    array = folder.array("master", "a", 1024, torch.float32)
    for path in tmp_path.glob("*/*"):
        path.unlink()
    next(tmp_path.iterdir()).rmdir()
    array.write(0, torch.ones(1024)).wait()
    with pytest.raises(SwapError, match=r"exp_avg of unit a.*the folder is gone"):
        folder.array("exp_avg", "a", 1024, torch.float32)


def test_after_close(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path, 0)
    array = folder.array("master", "a", 8 << 20, torch.float32)
    source = torch.ones(8 << 20)
    writes = [array.write(0, source) for _ in range(3)]
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []
    for one in writes:
        one.wait()
    with pytest.raises(SwapError, match="closed"):
        array.read(0, source)
    with pytest.raises(SwapError, match="closed"):
        folder.array("master", "b", 1, torch.float32)


def test_files_and_threads_end_with_the_folder(tmp_path: Path) -> None:
    def held() -> int:
        return sum(
            os.path.realpath(f"/proc/self/fd/{one}").startswith(str(tmp_path))
            for one in os.listdir("/proc/self/fd")
        )

    folder = SwapFolder(tmp_path, 0)
    array = folder.array("master", "a", 1024, torch.float32)
    array.write(0, torch.ones(1024)).wait()
    threads = [one for one in threading.enumerate() if one.name.startswith("onecopy-swap")]
    assert held() == 2
    del array
    folder.close()
    for one in threads:
        one.join(60)
    assert held() == 0


# Folders whose owners die ---------------------------------------------------------------------


# Without torch, whose import takes seconds.
OWN = """
import os, sys
from pathlib import Path
from onecopy.memory.private_folder import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1]), int(sys.argv[2]))
(folder.path / "0-master.swap").write_bytes(b"1" * 4096)
"""
# A child that outlives its parent does not keep the parent's folder.
FORK = """
begun, begin = os.pipe()
if os.fork() == 0:
    os.write(begin, b"1")
    sys.stdin.read()
    os._exit(0)
os.read(begun, 1)
"""
WAIT = "print('open', flush=True)\nsys.stdin.read()\n"

WRITE = """
import sys, torch
from pathlib import Path
from onecopy.memory.swap_files import SwapFolder
folder = SwapFolder(Path(sys.argv[1]), int(sys.argv[2]))
array = folder.array("master", "a", 1 << 23, torch.float32)
array.write(0, torch.ones(1 << 23))
raise SystemExit(7)
"""


def start(path: Path, rank: int, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, str(path), str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def is_open(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == "open\n"


def end(process: subprocess.Popen[str]) -> int:
    process.communicate("", timeout=120)
    return process.returncode


def ranks_in(path: Path) -> list[int]:
    return sorted(
        int(one.name.split("-")[-2].removeprefix("rank")) for one in path.glob("onecopy-swap-*")
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_owners_that_die_live_and_start_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    killed = start(tmp_path, 0, OWN + FORK + WAIT)
    living = start(tmp_path, 1, OWN + WAIT)
    assert is_open(killed)
    assert is_open(living)
    killed.send_signal(signal.SIGKILL)
    killed.wait(120)
    assert ranks_in(tmp_path) == [0, 1]
    # They meet the dead one's folder, and each other's in the making.
    starting = [start(tmp_path, rank, OWN + WAIT) for rank in range(2, 8)]
    assert all(is_open(one) for one in starting)
    assert ranks_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert len(list(tmp_path.glob("*/0-master.swap"))) == 7
    assert [end(one) for one in (living, *starting)] == [0] * 7
    # They went with their processes; what is not ours is there.
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]
    end(killed)


def test_a_write_under_way_does_not_keep_a_process(tmp_path: Path) -> None:
    assert end(start(tmp_path, 0, WRITE)) == 7
    assert list(tmp_path.iterdir()) == []


def leave(path: Path, host: str) -> Path:
    """The folder of a process that was killed."""
    folder = path / f"onecopy-swap-{host}-1-rank0-abc"
    folder.mkdir()
    for name in ("lock", "0-master.swap"):
        (folder / name).write_text("")
    return folder


def test_only_what_is_ours_is_swept(tmp_path: Path) -> None:
    host = private_folder._host()
    dead = leave(tmp_path, host)
    elsewhere = leave(tmp_path, "another-host")
    old = leave(tmp_path, "old-host")
    for one in (*old.iterdir(), old):
        os.utime(one, (0, 0))
    extended = leave(tmp_path, host + "-2")
    for one in (*extended.iterdir(), extended):
        os.utime(one, (0, 0))
    (extended / "notes.txt").write_text("")
    os.utime(extended / "notes.txt", (0, 0))
    os.utime(extended, (0, 0))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "0-master.swap").write_text("")
    link = tmp_path / f"onecopy-swap-{host}-2-rank0-abc"
    link.symlink_to(tmp_path / "target")
    (tmp_path / "onecopy-swap-notes").mkdir()
    SwapFolder(tmp_path, 0).close()
    assert not dead.exists()
    assert not old.exists()
    assert (elsewhere / "0-master.swap").exists()
    assert [one.name for one in extended.iterdir()] == ["notes.txt"]
    assert (tmp_path / "target" / "0-master.swap").exists()
    assert (tmp_path / "onecopy-swap-notes").exists()


def test_a_folder_swept_in_the_moment_of_its_making_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = private_folder._make, []

    def make(parent: Path, rank: int) -> Path:
        made.append(real(parent, rank))
        if len(made) == 1:
            private_folder._sweep(parent)
        return made[-1]

    monkeypatch.setattr(private_folder, "_make", make)
    folder = SwapFolder(tmp_path, 0)
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == [made[1]]
    folder.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_neither_deletes_nor_hangs(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path, 0)
    array = folder.array("master", "a", 1024, torch.float32)
    array.write(0, torch.ones(1024)).wait()
    child = os.fork()
    if not child:
        try:
            array.read(0, torch.empty(1024))
        except SwapError:
            folder.close()
            os._exit(5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    found = torch.empty(1024)
    array.read(0, found).wait()
    assert torch.equal(found, torch.ones(1024))
    folder.close()
