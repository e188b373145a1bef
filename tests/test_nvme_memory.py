"""The proof of the NVMe tier: models train whose states are five times the memory that there is.

Ranks with a limit are processes of their own, because it stays with a process. It is RLIMIT_DATA:
memory that a process asks for beyond it is refused. What has only been imported does not count; all
that comes with the model does: gathered units, gradients, activations, buffers, threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.memory_rank import Job, Outcome, train
from tests.pool import RANK_ENVIRONMENT, REPOSITORY, Pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are Linux's")

TIMES = 5
WIDTH = 512
NUMEL = WIDTH * WIDTH + WIDTH  # of a block
STEPS = 2
# Threads take memory for their stacks, which counts in full: in KiB.
STACK = 1024


def jobs(
    store: Path, world: int, num_blocks: int, settings: dict[str, Any], limit: int
) -> list[Job]:
    """One for each rank."""
    return [
        Job(
            rank=rank,
            world=world,
            store=str(store),
            limit=limit,
            settings=settings,
            num_blocks=num_blocks,
            width=WIDTH,
            steps=STEPS,
        )
        for rank in range(world)
    ]


def start(jobs: Sequence[Job]) -> list[Any]:
    """Ranks that train."""
    environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
    return [
        subprocess.Popen(
            [
                *("sh", "-c", f'ulimit -s {STACK}; exec "$@"', "sh"),
                *(sys.executable, "-m", "tests.memory_rank", json.dumps(asdict(job))),
            ],
            env=environment,
            cwd=REPOSITORY,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for job in jobs
    ]


def outcomes(ranks: Sequence[Any]) -> list[Outcome]:
    """What became of ranks that were started."""
    found = []
    for rank in ranks:
        output, errors = rank.communicate(timeout=240)
        assert rank.returncode == 0, errors
        found.append(Outcome(**json.loads(output.splitlines()[-1])))
    return found


def train_without_limit(jobs: Sequence[Job]) -> Outcome:
    """As a rank of the pool, which is there already."""
    return train(jobs[dist.get_rank()])


def on_disk(path: Path) -> dict[str, Any]:
    tiers = dict.fromkeys(("optimizer", "gradients", "parameters"), "nvme")
    return {**tiers, "path": str(path), "buffer_bytes": 1 << 20}


CASES = [
    pytest.param(1, 56, "fp32"),
    pytest.param(1, 56, "bf16", marks=pytest.mark.slow),
    pytest.param(2, 104, "fp32", marks=pytest.mark.slow),
    pytest.param(2, 104, "bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("world, num_blocks, precision", CASES)
def test_states_are_five_times_the_memory(
    pool: Pool, tmp_path: Path, world: int, num_blocks: int, precision: str
) -> None:
    """It trains within the limit, as without one; without states on disk the limit stops it."""
    bytes_each = {"fp32": 16, "bf16": 18}[precision]
    states = num_blocks * NUMEL * bytes_each
    limit = states // TIMES // world
    common: dict[str, Any] = {"precision": precision}
    # With gradients and masters that round as those on disk do.
    plain = common if precision == "fp32" else {**common, "offload": "cpu"}
    folder = tmp_path / "states"
    folder.mkdir()
    with ExitStack() as stack:
        started = []
        ways = {
            "limited": ({**common, "offload": on_disk(folder)}, limit),
            "stopped": (plain, limit),
        }
        for name, (settings, bound) in ways.items():
            ranks = start(jobs(tmp_path / name, world, num_blocks, settings, bound))
            for rank in ranks:
                stack.enter_context(rank)
                stack.callback(rank.kill)
            started.append(ranks)
        free = jobs(tmp_path / "unlimited", world, num_blocks, plain, 0)
        unlimited = pool.run(world, train_without_limit, free)
        limited, stopped = map(outcomes, started)
    assert [one.error for one in limited + unlimited] == [""] * 2 * world
    assert all(one.numel == num_blocks * NUMEL for one in limited + unlimited)
    assert [one.losses for one in limited] == [one.losses for one in unlimited]
    assert all(len(set(one.losses)) == STEPS + 1 for one in limited), "nothing was trained"
    peak = sum(one.peak for one in limited)
    print(f"{states / peak:.1f} times: {states:,} bytes of states, {peak:,} of memory")
    assert states >= TIMES * peak
    # One runs out of memory; the other may hear only that its peer has gone.
    assert all(one.error for one in stopped), stopped
    assert any("memory" in one.error for one in stopped), stopped
    assert not list(folder.iterdir()), "files were left"
