"""Training with quantized transfers: against a naive simulation, and what stays exact."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
            zero.backward(loss / backwards)
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
    backwards: int = 1, options: frozenset[str] = frozenset(), **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """A user's loop; the masters at its end."""
    model, optimizer = start(options, settings)
    losses = run(model, optimizer, range(STEPS), backwards, options)
    return losses, {name: one.clone() for name, one in model.state_dict().items()}


def start(
    options: frozenset[str], settings: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(checkpointed="checkpointed" in options)
    if "frozen" in options:
        model.blocks[0].requires_grad_(False)
    optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    onecopy.shard(model, optimizer, units=("blocks.*",), **settings)
    return model, optimizer


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    backwards: int,
    options: frozenset[str],
) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(backwards):
            is_local = "no_sync" in options and micro < backwards - 1
            with onecopy.no_sync(model) if is_local else nullcontext():
                loss = model(data(step, micro)).float().square().mean()
                (loss / backwards).backward()
            losses.append(loss.item())
        if "clipped" in options:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if "looked" in options:
            look(model)
    return losses


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


@pytest.mark.sampled(
    "stage, codes",
    list(
        itertools.product(
            (1, 2, 3),
            [
                (2, "int8", "int8", 1),
                (4, "fp8", "int4", 2),
                (2, "int4", None, 1),
                (2, None, "fp8", 1),
            ],
        )
    ),
    5,
    always=[(2, (2, "int8", "int8", 1)), (3, (4, "fp8", "int4", 2))],
)
def test_training_equals_the_simulation(
    pool: Pool, stage: int, codes: tuple[int, str | None, str | None, int]
) -> None:
    """Bit for bit, with exact masters: the simulation keeps its own apart from what it gathers."""
    world, weights, gradients, backwards = codes
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


@pytest.mark.sampled(
    "stage, precision",
    list(itertools.product((1, 2, 3), (None, "bf16"))),
    3,
    always=[(1, "bf16"), (3, None)],
)
def test_masters_are_exact(pool: Pool, stage: int, precision: str | None) -> None:
    pool.run(2, look_and_write, stage, precision)


def write_one(stage: int, offload: str | None) -> None:
    """What shares a block with a written value is not written, however often it is looked at."""
    model = build()
    optimizer = adamw(model.parameters())
    quantize = Quantize(weights="int4", gradients=None)
    onecopy.shard(model, optimizer, stage=stage, quantize=quantize, offload=offload)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with torch.no_grad():
        model(data(0))
        # Beyond all others: codes of its block have another scale.
        model.blocks[0].up.bias.copy_(torch.linspace(10.0, 20.0, 64))
    before["blocks.0.up.bias"] = torch.linspace(10.0, 20.0, 64)
    for _ in range(2):
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        look(model)


@pytest.mark.sampled(
    "stage, offload",
    list(itertools.product((1, 2, 3), (None, "cpu", "nvme"))),
    3,
    always=[(1, "nvme"), (2, None)],
)
def test_what_is_beside_a_write_stays(
    pool: Pool, tmp_path: Path, stage: int, offload: str | None
) -> None:
    pool.run(2, write_one, stage, f"nvme:{tmp_path}" if offload == "nvme" else offload)


# Together with everything else ------------------------------------------------------------------


class Case(NamedTuple):
    world: int
    node_size: int | None
    stage: int | str
    settings: dict[str, Any]
    options: frozenset[str]


