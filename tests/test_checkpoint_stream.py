"""The file that a rank writes: all bytes arrive, in order, and each item has its checksum."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.serialization import get_crc32_options

from onecopy.checkpoint.files import Writer
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.plan import SaveRanges
from onecopy.checkpoint.ranges import whole_tensor
from onecopy.checkpoint.stream import BLOCK_BYTES, SENT_TOGETHER_BYTES, SMALL_BYTES, NewFile
from onecopy.errors import CheckpointError

SIZES = (
    *(0, 1, 63, SMALL_BYTES - 1, SMALL_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1),
    SENT_TOGETHER_BYTES + 5,
)


def _write(path: Path, parts: list[bytes]) -> list[int]:
    """Write all parts; the checksum of each."""
    checksums = []
    with NewFile(path) as file:
        for part in parts:
            before = file.tell()
            # torch.save's views end with the call, so nothing may keep them.
            passing = bytearray(part)
            assert file.write(memoryview(passing)) == len(part)
            passing[:] = bytes(len(part))
            assert file.tell() == before + len(part)
            checksums.append(file.take_checksum())
        file.finish()
    return checksums


def test_all_bytes_arrive_in_order(tmp_path: Path, seed: int) -> None:
    """Small parts wait for others, large ones do not, and none overtakes another."""
    rng = random.Random(seed)
    parts = [rng.randbytes(size) for size in (*rng.choices(SIZES, k=30), *SIZES)]
    checksums = _write(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert checksums == [zlib.crc32(part) for part in parts]


def test_a_system_that_writes_less_than_it_is_given(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given the rest."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data)[:100_003]))
    parts = [random.Random(seed).randbytes(size) for size in SIZES]
    _write(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_without_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system takes none, all is written all the same."""

    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    data = bytes(2 * SENT_TOGETHER_BYTES)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    _write(tmp_path / "refused", [data])
    monkeypatch.delattr(os, "posix_fadvise")
    _write(tmp_path / "absent", [data])
    assert (tmp_path / "refused").read_bytes() == (tmp_path / "absent").read_bytes() == data


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """Whatever it is."""
    (tmp_path / "file").write_text("something")
    with pytest.raises(FileExistsError):
        NewFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "something"


def test_the_checksums_of_torch_save_are_its_users_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the disk is full."""
    seen = []

    def full(handle: int, data: memoryview) -> int:
        seen.append(get_crc32_options())
        raise OSError(28, "No space left on device")

    manifest = Manifest(
        step=0, time=0.0, version="", torch_version="", world_size=1, models={}, optimizers={}
    )
    planner = SaveRanges([whole_tensor("x", torch.ones(BLOCK_BYTES))], {}, {})
    plan = planner.create_local_plan()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        Writer(tmp_path, manifest).write_data(
            SavePlan(plan.items, storage_data="__0_0.distcp"), planner
        )
    assert seen[0] is False
    assert get_crc32_options() is True
