"""Checkpoints of pipeline stages: one of the whole model, whoever had which layers."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onecopy
from onecopy.checkpoint.folder import latest
from onecopy.checkpoint.inspect import inspect
from onecopy.errors import CheckpointError, CommunicationError, ConfigError
from onecopy.parallel import Parts
from tests.motley import compare
from tests.pool import Pool, RankError
from tests.test_tensor_parallel_checkpoint import stored

WIDTH, DEPTH = 6, 4


class Whole(nn.Module):
    """Layers of which each has a loss of its own: apart they are trained as they are together."""

    def __init__(self, seed: int, *, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(5, WIDTH)
            self.layers = nn.ModuleDict(
                {
                    str(number): nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
                    for number in range(DEPTH)
                }
            )
            self.head = nn.Linear(WIDTH, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.0 + seed))

    def losses(self, step: int, place: int) -> Tensor:
        """Of the layers that are there."""
        generator = torch.Generator().manual_seed(100 * step + place)
        x = torch.randn(3, WIDTH, generator=generator)
        outputs = [layer(x) for layer in self.layers.values()]
        outputs += [self.embed(torch.arange(5))] if self.embed is not None else []
        outputs += [self.head(x)] if self.head is not None else []
        return torch.stack([(one.square().sum() - 1).square() for one in outputs]).sum()


def stage_of(whole: Whole, number: int, count: int) -> Whole:
    """One of `count` pipeline stages, made by deleting layers."""
    stage = copy.deepcopy(whole)
    kept = range(number * DEPTH // count, (number + 1) * DEPTH // count)
    for name in list(stage.layers):
        if int(name) not in kept:
            del stage.layers[name]
    if number:
        stage.embed = None
        del stage.scale
    if number < count - 1:
        stage.head = None
    return stage


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With two groups; the last one has nothing on a stage without norms."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([one for one in groups if one["params"]], lr=1e-2)


def train(models: list[Whole], optimizers: list[Any], steps: Iterable[int], place: int) -> None:
    for step in steps:
        for model, optimizer in zip(models, optimizers, strict=True):
            model.losses(step, place).backward()
            optimizer.step()
            optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks do: load, train, save. shape: (pipeline, data) ranks."""

    shape: tuple[int, int]
    chunks: int = 1
    tied: bool = False
    stage: int = 2
    start: Path | None = None
    target: Path | None = None
    steps: Iterable[int] = ()


def run(plan: Plan) -> dict[str, Tensor]:
    """This rank's values, whole."""
    mesh = init_device_mesh("cpu", plan.shape, mesh_dim_names=("pp", "dp"))
    whole = Whole(seed=7 if plan.start else 0, tied=plan.tied)
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    count = plan.shape[0] * plan.chunks
    models = [whole]
    if count > 1:
        models = [stage_of(whole, pp + n * plan.shape[0], count) for n in range(plan.chunks)]
    optimizers = [optimizer_of(one) for one in models]
    for one, its in zip(models, optimizers, strict=True):
        onecopy.shard(one, its, stage=plan.stage, mesh=mesh)
    model: Any = Parts(*models) if plan.chunks > 1 else models[0]
    optimizer: Any = Parts(*optimizers) if plan.chunks > 1 else optimizers[0]
    if plan.start is not None:
        assert onecopy.load(plan.start, model, optimizer).step == 2
    train(models, optimizers, plan.steps, dp)
    if plan.target is not None:
        onecopy.save(plan.target, model, optimizer, step=2)
    return {name: value for one in models for name, value in one.state_dict().items()}


def go(pool: Pool, shape: tuple[int, int], **arguments: Any) -> dict[str, Tensor]:
    runs = pool.run(shape[0] * shape[1], run, Plan(shape=shape, **arguments))
    return {name: value for one in runs for name, value in one.items()}


@pytest.mark.sampled("stage", (1, 2, 3), 1)
def test_stages_are_saved_as_the_whole_model(pool: Pool, tmp_path: Path, stage: int) -> None:
    """To the last bit what the whole model has on as many data ranks; each loads as the others."""
    whole, piped, four = tmp_path / "whole", tmp_path / "piped", tmp_path / "four"
    begun = {"steps": range(2), "stage": stage}
    expected = go(pool, (1, 2), target=whole, **begun)
    compare("two stages", go(pool, (2, 2), target=piped, **begun), expected)
    compare("four chunks", go(pool, (2, 2), target=four, chunks=2, **begun), expected)
    states = stored(whole)
    compare("two stages", stored(piped), states)
    compare("four chunks", stored(four), states)
    found = inspect(piped)
    assert (found.health, found.world_size) == ("complete", 4)
    assert found.models[0].settings["num_parameters"] == sum(
        one.numel() for one in Whole(0).parameters()
    )
    later = go(pool, (1, 2), start=piped, steps=range(2, 4), stage=3 - stage)
    for root, arguments in ((whole, {"chunks": 2}), (four, {})):
        runs = go(pool, (2, 2), start=root, steps=range(2, 4), stage=stage, **arguments)
        compare(root.name, runs, later)


