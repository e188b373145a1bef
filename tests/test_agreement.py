"""Ranks that want different things get an error that names them, never a silent hang."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.comm import agreement
from tests import models
from tests.pool import Pool, RankError
from tests.runs import OPTIMIZERS


class Branches(nn.Module):
    """Runs its left or its right blocks, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        for block in self.left if side == "left" else self.right:
            x = block(x)
        return x


def _branches(stage: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branches()
    optimizer = OPTIMIZERS["sgd"](model)
    onecopy.shard(model, optimizer, stage=stage)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, side: str) -> None:
    model(torch.ones(2, 8), side).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _often() -> AbstractContextManager[Any]:
    """Inside, ranks that wait look at one another often; what they find is the same."""
    return mock.patch.multiple(agreement, LOOK_AFTER=0.05, LOOK_AT_MOST_EVERY=0.1)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def take_sides(trained_steps: int) -> None:
    """Rank 0 goes left, the others right, at once or after common steps."""
    model, optimizer = _branches()
    for _ in range(trained_steps):
        _step(model, optimizer, "left")
    _step(model, optimizer, "left" if dist.get_rank() == 0 else "right")


def one_more_forward() -> None:
    """Rank 0 evaluates once more than the others, which go on training."""
    model, optimizer = _branches()
    for _ in range(3):
        _step(model, optimizer, "left")
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(2, 8), "left")
    for _ in range(3):
        _step(model, optimizer, "left")


def one_more_step() -> None:
    """Rank 0 has one more batch; the others are done and have left."""
    model, optimizer = _branches()
    for _ in range(3):
        _step(model, optimizer, "left")
    if dist.get_rank():
        onecopy.handle.of(model).engine.collectives.agreement.close()
        _store().wait(["rank 0 has heard of it"])  # their connections do not tell it
        return
    try:
        _step(model, optimizer, "left")
    finally:
        _store().set("rank 0 has heard of it", "")


def full_on_one_rank() -> None:
    """The classic: rank 0 looks at the weights alone."""
    model, optimizer = _branches()
    for _ in range(2):
        _step(model, optimizer, "left")
    if dist.get_rank() == 0:
        with onecopy.full_parameters(model):
            pass
    else:
        _step(model, optimizer, "left")


class NotInGraph(nn.Module):
    """A block whose parameters reach the loss on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.w) if dist.get_rank() == 0 else x + 1


def other_backward() -> None:
    """The same forward, but backward needs the blocks on rank 0 only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(NotInGraph(), NotInGraph()), nn.Linear(8, 8))
    onecopy.shard(model, OPTIMIZERS["sgd"](model), stage=3)
    model(torch.ones(2, 8)).sum().backward()


def diverge(function: Callable[..., None], arguments: tuple[Any, ...], often: bool) -> None:
    """Call the function where ranks look as seldom as they do, or often."""
    with _often() if often else nullcontext():
        function(*arguments)


DIVERGE = pytest.mark.parametrize(
    ("function", "arguments", "names"),
    [
        (take_sides, (0,), ["left.0", "right.0"]),
        (take_sides, (3,), ["left.0", "right.0"]),
        (one_more_forward, (), ["rank 0", "left.1"]),
        (one_more_step, (), ["rank 0", "has ended"]),
        (full_on_one_rank, (), ["rank 0", "right.0", "left"]),
        (other_backward, (), ["rank 0", "unit 0.1", "the end of backward"]),
    ],
    ids=[
        "branch at once",
        "branch later",
        "extra forward",
        "extra batch",
        "one rank looks",
        "other backward",
    ],
)


@pytest.mark.parametrize("world", [2, 3])
@DIVERGE
def test_divergence_is_named(
    pool: Pool, world: int, function: Any, arguments: tuple[Any, ...], names: list[str]
) -> None:
    """With ranks and units in the message, on each that waits."""
    _check_divergence(pool, world, function, arguments, names, often=True)


def test_divergence_is_named_by_ranks_that_look_seldom(pool: Pool) -> None:
    """As they do when nobody tests; here the most rounds of looking are needed."""
    _check_divergence(pool, 2, one_more_forward, (), ["rank 0", "left.1"], often=False)


def _check_divergence(
    pool: Pool,
    world: int,
    function: Any,
    arguments: tuple[Any, ...],
    names: list[str],
    *,
    often: bool,
) -> None:
    results = pool.run(
        world,
        diverge,
        function,
        arguments,
        often,
        expect_failures=True,
        record_warnings=True,
    )
    errors = [result for result in results if isinstance(result, RankError)]
    assert errors, "ranks that diverge must fail"
    if function is not one_more_step:
        assert len(errors) == world, "every rank raises"
    for error in errors:
        assert error.type_name == "DivergenceError", str(error)
        assert "Giving up" not in error.message, "this is the process group's timeout"
        for name in names:
            assert name in error.message, error.message
        assert "rank 1" in error.message or "rank 2" in error.message, error.message


