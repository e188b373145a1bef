"""A model, and optimizers for it, with one of each thing that a checkpoint can get wrong.

Built the same way everywhere. What is not in a checkpoint must not be needed to go on: everything
that the model remembers changes its loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from onecopy.core.restore import _gather_states
from tests.runs import full_values

__all__ = ["OPTIMIZERS", "Motley", "batch", "compare", "make", "snapshot", "train"]

ROWS = 12  # of the global batch: divided by each number of ranks
WIDTH, PIXELS = 9, 16
Optimizers = dict[str, torch.optim.Optimizer]


class Counting(nn.Module):
    """Its state is no tensor of the module: a number in one, a tensor in the other."""

    def __init__(self, *, as_tensor: bool) -> None:
        super().__init__()
        self.as_tensor = as_tensor
        self.calls = 0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.calls) if self.as_tensor else {"calls": self.calls, "by": [1, 2]}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state if self.as_tensor else state["calls"])

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Block(nn.Module):
    """A block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Motley(nn.Module):
    """See the module's docstring; `is_noisy` is without a place in checkpoints."""

    mean: Tensor
    table: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.is_noisy = True
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.batch_norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(PIXELS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.tiny = nn.Linear(1, 1)
        self.last = nn.Linear(PIXELS, WIDTH)
        self.last.weight = self.first.weight
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.none = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, WIDTH))
        self.transposed = nn.Parameter(torch.randn(3, WIDTH).t())
        self.register_buffer("mean", torch.zeros(3, 4)[:, ::2])  # not dense
        self.register_buffer("table", torch.zeros(2, 3).t())
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.counting = Counting(as_tensor=False)
        self.counting_in_tensor = Counting(as_tensor=True)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3, 4, 4) -> (rows, WIDTH)
        h = self.conv(x)
        # Running statistics are those of a rank: nothing else may depend on them.
        h = h + 0.0 * self.batch_norm(h)
        h = h.mean(1).flatten(1)
        y = self.last(h)
        h = torch.tanh(self.first(h)) * self.scalar + self.none.sum()
        h = h + (h @ self.no_rows.t()).sum() + (h @ self.transposed).sum(1, keepdim=True)
        for block in self.blocks:
            h = block(h)
        h = self.frozen(h) * self.tiny(torch.ones(1, 1))
        with torch.no_grad():
            self.mean += 0.1
            self.table -= 0.2
            self.cache += 1
        h = h + self.mean.sum() * 0.1 + self.table.sum() * 0.1
        if self.is_noisy:
            h = h + random.random()
        return self.counting_in_tensor(self.counting(h)) + y


def _one(model: Motley) -> Optimizers:
    """One optimizer over everything, in several groups."""
    blocks = list(model.blocks.parameters())
    special = [model.scalar, model.none, model.transposed]
    taken = {id(one) for one in (*blocks, *special)}
    rest = [one for one in model.parameters() if id(one) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": rest},
        {"params": blocks, "lr": 3e-2, "betas": (0.8, 0.95)},
        {"params": special, "weight_decay": 0.0, "name": "special"},
    ]
    return {"": torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)}


def _three(model: Motley) -> Optimizers:
    """Adam, which hides a wrong scale, momentum and plain SGD, which do not."""
    blocks = [list(block.parameters()) for block in model.blocks]
    return {
        "momentum": torch.optim.SGD(
            [
                {"params": blocks[0]},
                {"params": [*blocks[1], model.scalar], "momentum": 0.5, "nesterov": True},
                {"params": [model.none]},
            ],
            lr=0.02,
            momentum=0.9,
            weight_decay=0.01,
        ),
        "plain": torch.optim.SGD([*blocks[2], model.transposed, model.no_rows], lr=0.05),
        "adam": torch.optim.Adam(
            [
                {"params": [*model.conv.parameters(), *model.first.parameters()]},
                {"params": [*model.tiny.parameters(), model.last.bias], "amsgrad": True},
                {"params": [*model.frozen.parameters(), *model.batch_norm.parameters()]},
            ],
            lr=1e-2,
        ),
    }


OPTIMIZERS: dict[str, Callable[[Motley], Optimizers]] = {"one": _one, "three": _three}


def make(kind: str, seed: int = 0) -> tuple[Motley, Optimizers]:
    """The model with the weights of this seed, and its optimizers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Motley()
    return model, OPTIMIZERS[kind](model)


def batch(step: int) -> Tensor:
    """This rank's rows of a step's global batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randn(ROWS, 3, 4, 4, generator=generator)
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: nn.Module, optimizers: Mapping[str, Any], steps: Sequence[int]) -> list[float]:
    """These steps, each on its own batch; this rank's losses."""
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        for one in optimizers.values():
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    return losses


def snapshot(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
    """Everything whole, put together without any code of checkpoints; a collective."""
    owner = onecopy.handle.of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {"parameters": full_values(model), "buffers": {}, "extra": {}}
    for name, value in model.state_dict().items():
        if name in dict(model.named_buffers()):
            found["buffers"][name] = value.clone()
        elif name.endswith("_extra_state"):
            found["extra"][name] = value
    for name, optimizer in optimizers.items():
        binding = next(one for one in owner.bindings if one.optimizer is optimizer)
        states = {
            names[identity]: state
            for identity, state in _gather_states(owner.engine, binding).items()
        }
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        found[f"optimizer {name}"] = {"states": states, "groups": groups}
    return found


def compare(place: str, found: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal in structure, types and values; to the last bit unless told otherwise."""
    if isinstance(expected, Tensor):
        assert type(found) is type(expected), f"{place}: {type(found)}"
        assert found.dtype == expected.dtype, f"{place}: {found.dtype}, not {expected.dtype}"
        assert found.shape == expected.shape, f"{place}: {found.shape}, not {expected.shape}"
        if rtol or atol:
            assert torch.allclose(found, expected, rtol, atol), f"{place}: {found - expected}"
        else:
            assert torch.equal(found, expected), f"{place}: {found} is not {expected}"
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping), f"{place}: {found}"
        assert found.keys() == expected.keys(), f"{place}: {list(found)}, not {list(expected)}"
        for key, value in expected.items():
            compare(f"{place}.{key}", found[key], value, rtol=rtol, atol=atol)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), f"{place}: {found}"
        assert len(found) == len(expected), f"{place}: {found}, not {expected}"
        for number, pair in enumerate(zip(found, expected, strict=True)):
            compare(f"{place}[{number}]", *pair, rtol=rtol, atol=atol)
    else:
        assert found == expected, f"{place}: {found}, not {expected}"
