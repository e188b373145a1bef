"""Module trees drawn from a seed: shared, unused, frozen, empty and odd-shaped parameters.

For property tests: hypothesis draws the seed, `random_tree(seed)` the same tree in every process.
Whatever the tree looks like, it maps (rows, WIDTH) to (rows, WIDTH).
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

WIDTH = 6
_SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (0,), (1,), (3,), (WIDTH,), (17,), (0, 4)),
    *((WIDTH, WIDTH), (2, 5), (7, 1, 3), (1, 1)),
)


class Leaf(nn.Module):
    """A few parameters of odd shapes; the last of them may go unused."""

    def __init__(self, parameters: list[nn.Parameter], num_used: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)
        self.num_used = num_used

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.num_used):
            row = _as_row(self.weights[index])
            x = x + torch.tanh(x * row + row)
        return x


class Calls(nn.Module):
    """Calls its children one after the other, a shared one as often as it is named."""

    def __init__(self, children: list[nn.Module], spare: list[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(children)
        self.spare = nn.ModuleDict({f"spare{i}": child for i, child in enumerate(spare)})
        self.register_buffer("scale", torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.steps:
            x = child(x) * self.scale
        return x


class _Drawer:
    """Draws one tree; remembers what may be shared."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters: list[nn.Parameter] = []
        self.modules: list[nn.Module] = []

    def parameter(self) -> nn.Parameter:
        if self.parameters and self.random.random() < 0.15:
            return self.random.choice(self.parameters)  # tied
        shape = self.random.choice(_SHAPES)
        values = 0.5 * torch.randn(shape, generator=self.generator)
        made = nn.Parameter(values, requires_grad=self.random.random() > 0.2)
        self.parameters.append(made)
        return made

    def leaf(self) -> nn.Module:
        count = self.random.randint(1, 4)
        num_used = count if self.random.random() < 0.7 else self.random.randint(0, count)
        return Leaf([self.parameter() for _ in range(count)], num_used)

    def linear(self) -> nn.Module:
        made = nn.Linear(WIDTH, WIDTH, bias=self.random.random() < 0.5)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=self.generator))
        return made

    def repeated(self) -> nn.Module:
        """Alike blocks: what units are made of by default."""
        count = self.random.randint(2, 3)
        return nn.Sequential(
            *(nn.Sequential(self.linear(), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(count))
        )

    def module(self, depth: int) -> nn.Module:
        if self.modules and self.random.random() < 0.1:
            return self.random.choice(self.modules)  # shared
        makers = [self.leaf, self.linear, self.repeated]
        if depth > 0:
            makers += [lambda: self.calls(depth - 1)] * 3
        made = self.random.choice(makers)()
        self.modules.append(made)
        return made

    def calls(self, depth: int) -> nn.Module:
        children = [self.module(depth) for _ in range(self.random.randint(1, 3))]
        spare = [self.leaf()] if self.random.random() < 0.2 else []
        return Calls(children, spare)


def random_tree(seed: int) -> nn.Module:
    """The tree of this seed. At least one parameter is trained."""
    drawer = _Drawer(seed)
    tree = drawer.calls(depth=2)
    assert isinstance(tree, Calls), "the root calls its children"
    tree.steps.append(drawer.linear())
    return tree


def _as_row(parameter: Tensor) -> Tensor:
    """(WIDTH,) made of all elements of a tensor of any shape."""
    flat = parameter.reshape(-1)
    copies = -(-WIDTH // max(1, flat.numel()))
    flat = flat.repeat(copies) if flat.numel() else flat.new_zeros(WIDTH) + flat.sum()
    padded = nn.functional.pad(flat, (0, -flat.numel() % WIDTH))
    return padded.view(-1, WIDTH).sum(0)
