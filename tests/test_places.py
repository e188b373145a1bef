"""Places where tensors wait: what comes back is what was kept, in whatever order."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onecopy.errors import SwapError
from onecopy.memory import swap_files
from onecopy.memory.direct_io import host_memory
from onecopy.memory.places import DevicePlace, DiskPlace, HostPlace, Kept, Place

DEVICE = torch.device("cpu")
MAKE: dict[str, Callable[[Path], Place]] = {
    "device": lambda folder: DevicePlace(DEVICE),
    "host": lambda folder: HostPlace(DEVICE),
    "nvme": lambda folder: DiskPlace(DEVICE, folder, 0),
}


class LateStream:
    """Copies what it is told to when the host waits for it, or values are used, and not before."""

    active: LateStream | None = None

    def __init__(self, device: object = None) -> None:
        self.left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_done = 0

    def wait_stream(self, other: object) -> None:
        """What computes is always done already."""

    def record_event(self) -> LateEvent:
        """Happens with the last copy."""
        return LateEvent(self, self.num_done + len(self.left))

    def run(self, until: int) -> None:
        """Make so many copies in all."""
        while self.num_done < until:
            self.num_done += 1
            target, source = self.left.pop(0)
            target.copy_(source)

    def __enter__(self) -> None:
        LateStream.active = self

    def __exit__(self, *_: object) -> None:
        LateStream.active = None


class LateEvent:
    """Of a late stream."""

    def __init__(self, stream: LateStream, number: int) -> None:
        self.stream, self.number = stream, number

    def synchronize(self) -> None:
        """Wait."""
        self.stream.run(self.number)


class Computing:
    """The stream that computes, at once."""

    def wait_stream(self, other: LateStream) -> None:
        """What is read by then does not change any more; the host goes on."""
        # Those to tensors of their own, not to a part of an arena.
        ups = [
            number
            for number, (target, _) in enumerate(other.left, 1)
            if target.untyped_storage().nbytes() == target.nbytes
        ]
        other.run(other.num_done + max(ups, default=0))
        other.left = [(target, source.clone()) for target, source in other.left]

    def wait_event(self, event: LateEvent) -> None:
        """And what comes before it."""
        event.synchronize()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies beside the computation, as late as can be."""
    copy = torch.Tensor.copy_

    def copy_late(target: torch.Tensor, source: torch.Tensor, **given: bool) -> torch.Tensor:
        if LateStream.active is None:
            return copy(target, source)
        assert given == {"non_blocking": True}, "nobody waits for it here"
        LateStream.active.left.append((target, source))
        return target

    make = HostPlace.__init__

    def with_stream(place: HostPlace, device: torch.device) -> None:
        make(place, device)
        place.stream = LateStream()  # type: ignore[assignment]

    monkeypatch.setattr(HostPlace, "__init__", with_stream)
    monkeypatch.setattr(HostPlace, "_take_chunk", lambda _, num_bytes: host_memory(num_bytes))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: Computing())
    monkeypatch.setattr(torch.Tensor, "copy_", copy_late)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


@pytest.mark.parametrize("name", ["host", "nvme"])
def test_copies_that_are_late(late: None, tmp_path: Path, seed: int, name: str) -> None:
    """As on an accelerator: whoever uses values, or their memory again, has waited for them."""
    test_any_order(tmp_path, seed, name)


@pytest.mark.parametrize("name", MAKE)
def test_any_order(tmp_path: Path, seed: int, name: str) -> None:
    """Kept, asked for, fetched once or twice, dropped while under way."""
    draw = random.Random(seed)
    place = MAKE[name](tmp_path)
    held: list[tuple[Kept, torch.Tensor]] = []
    for _ in range(400):
        action = draw.choice(["keep", "keep", "start", "fetch", "drop"])
        if action == "keep" or not held:
            dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
            values = torch.randn(draw.randrange(1, 5000)).to(dtype)
            held.append((place.keep(values, "a tensor"), values.clone()))
            place.settle()
            values.zero_()
            continue
        number = draw.randrange(len(held))
        kept, want = held[number]
        if action == "start":
            kept.start_fetch()
        elif action == "fetch":
            assert torch.equal(kept.fetch(), want)
        else:
            del held[number]
        del kept
    assert all(torch.equal(kept.fetch(), want) for kept, want in held)


def test_the_last_ones_are_not_read(tmp_path: Path) -> None:
    """Backward wants what was kept last first: those two are in memory."""
    place = DiskPlace(DEVICE, tmp_path, 0)
    held = [place.keep(torch.full((2000,), float(number)), "") for number in range(6)]
    assert [one.source for one in held] == ["nvme"] * 4 + ["host"] * 2
    for number in reversed(range(6)):
        assert (held[number].fetch() == number).all()


def test_host_memory_of_a_disk_is_bounded(tmp_path: Path) -> None:
    """However much is kept, and read one after another."""
    place = DiskPlace(DEVICE, tmp_path, 0)
    values, held = torch.ones(100_000), list[Kept]()
    for number in range(40):
        held.append(place.keep(values, ""))
        assert place._host._arena.used_bytes <= 4 * 102_400 * 4, number
    while held:
        one = held.pop()
        if held:
            held[-1].start_fetch()
        assert torch.equal(one.fetch(), values)
        assert place._host._arena.used_bytes <= 5 * 102_400 * 4, len(held)


def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told of by one of the next calls; what is in memory still is."""
    place = DiskPlace(DEVICE, tmp_path, 0)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(swap_files.DirectFile, "write", fail)
    first = place.keep(torch.ones(10), "first")
    with pytest.raises(SwapError, match="No space left on device"):
        for _ in range(3):
            place.keep(torch.ones(10), "more")
    assert torch.equal(first.fetch(), torch.ones(10))


def test_what_nobody_wants_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is gone before the next tensor is kept."""
    place, written = DiskPlace(DEVICE, tmp_path, 0), []
    write = swap_files.SwapArray.write

    def look(self: swap_files.SwapArray, start: int, source: torch.Tensor) -> swap_files.Transfer:
        written.append(start)
        return write(self, start, source)

    monkeypatch.setattr(swap_files.SwapArray, "write", look)
    for _ in range(5):
        place.keep(torch.ones(10), "")
    assert written == []
