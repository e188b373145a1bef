"""examples/three_d.py: pipeline x data x tensor parallelism computes what one process computes."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from onecopy.training.model import GPT
from tests.pool import Pool

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/three_d.py"
STEPS = 4


def example() -> ModuleType:
    spec = util.spec_from_file_location("three_d", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(shape: tuple[int, int, int], stage: int) -> list[float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    losses: list[float] = example().train(mesh, torch.device("cpu"), STEPS, stage)
    return losses


def train_alone(num_data: int) -> list[float]:
    """One process, with the batches of all data ranks."""
    module = example()
    torch.manual_seed(0)
    model = GPT(module.CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen = []
    for step in range(STEPS):
        parts = [module.batch(step, rank) for rank in range(num_data)]
        inputs, targets = (torch.cat(one) for one in zip(*parts, strict=True))
        loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.sampled(
    ("shape", "stage"),
    [
        ((2, 2, 2), 3),
        ((2, 2, 2), 1),
        ((2, 2, 2), 2),
        ((4, 1, 2), 3),
        ((1, 4, 2), 3),
        ((2, 4, 1), 3),
    ],
    0,
    always=[((2, 2, 2), 3)],
)
def test_three_dimensions(pool: Pool, shape: tuple[int, int, int], stage: int) -> None:
    """On eight ranks; the last pipeline stage knows the loss."""
    runs = pool.run(8, train, shape, stage)
    last = 8 - 8 // shape[0]
    assert all(run == [] for run in runs[:last])
    for run in runs[last:]:
        torch.testing.assert_close(run, train_alone(shape[1]), rtol=2e-5, atol=0)


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 120
