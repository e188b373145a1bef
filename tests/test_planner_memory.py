"""What the planner says a rank holds and sends, against ranks that train."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
import onecopy.errors
import onecopy.events
from onecopy import Offload, Quantize
from onecopy.core.precision import dtypes_of
from onecopy.events import Event
from onecopy.memory.live_tensors import LiveTensors
from onecopy.planner import estimate
from onecopy.planner.cluster import Cluster
from onecopy.planner.estimate import DiskTraffic
from onecopy.planner.memory import Memory, Step, memory_of, moved_by, swapped_by
from onecopy.planner.modules import units_of, widths_of_dtypes
from onecopy.planner.options import PlanOptions
from onecopy.planner.shapes import ModelShape
from onecopy.planner.traffic import Sent, sent_by
from onecopy.policies import MASTERS, Precision
from onecopy.report import memory
from tests.pool import Pool


class Tall(nn.Module):
    """Large weights and few values between them: a tied embedding, blocks, a frozen one."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 300), nn.Tanh(), nn.Linear(300, 128)) for _ in range(6)
        )
        self.head = nn.Linear(128, 500, bias=False)
        self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        for block in self.blocks:
            y = y + block(y)
        return self.head(y)


NO_TRAFFIC = DiskTraffic(read=0, written=0)


@dataclass
class Found:
    """What one rank saw, and what was planned for it."""

    held: memory.StateBytes
    peak: int
    sent: int
    planned: Memory
    planned_sent: Sent
    moved: int = 0
    planned_moved: int = 0
    swapped: DiskTraffic = NO_TRAFFIC
    planned_swapped: DiskTraffic = NO_TRAFFIC


def _backward(model: nn.Module) -> None:
    model(torch.arange(4)).float().square().mean().backward()


def _bytes(events: list[Event], what: str) -> int:
    return sum(one.num_bytes or 0 for one in events if one.kind == "swap" and one.what == what)


def trained(  # noqa: PLR0913
    stage: int | str,
    world: int,
    precision: Precision | str,
    frozen: bool,
    backwards: int,
    offload: Offload | None = None,
    node_size: int | None = None,
    quantize: Quantize | None = None,
) -> Found:
    """A rank that has trained for three steps; the last one was watched."""
    with LiveTensors() as live:
        model = Tall(frozen)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        options = PlanOptions(devices=world, precision=precision)
        shape = ModelShape(name="tall", units=units_of(model, options)).with_offload(offload)
        settings = {"stage": stage, "precision": precision, "node_size": node_size}
        onecopy.shard(model, optimizer, offload=offload, quantize=quantize, **settings)
        cluster = Cluster(devices=world, devices_per_node=node_size or world)
        rank = dist.get_rank()
        events: list[Event] = []
        for step in range(3):
            if step == 2:
                onecopy.events.add_sink(model, events.append)
                live.reset_peak()
            for _ in range(backwards):
                _backward(model)
            optimizer.step()
            optimizer.zero_grad()
        peak = live.peak_bytes
        moved = _bytes(events, "up") + _bytes(events, "down")
        swapped = DiskTraffic(read=_bytes(events, "read"), written=_bytes(events, "write"))
        sent = sum(one.num_bytes for one in events if one.kind in ("gather", "refresh", "reduce"))
        _backward(model)
        held = memory.measure(model, optimizer)
    widths = estimate.widths_of(options.policy, options.optimizer_states)
    step_of = Step(backwards=backwards, quantize=quantize)
    return Found(
        held=held,
        peak=peak,
        sent=sent,
        planned=memory_of(shape, stage, cluster, widths, step_of, rank),
        planned_sent=sent_by(
            shape, stage, cluster, widths, backwards, rank=rank, quantize=quantize
        ),
        moved=moved,
        planned_moved=moved_by(shape, stage, cluster, widths, backwards),
        swapped=swapped,
        planned_swapped=swapped_by(shape, stage, cluster, widths, backwards),
    )


@pytest.mark.sampled(
    "world, stage, precision, frozen, backwards",
    list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), ("fp32", "bf16"), (False, True), (1, 2))),
    12,
    always=[(4, stage, "bf16", False, 1) for stage in (0, 1, 2, 3)]
    + [(2, 3, "fp32", True, 2), (2, 1, "bf16", True, 1)],
)
def test_a_rank_holds_and_sends_what_was_planned(
    pool: Pool, world: int, stage: int, precision: str, frozen: bool, backwards: int
) -> None:
    for found in pool.run(world, trained, stage, world, precision, frozen, backwards):
        held, planned = found.held, found.planned
        assert (held.parameters, held.gradients) == (planned.parameters, planned.gradients)
        # Adam's two moments exist for pieces only: padding has none.
        assert 0 <= planned.optimizer - held.optimizer < 2 * 4 * 9 * 16 * world
        assert found.sent == found.planned_sent.total
        values = 4 * 4 * (500 + 6 * (300 + 2 * 128))
        assert found.peak <= planned.total + 2 * values
        assert planned.total <= 1.2 * found.peak


