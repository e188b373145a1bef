"""What travels between ranks, how fast, and whether it arrives as it was sent.

The transfers are those of training, by the same code. A gather and a reduce are of one unit. A
refresh is several gathers under way at once, as after a step at stages 1 and 2.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from onecopy.comm.collectives import Collectives
from onecopy.comm.groups import Group, has_native_collectives
from onecopy.comm.neighbours import Neighbours
from onecopy.comm.nodes import make_groups
from onecopy.comm.quantized import transports_of
from onecopy.comm.transport import Division
from onecopy.doctor.results import SIZES, Transfer
from onecopy.events import Events

__all__ = ["VERBS", "copy_speed", "measure"]

REFRESHED_UNITS = 4
VERB_SECONDS = 0.25  # in which a transfer is repeated
LONGEST_SECONDS = 3.0  # a single transfer that is expected to take longer is not tried
MOST_REPEATS = 20
COPIED_BYTES = 64 << 20
# The last number that a model can have, so that no model of the test takes it.
MODEL_NUMBER = (1 << 14) - 1
PERIOD = 251  # values repeat after it; a prime, so that no shifted slice looks right


def measure(
    world: Group, device: torch.device, say: Callable[[str], None], neighbours: Neighbours | None
) -> Iterator[Transfer]:
    """Each verb at each size, in an order that all ranks keep.

    Args:
        say: told what comes next.
        neighbours: as `meet_neighbours` has found them.
    """
    native = has_native_collectives(world, device)
    groups = make_groups(world, "world")
    ways = Collectives(
        groups,
        key="doctor",
        model_number=MODEL_NUMBER,
        transports=transports_of(groups, native=native, neighbours=neighbours),
        events=Events(),
    )
    try:
        slowest = dict.fromkeys(VERBS, 0.0)
        before = SIZES[0]
        for num_bytes in SIZES:
            numel = num_bytes // 4 // world.size // REFRESHED_UNITS * world.size * REFRESHED_UNITS
            for name in VERBS:
                if slowest[name] * num_bytes / before > LONGEST_SECONDS:
                    continue
                say(f"{name} of {num_bytes:,} bytes")
                transfer = _repeat(name, ways, numel, device)
                slowest[name] = transfer.seconds
                yield transfer
            before = num_bytes
    finally:
        ways.agreement.close()


def _repeat(name: str, ways: Collectives, numel: int, device: torch.device) -> Transfer:
    """One that warms up and says how often, then the others; the first and the last are checked."""
    world = ways.groups.world
    verb = VERBS[name](ways, numel, device)
    first, is_exact = _timed(verb, device), verb.is_exact()
    longest = max(ways.share(first, name, device))
    repeats = max(1, min(MOST_REPEATS, int(VERB_SECONDS / max(longest, 1e-6))))
    seconds = []
    for number in range(repeats):
        if number == repeats - 1:
            verb.forget()
        seconds.append(_timed(verb, device))
    return Transfer(
        verb=name,
        num_bytes=4 * numel,
        sent_bytes=4 * numel // world.size * (world.size - 1),
        seconds=max(ways.share(statistics.median(seconds), name, device)),
        is_exact=is_exact and verb.is_exact(),
    )


def _timed(verb: Verb, device: torch.device) -> float:
    begin = _start(device)
    verb.run()
    return _end(device, begin)


class Verb(Protocol):
    """One verb at one size: `run` it, and ask whether the values are right since `forget`."""

    def run(self) -> None: ...

    def forget(self) -> None: ...

    def is_exact(self) -> bool: ...


class _Gathers:
    """The gathers of some units, under way at the same time."""

    UNITS = 1

    def __init__(self, ways: Collectives, numel: int, device: torch.device) -> None:
        world, self._ways = ways.groups.world, ways
        self._expected = _values(numel // self.UNITS, device)
        self._numels = (self._expected.numel() // world.size,) * world.size
        self._own = self._expected.split_with_sizes(self._numels)[world.rank].clone()
        self._flats = [torch.zeros_like(self._expected) for _ in range(self.UNITS)]

    def run(self) -> None:
        pending = [
            self._ways.gather(flat, self._own, self._numels, unit)
            for unit, flat in enumerate(self._flats)
        ]
        for one in pending:
            one.finish()

    def forget(self) -> None:
        for flat in self._flats:
            flat.zero_()

    def is_exact(self) -> bool:
        return all(torch.equal(flat, self._expected) for flat in self._flats)


class _Refreshes(_Gathers):
    UNITS = REFRESHED_UNITS


class _Reduces:
    """Rank r brings r + 1 times the values; small whole numbers have exact sums in any order."""

    def __init__(self, ways: Collectives, numel: int, device: torch.device) -> None:
        world, self._ways = ways.groups.world, ways
        values = _values(numel, device)
        self._division = Division((numel // world.size,) * world.size)
        own = values.split_with_sizes(list(self._division.numels))[world.rank]
        total = own * (world.size * (world.size + 1) // 2)
        self._expected = total * (1.0 / world.size)
        self._buffer = values.mul_(world.rank + 1)
        self._mean = torch.empty(0)

    def run(self) -> None:
        self._mean = self._ways.reduce(self._buffer, self._division, torch.float32, 0).finish()

    def forget(self) -> None:
        self._mean = torch.empty(0)

    def is_exact(self) -> bool:
        return torch.equal(self._mean, self._expected)


VERBS: dict[str, Callable[[Collectives, int, torch.device], Verb]] = {
    "gather": _Gathers,
    "reduce": _Reduces,
    "refresh": _Refreshes,
}


def _values(numel: int, device: torch.device) -> torch.Tensor:
    """(numel,) fp32"""
    return torch.arange(numel, device=device, dtype=torch.int32).remainder_(PERIOD).float()


def copy_speed(device: torch.device) -> float:
    """Bytes that are copied in a second from one place to another, where the tensors lie."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(5):
        begin = _start(device)
        target.copy_(source)
        seconds.append(_end(device, begin))
    return COPIED_BYTES / statistics.median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _start(device: torch.device) -> float:
    _synchronize(device)
    return time.perf_counter()


def _end(device: torch.device, begin: float) -> float:
    _synchronize(device)
    return time.perf_counter() - begin
