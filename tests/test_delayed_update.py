"""The optimizer one step behind on the host: exactly the paper's recurrence, never a torn value."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.handle
from onecopy import Offload
from onecopy.errors import ConfigError, ShardingError
from tests import models
from tests.pool import Pool
from tests.runs import OPTIMIZERS, full_values

STEPS = 6


def delayed(first: bool | int = 3) -> Offload:
    """States on the host, updates delayed from the third step on."""
    return Offload(optimizer="host", gradients="host", delayed_update=first)


def serial(optimizer: str, first: int, world: int, max_norm: float) -> dict[str, Tensor]:
    """g_i at W_{i-1} before step `first` + 1, at W_{i-2} after it; W_i = U(W_{i-1}, g_i)."""
    newest = models.build("gpt")
    updater = OPTIMIZERS[optimizer](newest)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(updater, 0.9)
    before = copy.deepcopy(newest)
    for step in range(1, STEPS + 1):
        seen = before if step > first else newest
        taken = copy.deepcopy(seen)
        for rank in range(world):
            (models.loss(taken, models.batch("gpt", step, rank)) / world).backward()
        torch.nn.utils.clip_grad_norm_(taken.parameters(), max_norm)
        before = copy.deepcopy(newest)
        for parameter, its in zip(newest.parameters(), taken.parameters(), strict=True):
            parameter.grad = its.grad
        updater.step()
        updater.zero_grad()
        scheduler.step()
    return {name: value.detach() for name, value in newest.named_parameters()}


def train(stage: int, optimizer: str, first: int, max_norm: float) -> dict[str, Tensor]:
    """The same through the engine."""
    model = models.build("gpt")
    updater = OPTIMIZERS[optimizer](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(updater, 0.9)
    onecopy.shard(model, updater, stage=stage, offload=delayed(first))
    for step in range(1, STEPS + 1):
        models.loss(model, models.batch("gpt", step, dist.get_rank())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        updater.step()
        updater.zero_grad()
        scheduler.step()
    return full_values(model)


@pytest.mark.sampled(
    "world, stage, optimizer, first",
    [
        (world, stage, optimizer, first)
        for world in (1, 2)
        for stage in (0, 1, 2, 3)
        for optimizer in ("sgd", "momentum", "adamw", "adamw_fused")
        for first in (1, 3, STEPS + 1)
    ],
    2,
    always=[(1, 3, "momentum", 3), (2, 1, "adamw_fused", 1), (2, 3, "sgd", 1)],
)
def test_equals_the_recurrence(
    pool: Pool, world: int, stage: int, optimizer: str, first: int
) -> None:
    """With clipping, and a schedule that goes on while the update of before runs."""
    max_norm = 0.5
    expected = serial(optimizer, first, world, max_norm)
    for values in pool.run(world, train, stage, optimizer, first, max_norm):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-7, msg=name)


def begin(stage: int = 3, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model three steps on, with the last update under way."""
    model = models.build("gpt")
    updater = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, updater, stage=stage, offload=delayed(1), **settings)
    steps(model, updater, 0, 1, 2)
    return model, updater


def steps(model: nn.Module, updater: torch.optim.Optimizer, *numbers: int) -> None:
    """One step for each number of a batch."""
    for number in numbers:
        models.loss(model, models.batch("gpt", number, dist.get_rank())).backward()
        updater.step()
        updater.zero_grad()


def save_and_go_on(root: str) -> list[bool]:
    """Whether a run that loads goes on as the one that saved, values and optimizer states."""
    model, updater = begin()
    onecopy.save(root, model, updater)
    steps(model, updater, 3, 4)
    other = models.build("gpt", seed=1)
    its_updater = OPTIMIZERS["adamw"](other)
    onecopy.shard(other, its_updater, stage=3, offload=delayed(1))
    onecopy.load(root, other, its_updater)
    steps(other, its_updater, 3, 4)
    values, others = full_values(model), full_values(other)
    return [torch.equal(others[name], value) for name, value in values.items()]


def test_a_save_has_the_last_update(pool: Pool, tmp_path: Path) -> None:
    """And a run goes on from it as if it had not been interrupted."""
    for found in pool.run(2, save_and_go_on, str(tmp_path)):
        assert found
        assert all(found)


