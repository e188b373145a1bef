"""The simulator against reality: the same bytes alive, the same bytes sent, for any world."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onecopy
from benchmarks.guard import Calls
from onecopy.comm.groups import ImaginedWorld
from onecopy.errors import ConfigError, OneCopyError
from onecopy.events import Event, add_sink
from onecopy.memory.live_tensors import LiveTensors
from onecopy.simulator import fake
from onecopy.simulator.simulate import Simulation, simulate
from onecopy.training.model import GPT, GPTConfig
from tests.pool import Pool

SENT = ("gather", "reduce", "refresh")
CONFIG = GPTConfig(context=32, layers=3, width=64, heads=4)


class Checkpointed(GPT):
    """Each block's activations are computed again in backward."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def batch() -> dict[str, torch.Tensor]:
    """One rank's micro-batch."""
    tokens = torch.randint(0, 256, (2, CONFIG.context))
    return {"tokens": tokens, "targets": tokens}


def loss(model: nn.Module, given: Any) -> torch.Tensor:
    """The model computes it."""
    result: torch.Tensor = model(given["tokens"], given["targets"])
    return result


def _sent(events: list[Event]) -> list[tuple[str, str, int]]:
    return [(one.kind, one.unit, one.num_bytes) for one in events if one.kind in SENT]


def measure(kind: type[GPT], settings: dict[str, Any]) -> tuple[int, list[tuple[str, str, int]]]:
    """The most bytes that are alive in the second step of a real run, and what it sends."""
    events: list[Event] = []
    with LiveTensors() as live:
        model = kind(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        onecopy.shard(model, optimizer, **settings)
        for number in range(2):
            if number:
                live.reset_peak()
                add_sink(model, events.append)
            loss(model, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak_bytes, _sent(events)


def imagine(kind: type[GPT], world_size: int, settings: dict[str, Any]) -> Simulation:
    """The same in a world that is not there."""
    return simulate(lambda: kind(CONFIG), batch, ImaginedWorld(world_size), loss=loss, **settings)


COMBINATIONS = list(itertools.product([1, 2, 4], range(4), [GPT, Checkpointed], ["fp32", "bf16"]))


@pytest.mark.sampled(("world_size", "stage", "kind", "precision"), COMBINATIONS, 10)
def test_predicts_what_a_run_measures(
    pool: Pool, world_size: int, stage: int, kind: type[GPT], precision: str
) -> None:
    """Peak of live bytes within 1 % on the first rank, bytes of each transfer exactly."""
    settings = {"stage": stage, "precision": precision}
    peak, sent = pool.run(world_size, measure, kind, settings)[0]
    simulated = imagine(kind, world_size, settings)
    assert simulated.peak.total == pytest.approx(peak, rel=0.01)
    assert _sent(simulated.events) == sent


def test_memory_falls_with_the_stage_and_the_world() -> None:
    """As the paper says; and at the peak the parts add up."""
    peaks = [imagine(GPT, 8, {"stage": stage, "precision": "bf16"}).peak for stage in range(4)]
    assert peaks[0].total > peaks[1].total > peaks[2].total > peaks[3].total
    assert peaks[0].optimizer == pytest.approx(8 * peaks[1].optimizer, rel=0.01)
    assert all(peak.rest > 0 for peak in peaks)
    many = imagine(GPT, 256, {"stage": 3, "precision": "bf16"})
    assert many.peak.optimizer < peaks[3].optimizer / 16


def test_timeline_tells_each_unit() -> None:
    """At stage 3 each block is gathered in forward and in backward, and released after both."""
    found = imagine(GPT, 4, {"stage": 3})
    for block in range(CONFIG.layers):
        kinds = [one.what for one in found.timeline if one.unit == f"blocks.{block}"]
        assert kinds.count("gather") == 2
        assert kinds.count("release") == 2
    assert max(one.total for one in found.timeline) <= found.peak.total


def _calls(world_size: int, settings: dict[str, Any]) -> Counter[str]:
    """Of functions that make transfers, in a step after the first."""
    counted, num_steps = Calls(), 0

    def counting(model: nn.Module, given: Any) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            counted.start()
        return loss(model, given)

    world = ImaginedWorld(world_size, native=True)
    try:
        simulate(lambda: GPT(CONFIG), batch, world, loss=counting, **settings)
    finally:
        counted.stop()
    return Counter({name: n for name, n in counted.calls.items() if name.startswith("comm/")})


@pytest.mark.parametrize("settings", [{"stage": 3}, {"stage": "hpz", "node_size": 4}])
def test_transfers_call_no_more_in_a_larger_world(settings: dict[str, Any]) -> None:
    """One collective is one call, whatever the number of ranks, and so is counting its bytes."""
    assert _calls(128, settings) == _calls(8, settings)


class Chooses(nn.Module):
    """Looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps positive rows only."""
        return self.linear(x[x.sum(1) > 0])  # type: ignore[no-any-return]


def test_choice_by_values_is_refused_with_advice() -> None:
    """A simulation has no values to decide by."""
    with pytest.raises(ConfigError, match="Chooses decides by the values of its data"):
        simulate(Chooses, lambda: torch.randn(3, 4), ImaginedWorld(2))


@pytest.mark.parametrize(("world_size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_impossible_worlds_are_refused(world_size: int, rank: int) -> None:
    """Before anything is built."""
    with pytest.raises(ConfigError, match="give a rank"):
        simulate(Chooses, batch, ImaginedWorld(world_size, rank))


def test_changed_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the simulator leans on is private; another torch may not have it."""
    from torch._subclasses import fake_tensor

    monkeypatch.delattr(fake_tensor, "FakeTensorMode")
    with pytest.raises(OneCopyError, match="private parts of torch"), fake.fake_tensors():
        pass


def test_nothing_is_left_behind() -> None:
    """After a simulation, tensors are real again."""
    imagine(GPT, 2, {"stage": 3})
    assert torch.ones(2).sum().item() == 2
    assert torch.ones(2).data_ptr()
    assert not torch.distributed.is_initialized()