def sides_in_stage_two() -> list[float]:
    """Stages that keep parameters let ranks run different modules."""
    model, optimizer = _branches(stage=2)
    for _ in range(3):
        _step(model, optimizer, "left" if dist.get_rank() == 0 else "right")
    with onecopy.full_parameters(model):
        return [parameter.sum().item() for parameter in model.parameters()]


def test_stages_that_keep_parameters_allow_other_branches(pool: Pool) -> None:
    """The gradient is the mean, with zeros from ranks that did not take part."""
    runs = pool.run(2, sides_in_stage_two)
    torch.manual_seed(0)
    model = Branches()
    optimizer = OPTIMIZERS["sgd"](model)
    for _ in range(3):
        for side in ("left", "right"):
            (model(torch.ones(2, 8), side).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [parameter.sum().item() for parameter in model.parameters()]
    assert runs[0] == runs[1] == pytest.approx(expected, rel=1e-5)


def changing_order() -> list[float]:
    """All ranks change the order together, several times."""
    model, optimizer = _branches()
    for side in ("left", "left", "right", "right", "left", "right"):
        _step(model, optimizer, side)
    with onecopy.full_parameters(model):
        return [parameter.sum().item() for parameter in model.parameters()]


def test_a_changed_order_costs_prefetch_only(pool: Pool) -> None:
    """Results stay right, and one warning says what changed."""
    runs = pool.run(2, changing_order, record_warnings=True)
    texts = [warning.message for warning in pool.warnings[0]]
    assert len([text for text in texts if "order in which units are used has changed" in text]) == 1
    torch.manual_seed(0)
    model = Branches()
    optimizer = OPTIMIZERS["sgd"](model)
    for side in ("left", "left", "right", "right", "left", "right"):
        _step(model, optimizer, side)
    assert runs[0] == [parameter.sum().item() for parameter in model.parameters()]


def mismatched(what: str) -> None:
    """Rank 1 brings another model or other settings."""
    rank = dist.get_rank()
    if what == "shape":
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank))
    elif what == "dtype":
        model = nn.Linear(4, 4).to(torch.float64 if rank else torch.float32)
    elif what == "length":
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank)))
    else:
        model = nn.Linear(4, 4)
    onecopy.shard(model, stage=2 + rank if what == "stage" else 3)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("shape", ["parameter 1.weight", "(4, 4)", "(5, 4)"]),
        ("dtype", ["parameter weight", "float32", "float64"]),
        ("length", ["2.weight"]),
        ("stage", ["setting stage", "rank 0", "rank 1"]),
    ],
)
def test_different_models_are_named(pool: Pool, what: str, names: list[str]) -> None:
    """Before any transfer that could hang."""
    results = pool.run(2, mismatched, what, expect_failures=True)
    for result in results:
        assert result.type_name == "MismatchError", str(result)
        for name in names:
            assert name in result.message


def build_from_rank() -> dict[str, torch.Tensor]:
    """Every rank starts from other values."""
    model = models.build("convbn", seed=dist.get_rank())
    for buffer in model.buffers():
        buffer.add_(dist.get_rank())
    onecopy.shard(model, stage=3)
    return model.state_dict()


def test_values_and_buffers_become_those_of_the_first_rank(pool: Pool) -> None:
    """Parameters and buffers are equal on all ranks after shard."""
    for state in pool.run(3, build_from_rank):
        for name, value in models.build("convbn", seed=0).state_dict().items():
            assert torch.equal(state[name], value), name


class PartBlock(nn.Module):
    """A block whose second half is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.extra = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return self.extra(x) if whole else x


class Parts(nn.Module):
    """Many blocks; `skipped` says in which of them the optional half is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PartBlock() for _ in range(8))

    def forward(self, x: torch.Tensor, skipped: set[int]) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, number not in skipped)
        return x


SKIPPED = [[set(), set()], [set(), {5}], [{2}, {6, 7}], [set(), set()], [{0, 7}, {1, 2, 3}]]


def skip_parts(stage: int) -> list[torch.Tensor]:
    """Ranks leave out parts of blocks deep in the model, differently in each step."""
    torch.manual_seed(0)
    model = Parts()
    optimizer = OPTIMIZERS["momentum"](model)
    onecopy.shard(model, optimizer, stage=stage)
    for by_rank in SKIPPED:
        skipped = by_rank[dist.get_rank()]
        model(torch.ones(2, 8), skipped).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with onecopy.full_parameters(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_unused_on_one_rank_block_nobody(pool: Pool, stage: int) -> None:
    """A rank without a gradient reduces in time: else two ranks would wait for one another."""
    runs = pool.run(2, skip_parts, stage)
    torch.manual_seed(0)
    model = Parts()
    optimizer = OPTIMIZERS["momentum"](model)
    for by_rank in SKIPPED:
        for skipped in by_rank:
            (model(torch.ones(2, 8), skipped).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for value, ours in zip(model.parameters(), runs[0], strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-6)
