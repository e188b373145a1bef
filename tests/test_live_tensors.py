"""The tracker of live tensor bytes."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from onecopy.memory.live_tensors import LiveTensors
from tests.pool import Pool

KIB = 256  # elements of fp32


def test_made_and_dropped() -> None:
    with LiveTensors() as live:
        first = torch.zeros(KIB)
        second = torch.ones(2 * KIB)
        assert live.num_bytes() == 3 * 1024
        del second
        assert live.num_bytes() == 1024
        first.add_(1)
        assert live.num_bytes() == 1024
    assert live.peak_bytes == 3 * 1024
    del first
    assert live.num_bytes() == 0 and live.num_storages() == 0


def test_views_count_once_and_keep_the_whole() -> None:
    with LiveTensors() as live:
        whole = torch.zeros(4 * KIB)
        part = whole[:KIB].view(16, 16).t()
        assert live.num_bytes() == 4 * 1024
        del whole
        assert live.num_bytes() == 4 * 1024 and live.num_storages() == 1
    del part
    assert live.num_bytes() == 0


def test_resized_storages_are_read_anew() -> None:
    with LiveTensors() as live:
        flat = torch.zeros(4 * KIB)
        flat.untyped_storage().resize_(0)
        assert live.num_bytes() == 0 and live.num_storages() == 0
        flat.untyped_storage().resize_(8 * 1024)
        assert live.num_bytes() == 8 * 1024
    assert live.peak_bytes == 8 * 1024


def test_what_was_before_counts_only_when_watched() -> None:
    before = torch.zeros(KIB)
    with LiveTensors() as live:
        before.mul_(2)
        view = before.view(-1)
        assert live.num_bytes() == 0
        live.watch([before, view])
        assert live.num_bytes() == 1024
        live.watch([before])
        assert live.num_bytes() == 1024


def test_backward_is_seen() -> None:
    model = nn.Sequential(nn.Linear(KIB, KIB, bias=False), nn.ReLU())
    inputs = torch.randn(KIB, KIB)
    with LiveTensors() as live:
        model(inputs).sum().backward()
        gc.collect()
        assert live.num_bytes() == KIB * KIB * 4, "the gradient is left"
        assert live.peak_bytes >= 2 * KIB * KIB * 4, "activations were alive together"
        live.reset_peak()
        assert live.peak_bytes == live.num_bytes()
        model.zero_grad()
    assert live.num_bytes() == 0


def test_what_only_the_graph_holds_is_alive() -> None:
    leaf = torch.zeros(KIB, requires_grad=True)
    with LiveTensors() as live:
        saved = leaf.exp()
        result = saved.sum()
        del saved
        gc.collect()
        assert live.num_bytes() == 1024 + 4
        del result
    assert live.num_bytes() == 0


def test_fake_tensors_count_and_meta_tensors_do_not() -> None:
    with FakeTensorMode(), LiveTensors() as live:
        fake = torch.zeros(KIB) + 1
        assert live.num_bytes() == 1024 and fake.device.type == "cpu"
    with LiveTensors() as live:
        meta = torch.empty(KIB, device="meta")
        assert live.num_bytes() == 0 and meta.numel() == KIB


def test_tensors_without_storage_pass() -> None:
    with LiveTensors() as live:
        sparse = torch.eye(3).to_sparse()
        assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert live.peak_bytes > 0


def wrapped() -> list[tuple[int, int]]:
    """Bytes alive and storages in each situation, of DTensors over two ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before = distribute_tensor(torch.ones(2 * KIB), mesh, [Shard(0)])
    found = []
    with LiveTensors() as live:
        doubled = before * 2
        found.append((live.num_bytes(), live.num_storages()))
        live.watch([before])
        found.append((live.num_bytes(), live.num_storages()))
        doubled.add_(1)
        found.append((live.num_bytes(), live.num_storages()))
        del doubled, before
        found.append((live.num_bytes(), live.num_storages()))
    return found


def test_what_wrappers_consist_of_is_alive(pool: Pool) -> None:
    """Not the wrappers, whose size is that of all ranks' parts; operations inside of them too."""
    assert pool.run(2, wrapped) == [[(1024, 1), (2048, 2), (2048, 2), (0, 0)]] * 2
