"""The optimizer one step behind on the host: exactly the paper's recurrence, never a torn value."""

from __future__ import annotations

import copy
import time
import warnings
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


def written_before_flush() -> None:
    """The same, at the end of training."""
    model, _ = begin(0)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    onecopy.flush(model)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_zero_grad, "zero_grad"),
        (written_between, "onecopy.flush"),
        (written_before_flush, "onecopy.flush"),
    ],
)
def test_what_would_meet_the_update(pool: Pool, function: Any, words: str) -> None:
    """Is refused with what to do."""
    for error in pool.run(2, function, expect_failures=True):
        assert error.type_name == ShardingError.__name__, str(error)
        assert words in error.message


def gradient_after_step() -> None:
    """Taken by the update: zeros would be a wrong answer."""
    model, updater = begin()
    models.loss(model, models.batch("gpt", 3, 0)).backward()
    updater.step()
    parameter = next(model.parameters())
    assert parameter.grad is not None
    parameter.grad.norm()


def gradient_held() -> None:
    """The same, of a gradient that somebody has kept over the step."""
    model, updater = begin()
    models.loss(model, models.batch("gpt", 3, 0)).backward()
    gradient = next(model.parameters()).grad
    updater.step()
    updater.zero_grad()
    assert gradient is not None
    gradient.abs()


def two_in_one_unit() -> None:
    """An update holds whole units."""
    model = models.build("gpt")
    onecopy.shard(model, offload=delayed(1))
    halves = [list(model.parameters())[first::2] for first in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for half in halves:
            onecopy.shard(model, torch.optim.SGD(half, lr=0.1))


def captured() -> None:
    """What only an accelerator can do."""
    model = models.build("gpt")
    updater = torch.optim.AdamW(model.parameters(), capturable=True)
    try:
        onecopy.shard(model, updater, offload="cpu")
    finally:
        assert onecopy.handle.find(model) is None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (gradient_after_step, "between backward and step"),
        (gradient_held, "between backward and step"),
        (two_in_one_unit, "pass both optimizers"),
        (captured, "capturable=False"),
    ],
)
def test_what_an_update_cannot_give(pool: Pool, function: Any, words: str) -> None:
    """Is refused, instead of answered wrong."""
    (error,) = pool.run(1, function, expect_failures=True)
    assert error.type_name in (ShardingError.__name__, ConfigError.__name__), str(error)
    assert words in error.message


def read_between(stage: int) -> bool:
    """Values that are only read while an update is under way, by every rank, are no writes."""
    (model, updater), (other, its_updater) = begin(stage), begin(stage)
    for number in (3, 4):
        steps(model, updater, number)
        steps(other, its_updater, number)
        assert all(parameter.norm() > 0 for parameter in model.parameters() if parameter.dim() > 1)
    values, others = full_values(model), full_values(other)
    return all(torch.equal(others[name], value) for name, value in values.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_values_are_read_while_an_update_runs(pool: Pool, stage: int) -> None:
    """Logs and moving averages do so."""
    assert pool.run(2, read_between, stage) == [True, True]


def saved_before_step() -> list[float]:
    """What a forward sees while an update runs whose step came after a look at the state."""
    seen = []
    for look in (onecopy.flush, nn.Module.state_dict):
        model, updater = begin()
        models.loss(model, models.batch("gpt", 3, dist.get_rank())).backward()
        look(model)
        updater.step()
        time.sleep(0.1)  # the update may be through, and its values are not to be seen yet
        with torch.no_grad():
            seen.append(models.loss(model, models.batch("gpt", 9, 0)).item())
    return seen


def test_a_state_dict_between_backward_and_step(pool: Pool) -> None:
    """What the device lacks of the master is brought up before the update begins to change it."""
    for flushed, saved in pool.run(2, saved_before_step):
        assert saved == flushed


def state_of_a_part() -> bool:
    """`state_dict()` of a block, in the dtype of its masters."""
    model, _ = begin(0)
    block = model.get_submodule("blocks.0")
    found = block.state_dict()
    return all(torch.equal(found[name], value) for name, value in plain_values(model, block))


def plain_values(model: nn.Module, part: nn.Module) -> list[tuple[str, Tensor]]:
    """Of a part of it."""
    with onecopy.full_parameters(model):
        return [(name, value.detach().clone()) for name, value in part.named_parameters()]


def test_the_state_of_a_part_has_the_last_update(pool: Pool) -> None:
    """As that of the whole."""
    assert pool.run(2, state_of_a_part) == [True, True]


def unfrozen_between() -> bool:
    """A block is trained again from a forward on that comes before zero_grad."""
    model = models.build("gpt")
    block = model.get_submodule("blocks.1").requires_grad_(False)
    updater = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, updater, offload=delayed(1))
    steps(model, updater, 0)
    before = plain_values(model, block)
    models.loss(model, models.batch("gpt", 1, 0)).backward()
    updater.step()
    block.requires_grad_(True)
    loss = models.loss(model, models.batch("gpt", 2, 0))
    updater.zero_grad()
    loss.backward()
    updater.step()
    updater.zero_grad()
    after = dict(plain_values(model, block))
    return all(not torch.equal(after[name], value) for name, value in before)


def test_units_are_unfrozen_while_an_update_runs(pool: Pool) -> None:
    """No gradient of before is added to."""
    assert pool.run(2, unfrozen_between) == [True, True]


class Counting(torch.optim.Optimizer):
    """Counts its steps itself, in both places where that can be done."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "count": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """SGD, slower with each step."""
        time.sleep(0.005)
        self.count += 1
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"].item() / (self.count + group["count"])
                    parameter.sub_(parameter.grad, alpha=rate)


def count(offload: Offload | None) -> tuple[int, int, dict[str, Tensor]]:
    """Its counters and its values, with a learning rate that is set while the update runs."""
    model = models.build("gpt")
    updater = Counting(model.parameters())
    onecopy.shard(model, updater, stage=1, offload=offload)
    for number in range(3):
        steps(model, updater, number)
        updater.param_groups[0]["lr"].mul_(0.5)
        onecopy.flush(model)
    return updater.count, updater.param_groups[0]["count"], full_values(model)


@pytest.mark.parametrize("offload", [delayed(1), delayed(4)], ids=["delayed", "not delayed"])
def test_counters_and_settings_are_those_of_the_step(pool: Pool, offload: Offload) -> None:
    """Not of the unit, nor of the time at which the thread comes to it."""
    expected = pool.run(2, count, None)[0]
    for own, groups_own, values in pool.run(2, count, offload):
        assert (own, groups_own) == expected[:2] == (3, 3)
        assert all(torch.equal(values[name], value) for name, value in expected[2].items())


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