def resume(case: Case, folder: Path) -> tuple[list[float], list[float]]:
    """Losses without and with quantization; a run that is resumed goes on to the last bit."""
    quantize = Quantize(weights="int8", gradients=("int8", "int8"), block=BLOCK)
    settings = {"stage": case.stage, "node_size": case.node_size, **case.settings}
    backwards, options = 3 if "no_sync" in case.options else 1, case.options
    if "on disk" in options:
        settings["offload"] = f"nvme:{folder}"
    plain, _ = train(backwards, options, **settings)
    settings["quantize"] = quantize
    model, optimizer = start(options, settings)
    losses = run(model, optimizer, range(STEPS // 2), backwards, options)
    onecopy.save(folder / "saved", model, optimizer)
    losses += run(model, optimizer, range(STEPS // 2, STEPS), backwards, options)
    again, its_optimizer = start(options, settings)
    onecopy.load(folder / "saved", again, its_optimizer)
    rest = run(again, its_optimizer, range(STEPS // 2, STEPS), backwards, options)
    assert rest == losses[-len(rest) :]
    masters = again.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, masters[name]), name
    return plain, losses


WORLDS = [(2, None), (3, 2), (4, 2)]
STAGES = (0, 1, 2, 3, "hpz", "mics", "hfsdp", "whole/node/world")
HOST = {"offload": onecopy.Offload(optimizer="host", gradients="host", parameters="host")}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"precision": onecopy.Precision(compute="bf16", master="bf16+16")},
    {"precision": "bf16", "offload": "cpu"},
    HOST,
    {"step_in_backward": True},
]
OPTIONS = [
    frozenset[str](),
    frozenset({"no_sync", "clipped"}),
    frozenset({"checkpointed", "looked"}),
    frozenset({"frozen", "looked"}),
    frozenset({"on disk"}),
]
CASES = [
    Case(world, node_size, stage, settings, options)
    for (world, node_size), stage, settings, options in itertools.product(
        WORLDS, STAGES, SETTINGS, OPTIONS
    )
    # Nodes of unequal size hold no equal slices, steps in backward have no accumulation, and what
    # is not cut is not offloaded.
    if not (stage == "mics" and world == 3)
    and not (settings is HOST and stage in (0, 1, 2, "whole/node/world"))
    and not ("step_in_backward" in settings and options & {"no_sync", "clipped"})
    and not ("on disk" in options and settings not in SETTINGS[:3])
]
ALWAYS = [
    Case(4, 2, "hpz", SETTINGS[1], OPTIONS[1]),
    Case(2, None, 2, SETTINGS[4], OPTIONS[2]),
]


@pytest.mark.sampled("case", CASES, 4, always=ALWAYS)
def test_all_together(pool: Pool, tmp_path: Path, case: Case) -> None:
    """It trains as without, to a few percent of the loss, and resumes to the last bit."""
    for plain, losses in pool.run(case.world, resume, case, tmp_path):
        assert losses == pytest.approx(plain, rel=0.05)


def come_and_go(stage: int, precision: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters at the beginning, as files or `init_sharded` give them, and at the end."""
    with onecopy.init_sharded():
        model = build()
    optimizer = adamw(model.parameters())
    quantize = Quantize(weights="int4", gradients=("int8", "int8"), block=BLOCK)
    onecopy.shard(
        model, optimizer, stage=stage, precision=precision, units=("blocks.*",), quantize=quantize
    )
    first = {name: one.clone() for name, one in model.state_dict().items()}
    run(model, optimizer, range(2), 1, frozenset())
    second = {name: one.clone() for name, one in model.state_dict().items()}
    for name, one in copy.deepcopy(model).state_dict().items():
        assert torch.equal(one, second[name]), name
    model.blocks[1].requires_grad_(False)
    run(model, optimizer, range(2, 3), 1, frozenset())
    assert torch.equal(model.state_dict()["blocks.1.up.weight"], second["blocks.1.up.weight"])
    model.blocks[1].requires_grad_(True)
    run(model, optimizer, range(3, 5), 1, frozenset({"looked"}))
    last = {name: one.clone() for name, one in model.state_dict().items()}
    assert not torch.equal(last["blocks.1.up.weight"], second["blocks.1.up.weight"])
    onecopy.unshard(model)
    for name, one in model.state_dict().items():
        assert torch.equal(one, last[name]), name
    return first, last


@pytest.mark.sampled(
    "stage, precision", list(itertools.product((1, 2, 3), (None, "bf16"))), 2, always=[(2, None)]
)
def test_values_come_and_go_exactly(pool: Pool, stage: int, precision: str | None) -> None:
    """Made sharded, copied, frozen and thawed, and given back."""
    expected = build().state_dict()
    found = pool.run(2, come_and_go, stage, precision)
    for first, last in found:
        for name, value in expected.items():
            assert torch.equal(first[name], value), name
            assert torch.equal(last[name], found[0][1][name]), name
