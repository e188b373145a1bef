"""Checkpoints of tensor parallel models: in global coordinates, so they load at any shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import onecopy
from onecopy.checkpoint.folder import latest
from onecopy.checkpoint.verify import verify
from tests.motley import compare
from tests.pool import Pool
from tests.tensor_parallel import backward, batch, build, parallelize

# Batches of one step, whatever the number of data ranks.
BATCHES = 4
# Cut into unequal parts by two ranks.
VOCABULARY = 13
Shape = tuple[int, int]


def sharded(shape: Shape, style: str, stage: int, *, is_other: bool) -> tuple[nn.Module, Any, int]:
    """The model on a mesh of (data, tensor) ranks, its optimizer, this rank's place in the data."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = build(VOCABULARY)
    if is_other:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    if shape[1] > 1:
        parallelize(model, mesh["tp"], style)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    onecopy.shard(model, optimizer, stage=stage, mesh=mesh)
    return model, optimizer, mesh["dp"].get_local_rank()


def train(
    model: nn.Module, optimizer: Any, place: int, shape: Shape, style: str, steps: Iterable[int]
) -> None:
    style = style if shape[1] > 1 else "tensor"
    for step in steps:
        for number in range(place, BATCHES, shape[0]):
            backward(model, batch(step, number), style, factor=shape[0] / BATCHES)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    found = model.state_dict()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks do: load, train, save, train more."""

    shape: Shape
    style: str
    stage: int
    start: Path | None = None
    target: Path | None = None
    steps: Iterable[int] = ()
    more: Iterable[int] = ()


def run(plan: Plan) -> dict[str, Tensor]:
    """The whole model's values in the end."""
    shape, style = plan.shape, plan.style
    model, optimizer, place = sharded(shape, style, plan.stage, is_other=plan.start is not None)
    if plan.start is not None:
        loaded = onecopy.load(plan.start, model, optimizer)
        saved = {one["data"] for one in loaded.extras}
        assert (loaded.step, loaded.extra["data"]) == (2, place if place in saved else 0)
    train(model, optimizer, place, shape, style, plan.steps)
    if plan.target is not None:
        onecopy.save(plan.target, model, optimizer, extra={"data": place})
    train(model, optimizer, place, shape, style, plan.more)
    return values(model)


def stored(root: Path) -> dict[str, Any]:
    """Everything that torch finds in a checkpoint, without what belongs to ranks.

    The order of parameters in a group is that of the ranks that had them.
    """
    file = root / "one.pt"
    dcp_to_torch_save(next(root.glob("step-*")), file)
    found: dict[str, Any] = torch.load(file, weights_only=False)
    for group in found["optimizer"]["param_groups"]:
        group["params"].sort()
    return {key: value for key, value in found.items() if not key.startswith("onecopy.")}


COMBINATIONS = list(
    itertools.product(("tensor", "sequence", "loss"), (0, 1, 2, 3), ((4, 1), (1, 2), (2, 1)))
)


@pytest.mark.sampled("style, stage, other", COMBINATIONS, 1)
def test_any_shape_goes_on(
    pool: Pool, tmp_path: Path, style: str, stage: int, other: Shape
) -> None:
    """2 x 2 ranks to one process and back; to another shape, which goes on alike from both."""

    def go(shape: Shape, stage: int = stage, **arguments: Any) -> dict[str, Tensor]:
        plan = Plan(shape=shape, style=style, stage=stage, **arguments)
        runs = pool.run(shape[0] * shape[1], run, plan)
        for other in runs[1:]:
            compare("on another rank", other, runs[0])
        found: dict[str, Tensor] = runs[0]
        return found

    first, second = tmp_path / "first", tmp_path / "second"
    expected = go((2, 2), target=first, steps=range(2), more=range(2, 4))
    go((1, 1), 3 - stage, start=first, target=second)
    compare("as stored", stored(second), stored(first))
    for root in (first, second):
        compare(root.name, go((2, 2), start=root, more=range(2, 4)), expected)
    runs = [go(other, 3 - stage, start=root, more=range(2, 4)) for root in (first, second)]
    compare("at another shape", runs[0], runs[1])
    # What a bias of keys is trained by is rounding alone.
    for name in [one for one in expected if not one.endswith("k.bias")]:
        compare(f"{other}: {name}", runs[0][name], expected[name], rtol=1e-3, atol=1e-4)


