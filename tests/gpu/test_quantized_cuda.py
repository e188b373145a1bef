"""Quantized transfers on accelerators: run with `python -m pytest tests/gpu -k quantized`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.comm.codec import CODED_DTYPES, decode, encode
from onecopy.comm.coding import Coding
from onecopy.launcher import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
LEVELS = {"int8": 127, "int4": 7}
BLOCK = 256


def there_and_back(values: torch.Tensor, coding: Coding) -> torch.Tensor:
    num_bytes = coding.num_bytes(values.numel())
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=values.device)
    encode(values, coding, payload)
    decoded = torch.empty_like(values)
    decode(payload, coding, decoded)
    return decoded


@pytest.mark.parametrize("code", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", CODED_DTYPES)
def test_codes_are_those_of_the_processor(code: str, dtype: torch.dtype) -> None:
    """Fused or not: within a step where a value lies between two codes, and stable."""
    torch.manual_seed(0)
    values, coding = torch.randn(10 * BLOCK + 77).to(dtype), Coding(code, BLOCK)
    here = there_and_back(values.cuda(), coding)
    assert torch.equal(there_and_back(here, coding), here)
    there = there_and_back(values, coding)
    largest = torch.cat([one.abs().max().expand(len(one)) for one in values.float().split(BLOCK)])
    step = largest / LEVELS.get(code, 8) + values.float().abs() * torch.finfo(dtype).eps
    assert bool(((here.cpu() - there).float().abs() <= step).all())
    assert float((here.cpu() != there).float().mean()) < 0.01
    values[3] = float("inf")
    lost = there_and_back(values.cuda(), coding)[:BLOCK]
    assert not bool(lost.isfinite().any())


def train(quantize: onecopy.Quantize | None) -> list[float]:
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    onecopy.shard(model, optimizer, stage="hpz", node_size=1, precision="bf16", quantize=quantize)
    losses = []
    for step in range(5):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(32, 64, device=device)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses


def test_training_stays_close() -> None:
    """On one device nothing is sent; on several, each is a node of its own."""
    world = min(4, torch.cuda.device_count())
    plain = launch(train, world, None)
    quantized = launch(train, world, onecopy.Quantize(block=BLOCK))
    for one, other in zip(quantized, plain, strict=True):
        assert one == pytest.approx(other, rel=0.05)
