"""What the habits are made of: the table that they go into, a small net, its data, a loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.habit_sides import Optimizer, Plain

__all__ = [
    "HABITS",
    "Different",
    "Habit",
    "Net",
    "adam",
    "begin",
    "data",
    "habit",
    "loss_of",
    "number",
    "plain_tensor",
    "sgd",
    "train",
]

WIDTH = 6


class Different(Exception):
    """It runs, and is not what plain PyTorch gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """A row of the table.

    text: the row's heading.
    tolerance: absolute and relative.
    may_refuse: what is asked for is that it does not hang: an error on all ranks is as good.
    """

    text: str
    check: Callable[[Any], list[Tensor]]
    tolerance: float = 2e-5
    may_refuse: bool = False


HABITS: dict[str, Habit] = {}


def habit(text: str, **settings: Any) -> Callable[[Any], Any]:
    """Put a function into the table of habits."""

    def add(check: Callable[[Any], list[Tensor]]) -> Callable[[Any], list[Tensor]]:
        HABITS[check.__name__] = Habit(text=text, check=check, **settings)
        return check

    return add


class Block(nn.Module):
    """A residual block without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Net(nn.Module):
    """A stem, two blocks and a head; `how` chooses among unusual ways through it.

    extra: used where `how` says so, else not at all.
    """

    def __init__(self, how: str = "", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.how = how
        self.stem = nn.Linear(4, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4, bias=False)
        if how == "unused":
            self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        """(rows, 4) -> (rows, 4)."""
        h = self.stem(x)
        if self.how == "different modules":
            return self.head(self.blocks[rank](h))
        for block in self.blocks:
            if self.how.startswith("checkpoint"):
                h = checkpoint(block, h, use_reentrant=self.how == "checkpoint reentrant")
            else:
                h = block(h)
        if self.how == "unused" and rank == 0:
            h = h * self.extra
        if self.how == "root weight":
            return functional.linear(h, self.stem.weight.t())
        if self.how == "block weight":
            h = functional.linear(h, self.blocks[0].up.weight[:WIDTH])
        return self.head(h)

    def encode(self, x: Tensor) -> Tensor:
        """Without the blocks: (rows, 4) -> (rows, 4)."""
        return self.head(self.stem(x))


def data(step: int, rank: int) -> Tensor:
    """(3, 4), different in every step and on every rank."""
    return torch.sin(torch.arange(12.0).view(3, 4) * (0.7 + 0.1 * step + 0.3 * rank) + step)


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    """A loss that is large enough for every gradient to count."""
    return (model(data(step, rank)) - 1).square().mean()


def sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.2)


def adam(net: nn.Module) -> Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05, eps=1e-3)


def train(side: Plain, model: Any, optimizers: Any, steps: range) -> None:
    """The plainest loop."""
    for step in steps:
        side.backward(lambda rank, step=step: loss_of(model, step, rank))
        for optimizer in optimizers:
            side.step(optimizer)


def begin(side: Plain, *makers: Any, how: str = "", **hints: Any) -> tuple[Any, Any, Any]:
    """A net, the model to call, and its optimizer."""
    net = Net(how)
    model, optimizers = side.start(net, *(makers or (sgd,)), **hints)
    return net, model, optimizers[0]


def plain_tensor(value: Any) -> Tensor:
    """A copy of a tensor that ought to be plain and whole."""
    if value is None:
        raise Different("None")
    if hasattr(value, "full_tensor"):
        raise Different("a DTensor, not a plain tensor")
    if not value.numel():
        raise Different("an empty tensor")
    return value.detach().clone().float()


def number(value: Any) -> Tensor:
    """What float() says of a 0-d tensor."""
    return torch.tensor(float(value.detach()))
