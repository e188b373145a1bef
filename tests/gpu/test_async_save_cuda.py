"""async_save on accelerators: copies that are queued are complete before they are written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import onecopy
import onecopy.handle
from onecopy.checkpoint.saving import Job
from onecopy.launcher import launch
from tests import models
from tests.gpu.test_cuda import _loss
from tests.test_async_save import items

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def save_and_train_on(root: str, stage: int, precision: str | None) -> bool:
    """Whether the copies lay in pinned memory."""
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    model = models.build("tied").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onecopy.shard(model, optimizer, stage=stage, precision=precision)
    batches = models.batches("tied", 4, dist.get_world_size())

    def train(first: int, last: int) -> None:
        for step in batches[first:last]:
            _loss(model, step[dist.get_rank()][0], device).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(0, 2)
    onecopy.save(f"{root}/now", model, optimizer)
    go, write = threading.Event(), Job.write

    def late(job: Job, group: Any) -> Path:
        assert go.wait(60), "training goes on first"
        return write(job, group)

    with mock.patch.object(Job, "write", late):
        pending = onecopy.async_save(f"{root}/later", model, optimizer)
        train(2, 4)
        torch.cuda.synchronize()
        go.set()
        pending.wait()
    pinned = all(block.is_pinned() for block in onecopy.handle.of(model).host_buffer._blocks)
    if dist.get_rank() == 0:
        assert items(f"{root}/now") == items(f"{root}/later")
    dist.destroy_process_group()
    return pinned


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_values_are_those_of_the_call(tmp_path: Path, stage: int, precision: str | None) -> None:
    """Every stored byte is that of a save at the same moment."""
    ranks = min(torch.cuda.device_count(), 4)
    assert all(launch(save_and_train_on, ranks, str(tmp_path), stage, precision))
