"""A disk that fails: the rank that has it says so by name, and does not train on."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy import Offload
from onecopy.errors import CheckpointError, SwapError
from tests import ending_rank
from tests.pool import Pool, RankError

WIDTH = 48
BUFFER = 1 << 16


def make(path: Path | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Four units, each of several chunks; in memory where there is no path."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tiers = dict.fromkeys(("optimizer", "gradients", "parameters"), "nvme")
    offload = path and Offload(**tiers, path=str(path), buffer_bytes=BUFFER)
    onecopy.shard(model, optimizer, stage=3, offload=offload)
    return model, optimizer


def forward(model: nn.Module, number: int) -> torch.Tensor:
    batch = torch.linspace(-1, 1 + number, 2 * WIDTH).view(2, WIDTH) + dist.get_rank()
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for number in steps:
        loss = forward(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def kill(*_: object) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def ends_early(*_: object) -> int:
    return 0


# Of a disk: what it does to reads, and to writes; None is what it should.
DISKS: dict[str, tuple[Any, Any]] = {
    "cannot be read": (failing(errno.EIO), None),
    "cannot be written": (None, failing(errno.EIO)),
    "is full": (None, failing(errno.ENOSPC)),
    "ends early": (ends_early, None),
    "kills": (None, kill),
}
WORDS = {
    # A write that shares a block with its neighbour reads that block before.
    "cannot be read": "(reading|writing) .*Input/output error",
    "cannot be written": "writing .*Input/output error",
    "is full": "writing .*No space left",
    "ends early": "reading .*before its end",
}


@contextmanager
def disk_that(disk: str, after: int, *, here: bool) -> Iterator[None]:
    """Inside, and on the ranks that are meant, transfers fail after so many that do not."""
    real = os.preadv, os.pwritev
    left = after

    def after_some(replaced: Callable[..., int] | None, real: Callable[..., int]) -> Any:
        def move(handle: int, memory: Sequence[memoryview], offset: int) -> int:
            nonlocal left
            left -= replaced is not None
            return (real if replaced is None or left >= 0 else replaced)(handle, memory, offset)

        return move

    if here:
        os.preadv, os.pwritev = map(after_some, DISKS[disk], real)
    try:
        yield
    finally:
        os.preadv, os.pwritev = real


def meet(path: Path, root: Path, disk: str, where: str, after: int, victim: int) -> None:
    """Train, save, and meet a disk that fails in the first step, or in this part of a later one."""
    here = dist.get_rank() == victim
    model, optimizer = make(path)
    if where != "first step":
        train(model, optimizer, range(2))
    onecopy.save(root, model, optimizer, extra={"step": 0 if where == "first step" else 2})
    with disk_that(disk, after, here=here) if where == "forward" else nullcontext():
        loss = forward(model, 2)
    with disk_that(disk, after, here=here) if where == "backward" else nullcontext():
        loss.backward()
    try:
        with disk_that(disk, after, here=here) if "step" in where else nullcontext():
            optimizer.step()
    except SwapError:
        if dist.get_world_size() == 1:
            # The disk is as it should be again, and what is on it is not.
            with pytest.raises(SwapError, match="of no use since"):
                optimizer.step()
            with pytest.raises(CheckpointError, match="of no use since"):
                onecopy.save(root, model, optimizer)
        raise
    forward(model, 3)


def go_on(root: Path, path: Path) -> tuple[list[float], list[float]]:
    """Losses from the last checkpoint on, and those of a run that nothing happened to."""
    model, optimizer = make(None)
    expected = train(model, optimizer, range(4))
    model, optimizer = make(path)
    extra = onecopy.load(root, model, optimizer).extra
    return train(model, optimizer, range(extra["step"], 4)), expected[extra["step"] :]


CASES = [
    ("cannot be read", "forward", 0),
    ("cannot be read", "backward", 0),
    ("cannot be read", "step", 0),
    ("cannot be read", "step", 9),
    ("ends early", "step", 4),
    ("cannot be written", "backward", 0),
    ("cannot be written", "step", 5),
    ("is full", "first step", 2),
]
# What befalls rank VICTIM of two, by a name of each; see tests/failing_disk_rank.py.
VICTIM = 1
FAULTS = {
    "forward": ("cannot be read", "forward", 0),
    "backward": ("cannot be written", "backward", 0),
    "step": ("cannot be read", "step", 0),
    "first step": ("is full", "first step", 2),
    "killed": ("kills", "step", 2),
}
SLOW = {"backward", "step"}


@pytest.mark.parametrize("disk, where, after", CASES)
def test_a_disk_that_fails(pool: Pool, tmp_path: Path, disk: str, where: str, after: int) -> None:
    """The last checkpoint is good."""
    root, path = tmp_path / "saved", tmp_path / "states"
    path.mkdir()
    arguments = (path, root, disk, where, after, 0)
    outcomes = pool.run(1, meet, *arguments, expect_failures=True, record_warnings=True)
    assert all(isinstance(one, RankError) for one in outcomes), outcomes
    (failed,) = outcomes
    assert failed.is_a(SwapError), failed
    message = failed.message
    assert re.search(WORDS[disk], message), message
    assert "rank 0: " in message and "of unit " in message and ".swap" in message
    for losses, expected in pool.run(1, go_on, root, path):
        assert losses == expected


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[int], Path]]:
    """For each fault the exit codes of two ranks, of which one had it, and their folder."""
    faults = FAULTS if request.config.getoption("all") else set(FAULTS) - SLOW
    folders = {fault: tmp_path_factory.mktemp(fault.replace(" ", "-")) for fault in faults}
    for folder in folders.values():
        (folder / "states").mkdir()
    codes = ending_rank.ended("tests.failing_disk_rank", folders, dict.fromkeys(folders, 2))
    return {fault: (codes[fault], folder) for fault, folder in folders.items()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in FAULTS]
)
def test_the_other_rank_ends_too(
    pool: Pool, ended: dict[str, tuple[list[int], Path]], fault: str
) -> None:
    """Neither hangs; the other says what the first has met, and no files of them stay."""
    codes, folder = ended[fault]
    other, victim = ((folder / f"{rank}.err").read_text() for rank in (0, VICTIM))
    last = other.strip().splitlines()[-1]
    left = list((folder / "states").iterdir())
    if fault == "killed":
        assert codes == [1, -signal.SIGKILL], other
        assert "CommunicationError: the process of rank 1 has ended without a word" in last, other
        assert len(left) == 1, "what a killed process leaves is there until the next one comes"
        for losses, expected in pool.run(2, go_on, folder / "saved", folder / "states"):
            assert losses == expected
        assert left[0] not in (folder / "states").iterdir()
        return
    assert codes == [1, 1], (other, victim)
    words = rf"SwapError: rank 1: {WORDS[FAULTS[fault][0]]}"
    assert re.search(words, victim.strip().splitlines()[-1]), victim
    assert re.search(rf"CommunicationError: rank 1 has ended with an error: {words}", last), other
    assert not left
