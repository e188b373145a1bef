"""Stage 1: the owned mean lies in the buffer of local gradients, until others come there.

Stage 2 gives that buffer back, and its means have memory of their own: whatever a loop does, both
must compute the same, to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.handle
from onecopy.memory.live_tensors import LiveTensors
from onecopy.report import memory
from tests import models
from tests.pool import Pool
from tests.runs import OPTIMIZERS, full_values
from tests.test_memory import Deep

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def _backward(model: nn.Module, step: int) -> None:
    models.loss(model, models.batch("gpt", step, dist.get_rank())).backward()


def backwards_that_add_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Up to three for a step, and one more after a step that nobody has cleared."""
    for step in range(4):
        for number in range(1 + step % 3):
            _backward(model, 3 * step + number)
        optimizer.step()
        if step != 2:
            optimizer.zero_grad()


def zeros_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients stay, as zeros."""
    for step in range(4):
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 1)


def local_after_reduced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Local gradients come to the buffer in which a mean lies, and the other way round."""
    for step in range(3):
        _backward(model, 3 * step)
        with onecopy.no_sync(model):
            _backward(model, 3 * step + 1)
        if step != 1:
            _backward(model, 3 * step + 2)
        optimizer.step()
        optimizer.zero_grad()


class _FailsError(Exception):
    pass


def a_backward_that_fails(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What the backward before it has brought stays."""

    def fail(*_: Any) -> None:
        raise _FailsError

    def fail_here(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(fail)

    for step in range(3):
        _backward(model, 3 * step)
        hook = model.get_submodule("blocks.0").register_forward_hook(fail_here)
        with pytest.raises(_FailsError):
            _backward(model, 3 * step + 1)
        hook.remove()
        if step == 1:
            _backward(model, 3 * step + 2)
        optimizer.step()
        optimizer.zero_grad()


def gradients_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put there, removed and changed between backwards that add up."""
    for step in range(3):
        _backward(model, 2 * step)
        named = dict(model.named_parameters())
        named["positions.weight"].grad = None
        named["tokens.weight"].grad = torch.full_like(named["tokens.weight"], 0.01 * step)
        onecopy.clip_grad_norm_(model, 0.1)
        _backward(model, 2 * step + 1)
        optimizer.step()
        if step != 1:
            optimizer.zero_grad()


LOOPS: list[Loop] = [
    backwards_that_add_up,
    zeros_in_place,
    local_after_reduced,
    a_backward_that_fails,
    gradients_by_hand,
]


def looped(stage: int, loop: Loop, settings: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = models.build("gpt")
    optimizer = OPTIMIZERS["momentum"](model)
    onecopy.shard(model, optimizer, stage=stage, **settings)
    loop(model, optimizer)
    return full_values(model)


BF16 = onecopy.Precision(compute="bf16", gradient="bf16")
SETTINGS: list[dict[str, Any]] = [{}, {"whole_parameters": True}, {"precision": BF16}]


@pytest.mark.sampled(
    "loop, world, settings",
    list(itertools.product(LOOPS, (1, 2, 3), SETTINGS)),
    6,
    always=[(loop, 2, {}) for loop in LOOPS],
)
def test_a_loop_computes_what_it_does_at_stage_2(
    pool: Pool, loop: Loop, world: int, settings: dict[str, Any]
) -> None:
    for one, other in zip(
        pool.run(world, looped, 1, loop, settings),
        pool.run(world, looped, 2, loop, settings),
        strict=True,
    ):
        for name, value in other.items():
            assert torch.equal(one[name], value), name


class _Differences(torch.optim.Optimizer):
    """Steps by how gradients differ from those of the step before, which it keeps as they are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for piece in group["params"]:
                if piece.grad is None:
                    continue
                state = self.state[piece]
                before = state.get("before", torch.zeros_like(piece))
                state["before"] = piece.grad
                piece.sub_(0.9 * piece.grad - 0.4 * before, alpha=group["lr"])


def kept_by_an_optimizer(stage: int, adds_up: bool) -> dict[str, Tensor]:
    """It keeps the tensors themselves: another backward must not write there."""
    model = models.build("gpt")
    optimizer = _Differences(model.parameters())
    onecopy.shard(model, optimizer, stage=stage)
    for step in range(4):
        _backward(model, step)
        optimizer.step()
        if not adds_up:
            optimizer.zero_grad()
    return full_values(model)


@pytest.mark.parametrize("adds_up", [False, True])
def test_gradients_that_an_optimizer_keeps(pool: Pool, adds_up: bool) -> None:
    one, other = (pool.run(2, kept_by_an_optimizer, stage, adds_up)[0] for stage in (1, 2))
    for name, value in other.items():
        assert torch.equal(one[name], value), name


def where_means_lie(neighbours: str) -> list[list[bool]]:
    """After each of some backwards, for each unit: the mean lies in the buffer."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=1, neighbours=neighbours)
    found = []
    for step in range(6):
        _backward(model, step)
        units = onecopy.handle.of(model).engine.units
        pairs = [(one.gradients.mean.value, one.gradients.buffer) for one in units if one.gradients]
        found.append(
            [
                mean.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                for mean, buffer in pairs
                if mean is not None
            ]
        )
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("neighbours", ["read", "send"])
def test_a_mean_of_one_backward_lies_in_the_buffer(pool: Pool, neighbours: str) -> None:
    for found in pool.run(2, where_means_lie, neighbours):
        assert len(found[0]) > 1
        for step, are_there in enumerate(found):
            assert are_there == [step != 2] * len(found[0]), step


def risen_in_backward(depth: int) -> tuple[int, int, int]:
    """How far a backward at stage 1 rises above what is there before it, at its end and at most,
    and a unit's bytes."""
    with LiveTensors() as live:
        model = Deep(depth, 256)
        optimizer = OPTIMIZERS["adamw"](model)
        onecopy.shard(model, optimizer, stage=1)
        for _ in range(3):
            loss = model(torch.ones(1, 256)).sum()
            before = live.num_bytes()
            live.reset_peak()
            loss.backward()
            rise, most = live.num_bytes() - before, live.peak_bytes - before
            optimizer.step()
            optimizer.zero_grad()
        units = onecopy.handle.of(model).engine.units
        assert memory.measure(model, optimizer).gradients == sum(
            one.gradients.buffer.nbytes for one in units if one.gradients
        )
        return rise, most, 4 * units[0].layout.gradient_numel


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_backward_at_stage_1_adds_no_slices(pool: Pool, world: int) -> None:
    """Means take no memory, what comes in of others that of two units, however many there are."""
    for rise, most, unit_bytes in pool.run(world, risen_in_backward, 12):
        activations = 4 * 4 * 256 * 13
        assert rise <= activations
        assert most <= 3 * unit_bytes + activations, most / unit_bytes