@pytest.mark.sampled(
    "ranks, stage, precision, frozen, backwards",
    [
        *itertools.product(
            [(4, 2)],
            (2, 3, "hpz", "hfsdp", "mics", "whole/node/world"),
            ("fp32", "bf16"),
            (False, True),
            (1, 2),
        ),
        *itertools.product([(3, 2)], ("hpz", "hfsdp"), ("bf16",), (False, True), (1, 2)),
    ],
    2,
    always=[((4, 2), stage, "bf16", False, 1) for stage in (3, "hpz", "mics", "hfsdp")]
    + [((4, 2), stage, "bf16", True, 2) for stage in ("hfsdp", "mics")]
    + [((4, 2), "mics", "fp32", False, 1), ((3, 2), "hfsdp", "bf16", True, 2)],
)
def test_a_rank_in_a_node_holds_what_was_planned(
    pool: Pool,
    ranks: tuple[int, int],
    stage: int | str,
    precision: str,
    frozen: bool,
    backwards: int,
) -> None:
    """Secondary slices are parameters; sums that wait for the last backward are gradients."""
    world, in_node = ranks
    for found in pool.run(
        world, trained, stage, world, precision, frozen, backwards, None, in_node
    ):
        held, planned = found.held, found.planned
        assert (held.parameters, held.gradients) == (planned.parameters, planned.gradients)
        assert 0 <= planned.optimizer - held.optimizer < 2 * 4 * 9 * 16 * world
        assert found.sent == found.planned_sent.total
        values = 4 * 4 * (500 + 6 * (300 + 2 * 128))
        assert found.peak <= planned.total + 2 * values
        assert planned.total <= 1.25 * found.peak


CODED = Quantize(block=256)
FEEDBACK = Quantize(block=256, error_feedback=True)


@pytest.mark.sampled(
    "stage, precision, backwards, quantize",
    list(itertools.product((1, 2, 3, "hpz", "mics"), ("fp32", "bf16"), (1, 2), (CODED, FEEDBACK))),
    2,
    always=[(2, "fp32", 1, CODED), (3, "bf16", 1, FEEDBACK), ("hpz", "bf16", 2, CODED)],
)
def test_a_rank_that_quantizes_holds_what_was_planned(
    pool: Pool, stage: int | str, precision: str, backwards: int, quantize: Quantize
) -> None:
    """Where parameters stay, exact masters lie beside them; with feedback, errors are kept."""
    for found in pool.run(4, trained, stage, 4, precision, True, backwards, None, 2, quantize):
        held, planned = found.held, found.planned
        assert (held.parameters, held.gradients) == (planned.parameters, planned.gradients)
        assert found.sent == found.planned_sent.total
        values = 4 * 4 * (500 + 6 * (300 + 2 * 128))
        assert found.peak <= planned.total + 2 * values
        assert planned.total <= 1.3 * found.peak


HOST = Offload(optimizer="host", gradients="host")
ALL_HOST = Offload(optimizer="host", gradients="host", parameters="host")
HALF = Offload(optimizer="host", gradients="host", fraction=0.5)
MEANS, STATES = Offload(gradients="host"), Offload(optimizer="host")


PLAIN, AGAIN = (False, 1), (True, 2)  # frozen, backwards


@pytest.mark.sampled(
    "world, stage, precision, training, offload",
    [
        *itertools.product((1, 2, 3), (0, 1, 2, 3), ("fp32", "bf16"), (PLAIN, AGAIN), (HOST, HALF)),
        *itertools.product((1, 2, 3), (3,), ("fp32", "bf16"), (PLAIN, AGAIN), (ALL_HOST,)),
        *itertools.product((1, 2), (0, 1, 3), ("fp32", "bf16"), (PLAIN,), (MEANS, STATES)),
    ],
    4,
    always=[(2, stage, "bf16", PLAIN, HOST) for stage in (0, 1, 2, 3)]
    + [(2, stage, "fp32", PLAIN, HOST) for stage in (0, 1, 3)]
    + [(3, 3, "bf16", AGAIN, ALL_HOST), (2, 3, "fp32", PLAIN, ALL_HOST)]
    + [(2, 2, "bf16", AGAIN, HALF), (2, 3, "bf16", PLAIN, MEANS), (2, 0, "fp32", PLAIN, STATES)],
)
def test_states_in_host_memory(
    pool: Pool,
    world: int,
    stage: int,
    precision: str,
    training: tuple[bool, int],
    offload: Offload,
) -> None:
    """What lies on which side, what moves between them, and that nothing else changes."""
    for found in pool.run(world, trained, stage, world, precision, *training, offload):
        held, planned, host = found.held, found.planned, found.planned.host
        assert held.parameters == planned.parameters + host.parameters
        assert held.gradients == planned.gradients + host.gradients
        padding = range(2 * 4 * 9 * 16 * world)
        assert planned.optimizer + host.optimizer - held.optimizer in padding
        assert host.total - held.host in padding
        assert planned.states - held.device in padding
        assert host.total
        assert found.sent == found.planned_sent.total
        if offload is ALL_HOST:
            # The last unit of a forward is still there in backward.
            assert 0.7 * found.planned_moved < found.moved <= found.planned_moved
        else:
            assert found.moved == found.planned_moved
        # Here both lie in the same memory, with what arrives at the host and is added there.
        values = 4 * 4 * (500 + 6 * (300 + 2 * 128))
        arriving = 3 * 8 * 500 * 128 // (world if stage else 1)
        assert found.peak <= planned.total + host.total + 2 * values + arriving


