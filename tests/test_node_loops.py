"""What loops do beside training where states are cut inside nodes: writes, looks, failures.

Each is compared with stage 3 on the same ranks. Two nodes of two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import onecopy
from onecopy.errors import DivergenceError
from onecopy.memory import buffers
from onecopy.report.run_folder import read_run
from tests.pool import Pool

HYBRIDS = ("mics", "hfsdp", "hpz", "whole/node/world")
WIDTH = 8


class Masked(nn.Linear):
    """A layer whose forward keeps a part of its weight at zero: counted by torch, or hidden.

    Attributes:
        only_rank: the others do not write, where it is set.
    """

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how = how
        self.only_rank: int | None = None
        self.register_buffer("mask", (torch.arange(64).view(8, 8) % 3 > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        if self.only_rank in (None, dist.get_rank()):
            self.write()
        return F.linear(x, self.weight, self.bias)

    def write(self) -> None:
        if self.how == "hidden":
            self.weight.data *= self.mask
        elif self.how == "counted":
            with torch.no_grad():
                self.weight.mul_(self.mask)


class MaskedByData(Masked):
    """The same in the forward's own code."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return F.linear(x, self.weight, self.bias)


class Net(nn.Module):
    """A table, three layers and a head; the table may keep its rows short, as torch's can."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(12, WIDTH, max_norm=0.5 if how == "max_norm" else None)
        self.blocks = nn.ModuleList(
            (MaskedByData if how == "data" else Masked)(how) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.uses_gate = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.uses_gate:
            x = x * self.gate
        return self.head(x)


class Loop:
    """A sharded model and what a loop does with it."""

    def __init__(self, stage: int | str, how: str = "", **settings: Any) -> None:
        self.model = Net(how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        onecopy.shard(self.model, self.optimizer, stage=stage, node_size=2, **settings)
        self.found: list[Any] = []
        self.draws = torch.Generator().manual_seed(5 + dist.get_rank())

    def loss(self) -> Tensor:
        tokens = torch.randint(0, 12, (3, 4), generator=self.draws)
        return self.model(tokens).square().mean()

    def backward(self, times: int = 1) -> None:
        for _ in range(times):
            self.loss().backward()

    def step(self, backwards: int = 2) -> None:
        self.backward(backwards)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def trained(self) -> list[Tensor]:
        """Those that each rank uses."""
        return [one for one in self.model.parameters() if one is not self.model.gate]

    def evaluate(self) -> None:
        with torch.no_grad():
            self.found.append(self.loss().item())

    def end(self) -> list[Any]:
        """What was found, and the values of all parameters."""
        self.evaluate()
        with onecopy.full_parameters(self.model):
            self.found += [one.detach().clone() for one in self.model.parameters()]
        return self.found


def both(do: Callable[[Loop], None], stage: str, how: str = "", **settings: Any) -> list[list[Any]]:
    """The same loop at a stage and at stage 3."""
    found = []
    for one in (stage, 3):
        loop = Loop(one, how, **settings)
        loop.step()
        loop.step()
        do(loop)
        found.append(loop.end())
    return found


def are_equal(found: list[list[Any]]) -> None:
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def write_inside_full_parameters(loop: Loop) -> None:
    loop.evaluate()
    with onecopy.full_parameters(loop.model), torch.no_grad():
        loop.model.head.weight.mul_(0.5)
    loop.evaluate()
    loop.step()


def load_a_state_dict(loop: Loop) -> None:
    state = {name: 0.9 * value for name, value in loop.model.state_dict().items()}
    loop.evaluate()
    loop.model.load_state_dict(state)
    loop.evaluate()
    loop.step()


def touch_and_write(loop: Loop) -> None:
    loop.evaluate()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.9)
    loop.evaluate()
    loop.backward()
    loop.step()


def only_train(loop: Loop) -> None:
    for _ in range(2):
        loop.evaluate()
        loop.step()


def freeze_and_unfreeze(loop: Loop) -> None:
    loop.model.blocks[1].requires_grad_(False)
    loop.step()
    loop.evaluate()
    loop.model.blocks[1].requires_grad_(True)
    loop.step()


WRITES = [
    *((do, "") for do in (write_inside_full_parameters, load_a_state_dict, touch_and_write)),
    *((only_train, how) for how in ("data", "hidden", "counted", "max_norm")),
    (freeze_and_unfreeze, ""),
]


@pytest.mark.sampled("do, how", WRITES, 4)
def test_written_values_are_seen(pool: Pool, do: Callable[[Loop], None], how: str) -> None:
    """What a node keeps together of the parameters is never what they were before."""
    for found in pool.run(4, both, do, "hpz", how):
        are_equal(found)


def write_on_one_rank() -> None:
    loop = Loop("hpz", "counted")
    for block in loop.model.blocks:
        block.only_rank = 0
    # While uses are recorded the ranks tell each other; afterwards they would wait for each other.
    loop.step()
    loop.step()


def test_a_forward_that_writes_on_some_ranks_only(pool: Pool) -> None:
    """An error that names it, and no hang."""
    for failure in pool.run(4, write_on_one_rank, expect_failures=True):
        assert DivergenceError.__name__ in failure.names, failure


def look_at_norms(loop: Loop) -> None:
    loop.backward()
    loop.found += [one.grad.norm().item() for one in loop.trained()]


def look_at_values(loop: Loop) -> None:
    loop.backward()
    loop.found += [one.grad.sum().item() for one in loop.trained()]


def show_gradients(loop: Loop) -> None:
    loop.backward()
    with onecopy.full_parameters(loop.model, grads=True):
        loop.found += [one.grad.clone() for one in loop.trained()]


def halve_gradients(loop: Loop) -> None:
    loop.backward(3)
    for one in loop.trained():
        one.grad.mul_(0.5)
    loop.backward()


def remove_one(loop: Loop) -> None:
    loop.backward()
    loop.model.head.weight.grad = None
    loop.backward(3)
    loop.model.head.bias.grad = None


def replace_one(loop: Loop) -> None:
    loop.backward()
    loop.model.head.weight.grad = torch.ones(3, WIDTH)
    loop.backward(3)
    loop.model.head.bias.grad = torch.ones(3)


def clip_in_between(loop: Loop) -> None:
    loop.backward()
    loop.found.append(onecopy.clip_grad_norm_(loop.model, 0.01).item())
    loop.backward()


def give_up_a_batch(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.zero_grad()
    loop.backward(3)
    loop.model.zero_grad()
    loop.backward()


def fail_in_between(loop: Loop) -> None:
    loop.backward()
    handle = loop.model.blocks[0].register_full_backward_hook(_fail)
    try:
        loop.backward()
    except ZeroDivisionError:
        loop.found.append(1.0)
    handle.remove()
    loop.optimizer.zero_grad()
    loop.backward()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def mix_with_no_sync(loop: Loop) -> None:
    loop.backward()
    with onecopy.no_sync(loop.model):
        loop.backward(2)


def unused_on_some_ranks(loop: Loop) -> None:
    """In a backward that leaves sums in nodes, and then in no other."""
    loop.model.uses_gate = dist.get_rank() == 3
    loop.backward()
    loop.model.uses_gate = False
    loop.backward(2)


def used_for_the_first_time(loop: Loop) -> None:
    """In a backward that leaves sums in nodes: whoever looks must not miss it."""
    loop.model.uses_gate = True
    loop.backward()
    loop.found.append(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01).item())
    loop.found.append(loop.model.gate.grad.norm().item())


def uneven_data(loop: Loop) -> None:
    for _ in onecopy.join(loop.model, range(1 + dist.get_rank() % 3)):
        loop.step()


def scale_by_hand(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for backwards in (1, 2, 3, 1):
        for _ in range(backwards):
            scaler.scale(loop.loss()).backward()
        scaler.unscale_(loop.optimizer)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()


LOOKS = [
    look_at_norms,
    look_at_values,
    show_gradients,
    halve_gradients,
    remove_one,
    replace_one,
    clip_in_between,
    give_up_a_batch,
    fail_in_between,
    mix_with_no_sync,
    unused_on_some_ranks,
    used_for_the_first_time,
    uneven_data,
    scale_by_hand,
]


def one_backward_and(do: Callable[[Loop], None], loop: Loop) -> None:
    """Where two are expected: its sums are in the nodes."""
    do(loop)
    loop.step(1)
    loop.step(3)


@pytest.mark.sampled(
    "stage, do",
    [(stage, do) for stage in HYBRIDS for do in LOOKS],
    5,
    always=[
        ("mics", replace_one),
        ("hfsdp", fail_in_between),
        ("whole/node/world", used_for_the_first_time),
    ],
)
def test_gradients_before_the_boundary(pool: Pool, stage: str, do: Callable[[Loop], None]) -> None:
    for found in pool.run(4, both, partial(one_backward_and, do), stage):
        are_equal(found)


def in_poisoned_memory(stage: int | str) -> list[Any]:
    """Train with codes where memory that nobody has written to is not a number."""
    grow = buffers.grow

    def poisoned(tensor: Tensor) -> None:
        grow(tensor)
        tensor.fill_(float("nan"))

    with mock.patch.object(buffers, "grow", poisoned):
        loop = Loop(stage, quantize=onecopy.Quantize())
        loop.step()
        loop.step(3)
    return loop.end()


@pytest.mark.parametrize("stage", [3, "hfsdp"])
def test_what_lies_between_gradients_is_not_coded(pool: Pool, stage: int | str) -> None:
    """It would be in the scale of a block, and one that is not finite makes its block so."""
    for found in pool.run(4, in_poisoned_memory, stage):
        assert all(torch.as_tensor(one).isfinite().all() for one in found)


def recorded(folder: Path) -> None:
    loop = Loop("hfsdp")
    with onecopy.record(folder, loop.model, loop.optimizer, trace=2) as run:
        for step in range(4):
            loop.step(3)
            run.log(step=step)


def test_recorded_runs_tell_what_crosses(pool: Pool, tmp_path: Path) -> None:
    """Bytes of each step but the first are those of the formula; events have their part."""
    pool.run(4, recorded, tmp_path)
    for rank in read_run(tmp_path).ranks:
        assert any(event.across_bytes for event in rank.events)
        for step in rank.steps[1:]:
            assert step.sent["gather"] == step.expected["gather"], step
            # The formula leaves out flags.
            assert step.sent["reduce"] == pytest.approx(step.expected["reduce"], rel=0.2)
