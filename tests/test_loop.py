"""Every loop of tests/loops.py, sharded against plain, and what may differ between ranks."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.loops import LOOPS, Side
from tests.pool import Pool

EVERY = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))


def run_loop(name: str, stage: int | None) -> list[Tensor]:
    """What a loop returns."""
    return LOOPS[name](Side(stage))


@cache
def _expected(name: str) -> list[Tensor]:
    return run_loop(name, None)


@pytest.mark.sampled("world, stage", EVERY, 2, always=[(2, 3)])
@pytest.mark.parametrize("name", LOOPS)
def test_means_what_it_means_in_plain_pytorch(
    pool: Pool, name: str, world: int, stage: int
) -> None:
    """The same values on every rank."""
    for values in pool.run(world, run_loop, name, stage, timeout=120):
        assert len(values) == len(_expected(name))
        torch.testing.assert_close(values, _expected(name), rtol=1e-5, atol=1e-6)
