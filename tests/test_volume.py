"""Bytes that each rank sends and the order of events, exactly as DESIGN's table of stages says."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

import onecopy
import onecopy.events
import onecopy.handle
from onecopy.events import Event
from onecopy.planner import estimate
from tests import models
from tests.pool import Pool
from tests.runs import OPTIMIZERS

ITEMSIZE = {"fp32": 4, "bf16": 2}


def one_step(
    stage: int, backwards: int, no_sync: bool, precision: str
) -> tuple[int, int, int, list[Event]]:
    """Padded elements of flat and gradient buffers, the trainable share, and a step's events."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage, precision=precision)
    units = onecopy.handle.of(model).engine.units
    events: list[Event] = []
    for step in range(2):
        if step == 1:
            onecopy.events.add_sink(model, events.append)
        for micro in range(backwards):
            if no_sync and micro < backwards - 1:
                with onecopy.no_sync(model):
                    models.loss(model, models.batch("gpt", step, dist.get_rank())).backward()
            else:
                models.loss(model, models.batch("gpt", step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    # The refreshes of the first step have ended before the second began to count.
    flat = sum(unit.layout.padded_numel for unit in units)
    gradient = sum(unit.layout.gradient_numel for unit in units)
    return flat, gradient, len(units), events


COMBINATIONS = list(
    itertools.product((1, 2, 3, 4), (0, 1, 2, 3), (1, 3), (False, True), ("fp32", "bf16"))
)


@pytest.mark.sampled(
    "world, stage, backwards, no_sync, precision",
    COMBINATIONS,
    20,
    always=[(3, stage, 3, no_sync, "bf16") for stage in (0, 1, 2, 3) for no_sync in (False, True)],
)
def test_bytes_equal_the_formula(
    pool: Pool, world: int, stage: int, backwards: int, no_sync: bool, precision: str
) -> None:
    """Gathers and refreshes move flat buffers, reduces gradient buffers, each (N-1)/N of them."""
    for flat, gradient, _, events in pool.run(
        world, one_step, stage, backwards, no_sync, precision
    ):
        reduces = 1 if no_sync else backwards
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * backwards}[stage]
        share = (world - 1) / world * ITEMSIZE[precision]
        sums = (2 if stage == 0 else 1) * reduces * gradient
        sent = {
            kind: sum(event.num_bytes for event in events if event.kind in kinds)
            for kind, kinds in (("reduce", {"reduce"}), ("gather", {"gather", "refresh"}))
        }
        assert sent["reduce"] == sums * share
        assert sent["gather"] == gathers * flat * share
        # The same in the planner's words, where padding is left out.
        elements = estimate.elements_sent(
            stage=stage, world_size=world, backwards=backwards, no_sync=no_sync
        )
        assert (gathers + sums / gradient) * (world - 1) / world == pytest.approx(elements)


_REDUCES = [
    "backward: reduce blocks.2",
    "backward: reduce blocks.1",
    "backward: reduce blocks.0",
    "backward: reduce root",
]
_REFRESHES = [
    "step: refresh root",
    "step: refresh blocks.0",
    "step: refresh blocks.1",
    "step: refresh blocks.2",
    "step: step",
]
ORDER = {
    0: [*_REDUCES, "step: step"],
    1: [*_REDUCES, *_REFRESHES],
    2: [*_REDUCES, *_REFRESHES],
    3: [
        # The next unit is on its way before the one that is needed has arrived.
        "forward: gather root",
        "forward: gather blocks.0",
        "forward: gather blocks.1",
        "forward: release blocks.0",
        "forward: gather blocks.2",
        "forward: release blocks.1",
        "forward: release blocks.2",
        "forward: release root",
        "backward: gather root",
        "backward: gather blocks.2",
        "backward: gather blocks.1",
        "backward: release blocks.2",
        "backward: reduce blocks.2",
        "backward: gather blocks.0",
        "backward: release blocks.1",
        "backward: reduce blocks.1",
        "backward: release blocks.0",
        "backward: reduce blocks.0",
        "backward: release root",
        "backward: reduce root",
        "step: step",
    ],
}


def _flatten(events: list[Event]) -> list[str]:
    return [
        f"{event.phase}: {event.kind} {event.unit}".strip()
        for event in events
        if event.kind not in ("wait", "pass")
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_order_of_events(pool: Pool, stage: int) -> None:
    """One frozen step against a literal list."""
    for _, _, _, events in pool.run(2, one_step, stage, 1, False, "fp32"):
        assert _flatten(events) == ORDER[stage]
