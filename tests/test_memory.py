"""Memory per rank against DESIGN section 3's formula, term by term, and the peak of a step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
import onecopy.handle
from onecopy.memory.live_tensors import LiveTensors
from onecopy.planner import estimate
from onecopy.report import memory
from tests import models
from tests.pool import Pool
from tests.runs import OPTIMIZERS


@dataclass
class Sizes:
    """What one rank saw."""

    held: memory.StateBytes
    tracked: int  # live bytes of all tensors, by the tracker
    flat: int  # elements of all flat buffers
    gradient: int  # elements of all gradient buffers


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: int) -> None:
    for step in range(steps):
        models.loss(model, models.batch(name, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def after_backward(name: str, stage: int, precision: str) -> Sizes:
    """Sizes after a backward, before its step, when optimizer states exist."""
    with LiveTensors() as live:
        model = models.build(name)
        optimizer = OPTIMIZERS["adamw"](model)
        onecopy.shard(model, optimizer, stage=stage, precision=precision)
        _train(model, optimizer, name, 2)
        batch = models.batch(name, 2, 0)
        models.loss(model, batch).backward()
        batch_bytes = sum(tensor.nbytes for tensor in batch.tensors.values())
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        units = onecopy.handle.of(model).engine.units
        return Sizes(
            held=memory.measure(model, optimizer),
            tracked=live.num_bytes() - batch_bytes - buffers,
            flat=sum(unit.layout.padded_numel for unit in units),
            gradient=sum(unit.layout.gradient_numel for unit in units),
        )


@pytest.mark.sampled(
    "world, stage, precision",
    list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), ("fp32", "bf16"))),
    12,
    always=[(3, stage, "bf16") for stage in (0, 1, 2, 3)] + [(2, 3, "fp32")],
)
def test_bytes_equal_the_formula(pool: Pool, world: int, stage: int, precision: str) -> None:
    """C + F + (M + A + S)/N, each term from its dtype, padding and trailers included.

    Gradient buffers are longer than flat ones by the trailers, so their terms use their length.
    """
    for sizes in pool.run(world, after_backward, "gpt", stage, precision):
        cut = world if stage else 1
        compute = 4 if precision == "fp32" else 2
        whole = 0 if stage == 3 else compute * sizes.flat
        is_separate = precision == "bf16" or stage == 3
        master = 4 * sizes.flat // cut if is_separate else 0
        assert sizes.held.parameters == whole + master
        full_gradients = compute * sizes.gradient if stage == 1 else 0
        # At stage 1 the owned mean lies in the buffer of full gradients, where it is as wide.
        mean = 0 if full_gradients and precision == "fp32" else 4 * sizes.gradient // cut
        assert sizes.held.gradients == full_gradients + mean
        # Adam's two moments exist for pieces only: padding has none.
        padding = 8 * (sizes.flat // cut) - sizes.held.optimizer
        assert 0 <= padding < 8 * sizes.flat // cut
        # The planner's figure for as many parameters differs by padding and trailers alone.
        planned = estimate.state_bytes(
            stage=stage,
            num_parameters=sizes.flat,
            world_size=world,
            widths=estimate.FP32 if precision == "fp32" else estimate.BF16,
        )
        trailers = sizes.gradient - sizes.flat
        assert abs(planned.total - sizes.held.total) <= padding + 8 * trailers + 64


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_else_is_held(pool: Pool, stage: int) -> None:
    """The tracker of all live tensors sees the model states and next to nothing beside them."""
    for sizes in pool.run(2, after_backward, "gpt", stage, "fp32"):
        beside = sizes.tracked - sizes.held.total
        assert 0 <= beside < 0.02 * sizes.held.total + 4096, beside


class Deep(nn.Module):
    """Blocks of equal size, far larger than their activations."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def peak_of_a_step(depth: int, width: int, **settings: Any) -> tuple[int, int, int]:
    """Peak of live bytes in a stage-3 step, bytes at rest before the step's end, a unit's bytes."""
    with LiveTensors() as live:
        model = Deep(depth, width)
        optimizer = OPTIMIZERS["adamw"](model)
        onecopy.shard(model, optimizer, stage=3, **settings)
        x = torch.ones(1, width)
        for step in range(3):
            if step == 2:
                live.reset_peak()
            model(x).sum().backward()
            held = memory.measure(model, optimizer).total
            optimizer.step()
            optimizer.zero_grad()
        unit = onecopy.handle.of(model).engine.units[0]
        unit_bytes = 4 * (unit.layout.padded_numel + unit.layout.gradient_numel)
        return live.peak_bytes, held, unit_bytes


@pytest.mark.parametrize("depth", [6, 12])
@pytest.mark.parametrize("world", [2, 4])
def test_peak_of_a_stage_3_step(pool: Pool, world: int, depth: int) -> None:
    """At most the states and two units (values and gradients), however deep the model is."""
    for peak, held, unit_bytes in pool.run(world, peak_of_a_step, depth, 256):
        activations = 4 * 4 * 256 * (depth + 1)
        assert peak <= held + 2 * unit_bytes + activations, (peak - held) / unit_bytes


@pytest.mark.parametrize("world", [2, 4])
def test_peak_where_one_rank_owns_a_whole_unit(pool: Pool, world: int) -> None:
    """Little more: an owner takes in sums, not the gradients of all ranks at once."""
    whole = partial(peak_of_a_step, whole_parameters=True)
    for peak, held, unit_bytes in pool.run(world, whole, 8, 256):
        activations = 4 * 4 * 256 * 9
        # Half a unit more, for the sums; three units if owners took in everything at once.
        assert peak <= held + 2.5 * unit_bytes + activations, (peak - held) / unit_bytes
