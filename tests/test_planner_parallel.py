"""Plans of tensor parallelism and pipelines: what ZeRO cuts is each rank's part of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import onecopy
from onecopy import cli
from onecopy.errors import ConfigError
from onecopy.planner import estimate
from onecopy.planner.cluster import Cluster
from onecopy.planner.largest import Largest, largest_models
from onecopy.planner.memory import Memory, memory_of
from onecopy.planner.model_parallel import parts_of
from onecopy.planner.modules import units_of
from onecopy.planner.options import PlanOptions
from onecopy.planner.shapes import ModelShape, UnitShape
from onecopy.report import memory
from tests.pool import Pool
from tests.tensor_parallel import backward, batch, build, parallelize
from tests.test_papers import TABLE_2


@pytest.mark.parametrize("row", TABLE_2.split())
def test_zero_table_2_is_planned(row: str) -> None:
    """The largest models of the table, on its devices: their states fill 32 GB."""
    degree, *billions = row.split(",")
    settings: dict[str, Any] = {"devices": 64 * int(degree), "tensor": int(degree)}
    for stage, size in enumerate(billions):
        plan = onecopy.plan(f"{size}B", stage=stage, checkpoint_activations="on", **settings)
        tolerance = 0.025 if size in ("500", "1000", "2000") else 0.01
        assert plan.rows[0].paper == pytest.approx(32e9, rel=tolerance), (degree, stage)


def test_the_largest_models_beside_3d_parallelism() -> None:
    """Table 2 by the command, whose row of 3D parallelism is planned with its stages, too."""
    for row in TABLE_2.split()[2:]:
        degree, baseline, _, second, third = map(float, row.split(","))
        settings: dict[str, Any] = {"devices": int(64 * degree), "tensor": int(degree)}
        found = _by_name(largest_models(**settings, device_memory="32GB"))
        for name, billions in (("data parallel", baseline), ("ZeRO-2", second), ("ZeRO-3", third)):
            assert found[name].states == pytest.approx(billions * 1e9, rel=0.03)
        planned = found["3D parallel"]
        assert planned.here is not None
        assert 0.4 * billions * 1e9 < planned.here < billions * 1e9
    settings = {"devices": 512, "devices_per_node": 16, "device_memory": "32GB", "sequence": 1024}
    found = _by_name(largest_models(**settings))
    planned = found["3D parallel"]
    # ZeRO-Infinity quotes 650B as the limit of 3D parallelism there.
    assert planned.states == pytest.approx(1.02e12, rel=0.01)
    assert planned.here is not None
    assert 0.5 * 650e9 < planned.here < 1.02e12
    assert planned.words == "1, pp 32, tp 16"
    half = _by_name(largest_models(**settings, pipeline=16, tensor=16))["3D parallel"]
    assert (half.words, half.options.cluster.devices) == ("1, pp 16, tp 16", 2)


def _by_name(found: tuple[Largest, ...]) -> dict[str, Largest]:
    return {one.strategy.name: one for one in found}


def test_what_each_pipeline_stage_has() -> None:
    units = (
        UnitShape(name="root", numels=(8, 4), surrounds=True),
        UnitShape(name="tokens", numels=(100,)),
        UnitShape(name="blocks", numels=(48, 7), count=7),
        UnitShape(name="head", numels=(90,)),
    )
    shape = ModelShape(name="", units=units)
    first, last = parts_of(shape, 2, 3, 1)
    assert [(one.name, one.numels, one.count) for one in first.units] == [
        ("root", (4, 2), 1),
        ("tokens", (50,), 1),
        ("blocks", (24, 4), 3),
    ]
    assert [one.name for one in last.units] == ["root", "blocks", "head"]
    assert parts_of(ModelShape(name="", units=units), 1, 1, 4) == (
        ModelShape(name="", units=units),
    )


def test_activations_of_a_pipeline() -> None:
    """The first stage keeps those of as many micro-batches as there are stages: 1F1B."""
    settings: dict[str, Any] = {"stage": 1, "checkpoint_activations": "off", "layers": 32}
    settings |= {"hidden": 1024, "devices": 32, "device_memory": "1TB"}
    whole = _activations(onecopy.plan("400M", **settings, accumulate=8))
    for accumulate, share in ((1, 1 / 4), (2, 2 / 4), (4, 1), (8, 1)):
        plan = onecopy.plan("400M", **settings, pipeline=4, accumulate=accumulate)
        # Beside what blocks keep there is what one takes in backward.
        assert _activations(plan) == pytest.approx(share * whole, rel=0.1), accumulate
    # Korthikanti et al. 2022, equation 2: 10 + 24/t of 34.
    plan = onecopy.plan("400M", **settings, tensor=8, accumulate=8)
    assert _activations(plan) == pytest.approx(whole * 13 / 34, rel=0.1)


def _activations(plan: Any) -> int:
    found: int = plan.rows[0].memory.activations
    return found


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("plan 175B --devices 512 --tensor 8 --pipeline 8 --accumulate 16".split()) == 0
    printed = capsys.readouterr().out
    for words in (
        "512 devices in 64 nodes, 8 pipeline stages x 8 data parallel x 8 tensor parallel:",
        "tensor parallelism sends",
        "a pipeline stage sends",
        'mesh = init_device_mesh(device.type, [8, 8, 8], mesh_dim_names=["pp", "dp", "tp"])',
        "mesh=mesh)",
    ):
        assert words in printed, words
    assert "init_sharded" not in printed


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"devices": 8, "tensor": 3}, "--tensor 3 times --pipeline 1 does not divide"),
        ({"devices": 8, "pipeline": 8, "layers": 4, "hidden": 64}, "which are what pipeline"),
    ],
)
def test_what_cannot_be_spread_so(settings: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        onecopy.plan("1M", **settings)


def held(stage: int) -> tuple[Memory, memory.StateBytes, int]:
    """What was planned for a rank of 2 x 2, from its part of a model, what it held; elements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh["dp"].get_local_rank()
    model = parallelize(build(13), mesh["tp"], "tensor")
    options = PlanOptions(precision="fp32")
    shape = ModelShape(name="", units=units_of(model, options))
    widths = estimate.widths_of(options.policy, options.optimizer_states)
    planned = memory_of(shape, stage, Cluster(devices=2, devices_per_node=2), widths, rank=place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onecopy.shard(model, optimizer, stage=stage, mesh=mesh)
    backward(model, batch(0, place), "tensor")
    optimizer.step()
    optimizer.zero_grad()
    backward(model, batch(1, place), "tensor")
    return planned, memory.measure(model, optimizer), shape.num_parameters


@pytest.mark.sampled("stage", (0, 1, 2, 3), 1)
def test_a_rank_holds_what_was_planned(pool: Pool, stage: int) -> None:
    runs = pool.run(4, held, stage)
    for planned, found, _ in runs:
        assert (found.parameters, found.gradients) == (planned.parameters, planned.gradients)
        # The plan counts padding, which has no optimizer states.
        assert found.optimizer <= planned.optimizer
    for tensor_rank in (0, 1):
        first, second = (runs[tensor_rank + 2 * place] for place in (0, 1))
        states = first[1].optimizer + second[1].optimizer
        # Two fp32 moments of each element, on each of the ranks where they are not cut.
        assert states == 8 * first[2] * (1 if stage else 2)
