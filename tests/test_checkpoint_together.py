"""Saves, loads and exports that only some ranks call are named in seconds, not waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.errors import DivergenceError
from tests.pool import Pool
from tests.runs import full_values


def made(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    onecopy.shard(model, optimizer, stage=stage)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


CALLS: dict[str, Callable[..., Any]] = {
    "onecopy.save": onecopy.save,
    "onecopy.async_save": onecopy.async_save,
    "onecopy.load": onecopy.load,
    "onecopy.export": lambda root, model, _: onecopy.export(model, f"{root}-files"),
}


def only_first(root: str, verb: str, stage: int) -> str:
    """The first rank calls it, the others train on."""
    model, optimizer = made(stage)
    train(model, optimizer)
    try:
        if dist.get_rank() == 0:
            CALLS[verb](root, model, optimizer)
        train(model, optimizer)
        train(model, optimizer)
    except DivergenceError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("verb", "stage"),
    [
        ("onecopy.save", 3),
        ("onecopy.save", 0),
        ("onecopy.save", 2),
        ("onecopy.async_save", 1),
        ("onecopy.load", 3),
        ("onecopy.export", 3),
    ],
)
def test_the_others_train_on(pool: Pool, tmp_path: Path, verb: str, stage: int) -> None:
    said = pool.run(2, only_first, str(tmp_path / "run"), verb, stage)
    assert said[0] == said[1]
    assert "ranks have diverged at use" in said[0]
    assert f"rank 0 wants {verb}" in said[0]
    assert "such as `if rank == 0:` around a save" in said[0]
    assert not (tmp_path / "run").exists()


def once_more(root: str) -> str:
    """Rank 0 saves once more than rank 1, whose program ends: so it looks to rank 0."""
    model, optimizer = made(3)
    onecopy.save(root, model, optimizer)
    if dist.get_rank() == 1:
        vars(model)["_onecopy"].engine.collectives.agreement.close()
        return ""
    with pytest.raises(DivergenceError) as caught:
        onecopy.save(root, model, optimizer)
    return str(caught.value)


def test_the_others_have_ended(pool: Pool, tmp_path: Path) -> None:
    said, _ = pool.run(2, once_more, str(tmp_path))
    assert "rank 1 has ended after 1 uses of units, but rank 0 is at use 2, onecopy.save" in said


def save_and_load(root: str) -> str:
    model, optimizer = made(3)
    onecopy.save(root, model, optimizer)
    with pytest.raises(DivergenceError) as caught:
        CALLS["onecopy.save" if dist.get_rank() else "onecopy.load"](root, model, optimizer)
    return str(caught.value)


def test_different_calls(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(2, save_and_load, str(tmp_path)):
        assert "rank 0 wants onecopy.load" in said
        assert "rank 1 wants onecopy.save" in said


def save_when_interrupted(root: str, stage: int) -> list[Any]:
    """Ctrl-C reaches the ranks at different places of a forward; each handles it by saving."""
    model, optimizer = made(stage)
    train(model, optimizer)
    before = full_values(model)
    block = model[1] if dist.get_rank() else model[0]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with block.register_forward_pre_hook(interrupt), contextlib.suppress(KeyboardInterrupt):
        train(model, optimizer)
    try:
        onecopy.save(root, model, optimizer)
    except DivergenceError as error:
        return [str(error)]
    train(*(other := made(2)))
    onecopy.load(root, *other)
    return [before, full_values(other[0])]


def test_ranks_that_were_interrupted_elsewhere(pool: Pool, tmp_path: Path) -> None:
    for before, loaded in pool.run(2, save_when_interrupted, str(tmp_path), 2):
        assert before.keys() == loaded.keys()
        assert all(torch.equal(before[name], loaded[name]) for name in before)


def test_interrupted_between_gathers(pool: Pool, tmp_path: Path) -> None:
    """At stage 3 one rank waits for slices that the other will not send: said, not waited for."""
    for (said,) in pool.run(2, save_when_interrupted, str(tmp_path), 3):
        assert "ranks have diverged" in said
        assert "onecopy.save" in said
