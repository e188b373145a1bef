"""What the closed formulas say of a model that is sharded: its real units, on its real world."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onecopy.core.stages import STAGES
from onecopy.planner import estimate
from onecopy.planner.memory import Cluster, memory_of
from onecopy.planner.modules import shape_of, widths_of_dtypes
from onecopy.planner.shapes import ModelShape, UnitShape

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["ModelTraffic", "UnitTraffic", "memory_at_peak", "model_traffic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTraffic:
    """Bytes that this rank sends for a unit.

    gather: in each forward and in each backward. reduce: in each backward that reduces. refresh:
    after each step of the optimizer that has the unit.
    """

    gather: int
    reduce: int
    refresh: int


def traffic_of(engine: Engine, unit: Unit) -> UnitTraffic:
    """What this rank sends for a unit, by the table of stages (docs/papers.md).

    With P elements on N ranks, each message is (N-1)/N of P; where parameters are not cut, a rank
    sends its slice to all others, and of its gradients all that is not in it.
    """
    groups, layout, dtypes = engine.collectives.groups, unit.layout, unit.dtypes
    size, shard = groups.world.size, groups.shard
    values = estimate.bytes_sent(1, layout.padded_numel, size, dtypes.compute.itemsize)
    sums = estimate.bytes_sent(1, layout.gradient_numel, size, dtypes.reduce.itemsize)
    if layout.is_whole and shard.size > 1:
        values = layout.slice_numels[shard.rank] * (size - 1) * dtypes.compute.itemsize
        others = layout.gradient_numel - layout.strides[shard.rank]
        sums = others * dtypes.reduce.itemsize
    is_cut = engine.stage.shards_anything
    return UnitTraffic(
        gather=values if unit.releases else 0,
        reduce=sums * (1 if is_cut else 2) if unit.gradients is not None else 0,
        refresh=values if is_cut and not unit.releases else 0,
    )


@dataclass(frozen=True, slots=True)
class ModelTraffic:
    """Bytes that this rank sends for a model: `UnitTraffic` of all its units.

    refresh: by the number of the optimizer, of the units that it has.
    """

    gather: int
    reduce: int
    refresh: Mapping[int, int]


def model_traffic(engine: Engine, optimizers: Mapping[int, Collection[Unit]]) -> ModelTraffic:
    """Of a model, and of optimizers with these units, of which some may be other models'."""
    traffic = {unit: traffic_of(engine, unit) for unit in engine.units}
    return ModelTraffic(
        gather=sum(one.gather for one in traffic.values()),
        reduce=sum(one.reduce for one in traffic.values()),
        refresh={
            number: sum(traffic[unit].refresh for unit in units if unit in traffic)
            for number, units in optimizers.items()
        },
    )


def memory_at_peak(engine: Engine, states: Mapping[Unit, int | None]) -> dict[str, int]:
    """Bytes on a rank at the peak of a step of one backward, by kind, without activations.

    "host", "nvme": how many of the model states lie in host memory and on NVMe, if any do.

    Args:
        states: tensors of a parameter's size that the optimizer of each unit keeps, if it has one.
            Where it is not known for some unit, the kind "optimizer" is missing.
    """
    size = engine.collectives.groups.world.size
    cluster = Cluster(devices=size, devices_per_node=size)
    offload = engine.config.offload
    assert not isinstance(offload, str), "a configuration makes it a record"
    by_stage: dict[int, list[UnitShape]] = {}
    last: dict[int, Unit] = {}
    modules = {id(unit.module) for unit in engine.units}
    numbers = {cut: number for number, cut in STAGES.items()}
    for unit in engine.units:
        # Units that stay at stage 3 are what all units are at a lower stage.
        cut = engine.stage if unit.releases else engine.stage.with_whole_parameters
        number = numbers[cut]
        shape = replace(
            shape_of(unit, unit.parameters, modules),
            trainable=unit.gradients is not None,
            owners=unit.layout.owners,
            widths=widths_of_dtypes(unit.dtypes, states.get(unit) or 0),
            offload=offload if unit.slice.lane is not None else None,
            joins=number in last and last[number].module is unit.module,
        )
        by_stage.setdefault(number, []).append(shape)
        last[number] = unit
    total: Counter[str] = Counter()
    for number, shapes in by_stage.items():
        model = ModelShape(name="", units=tuple(shapes))
        memory = memory_of(model, number, cluster, estimate.FP32)
        for kind, num_bytes in memory.by_kind().items():
            total[kind] += num_bytes or 0
        for kind in ("parameters", "gradients", "optimizer"):
            total[kind] += getattr(memory.host, kind) + getattr(memory.nvme, kind)
        total["host"] += memory.host.total
        total["nvme"] += memory.nvme.total
    for tier in ("host", "nvme"):
        if not total[tier]:
            del total[tier]
    if None in states.values():
        # So the sum with them is not known either.
        for kind in ("optimizer", "host", "nvme"):
            total.pop(kind, None)
    return dict(total)
