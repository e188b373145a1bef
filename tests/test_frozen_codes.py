"""Frozen weights that owners keep as codes: less memory, and they are what the codes say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy import Quantize, handle
from onecopy.comm.codec import decode, encode
from onecopy.comm.coding import Coding
from onecopy.core.unit import Unit
from tests.pool import Pool

BLOCK = 64
CODING = Coding("int8", BLOCK)


def build(*, trains: bool = False) -> nn.Module:
    """Two frozen blocks between trained layers; slices of whole blocks on up to four ranks."""
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    blocks.requires_grad_(trains)
    return nn.Sequential(nn.Linear(8, 64), blocks, nn.Linear(64, 4))


def coded(values: Tensor) -> Tensor:
    payload = torch.zeros(CODING.num_bytes(values.numel()), dtype=torch.uint8)
    encode(values.reshape(-1), CODING, payload)
    decoded = torch.empty(values.numel(), dtype=values.dtype)
    decode(payload, CODING, decoded)
    return decoded.view(values.shape)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    loss = model(torch.randn(8, 8, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def trained(stage: Any, quantize: Quantize | None, precision: str) -> tuple[list[float], int]:
    """Losses, and the bytes in which owners keep frozen weights."""
    model = build()
    if quantize is None:
        # What the codes make of them, as plain values.
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    exact = parameter.to(torch.bfloat16 if precision == "bf16" else torch.float32)
                    parameter.copy_(coded(exact))
    optimizer = optimizer_of(model)
    onecopy.shard(
        model, optimizer, stage=stage, node_size=2, quantize=quantize, precision=precision
    )
    losses = [step(model, optimizer, seed) for seed in range(3)]
    units: list[Unit] = handle.of(model).engine.units
    frozen = [unit for unit in units if unit.gradients is None]
    kept = sum(one.untyped_storage().nbytes() for unit in frozen for one in unit.slice.tensors)
    return losses, kept


@pytest.mark.parametrize(("world", "stage"), [(2, 3), (4, "hpz"), (4, "mics")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_that_of_the_coded_values(
    pool: Pool, world: int, stage: Any, precision: str
) -> None:
    quantize = Quantize(weights=None, gradients=None, block=BLOCK, frozen="int8")
    owners = 2 if stage == "mics" else world
    for (losses, kept), (expected, _) in zip(
        pool.run(world, trained, stage, quantize, precision),
        pool.run(world, trained, stage, None, precision),
        strict=True,
    ):
        assert losses == expected
        assert kept == 2 * CODING.num_bytes(64 * 64 // owners)


def looked_at(folder: Path) -> None:
    """Reading, writing, saving and unfreezing, on codes that travel as codes."""
    model = build()
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = optimizer_of(model)
    onecopy.shard(model, optimizer, quantize=Quantize(block=BLOCK, frozen="int8"))
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    said = {name: coded(exact[name]) for name in frozen}

    def check() -> None:
        state = model.state_dict()
        with onecopy.full_parameters(model):
            parameters = dict(model.named_parameters())
            for name in frozen:
                assert torch.equal(state[name], said[name])
                assert torch.equal(parameters[name].detach(), said[name])

    check()
    step(model, optimizer, 0)
    check()
    with onecopy.full_parameters(model), torch.no_grad():
        model.get_parameter(frozen[0]).mul_(3.0)
    said[frozen[0]] = coded(said[frozen[0]] * 3.0)
    check()
    onecopy.save(folder, model, optimizer)
    with onecopy.full_parameters(model), torch.no_grad():
        model.get_parameter(frozen[1]).zero_()
    onecopy.load(folder, model, optimizer)
    check()


def test_who_looks_sees_what_the_codes_say(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, looked_at, tmp_path)


def unfrozen() -> tuple[list[float], list[float]]:
    """Trained after all, from what the codes say: as one that begins with these values."""
    model, plain = build(), build(trains=True)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.copy_(parameter if parameter.requires_grad else coded(parameter.detach()))
    optimizers = []
    codes = Quantize(weights=None, gradients=None, block=BLOCK, frozen="int8")
    for one, quantize in ((model, codes), (plain, None)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        onecopy.shard(one, optimizer, quantize=quantize)
        one.requires_grad_(True)
        optimizers.append(optimizer)
    return tuple(  # type: ignore[return-value]
        [step(one, optimizer, seed) for seed in range(3)]
        for one, optimizer in zip((model, plain), optimizers, strict=True)
    )


def test_what_is_unfrozen_is_trained_from_there(pool: Pool) -> None:
    for losses, expected in pool.run(2, unfrozen):
        assert losses == expected
