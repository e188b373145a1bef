"""Before the first step: is there room for what leaves the devices, on a node and on its drive?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import onecopy
import onecopy.handle
from onecopy import Offload
from onecopy.config import Config
from onecopy.core import chunked_step, engine
from onecopy.errors import ConfigError
from onecopy.memory.cgroup import read_room
from onecopy.memory.host import free_host_memory, free_space
from onecopy.planner import room, staging
from onecopy.planner.room import Room, shortage
from tests import models
from tests.pool import Pool
from tests.runs import OPTIMIZERS

HOST = Offload(optimizer="host", gradients="host")
GB = 10**9


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# What is there -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        # Of 4 GB 3 are used, of which 1.5 are pages of files.
        ("4000000000", 2_500_000_000),
        ("max", 8_000_000_000),
    ],
)
def test_what_the_group_leaves(tmp_path: Path, limit: str, expected: int) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 7812500 kB\n",
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/job/memory.max": limit,
            "sys/fs/cgroup/job/memory.current": "3000000000",
            "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 1000000000\n"
            "active_file 500000000\n",
        },
    )
    assert free_host_memory(tmp_path) == expected


def test_groups_of_version_1_count_those_below(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n",
            "proc/self/mountinfo": "30 23 0:26 / /cg/memory rw - cgroup cgroup rw,memory\n",
            "cg/memory/job/memory.limit_in_bytes": "1000",
            "cg/memory/job/memory.usage_in_bytes": "900",
            "cg/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n"
            "total_active_file 100\n",
            # The one above is tighter.
            "cg/memory/memory.limit_in_bytes": "2000",
            "cg/memory/memory.usage_in_bytes": "1700",
        },
    )
    assert read_room(tmp_path) == 300
    (tmp_path / "proc/self/cgroup").unlink()
    assert read_room(tmp_path / "nothing") is None
    assert free_host_memory(tmp_path / "nothing") is None


def test_a_folder_that_is_still_to_be_made_lies_on_a_drive(tmp_path: Path) -> None:
    assert free_space(tmp_path / "a/b/c") is not None
    drive, free = free_space(tmp_path) or (0, 0)
    assert drive == tmp_path.stat().st_dev
    assert free > 0


# Who shares what ----------------------------------------------------------------------------------


def rank(number: int, node: str, host: int, nvme: int = 0) -> Room:
    """Needs so many GB, where each node has 10 of memory, and 20 on its drive."""
    return Room(
        rank=number,
        node=node,
        host=10 * GB,
        given_up=0,
        drive=(7, 20 * GB),
        needs={3: (host * GB, nvme * GB)},
    )


NVME = Config(stage=3, offload="nvme:/swap")


@pytest.mark.parametrize(
    ("rooms", "words"),
    [
        ([rank(0, "a", 5), rank(1, "a", 5), rank(2, "b", 10)], None),
        (
            [rank(0, "a", 5), rank(1, "b", 6), rank(2, "b", 5)],
            ["host memory", "(1, 2)", "need 11.0 GB", "10.0 GB can be had", "buffer_bytes"],
        ),
        ([rank(0, "a", 1, 20), rank(1, "b", 1, 20)], None),
        (
            [rank(0, "a", 1, 11), rank(1, "a", 1, 10)],
            ["drive of /swap", "(0, 1)", "need 21.0 GB", "20.0 GB", 'gradients="host"'],
        ),
        ([replace(rank(0, "a", 12), given_up=2 * GB)], None),
        ([replace(rank(0, "a", 12), host=None, drive=None)], None),
    ],
)
def test_ranks_of_a_node_share_what_it_has(rooms: list[Room], words: list[str] | None) -> None:
    text = shortage(rooms, 3, NVME)
    assert (text is None) == (words is None), text
    assert all(word in (text or "") for word in words or [])


def test_remedies_are_those_of_the_tier() -> None:
    text = shortage([rank(0, "a", 11)], 3, Config(stage=3, offload="cpu"))
    assert text is not None
    assert 'offload="nvme:/path"' in text
    assert "rank 0 need 11.0 GB" in text


# At shard -----------------------------------------------------------------------------------------


def sharded_with(
    memory: int, space: int, stage: int | str, offload: Offload | str
) -> tuple[str, bool, int | str]:
    """What shard says where so much is there, whether the model is as it was, and the stage."""
    model = models.build("gpt")
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with (
        mock.patch.object(room, "free_host_memory", lambda: memory),
        mock.patch.object(room, "free_space", lambda _: (1, space)),
    ):
        settings = {"memory": "1GB"} if stage == "auto" else {"node_size": 1}
        try:
            onecopy.shard(
                model, OPTIMIZERS["adamw"](model), stage=stage, offload=offload, **settings
            )
        except ConfigError as error:
            is_plain = onecopy.handle.find(model) is None
            same = all(torch.equal(before[name], one) for name, one in model.named_parameters())
            return str(error), is_plain and same, 0
    return "", False, onecopy.config_of(model).stage


@pytest.mark.parametrize("asked", [3, "mics"])
def test_shard_refuses_before_anything_has_changed(pool: Pool, asked: int | str) -> None:
    for text, is_plain, _ in pool.run(2, sharded_with, 1000, 0, asked, HOST):
        assert "offload: host memory is too small" in text
        assert "the ranks of its node (0, 1)" in text
        assert is_plain
    for text, _, stage in pool.run(2, sharded_with, GB, 0, asked, HOST):
        assert (text, stage) == ("", asked)


def test_auto_takes_a_stage_for_which_there_is_room(pool: Pool) -> None:
    """On one rank nothing is cut; on two, stage 0 has every state twice."""
    for text, is_plain, _ in pool.run(2, sharded_with, 1000, 0, "auto", HOST):
        assert 'stage="auto": offload: host memory is too small' in text
        assert is_plain
    for _, _, stage in pool.run(2, sharded_with, GB, 0, "auto", HOST):
        assert stage == 2


def reserved(path: str, stage: int, kind: str, settings: dict[str, str]) -> tuple[int, int]:
    """Bytes that were said to be needed on the drive, and those that a rank reserved."""
    found: list[Room] = []

    def keep(*arguments: object) -> Room | None:
        seen = room_of(*arguments)  # type: ignore[arg-type]
        found.extend([seen] if seen is not None else [])
        return seen

    room_of = room.room_of
    model = models.build("gpt")
    optimizer = OPTIMIZERS[kind](model)
    offload = Offload(optimizer="nvme", path=path, **settings)
    with mock.patch.object(room, "room_of", keep):
        onecopy.shard(model, optimizer, stage=stage, precision="bf16", offload=offload)
    for step in range(2):
        models.loss(model, models.batch("gpt", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    units = onecopy.handle.of(model).engine.units
    disk = next(unit.slice.disk for unit in units if unit.slice.disk is not None)
    return found[0].needs[stage][1], disk.files.lane.folder.num_bytes


@pytest.mark.parametrize(
    ("world", "stage", "kind", "settings"),
    [
        (2, 3, "adamw", {"gradients": "nvme", "parameters": "nvme"}),
        (3, 2, "adamw", {"gradients": "nvme"}),
        (1, 0, "momentum", {"gradients": "host"}),
        (2, 3, "sgd", {"gradients": "host", "parameters": "host"}),
        (2, 1, "adamw", {"gradients": "device"}),
    ],
)
def test_the_need_is_what_is_reserved(
    pool: Pool, tmp_path: Path, world: int, stage: int, kind: str, settings: dict[str, str]
) -> None:
    for need, taken in pool.run(world, reserved, str(tmp_path), stage, kind, settings):
        assert need == taken


def test_buffers_are_those_of_the_runtime() -> None:
    """The planner's file knows no torch, so that `onecopy plan` answers at once."""
    assert staging.CHUNKS == chunked_step.NUM_SLOTS
    assert staging.READ_AHEAD == engine.FETCHED_AHEAD
    assert staging.PAGE == chunked_step.ALIGNMENT
