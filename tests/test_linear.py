"""What is done grows with the number of units, and of parameters in a unit, and no faster.

Counted is how often each line of ours runs, in a small model and in one several times as large: a
line in a loop over all that is itself run for each stands out, on every machine alike.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from tests.pool import Pool

PACKAGE = str(Path(onecopy.__file__).parent) + os.sep
# How often is looked whether others are there depends on how fast they are.
WAITING = "comm"
WIDTH, BLOCKS, FEW, TIMES = 8, 2, 6, 4
# Beyond what a line is run in proportion: some of it is not for units.
MOST_GROWTH, SOME = 1.1, 24

# By file and number.
Lines = Counter[tuple[str, int]]


class Many(nn.Module):
    """So many small parameters, each used once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)."""
        return x * torch.stack(list(self.scales)).mean(0)


@contextmanager
def counted(lines: Lines) -> Iterator[None]:
    """Inside, count the lines of ours that this thread runs."""

    def in_frame(frame: FrameType, what: str, _: Any) -> Any:
        if what == "line":
            lines[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno] += 1
        return in_frame

    def at_call(frame: FrameType, what: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        is_ours = name.startswith(PACKAGE) and not name.startswith(PACKAGE + WAITING)
        return in_frame if is_ours else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)


def use(model: nn.Module, settings: dict[str, Any], folder: str) -> Lines:
    """What most loops do with a model, once or twice; in a rank process."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, lines = torch.randn(2, WIDTH), Lines()
    with counted(lines):
        onecopy.shard(model, optimizer, **settings)
        for _ in range(2):
            model(x).float().square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        model(x).float().square().mean().backward()
        with onecopy.full_parameters(model, grads=True):
            pass
        held = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        del held
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        onecopy.save(folder, model, optimizer, step=1)
        onecopy.load(folder, model, optimizer)
        onecopy.unshard(model)
    return lines


def use_units(number: int, settings: dict[str, Any], folder: str) -> Lines:
    """Of a model of so many units."""
    return use(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(number))), settings, folder)


def use_parameters(number: int, settings: dict[str, Any], folder: str) -> Lines:
    """Of units of so many parameters."""
    return use(nn.Sequential(*(Many(number) for _ in range(BLOCKS))), settings, folder)


@pytest.mark.parametrize("of", [use_units, use_parameters])
@pytest.mark.parametrize(
    "settings",
    [{"stage": 1, "max_grad_norm": 1.0}, {"stage": 3, "precision": "bf16", "offload": "cpu"}],
    ids=["stage 1", "offload"],
)
def test_no_line_is_run_out_of_proportion(
    pool: Pool, tmp_path: Path, of: Any, settings: dict[str, Any]
) -> None:
    """Four times as many units, or parameters in each: no line is run more than four times."""
    few, many = (
        pool.run(2, of, number, settings, str(tmp_path / str(number)))[0]
        for number in (FEW, FEW * TIMES)
    )
    grown = {
        f"{file}:{line}": (few[file, line], count)
        for (file, line), count in many.items()
        if count > MOST_GROWTH * TIMES * few[file, line] + SOME
    }
    assert not grown
