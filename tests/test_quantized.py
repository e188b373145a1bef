"""Training with quantized transfers: against a naive simulation, and what stays exact."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.handle
from onecopy import Quantize
from onecopy.comm.codec import decode, encode
from onecopy.comm.coding import Coding
from onecopy.errors import ConfigError
from tests import naive_zero
from tests.pool import Pool

STEPS = 4
BLOCK = 64


class Block(nn.Module):
    """Sizes of which every rank gets whole rows of 64 elements: flat buffers need no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.relu(self.up(x[:, :16]))))


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(64, 64)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x)


def build(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def data(step: int, micro: int = 0) -> Tensor:
    seed = 1000 * step + 10 * micro + dist.get_rank()
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


# Against a simulation ---------------------------------------------------------------------------


def coded(values: Tensor, code: str | None) -> Tensor:
    """Values as they arrive."""
    if code is None:
        return values.clone()
    coding, arrived = Coding(code, BLOCK), torch.empty_like(values)
    payload = torch.empty(coding.num_bytes(values.numel()), dtype=torch.uint8)
    encode(values, coding, payload)
    decode(payload, coding, arrived)
    return arrived


class NaiveQuantizedUnit(naive_zero.Unit):
    """What is gathered and what is summed goes through the codec; stages 1 to 3 on one node."""

    weights: str | None
    gradients: str | None

    def gather(self) -> None:
        super().gather()
        for part in self.flat.chunk(self.world):
            part.copy_(coded(part, self.weights))

    def reduce(self) -> None:
        # The owner's own part is exact: bring all parts as they arrive, and sum those.
        mine = torch.zeros(len(self.flat)) if self.grads is None else self.grads
        whole = mine.clone()
        for number, part in enumerate(mine.chunk(self.world)):
            if number != dist.get_rank():
                part.copy_(coded(part, self.gradients))
        theirs = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(theirs, mine)
        theirs[dist.get_rank()] = whole
        mean = sum(theirs[1:], theirs[0])[self.low : self.high] * (1 / self.world)
        for piece in self.pieces.values():
            grad = mean[piece.storage_offset() :][: len(piece)]
            piece.grad = grad if piece.grad is None else piece.grad + grad
        self.grads = None if self.stage > 1 else mine.zero_()


def train_naive(
    stage: int, weights: str | None, gradients: str | None, backwards: int
) -> tuple[list[float], dict[str, Tensor]]:
    NaiveQuantizedUnit.weights, NaiveQuantizedUnit.gradients = weights, gradients
    model = build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naive_zero, "Unit", NaiveQuantizedUnit)
        zero = naive_zero.NaiveZero(model, stage, adamw)
    losses = []
    for unit in zero.units:
        unit.gather()
        unit.release()
    for step in range(STEPS):
        for micro in range(backwards):
            loss = model(data(step, micro)).square().mean()
            losses.append(loss.item())
            zero.backward(loss)
        zero.optimizer.step()
        zero.optimizer.zero_grad()
        for unit in zero.units:
            unit.gather()
            unit.release()
    # The masters.
    for unit in zero.units:
        naive_zero.Unit.gather(unit)
    return losses, {name: one.detach().clone() for name, one in model.named_parameters()}


def train(
    backwards: int = 1, options: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """A user's loop; the masters at its end."""
    options = options or {}
    model = build(checkpointed=options.get("checkpointed", False))
    optimizer = adamw(model.parameters())
    onecopy.shard(model, optimizer, units=("blocks.*",), **settings)
    losses = []
    for step in range(STEPS):
        for micro in range(backwards):
            last = micro == backwards - 1
            with onecopy.no_sync(model) if options.get("no_sync") and not last else _nothing():
                loss = model(data(step, micro)).float().square().mean()
                loss.backward()
            losses.append(loss.item())
        if options.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        optimizer.step()
        optimizer.zero_grad()
        if options.get("look"):
            look(model)
    return losses, {name: one.clone() for name, one in model.state_dict().items()}


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def look(model: nn.Module) -> None:
    """What must change nothing."""
    with onecopy.full_parameters(model):
        held = {name: one.detach().clone() for name, one in model.named_parameters()}
    for name, value in model.state_dict().items():
        assert torch.equal(value, held[name].to(value.dtype)) or value.dtype != held[name].dtype
    with torch.no_grad():
        model(data(99))
    _ = model.first.weight.sum().item()
    with torch.no_grad():
        model.first.weight.mul_(1.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("world", "weights", "gradients", "backwards"),
    [(2, "int8", "int8", 1), (4, "fp8", "int4", 2), (2, "int4", None, 1), (2, None, "fp8", 1)],
)
def test_training_equals_the_simulation(
    pool: Pool, stage: int, world: int, weights: str | None, gradients: str | None, backwards: int
) -> None:
    """Bit for bit, with exact masters: the simulation keeps its own apart from what it gathers."""
    naive = pool.run(world, train_naive, stage, weights, gradients, backwards)
    pair = None if gradients is None else (gradients, None)
    quantize = Quantize(weights=weights, gradients=pair, block=BLOCK)
    found = pool.run(world, partial(train, backwards, stage=stage, quantize=quantize))
    for (losses, masters), (naive_losses, naive_masters) in zip(found, naive, strict=True):
        assert losses == naive_losses
        for name, value in masters.items():
            assert torch.equal(value, naive_masters[name]), name


# What stays exact -------------------------------------------------------------------------------


def masters_of(model: nn.Module) -> list[Tensor]:
    return [unit.slice.master.clone() for unit in onecopy.handle.of(model).engine.units]


def look_and_write(stage: int, precision: str | None) -> None:
    """Looking changes no master; what is written arrives, also where codes had the same value."""
    model = build()
    optimizer = adamw(model.parameters())
    quantize = Quantize(weights="int4", gradients=None, block=BLOCK)
    onecopy.shard(
        model, optimizer, stage=stage, precision=precision, units=("blocks.*",), quantize=quantize
    )
    model(data(0)).square().mean().backward()
    optimizer.step()
    before = masters_of(model)
    look(model)
    model(data(1))
    look(model)
    assert all(map(torch.equal, masters_of(model), before))
    tiny = model.blocks[0].up.weight
    with onecopy.full_parameters(model), torch.no_grad():
        # Codes make zeros of what is small beside one large value.
        tiny.fill_(1e-4)
        tiny.view(-1)[::64] = 1.0
    assert float(model.state_dict()["blocks.0.up.weight"].view(-1)[1]) == pytest.approx(1e-4, 1e-2)
    model(data(2))
    with onecopy.full_parameters(model), torch.no_grad():
        assert tiny.view(-1)[1].item() == pytest.approx(1e-4, 1e-2)
        tiny.zero_()
    assert not model.state_dict()["blocks.0.up.weight"].any()
    model(data(3))
    given = {name: torch.randn_like(one) for name, one in model.state_dict().items()}
    dist.broadcast(given["last.weight"], 0)
    given = {name: one * 0 if "up" in name else one for name, one in given.items()}
    model.load_state_dict(given)
    for name, value in model.state_dict().items():
        assert torch.equal(value, given[name]), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_masters_are_exact(pool: Pool, stage: int, precision: str | None) -> None:
    pool.run(2, look_and_write, stage, precision)