def pretrained(root: Path) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    model = stage_of(Whole(7), mesh["pp"].get_local_rank(), 2)
    onecopy.shard(model, mesh=mesh)
    assert not any(onecopy.load_pretrained(model, root))
    return dict(model.state_dict())


def test_stages_take_theirs_of_files_of_weights(pool: Pool, tmp_path: Path) -> None:
    whole = Whole(0)
    onecopy.export(whole, tmp_path)
    first, second = pool.run(2, pretrained, tmp_path)
    compare("both stages", {**first, **second}, dict(whole.state_dict()))


def test_tied_in_the_whole(pool: Pool, tmp_path: Path) -> None:
    """An embedding that the whole model has once, and two stages have a copy each of."""
    whole, piped, again = tmp_path / "whole", tmp_path / "piped", tmp_path / "again"
    expected = go(pool, (1, 1), tied=True, steps=range(2), target=whole)
    compare("stages", go(pool, (2, 1), tied=True, start=whole, target=piped), expected)
    compare("whole", go(pool, (1, 1), tied=True, start=piped, target=again), expected)
    compare("stored", stored(again), stored(whole))


def same_on_both(root: Path) -> str:
    """An embedding under one name on the first stage and the last."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pp, whole = mesh["pp"].get_local_rank(), Whole(0)
    model = stage_of(whole, pp, 2)
    model.embed = copy.deepcopy(whole.embed)
    optimizer = optimizer_of(model)
    onecopy.shard(model, optimizer, stage=2, mesh=mesh)
    train([model], [optimizer], range(2), 0)
    onecopy.save(root, model, optimizer)
    with torch.no_grad(), onecopy.full_parameters(model):
        model.embed.weight.mul_(1.0 + pp)
    with pytest.raises(CheckpointError) as failure:
        onecopy.save(root, model, optimizer, step=3)
    onecopy.load(root, model, optimizer)
    onecopy.save(root, model, optimizer, step=3)
    return str(failure.value)


def test_one_embedding_on_two_stages(pool: Pool, tmp_path: Path) -> None:
    """It is saved once, and loaded by both; copies that have come to differ are refused."""
    messages = pool.run(2, same_on_both, tmp_path)
    assert all("under the same names, embed.weight:" in one for one in messages)
    assert latest(tmp_path) == tmp_path / "step-00000003"
    go(pool, (1, 1), start=tmp_path / "step-00000002")


class Built(nn.Module):
    """A stage that was built on its own, and counts its layers from 0."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


def same_names(root: Path) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp = mesh["pp"].get_local_rank()
    model = Built(pp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    onecopy.shard(model, optimizer, stage=3, mesh=mesh)
    with pytest.raises(CheckpointError) as failure:
        onecopy.save(root, model, optimizer)

    def names(name: str) -> str:
        _, number, rest = name.split(".")
        return f"layers.{2 * pp + int(number)}.{rest}"

    onecopy.save(root, Parts(model, names=names), optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    exported = onecopy.export(Parts(model, names=names), root / "files")
    assert exported.num_elements == 4 * (WIDTH + 1) * WIDTH
    with torch.no_grad(), onecopy.full_parameters(model):
        for parameter in model.parameters():
            parameter.zero_()
    onecopy.load(root, Parts(model, names=names), optimizer)
    compare("loaded", dict(model.state_dict()), expected)
    other = onecopy.shard(Built(3), mesh=mesh)
    with pytest.raises(
        ConfigError, match=r"two parts of the model have a tensor layers\.0\.weight"
    ):
        onecopy.save(root, Parts(model, other), optimizer)
    return str(failure.value)


def test_same_names_of_other_layers(pool: Pool, tmp_path: Path) -> None:
    message = pool.run(4, same_names, tmp_path)[0]
    assert "ranks 0 and 2 have different tensors under the same names, layers.0.weight" in message
    assert "Parts(stage, names=...)" in message
    assert sorted(os.listdir(tmp_path)) == ["files", "latest", "step-00000000"]
    names = {key for key in stored(tmp_path) if key.startswith("layers.")}
    assert names == {f"layers.{n}.{kind}" for n in range(4) for kind in ("weight", "bias")}


def die(root: Path) -> str:
    """Rank 3, of the second stage, ends in the middle of the second save."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = stage_of(Whole(0), mesh["pp"].get_local_rank(), 2)
    optimizer = optimizer_of(model)
    onecopy.shard(model, optimizer, stage=1, mesh=mesh)
    onecopy.save(root, model, optimizer, step=1)
    if dist.get_rank() == 3:
        from onecopy.checkpoint import files

        files.NewFile.finish = lambda _: os._exit(3)  # type: ignore[method-assign]
    with pytest.raises(CommunicationError, match="has ended during a checkpoint") as failure:
        onecopy.save(root, model, optimizer, step=2)
    return str(failure.value)


def test_a_rank_of_another_stage_dies(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.run(4, die, tmp_path, expect_failures=True)
    assert isinstance(outcomes[3], RankError)
    assert all(isinstance(one, str) for one in outcomes[:3]), outcomes
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert not (tmp_path / "step-00000002").exists()
    assert inspect(tmp_path).health == "complete"