def looked_at(stage: int) -> tuple[bool, bool, bool]:
    """Whether flush changes the output, and whether everything that looks sees the newest."""
    model, _ = begin(stage)
    batch = models.batch("gpt", 9, 0)
    with torch.no_grad():
        stale = models.loss(model, batch).item()
        onecopy.flush(model)
        fresh = models.loss(model, batch).item()
        onecopy.flush(model)
        same = models.loss(model, batch).item()
    plain = models.build("gpt")
    outputs = []
    for look in ("state_dict", "full_parameters", "unshard"):
        other, _ = begin(stage)
        if look == "state_dict":
            plain.load_state_dict(other.state_dict())
        elif look == "full_parameters":
            with onecopy.full_parameters(other), torch.no_grad():
                for mine, theirs in zip(plain.parameters(), other.parameters(), strict=True):
                    mine.copy_(theirs)
        else:
            plain = onecopy.unshard(other)
        with torch.no_grad():
            outputs.append(models.loss(plain, batch).item())
    return stale != fresh, same == fresh, outputs == [fresh] * 3


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whoever_looks_sees_the_last_update(pool: Pool, stage: int) -> None:
    """A forward sees the values of before, on purpose, until flush."""
    assert pool.run(2, looked_at, stage) == [(True, True, True)] * 2


def states_on_one_rank() -> bool:
    """`optimizer.state_dict()` is no collective: trainers call it on the first rank alone."""
    model, updater = begin()
    complete = True
    if dist.get_rank() == 0:
        state = updater.state_dict()["state"]
        complete = {float(one["step"]) for one in state.values()} == {3.0}
    steps(model, updater, 3)
    return complete


def test_states_are_those_of_the_last_update(pool: Pool) -> None:
    """Also where only one rank asks."""
    assert pool.run(2, states_on_one_rank) == [True, True]


def without_zero_grad() -> None:
    """The next backward would add to gradients that the update is reading."""
    model, updater = begin()
    models.loss(model, models.batch("gpt", 3, 0)).backward()
    updater.step()
    models.loss(model, models.batch("gpt", 4, 0)).backward()


def written_between() -> None:
    """A value that would be lost, or torn."""
    model, _ = begin()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    models.loss(model, models.batch("gpt", 3, 0)).backward()


@pytest.mark.parametrize(
    ("function", "words"),
    [(without_zero_grad, "zero_grad"), (written_between, "onecopy.flush")],
)
def test_what_would_meet_the_update(pool: Pool, function: Any, words: str) -> None:
    """Is refused with what to do."""
    for error in pool.run(2, function, expect_failures=True):
        assert error.type_name == ShardingError.__name__, str(error)
        assert words in error.message


class Raises(torch.optim.SGD):
    """Raises in its second step."""

    number = 0

    def step(self, closure: Any = None) -> Any:
        type(self).number += 1
        if type(self).number > 4:
            raise ValueError("the optimizer is not well")
        return super().step(closure)


def error_in_update() -> str:
    """What the loop hears of an error in the thread."""
    Raises.number = 0
    model = models.build("gpt")
    updater = Raises(model.parameters(), lr=0.1)
    onecopy.shard(model, updater, offload=delayed(1))
    with pytest.raises(ValueError, match="not well") as caught:
        steps(model, updater, *range(20))
    return str(caught.value)


def test_an_error_in_the_update_reaches_the_loop(pool: Pool) -> None:
    """At the next step."""
    assert pool.run(1, error_in_update) == ["the optimizer is not well"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delayed_update": 0}, ["delayed_update=0", "1 or more"]),
        ({"delayed_update": True, "fraction": 0.5}, ["fraction=0.5"]),
        ({"delayed_update": True, "parameters": "host"}, ['parameters="device"']),
    ],
)
def test_what_cannot_be_meant(settings: dict[str, Any], words: list[str]) -> None:
    """Refused with what to write instead."""
    with pytest.raises(ConfigError) as caught:
        Offload(optimizer="host", gradients="host", **settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_not_with_a_step_in_backward() -> None:
    """Each wants the update at another time."""
    with pytest.raises(ConfigError, match="delayed_update and step_in_backward"):
        onecopy.Config(offload=delayed(), step_in_backward=True)
    config = onecopy.Config(offload=delayed(1))
    assert onecopy.Config.from_toml(config.to_toml()) == config
