"""Optimizers of the tests by name, several for one model where one cannot have all of it.

Each entry makes the optimizers of a model, the same in a rank and in the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from tests import models
from tests.runs import full_values

# States that say how far training has come, not what a parameter is.
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})

Make = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]


@dataclass
class Together:
    """Several optimizers where `reference.train` and the loop below expect one."""

    optimizers: Sequence[torch.optim.Optimizer]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


# User-written rules -----------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Elementwise, written as users do: no foreach, states made in the first step."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(momentum.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - second)


class Replacing(torch.optim.Optimizer):
    """Gives parameters new memory instead of new values."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p - group["lr"] * p.grad


class RowAndColumn(torch.optim.Optimizer):
    """Shampoo-like: preconditions a matrix from both sides. Its name tells nobody."""

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-2):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                matrix = p.grad.reshape(len(p.grad), -1) if p.grad.dim() else p.grad.view(1, 1)
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["left"] = group["eps"] * torch.eye(len(matrix))
                    state["right"] = group["eps"] * torch.eye(matrix.shape[1])
                state["step"] += 1
                state["left"] += matrix @ matrix.t()
                state["right"] += matrix.t() @ matrix
                update = _inverse_root(state["left"]) @ matrix @ _inverse_root(state["right"])
                p.sub_(update.view(p.shape), alpha=group["lr"])


class Shampoo(RowAndColumn):
    """The same under a name that is known."""


def _inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.t()


# By name ----------------------------------------------------------------------------------------


def _one(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    # Adafactor divides by the number of elements.
    return lambda model: [kind([p for p in model.parameters() if p.numel()], **options)]


def _matrices_and_rest(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """Muon for what is a matrix, AdamW for the rest of the same modules."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.dim() == 2 and p.numel()]
    rest = [p for p in trainable if p.dim() != 2 or not p.numel()]
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=0.02, **options)]
    return [*made, torch.optim.AdamW(rest, lr=1e-2)] if rest else made


MATRIX: dict[str, Make] = {
    "muon": _matrices_and_rest,
    "muon_plain": partial(_matrices_and_rest, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "adafactor": _one(torch.optim.Adafactor, lr=0.05, weight_decay=0.1),
    "adafactor_foreach": _one(torch.optim.Adafactor, lr=0.05, foreach=True),
    "shampoo": _one(Shampoo),
    "user_written": _one(RowAndColumn),
}


# Training ---------------------------------------------------------------------------------------


@dataclass
class Trained:
    """One rank's view of a run."""

    losses: list[list[float]]
    parameters: dict[str, Tensor]
    state_bytes: int


def train(
    make: Make,
    name: str,
    *,
    steps: int = 3,
    backwards: int = 1,
    no_sync: bool = False,
    **settings: Any,
) -> Trained:
    """Train a model of `tests.models` with these optimizers through the engine."""
    model = models.build(name)
    together = Together(make(model))
    onecopy.shard(model, together.optimizers, **settings)
    losses = []
    for step in models.batches(name, steps, dist.get_world_size(), backwards):
        losses.append([])
        for number, batch in enumerate(step[dist.get_rank()]):
            loss = models.loss(model, batch)
            if no_sync and number < backwards - 1:
                with onecopy.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            losses[-1].append(loss.item())
        together.step()
        together.zero_grad()
    return Trained(losses, full_values(model), state_bytes(together.optimizers))


def state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes of all optimizer states; what counts steps aside, of which each piece has its own."""
    return sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and key not in COUNTERS
    )
