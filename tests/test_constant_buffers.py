"""C_B of ZeRO-R: beside the states, what a rank holds at once does not grow with the model.

Two models, one of twice the depth, are trained; from the peak of each the states are taken away.
What is left is the flat buffers that are gathered ahead, gradients on their way, windows and codes
of transfers, and copies: constant. (Values of activations do grow; here they are tiny.)
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import onecopy
from onecopy import Quantize
from onecopy.memory.live_tensors import LiveTensors
from onecopy.report import memory
from tests.pool import Pool

WIDTH, SHALLOW, DEEP = 96, 5, 10
# Of one block: weights, and what a forward leaves of it for its backward, in fp32.
BLOCK_BYTES = 4 * (2 * WIDTH * 2 * WIDTH + 3 * WIDTH)
VALUES_BYTES = 4 * 6 * 2 * WIDTH

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "clipped": {"max_grad_norm": 0.1},
    "accumulated": {"backwards": 3},
    "offloaded": {"offload": "cpu", "precision": "bf16"},
    "quantized": {"quantize": Quantize(block=256), "node_size": 1},
    "in backward": {"step_in_backward": True},
}


def excess(depth: int, backwards: int = 1, **settings: Any) -> int:
    """Bytes at the peak of a step beside the model states."""
    with mock.patch("onecopy.core.engine.CODED_NUMEL", 4 * WIDTH * WIDTH):
        return _excess(depth, backwards, settings)


def _excess(depth: int, backwards: int, settings: dict[str, Any]) -> int:
    with LiveTensors() as live:
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        ]
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        onecopy.shard(model, optimizer, **settings)
        for step in range(3):
            if step == 2:
                live.reset_peak()
            for _ in range(backwards):
                model(torch.ones(1, WIDTH)).square().mean().backward()
            held = memory.measure(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        peak: int = live.peak_bytes
        return peak - held.parameters - held.gradients - held.optimizer


# A secondary slice goes with the step, which is over in backward: it is counted with the peak only.
CASES = [
    (stage, name)
    for stage, name in itertools.product((0, 1, 2, 3, "hpz", "mics"), SETTINGS)
    if (stage, name) != ("hpz", "in backward")
]


@pytest.mark.sampled(
    ("stage", "name"),
    CASES,
    4,
    always=[(3, "plain"), (2, "quantized"), (3, "offloaded"), ("hpz", "quantized")],
)
def test_buffers_do_not_grow_with_the_model(pool: Pool, stage: int | str, name: str) -> None:
    settings = {"stage": stage, "units": ("*",), **SETTINGS[name]}
    if stage in ("hpz", "mics"):
        settings["node_size"] = 1
    shallow, deep = (
        max(pool.run(2, partial(excess, depth, **settings))) for depth in (SHALLOW, DEEP)
    )
    assert deep - shallow <= (DEEP - SHALLOW) * VALUES_BYTES
    # Units that are gathered ahead, gradients on their way, sums and codes of one or two of them.
    assert deep <= 7 * BLOCK_BYTES