def everything(root: Path) -> tuple[dict[str, Tensor], str]:
    """In the background, with random numbers, refused while one is busy; exported while live."""
    shape, style = (2, 2), "sequence"
    model, optimizer, place = sharded(shape, style, 3, is_other=False)
    train(model, optimizer, place, shape, style, range(1))
    torch.manual_seed(place)  # tensor parallel ranks draw the same numbers
    pending = onecopy.async_save(root / "run", model, optimizer, extra={"data": place})
    then = values(model)
    drawn = torch.rand(1)
    train(model, optimizer, place, shape, style, range(1, 2))
    pending.wait()
    exported = onecopy.export(model, root / "live", dtype="bf16", max_shard_bytes=2000)
    assert len(exported.files) > 2 and exported.num_elements == sum(
        one.numel() for one in then.values()
    )
    loaded = onecopy.load(root / "run", model, optimizer)
    compare("drawn", torch.rand(1), drawn)
    assert (loaded.world_size, loaded.extras) == (4, [{"data": 0}] * 2 + [{"data": 1}] * 2)
    compare("loaded", values(model), then)
    return values(model), f"{torch.rand(1).item():.6f}"


def other_shape(root: Path) -> tuple[dict[str, Any], float]:
    model, optimizer, _ = sharded((1, 2), "tensor", 2, is_other=True)
    loaded = onecopy.load(root / "run", model, optimizer)
    return loaded.extra, torch.rand(1).item()


def pretrained(root: Path) -> list[dict[str, Tensor]]:
    """Files of weights, into parts of a model before it is sharded and after."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for stage, is_before in ((3, False), (1, False), (2, True)):
        model = parallelize(build(VOCABULARY), mesh["tp"], "sequence")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        if is_before:
            onecopy.load_pretrained(model, root)
        onecopy.shard(model, stage=stage, mesh=mesh)
        if not is_before:
            onecopy.load_pretrained(model, root)
        found.append(values(model))
    return found


def with_torch(root: Path) -> None:
    """A tensor parallel model of torch alone takes a checkpoint, and gives one back."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer, _ = sharded((1, 2), "tensor", 3, is_other=True)
    onecopy.load(root / "run", model, optimizer)
    expected = values(model)
    theirs = parallelize(build(VOCABULARY), mesh["tp"], "sequence")
    its = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    state = {**get_model_state_dict(theirs), "optimizer": get_optimizer_state_dict(theirs, its)}
    dcp.load(state, checkpoint_id=latest(root / "run"))
    set_optimizer_state_dict(theirs, its, state.pop("optimizer"))
    set_model_state_dict(theirs, state)
    compare("theirs", values(theirs), expected)
    backward(theirs, batch(7, 0), "sequence")
    its.step()
    state = {
        "model": get_model_state_dict(theirs),
        "optim": get_optimizer_state_dict(theirs, its),
    }
    dcp.save(state, checkpoint_id=root / "theirs")
    model, _, _ = sharded((1, 2), "sequence", 2, is_other=True)
    onecopy.load(root / "theirs", model)
    compare("ours", values(model), values(theirs))


def test_everything_else_of_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    runs = pool.run(4, everything, tmp_path)
    assert len({drawn for _, drawn in runs[:2]}) == 1, "of one data rank"
    assert len({drawn for _, drawn in runs}) == 2
    others = pool.run(2, other_shape, tmp_path)
    assert others[0] == others[1], "tensor parallel ranks go on alike"
    assert others[0][0] == {"data": 0}
    assert [one.problems for one in verify(tmp_path / "run")] == [[]]
    onecopy.export(tmp_path / "run", tmp_path / "stored")
    for name, read in (("stored", runs[0][0]), ("live", None)):
        found = build(VOCABULARY)
        onecopy.load_pretrained(found, tmp_path / name)
        if read is not None:
            compare(name, dict(found.state_dict()), read)
    assert not (tmp_path / "live" / ".checkpoint").exists()
    pool.run(2, with_torch, tmp_path)
    for run_of_rank in pool.run(2, pretrained, tmp_path / "stored"):
        compare("parts", run_of_rank, [runs[0][0]] * 3)
