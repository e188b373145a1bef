"""Models that no device holds are built straight into the places of their states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy import Offload
from onecopy.comm.groups import ImaginedWorld
from onecopy.memory.live_tensors import LiveTensors, storage_of, tensors_in
from tests.fake_accelerator import fake_accelerator
from tests.pool import Pool

WORLD, BLOCKS, WIDTH = 4, 8, 64
UNIT = 4 * WIDTH * (WIDTH + 1)
ALL = BLOCKS * UNIT
PLACES = {
    "host": Offload(optimizer="host", gradients="host"),
    "all host": Offload(optimizer="host", gradients="host", parameters="host"),
    "masters": Offload(optimizer="host"),
}


class Layer(nn.Module):
    """Its values are not random: the fake accelerator has no generators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))


class LiveByDevice(LiveTensors):
    """Peaks of live bytes on the device, and in host memory: fake storages say neither."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks = {"device": 0, "host": 0}
        self._on_host: dict[int, bool] = {}

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__torch_dispatch__(*args, **kwargs)
        for tensor in tensors_in(result):
            self._on_host[id(storage_of(tensor))] = tensor.device.type == "cpu"
        for name, total in self.now().items():
            self.peaks[name] = max(self.peaks[name], total)
        return result

    def now(self) -> dict[str, int]:
        """Live bytes in both places."""
        live = {key: storage for key, each in self._storages.items() if (storage := each())}
        return {
            name: sum(one.nbytes() for key, one in live.items() if self._on_host.get(key) is where)
            for name, where in (("device", False), ("host", True))
        }


def on_device(device: str, offload: Offload) -> dict[str, tuple[int, int, int]]:
    """Bytes on the device, and in host memory: before, at most, and after a model is sharded."""
    with LiveByDevice() as live:
        with torch.device(device):
            model = nn.Sequential(*(Layer() for _ in range(BLOCKS)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        before = live.now()
        live.peaks = dict(before)
        world = ImaginedWorld(WORLD, native=True)
        onecopy.shard(model, optimizer, mesh=world, stage=3, units=("*",), offload=offload)
        return {name: (before[name], live.peaks[name], live.now()[name]) for name in before}


def main() -> None:
    """Real devices, without values: what a model that is there gives way to."""
    with fake_accelerator() as device:
        for name, place in PLACES.items():
            found = on_device(device, place)
            before, peak, after = found["device"]
            assert before == ALL, found
            # One unit's whole values, and its slice.
            assert peak <= ALL + UNIT + UNIT // WORLD, (name, found)
            assert after == (0 if place.parameters == "host" else ALL // WORLD), (name, found)
            # Units go one after the other: host memory never holds more than the slices.
            assert found["host"] == (0, ALL // WORLD, ALL // WORLD), (name, found)
    print("all were built")


def test_units_leave_the_device_one_by_one(pool: Pool) -> None:
    """Host memory holds slices, the device never two models' worth."""
    done = pool.run_in_subprocess("from tests.test_offload_build import main; main()")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all were built" in done.stdout


def built(how: str, offload: Offload) -> tuple[int, int]:
    """Bytes at most, and afterwards, of a model that is made unit by unit, in all memory."""
    with LiveTensors() as live:
        with onecopy.init_sharded() if how == "init_sharded" else torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        onecopy.shard(model, optimizer, stage=3, units=("*",), offload=offload, precision="bf16")
        return live.peak_bytes, live.num_bytes()


@pytest.mark.parametrize("how", ["init_sharded", "meta"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_unmade_is_made_where_it_belongs(pool: Pool, how: str, place: str) -> None:
    """The slices of a rank, with one unit being made; here the device is host memory, too."""
    kept = 0 if PLACES[place].parameters == "host" else ALL // 4
    for peak, after in pool.run(2, built, how, PLACES[place]):
        assert after == ALL // 2 + kept
        assert peak <= after + UNIT