@pytest.mark.parametrize(
    ("world", "stage", "precision", "backwards", "tiers"),
    [
        (2, 3, "bf16", 2, {"gradients": "nvme", "parameters": "nvme"}),
        (2, 3, "fp32", 2, {"gradients": "nvme", "parameters": "nvme"}),
        (3, 2, "bf16", 2, {"gradients": "nvme"}),
        (2, 3, "bf16", 1, {"gradients": "host", "parameters": "host"}),
        (1, 0, "fp32", 1, {"gradients": "host"}),
        (2, 1, "bf16", 2, {"gradients": "device"}),
        (2, 3, "bf16", 2, {"gradients": "device", "parameters": "nvme"}),
    ],
)
def test_states_on_nvme(  # noqa: PLR0913
    pool: Pool,
    tmp_path: Path,
    world: int,
    stage: int,
    precision: str,
    backwards: int,
    tiers: dict[str, str],
) -> None:
    """What is read and written in a step, and what goes up and down."""
    # So small that no mean is still in memory when the next backward adds to it.
    offload = Offload(optimizer="nvme", path=tmp_path, buffer_bytes=4096, **tiers)  # type: ignore[arg-type]
    for found in pool.run(world, trained, stage, world, precision, False, backwards, offload):
        planned, swapped = found.planned_swapped, found.swapped
        assert found.sent == found.planned_sent.total
        assert swapped.written == planned.written
        # The last unit of a forward may still be there in backward.
        is_gathered = offload.parameters != "device"
        assert (0.7 if is_gathered else 1) * found.planned_moved <= found.moved
        assert found.moved <= found.planned_moved
        assert (0.85 if is_gathered else 1) * planned.read <= swapped.read <= planned.read


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [
        Precision(compute="bf16", master="bf16+16"),
        Precision(compute="bf16", gradient="bf16"),
        Precision(compute="bf16", master="bf16"),
        Precision(compute="bf16", reduce="fp32"),
    ],
    ids=["bf16+16", "bf16 gradients", "bf16 masters", "fp32 on the wire"],
)
def test_memory_lean_modes(pool: Pool, stage: int, policy: Precision) -> None:
    for found in pool.run(2, trained, stage, 2, policy, False, 1):
        held, planned = found.held, found.planned
        # A split master keeps a few exact values beside its remainders.
        extra = held.parameters - planned.parameters
        assert 0 <= extra < 0.01 * planned.parameters
        assert held.gradients == planned.gradients
        assert found.sent == found.planned_sent.total


@pytest.mark.parametrize("compute", [None, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("reduce", [None, "fp32", "bf16"])
@pytest.mark.parametrize("gradient", [None, "fp32", "bf16"])
@pytest.mark.parametrize("master", [None, *MASTERS])
def test_widths_are_those_of_the_runtime(
    compute: str | None, reduce: str | None, gradient: str | None, master: str | None
) -> None:
    try:
        policy = Precision(compute=compute, reduce=reduce, gradient=gradient, master=master)
    except onecopy.errors.ConfigError:
        pytest.skip("no such policy")
    if master not in (None, "fp32") and compute != "bf16":
        pytest.skip("refused by shard for fp32 parameters")
    of_runtime = widths_of_dtypes(dtypes_of(nn.Parameter(torch.zeros(1)), policy), 2)
    assert estimate.widths_of(policy, 2) == of_runtime


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_crosses_nodes(stage: int) -> None:
    """At stage 0 each of the seven others gets as much, three of them here; else once a node."""
    shape = ModelShape(name="tall", units=units_of(Tall(False), PlanOptions()))
    widths = estimate.BF16
    cluster = Cluster(devices=8, devices_per_node=4)
    sent = sent_by(shape, stage, cluster, widths, 1)
    assert sent.inside == sent.across * (3 * 2 if stage else Fraction(3, 4))
    alone = sent_by(shape, stage, Cluster(devices=8, devices_per_node=8), widths, 1)
    assert (alone.across, alone.inside) == (0, sent.total)
    elements = estimate.elements_sent(stage, 8)
    # Padding and flags come on top.
    assert 1 <= sent.total / (2 * shape.num_parameters * elements) < 1.01
