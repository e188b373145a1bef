"""An embedding and a head in different pipeline stages that stay equal, against one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onecopy
import onecopy.handle
from onecopy.errors import ShardingError
from onecopy.parallel import tie
from tests import pipelines
from tests.pipelines import PP, Plan, compare, one_process, train
from tests.pool import Pool

PLANS = [
    Plan(schedule=name, dp=dp, stage=stage, own_unit=own, max_grad_norm=limit, tied=True)
    for name, dp, stage, own, limit in itertools.product(
        ("1f1b", "interleaved"), (1, 2), (1, 2, 3), (False, True), (None, 0.3)
    )
    if name == "1f1b" or not own
]
MIDDLE = Plan(pp=4, max_grad_norm=0.3, tied=True, optimizer="sgd")  # two stages in between


@pytest.mark.sampled(
    "plan",
    [*(replace(plan, optimizer="sgd") for plan in PLANS), MIDDLE],
    4,
    always=[
        Plan(dp=2, max_grad_norm=0.3, tied=True, optimizer="sgd"),
        Plan(dp=2, stage=2, own_unit=True, tied=True, optimizer="sgd"),
        Plan(schedule="interleaved", stage=1, max_grad_norm=0.3, tied=True, optimizer="sgd"),
        MIDDLE,
    ],
)
def test_a_tied_embedding(pool: Pool, plan: Plan) -> None:
    """Cut alike (units of their own) or not; its norm counts once."""
    runs = pool.run(plan.pp * plan.dp, train, plan)
    compare(plan, runs, one_process(plan), rtol=1e-5, atol=1e-6)
    both: dict[str, torch.Tensor] = {}
    for run in runs:
        both |= {
            name: value
            for name, value in run.values.items()
            if "s.weight" in name or "head" in name
        }
    assert torch.equal(both["tokens.weight"], both["head.weight"])


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"offload": "cpu"},
        {"precision": onecopy.Precision(compute="fp16", loss_scale=256.0), "max_grad_norm": 0.5},
    ],
    ids=str,
)
def test_both_stay_equal(pool: Pool, settings: dict[str, Any]) -> None:
    """To the last bit, in low precision and where gradients lie in host memory."""
    plan = Plan(dp=2, tied=True, settings=settings)
    values = {}
    for run in pool.run(plan.pp * plan.dp, train, plan):
        values |= run.values
    assert torch.equal(values["tokens.weight"], values["head.weight"])
    assert not torch.equal(values["tokens.weight"], pipelines.build().tokens.weight)


def go_wrong() -> list[str]:
    """What is refused, in the order of the words below; and whether both are cut alike."""
    mesh, (part,) = pipelines.make("gpipe", PP, 1, pipelines.build(tied=True))
    name = "tokens.weight" if mesh.get_local_rank("pp") == 0 else "head.weight"
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    onecopy.shard(part, optimizer, mesh=mesh, stage=3)
    pipe = pipelines.connect("gpipe", mesh, [part], 2)
    said = []

    def refused(what: Callable[[], object]) -> None:
        try:
            what()
        except ShardingError as error:
            said.append(str(error))

    refused(lambda: tie(part, "embedding.weight"))
    refused(lambda: tie(part, "blocks.0.norm1.bias" if "tokens" in name else name))
    tie(part, name)
    engine = onecopy.handle.of(part).engine
    assert all(tied._is_alike for tied in engine.owned.ties), "each is the only owner"
    pipe.step(0, 2)
    onecopy.clip_grad_norm_(part, 1.0)
    # Once more, where it is the sum already.
    onecopy.clip_grad_norm_(part, 1.0)
    tokens = pipelines.batch(1, 0, 1)
    given = tokens if "tokens" in name else torch.randn(*tokens.shape, pipelines.WIDTH)
    refused(lambda: part(given).sum().backward())
    optimizer.zero_grad()
    part(given).sum().backward()

    alone = nn.Linear(3, 3)
    onecopy.shard(alone, mesh=init_device_mesh("cpu", (PP,), mesh_dim_names=("dp",)))
    refused(lambda: tie(alone, "weight"))
    return said


def test_what_is_refused(pool: Pool) -> None:
    for name, values, more, mesh in pool.run(PP, go_wrong):
        assert "no parameter in training of this Part" in name
        assert "shape (16,)" in values and "same seed" in values
        assert "is the sum over its pipeline stages already" in more and "zero_grad()" in more
        assert "no pipeline" in mesh and "mesh=" in mesh
