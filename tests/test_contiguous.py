"""M_D of ZeRO-R: what lives long is made once, and stays where it is.

Masters are made by shard, one storage for each unit, and the optimizer's states by the first step.
Whatever the lengths of later batches, no step makes another one or moves them: a long-lived tensor
that came in the midst of a backward would lie among activations, and leave a hole there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.memory.live_tensors import LiveTensors, storage_of
from tests.pool import Pool

WIDTH, BLOCKS, STEPS = 24, 4, 7


def places(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """The address and length of each tensor."""
    return [(one.data_ptr(), one.nbytes) for one in tensors]


def train(**settings: Any) -> dict[str, list[Any]]:
    """What lives long after each step, and how many storages of how many bytes there are."""
    seen: dict[str, list[Any]] = {"masters": [], "states": [], "storages": [], "bytes": []}
    with LiveTensors() as live:
        blocks = (
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.AdamW(model.parameters())
        onecopy.shard(model, optimizer, units=("*",), **settings)
        pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
        for step in range(STEPS):
            for length in (3 + 5 * step % 11, 1 + step):
                model(torch.ones(length, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            states = [
                value
                for piece in pieces
                for value in optimizer.state[piece].values()
                if value.dim()
            ]
            seen["masters"].append((len({storage_of(piece) for piece in pieces}), places(pieces)))
            seen["states"].append((len(states), places(states)))
            model(torch.ones(1, WIDTH))  # what the step has sent around has arrived
            seen["storages"].append(live.num_storages())
            seen["bytes"].append(live.num_bytes())
    return seen


SETTINGS: list[dict[str, Any]] = [
    *({"stage": stage} for stage in (0, 1, 2, 3)),
    {"stage": 2, "precision": "bf16"},
    {"stage": 3, "precision": "bf16", "offload": "cpu"},
    {"stage": 3, "quantize": "zero++", "node_size": 1},
]


@pytest.mark.sampled("settings", SETTINGS, 3, always=SETTINGS[2:3])
def test_what_lives_long_is_made_once(pool: Pool, settings: dict[str, Any]) -> None:
    for seen in pool.run(2, partial(train, **settings)):
        num_storages, _ = seen["masters"][0]
        assert num_storages == BLOCKS, "one for each unit"
        num_states, _ = seen["states"][0]
        assert num_states, "the first step has made them"
        for name in ("masters", "states"):
            assert seen[name] == [seen[name][0]] * STEPS, f"{name} are moved or made anew"
        for name in ("storages", "bytes"):
            assert seen[name][1:] == [seen[name][1]] * (STEPS - 1), f"{name} grow"
