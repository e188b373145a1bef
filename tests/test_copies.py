"""Copies, conversions and pickles of a sharded model."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onecopy
import onecopy.handle
from tests import models
from tests.pool import Pool
from tests.runs import full_values

WORLDS_AND_STAGES = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))
NAMES = ("tied", "convbn", "odd", "frozen")


def _sharded(name: str, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.build(name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    onecopy.shard(model, optimizer, **settings)
    return model, optimizer


def _train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        models.loss(model, models.batch(name, step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def _clone(values: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values}


def copy_in_mid_run(name: str, settings: dict[str, Any]) -> bool:
    """The copy has the values of now, is plain, and lives a life of its own."""
    model, optimizer = _sharded(name, **settings)
    _train(name, model, optimizer, range(2))
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("users"))
    plain = copy.deepcopy(model)
    before = full_values(model)
    assert onecopy.handle.find(plain) is None
    assert not set(vars(plain)) & {"no_sync", "zero_grad", "_apply", "__deepcopy__"}
    assert type(plain) is type(model)
    for key, value in plain.named_parameters():
        assert type(value) is nn.Parameter
        assert torch.equal(value, before[key]), key
    buffers = dict(model.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in plain.named_buffers())
    assert len(list(plain.parameters())) == len(list(model.parameters()))  # ties stay ties

    # Each goes on by itself.
    _train(name, model, optimizer, range(2, 3))
    other = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    expected = dist.get_world_size() == 1 and settings.get("precision") is None
    seen.clear()
    _train(name, plain, other, range(2, 3))
    assert seen == ["users"], "the user's hooks are copied, ours are not"
    after = full_values(model)
    if expected:
        assert all(torch.equal(value, after[key]) for key, value in plain.named_parameters())
    # What is plain can be sharded and copied again.
    other.zero_grad()
    assert torch.equal(copy.deepcopy(plain).state_dict()[key], plain.state_dict()[key])
    onecopy.shard(plain, other, stage=3)
    _train(name, plain, other, range(3, 4))
    return True


@pytest.mark.sampled("world, stage", WORLDS_AND_STAGES, 2, always=[(2, 3)])
@pytest.mark.sampled("name", NAMES, 2)
def test_a_copy_is_plain(pool: Pool, name: str, world: int, stage: int) -> None:
    """copy.deepcopy on all ranks gives a model that was never sharded."""
    assert all(pool.run(world, copy_in_mid_run, name, {"stage": stage}))


@pytest.mark.sampled("stage", [0, 1, 2, 3], 1)
def test_a_copy_has_the_masters(pool: Pool, stage: int) -> None:
    """With bf16 compute the values are not rounded."""
    assert all(pool.run(2, copy_in_mid_run, "gpt", {"stage": stage, "precision": "bf16"}))


def average(stage: int | None) -> dict[str, Tensor]:
    """An exponential average beside the training; all ranks see the same data."""
    model = models.build("convbn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for step in range(3):
        models.loss(model, models.batch("convbn", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if stage is None:
            averaged.update_parameters(model)
        else:
            with onecopy.full_parameters(model):
                averaged.update_parameters(model)
    return _clone(averaged.module.state_dict().items())


@pytest.mark.sampled("world, stage", WORLDS_AND_STAGES, 2, always=[(2, 3)])
def test_averaged_model(pool: Pool, world: int, stage: int) -> None:
    """torch.optim.swa_utils: the average of the whole values."""
    expected = average(None)
    for values in pool.run(world, average, stage):
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=1e-6, atol=1e-7)


def convert_after(stage: int) -> list[str]:
    """What changes nothing is allowed, everything else refused before it has changed anything."""
    model, optimizer = _sharded("convbn", stage=stage)
    _train("convbn", model, optimizer, range(1))
    before = full_values(model)
    around = nn.ModuleList([model])
    for allowed in (
        lambda: model.to("cpu"),
        lambda: model.to("cpu:0"),  # as Accelerate calls it
        lambda: model.to(torch.device("cpu"), torch.float32, non_blocking=True),
        model.float,
        model.cpu,
        lambda: around.to("cpu"),
    ):
        assert allowed() in (model, around)
    said = []
    for refused in (
        model.half,
        lambda: model.to(torch.bfloat16),
        lambda: model.to("meta"),
        lambda: model.to_empty(device="cpu"),
        lambda: model.to(memory_format=torch.channels_last),
        model.double,
        around.half,
    ):
        try:
            refused()
        except onecopy.OneCopyError as error:
            said.append(str(error))
    assert all(torch.equal(value, before[key]) for key, value in full_values(model).items())
    _train("convbn", model, optimizer, range(1, 2))
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_conversions(pool: Pool, stage: int) -> None:
    """model.to(), half() and others, of the model or of a module around it."""
    for said in pool.run(2, convert_after, stage):
        assert len(said) == 7
        assert all("before shard" in text for text in said), said


def pickled(stage: int) -> list[str]:
    """Names of errors, and their texts."""
    model, _ = _sharded("mlp", stage=stage)
    said = []
    for attempt in (
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
    ):
        try:
            attempt()
        except onecopy.OneCopyError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_pickling_is_refused(pool: Pool, stage: int) -> None:
    """A pickle of a rank's part would be no model."""
    (said,) = pool.run(1, pickled, stage)
    assert len(said) == 2, said
