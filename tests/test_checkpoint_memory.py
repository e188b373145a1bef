"""What a load takes: memory for the states that are there already is not taken once more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onecopy
from tests.pool import Pool

WIDTH = 64


class Anchored(torch.optim.SGD):
    """Momentum, and a state that shares the parameter's memory when it is made."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("anchor", parameter.detach())


def make(kind: str, whole: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, WIDTH))
    model[0].to(memory_format=torch.channels_last)
    optimizer: torch.optim.Optimizer
    if kind == "anchored":
        optimizer = Anchored(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, whole_parameters=whole)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = [value for state in optimizer.state.values() for value in state.values()]
    return [one for one in found if isinstance(one, Tensor) and one.dim()]


def go_back(root: Path, whole: bool) -> tuple[list[bool], list[float], list[float]]:
    """Save, go on, load, go on: whether states are where they were, and the losses."""
    model, optimizer = make("adamw", whole)
    train(model, optimizer)
    onecopy.save(root, model, optimizer)
    first = [train(model, optimizer) for _ in range(3)]
    places = [one.data_ptr() for one in states(optimizer)]
    strides = [one.stride() for one in states(optimizer)]
    onecopy.load(root, model, optimizer)
    assert strides == [one.stride() for one in states(optimizer)]
    same = [one.data_ptr() == place for one, place in zip(states(optimizer), places, strict=True)]
    return same, first, [train(model, optimizer) for _ in range(3)]


@pytest.mark.parametrize("whole", [False, True])
def test_states_are_read_into_their_memory(pool: Pool, tmp_path: Path, whole: bool) -> None:
    for same, first, again in pool.run(2, go_back, tmp_path, whole):
        assert same and all(same)
        assert first == again


def go_back_anchored(root: Path) -> bool:
    """Whether a state that shared the parameter's memory has its saved values, and so has it."""
    model, optimizer = make("anchored", False)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["anchor"] = torch.full_like(state["anchor"], 7.0)
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    saved = [piece.detach().clone() for piece in pieces]
    onecopy.save(root, model, optimizer)
    for piece, state in optimizer.state.items():
        state["anchor"] = piece.detach()
    onecopy.load(root, model, optimizer)
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    return all(
        torch.equal(piece, before) and bool((optimizer.state[piece]["anchor"] == 7.0).all())
        for piece, before in zip(pieces, saved, strict=True)
        if piece.numel()
    )


def test_a_state_that_shares_memory_gets_its_own(pool: Pool, tmp_path: Path) -> None:
    assert all(pool.run(2, go_back_anchored, tmp_path))
