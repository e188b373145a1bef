"""The recorded order of use: what it foresees, when it is left, and how far prefetch goes."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

import onecopy
import onecopy.events
from onecopy.core.schedule import MOST_SEGMENTS, Schedule
from onecopy.core.unit import Unit
from tests.pool import Pool
from tests.runs import OPTIMIZERS


def _units(*names: str) -> list[Unit]:
    """Stand-ins: a schedule only compares and names units."""
    units = []
    for name in names:
        unit = object.__new__(Unit)
        unit.name = name
        units.append(unit)
    return units


def _run(schedule: Schedule, key: object, units: list[Unit]) -> list[bool]:
    schedule.begin(key)
    foreseen = [schedule.use(unit) for unit in units]
    schedule.end()
    return foreseen


def test_recorded_once_then_foreseen() -> None:
    """The first time nothing is foreseen, then everything, for each key by itself."""
    a, b = _units("a", "b")
    schedule = Schedule()
    assert _run(schedule, "forward", [a, b, a]) == [False] * 3
    assert _run(schedule, "forward", [a, b, a]) == [True] * 3
    assert _run(schedule, "evaluation", [b]) == [False]
    assert schedule.knows("evaluation")
    schedule.begin("forward")
    assert tuple(schedule.upcoming()) == (a, b, a)
    schedule.use(a)
    assert tuple(schedule.upcoming()) == (b, a)


def test_a_changed_order_is_recorded_anew_and_said_once() -> None:
    """From the first difference on nothing is foreseen; the next time all of it is."""
    a, b, c = _units("a", "b", "c")
    schedule = Schedule()
    _run(schedule, "forward", [a, b, c])
    with pytest.warns(UserWarning, match="expected b, used c"):
        assert _run(schedule, "forward", [a, c, b]) == [True, False, False]
    assert _run(schedule, "forward", [a, c, b]) == [True] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _run(schedule, "forward", [b]) == [False]
        # One that ends early, or goes on, is another order too.
        assert _run(schedule, "forward", [b, a]) == [True, False]
        assert _run(schedule, "forward", [b]) == [True]
        assert _run(schedule, "forward", [b]) == [True]


def test_what_failed_is_not_recorded() -> None:
    """An exception cuts a segment short: the order that was known stays known."""
    a, b = _units("a", "b")
    schedule = Schedule()
    _run(schedule, "forward", [a, b])
    schedule.begin("forward")
    schedule.use(a)
    schedule.end(failed=True)
    assert _run(schedule, "forward", [a, b]) == [True, True]


def test_memory_is_bounded() -> None:
    """The least recently used order is forgotten."""
    (a,) = _units("a")
    schedule = Schedule()
    for key in range(MOST_SEGMENTS + 1):
        _run(schedule, key, [a])
    assert not schedule.knows(0)
    assert schedule.knows(1)


class Deep(nn.Module):
    """Six blocks of 4,160 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def ahead_of_use(prefetch_bytes: int | None) -> tuple[list[int], list[torch.Tensor]]:
    """How many units were gathered or on their way after each gather of a frozen step."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = OPTIMIZERS["momentum"](model)
    onecopy.shard(model, optimizer, stage=3, prefetch_bytes=prefetch_bytes)
    held, most = set[str](), list[int]()

    def watch(event: onecopy.events.Event) -> None:
        if event.kind == "gather":
            held.add(event.unit)
        elif event.kind == "release":
            held.discard(event.unit)
        most.append(len(held))

    for step in range(3):
        if step == 2:
            remove = onecopy.events.add_sink(model, watch)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    remove()
    with onecopy.full_parameters(model):
        return most, [parameter.detach().clone() for parameter in model.parameters()]


UNIT_BYTES = 4 * (64 * 64 + 64)


@pytest.mark.parametrize(
    ("prefetch_bytes", "most"),
    [(0, 1), (UNIT_BYTES - 1, 1), (None, 2), (3 * UNIT_BYTES, 4), (1 << 30, 6)],
)
def test_prefetch_goes_as_far_as_it_may(pool: Pool, prefetch_bytes: int | None, most: int) -> None:
    """The unit in use and those ahead of it, never more; results do not depend on it."""
    plain = pool.run(2, ahead_of_use, 0)
    for (held, values), (_, expected) in zip(
        pool.run(2, ahead_of_use, prefetch_bytes), plain, strict=True
    ):
        assert max(held) == most
        assert all(itertools.starmap(torch.equal, zip(values, expected, strict=True)))
