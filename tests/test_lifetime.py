"""A deleted model leaves nothing behind, and meshes cut the world into independent models."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import onecopy
from onecopy import Precision
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, full_values


def rebuild(stage: int, times: int = 3, **settings: Any) -> list[tuple[bool, int, int]]:
    """Build, train and delete a model: is it gone, and how many threads and tensors are left?"""
    seen = []
    # Other tests of this process may have left some: compilers keep what they have compiled.
    before = threading.active_count()
    for _ in range(times):
        model = models.build("gpt")
        optimizer = OPTIMIZERS["adamw"](model)
        onecopy.shard(model, optimizer, stage=stage, **settings)
        for step in range(2):
            models.loss(model, models.batch("gpt", step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        reference_to_model = weakref.ref(model)
        del model, optimizer
        gc.collect()
        # The watching thread may hold its agreement for the moment in which it looks.
        deadline = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.05)
            gc.collect()
        left = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
        seen.append((reference_to_model() is None, threading.active_count() - before, left))
    return seen


LEAN = Precision(compute="bf16", master="bf16+16", gradient="bf16")


@pytest.mark.parametrize(
    ("stage", "settings"), [(1, {}), (3, {}), (2, {"precision": LEAN, "step_in_backward": True})]
)
def test_deleting_the_model_frees_everything(
    pool: Pool, stage: int, settings: dict[str, Any]
) -> None:
    """Parameters, slices, gradients, optimizer states and the watching thread."""
    for first, *later in pool.run(2, partial(rebuild, **settings), stage):
        assert first[:2] == (True, 0)
        assert later == [first] * len(later), "something grows with each rebuild"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_grows_over_many_rebuilds(pool: Pool, stage: int) -> None:
    """As a notebook does it, whose cell is run again and again."""
    for first, *later in pool.run(2, rebuild, stage, 20, timeout=200):
        assert later == [first] * 19


def on_a_mesh(stage: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Four ranks, two models: each pair of ranks trains its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    number, place = divmod(dist.get_rank(), 2)
    model = models.build("tied", seed=number)
    optimizer = OPTIMIZERS["momentum"](model)
    onecopy.shard(model, optimizer, stage=stage, mesh=mesh["data"])
    losses = []
    for step in range(3):
        loss = models.loss(model, models.batch("tied", step, place))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item()])
    return losses, full_values(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_dimension_of_a_mesh(pool: Pool, stage: int) -> None:
    """Each pair equals one process with two ranks' batches, whatever the other pair does."""
    runs = pool.run(4, on_a_mesh, stage)
    for rank, (losses, parameters) in enumerate(runs):
        number, place = divmod(rank, 2)
        expected = reference.train(
            partial(models.build, "tied", number),
            models.batches("tied", 3, 2),
            OPTIMIZERS["momentum"],
        )
        assert losses == [step[place] for step in expected.losses]
        for name, value in expected.parameters.items():
            assert torch.equal(parameters[name], value), f"{name} on rank {rank}"
