"""state_dict() and load_state_dict() of an attached optimizer: local, tagged, checked."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from tests import models
from tests.pool import Pool
from tests.runs import full_values

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    small = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
    large = [(name, parameter) for name, parameter in named if parameter.dim() >= 2]
    return [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 0.02}]


MAKERS: dict[str, Make] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "named groups": lambda model: torch.optim.Adam(_groups(model), lr=1e-2),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-2),
}
NAME = "odd"  # scalars, empty, transposed


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """All ranks see the same data, so that one process computes the same."""
    for step in steps:
        models.loss(model, models.batch(NAME, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def round_trips(stage: int, kind: str) -> dict[str, Tensor]:
    """Saved and loaded before the first step, after some, and into another optimizer."""
    model = models.build(NAME)
    optimizer = MAKERS[kind](model)
    onecopy.shard(model, optimizer, stage=stage)
    optimizer.load_state_dict(optimizer.state_dict())
    _train(model, optimizer, range(2))
    state, values = _through_a_file(optimizer.state_dict()), model.state_dict()
    _train(model, optimizer, range(5, 7))
    optimizer.load_state_dict(state)
    model.load_state_dict(values)
    _train(model, optimizer, range(2, 3))
    state, values = optimizer.state_dict(), model.state_dict()
    other = models.build(NAME)
    again = MAKERS[kind](other)
    onecopy.shard(other, again, stage=stage)
    other.load_state_dict(values)
    again.load_state_dict(state)
    _train(other, again, range(3, 5))
    onecopy.unshard(other)
    _train(other, again, range(5, 6))
    return {name: value.detach().clone() for name, value in other.named_parameters()}


def _plain(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.build(NAME)
    optimizer = MAKERS[kind](model)
    _train(model, optimizer, range(steps))
    return model, optimizer


EVERY = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), MAKERS))


@pytest.mark.sampled("world, stage, kind", EVERY, 3, always=[(2, 3, "named groups")])
def test_round_trips(pool: Pool, world: int, stage: int, kind: str) -> None:
    """The same bits on every rank as without any saving."""
    expected = dict(_plain(kind, 6)[0].named_parameters())
    for values in pool.run(world, round_trips, stage, kind):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)


def from_plain(stage: int, kind: str, state: dict[str, Any], values: dict[str, Tensor]) -> Any:
    """A plain optimizer's checkpoint is loaded after shard."""
    model = models.build(NAME, seed=1)
    optimizer = MAKERS[kind](model)
    onecopy.shard(model, optimizer, stage=stage)
    model.load_state_dict(values)
    optimizer.load_state_dict(state)
    _train(model, optimizer, range(3, 6))
    return full_values(model)


@pytest.mark.sampled("world, stage, kind", EVERY, 3, always=[(2, 3, "named groups")])
def test_a_plain_checkpoint_is_cut(pool: Pool, world: int, stage: int, kind: str) -> None:
    """Whole states go to the pieces: no need to load before shard."""
    model, optimizer = _plain(kind, 3)
    arguments = (stage, kind, optimizer.state_dict(), model.state_dict())
    results = pool.run(world, from_plain, *arguments)
    _train(model, optimizer, range(3, 6))
    for values in results:
        for name, value in model.named_parameters():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)


def on_one_rank(stage: int) -> dict[str, Any]:
    """state_dict() on rank 0 alone, as trainers call it; its tag everywhere."""
    model = models.build(NAME)
    optimizer = MAKERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage)
    _train(model, optimizer, range(1))
    if dist.get_rank() == 0:
        optimizer.state_dict()
    _train(model, optimizer, range(1, 2))
    tag: dict[str, Any] = optimizer.state_dict()["onecopy"]
    return tag


def load_other(stage: int, what: str) -> str:
    """The states of somebody else."""
    model = models.build("mlp")
    optimizer = MAKERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage)
    models.loss(model, models.batch("mlp", 0, 0)).backward()
    optimizer.step()
    state = optimizer.state_dict()
    tag = state["onecopy"]
    if what == "rank":
        state["onecopy"] = {**tag, "rank": (tag["rank"] + 1) % tag["world_size"]}
    elif what == "world":
        state["onecopy"] = {**tag, "world_size": 8}
    elif what == "units":
        state["onecopy"] = {**tag, "pieces": [[["0.weight", 0, 1]]]}
    elif what == "groups":
        del state["onecopy"]
    elif what == "shapes":
        plain = models.build("mlp")
        plain[2].weight = nn.Parameter(torch.ones(3, 7))
        other = MAKERS["adamw"](plain)
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        other.step()
        state = other.state_dict()
    try:
        optimizer.load_state_dict(state)
    except onecopy.OneCopyError as error:
        return str(error)
    return ""


def test_it_is_local(pool: Pool) -> None:
    """No collective, and it says whose it is."""
    tags = pool.run(2, on_one_rank, 2)
    assert [tag["rank"] for tag in tags] == [0, 1]
    assert {tag["world_size"] for tag in tags} == {2}
    assert tags[0]["pieces"] != tags[1]["pieces"]
    # Where nothing is cut, every rank has everything.
    first, second = pool.run(2, on_one_rank, 0)
    assert first == second


WRONG = {
    "rank": "saved by rank",
    "world": "of 8",
    "units": "belongs to other pieces (at",
    "groups": "parameters in its groups",
    "shapes": "has shape (3, 7)",
}


@pytest.mark.parametrize("what", WRONG)
def test_states_of_others_are_refused(pool: Pool, what: str) -> None:
    """Before a step with the wrong moments."""
    texts = pool.run(2, load_other, 3, what)
    if what == "shapes":
        texts = [text for text in texts if text]  # said where a part of it is owned
    assert texts
    for said in texts:
        assert WRONG[what] in said
    assert what not in ("rank", "world", "units") or "onecopy.unshard(model)" in said
