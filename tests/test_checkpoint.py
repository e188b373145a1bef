"""Checkpoints go on as if nothing had happened: any number of ranks, any stage, any units."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecopy
from tests import motley
from tests.conftest import Sampler
from tests.motley import compare, snapshot, train
from tests.pool import Pool
from tests.runs import full_values

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)
# How units are chosen: "tiny" alone has fewer elements than there are ranks.
UNITS = (None, ("tiny", "conv", "blocks.*.linear"), ("blocks.1", "frozen"))


def settings_of(world: int, stage: int, *, is_saving: bool) -> dict[str, Any]:
    """Others at save than at load."""
    number = world + stage + 2 * is_saving
    return {
        "stage": stage,
        "units": UNITS[number % 3],
        "whole_parameters": (number // 2) % 2 == 1,
    }


def sharded(
    kind: str, seed: int, settings: dict[str, Any]
) -> tuple[motley.Motley, motley.Optimizers, dict[str, Any]]:
    """A model, its optimizers and their schedulers."""
    model, optimizers = motley.make(kind, seed)
    onecopy.shard(model, list(optimizers.values()), **settings)
    schedulers = {
        name: torch.optim.lr_scheduler.MultiStepLR(one, [1, 3], gamma=0.5)
        for name, one in optimizers.items()
    }
    return model, optimizers, schedulers


def as_passed(optimizers: motley.Optimizers) -> Any:
    return optimizers[""] if "" in optimizers else optimizers


def train_on(
    model: motley.Motley,
    optimizers: motley.Optimizers,
    schedulers: dict[str, Any],
    steps: range,
) -> list[float]:
    losses = []
    for step in steps:
        losses += train(model, optimizers, [step])
        for scheduler in schedulers.values():
            scheduler.step()
    return losses


def resume(
    root: Path, model: motley.Motley, optimizers: motley.Optimizers, schedulers: dict[str, Any]
) -> onecopy.checkpoint.loading.Loaded:
    loaded = onecopy.load(root, model, as_passed(optimizers))
    for name, scheduler in schedulers.items():
        scheduler.load_state_dict(loaded.extra["schedulers"][name])
    return loaded


def quiet(model: motley.Motley, *, is_quiet: bool) -> None:
    """Without what depends on the number of ranks: dropout and random numbers."""
    model.is_noisy = not is_quiet
    for block in model.blocks:
        block.drop.p = 0.0 if is_quiet else 0.3


def save(root: Path, kind: str, stage: int) -> None:
    """Train, save, and train on in two ways, each with its results beside the checkpoint."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    settings = settings_of(world, stage, is_saving=True)
    model, optimizers, schedulers = sharded(kind, 0, settings)
    train_on(model, optimizers, schedulers, range(2))
    extra = {"schedulers": {n: one.state_dict() for n, one in schedulers.items()}, "rank": rank}
    path = onecopy.save(root, model, as_passed(optimizers), extra=extra)
    assert path == root / "step-00000002"
    then = snapshot(model, optimizers)
    losses = train_on(model, optimizers, schedulers, range(2, 5))
    noisy = full_values(model)
    resume(root, model, optimizers, schedulers)
    quiet(model, is_quiet=True)
    train_on(model, optimizers, schedulers, range(2, 5))
    expected = {"then": then, "noisy": noisy, "quiet": full_values(model), "losses": losses}
    torch.save(expected, root / f"expected-{rank}.pt")


def load(roots: list[tuple[int, Path]], kind: str, stage: int) -> None:
    """Load each, in the middle of a run of its own, and train on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    settings = settings_of(world, stage, is_saving=False)
    model, optimizers, schedulers = sharded(kind, 1, settings)
    for saved_world, root in roots:
        train_on(model, optimizers, schedulers, range(10, 11))
        is_same = saved_world == world
        expected = torch.load(root / f"expected-{rank if is_same else 0}.pt", weights_only=True)
        loaded = resume(root, model, optimizers, schedulers)
        where = f"{saved_world} ranks in {root.name}"
        assert (loaded.step, loaded.world_size) == (2, saved_world), where
        assert [one["rank"] for one in loaded.extras] == list(range(saved_world)), where
        assert loaded.extra["rank"] == (rank if rank < saved_world else 0), where
        found = snapshot(model, optimizers)
        buffers = torch.load(root / "expected-0.pt", weights_only=True)["then"]["buffers"]
        compare(where, found, {**expected["then"], "buffers": buffers})
        quiet(model, is_quiet=not is_same)
        losses = train_on(model, optimizers, schedulers, range(2, 5))
        if is_same:
            compare(where, losses, expected["losses"])
            compare(where, full_values(model), expected["noisy"])
        else:
            compare(where, full_values(model), expected["quiet"], rtol=1e-4, atol=1e-5)
        quiet(model, is_quiet=False)


PLACES = list(itertools.product(WORLDS, STAGES))
TWICE = (0, 2, 3, 1)  # times two in the field of four elements, whose sum is ^


def pairwise() -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Sixteen of the (saved, loaded) places: an orthogonal array.

    Each has another saver and another loader, and of the four numbers (ranks and stage at the save,
    ranks and stage at the load) any two take every pair of values.
    """
    return [
        ((WORLDS[a], STAGES[b]), (WORLDS[a ^ b], STAGES[a ^ TWICE[b]]))
        for a, b in itertools.product(range(4), repeat=2)
    ]


def test_the_sixteen_meet_every_pair() -> None:
    """What `pairwise` promises."""
    for one, other in itertools.combinations(range(4), 2):
        met = {((*saved, *loaded)[one], (*saved, *loaded)[other]) for saved, loaded in pairwise()}
        assert len(met) == 16


@pytest.mark.sampled("kind", motley.OPTIMIZERS, 1, always=["three"])
def test_any_number_of_ranks_and_any_stage(
    pool: Pool,
    tmp_path: Path,
    kind: str,
    sampled: Sampler[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    """Each pair of worlds, of stages, and of world and stage; all combinations with --all.

    What is loaded equals what was saved, to the last bit. So does training on, on as many ranks.
    """
    for world, stage in PLACES:
        root = tmp_path / f"{world}-{stage}"
        root.mkdir()
        pool.run(world, save, root, kind, stage, timeout=240)
    chosen = sampled(itertools.product(PLACES, PLACES), 20, always=pairwise())
    for world, stage in PLACES:
        roots = [
            (saved_world, tmp_path / f"{saved_world}-{saved_stage}")
            for (saved_world, saved_stage), loaded in chosen
            if loaded == (world, stage)
        ]
        assert roots
        pool.run(world, load, roots, kind, stage, timeout=240)
