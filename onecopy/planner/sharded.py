"""What the closed formulas say of a model that is sharded: its real units, on its real world."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onecopy.core.stages import Stage
from onecopy.events import SENT
from onecopy.planner import estimate
from onecopy.planner.cluster import Cluster
from onecopy.planner.memory import Step, memory_of
from onecopy.planner.modules import shape_of, widths_of_dtypes
from onecopy.planner.shapes import ModelShape, UnitShape
from onecopy.planner.sized import SizedUnit
from onecopy.planner.traffic import counts_of, messages_of
from onecopy.policies import Quantize

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["ModelTraffic", "memory_at_peak", "model_traffic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraffic:
    """Bytes that this rank sends for a model: of all its units, as its stage cuts them.

    gather: in each forward and in each backward. reduce: in each backward that reduces. refresh: by
    the number of the optimizer, of the units that it has, after each of its steps.
    gather_once, reduce_once: of gathers and reduces what crosses nodes once a step, however many
    backwards it has.
    """

    gather: int
    reduce: int
    refresh: Mapping[int, int]
    gather_once: int = 0
    reduce_once: int = 0


def model_traffic(engine: Engine, optimizers: Mapping[int, Collection[Unit]]) -> ModelTraffic:
    """Of a model, and of optimizers with these units, of which some may be other models'.

    By the table of stages (docs/papers.md), from how bytes grow with the backwards of a step.
    """
    cluster, rank = _cluster_of(engine)
    quantize = _quantize_of(engine)
    modules = {id(unit.module) for unit in engine.units}
    sent = {
        unit: [
            _bytes_sent(_sized(engine, unit, modules, cluster), rank, quantize, k) for k in (1, 2)
        ]
        for unit in engine.units
    }
    one, two = (
        {kind: sum(by_kind[place][kind] for by_kind in sent.values()) for kind in SENT}
        for place in (0, 1)
    )
    return ModelTraffic(
        # Each backward has a forward.
        gather=(two["gather"] - one["gather"]) // 2,
        gather_once=2 * one["gather"] - two["gather"],
        reduce=two["reduce"] - one["reduce"],
        reduce_once=2 * one["reduce"] - two["reduce"],
        refresh={
            number: sum(sent[unit][0]["refresh"] for unit in units if unit in sent)
            for number, units in optimizers.items()
        },
    )


def _bytes_sent(
    one: SizedUnit, rank: int, quantize: Quantize | None, backwards: int
) -> dict[str, int]:
    """In a step, by the kind of event."""
    messages = messages_of(one, rank, quantize)
    inside, across = (counts.by_kind() for counts in counts_of(one, backwards))
    count = {kind: messages.values.times for kind in SENT} | {"reduce": messages.reduces}
    return {kind: count[kind](inside[kind], across[kind]).total for kind in SENT}


def _quantize_of(engine: Engine) -> Quantize | None:
    wanted = engine.config.quantize
    return wanted if isinstance(wanted, Quantize) else None


def _cluster_of(engine: Engine) -> tuple[Cluster, int]:
    """The nodes, and the place of this rank in them."""
    groups = engine.collectives.groups
    nodes = groups.node_ranks or (groups.world.ranks,)
    order = [rank for node in nodes for rank in node]
    me = groups.world.ranks[groups.world.rank]
    return Cluster.of_nodes([len(node) for node in nodes]), order.index(me)


def _sized(engine: Engine, unit: Unit, modules: set[int], cluster: Cluster) -> SizedUnit:
    """A unit as the planner sees it, laid out as it is."""
    shape = replace(shape_of(unit, unit.parameters, modules), trainable=unit.gradients is not None)
    cut = _cut_of(engine, unit)
    return SizedUnit(shape, unit.layout, widths_of_dtypes(unit.dtypes, 0), cut, cluster)


def _cut_of(engine: Engine, unit: Unit) -> Stage:
    """Units that stay at stage 3 are what all units are at a lower stage."""
    return engine.stage if unit.releases else engine.stage.with_whole_parameters


def memory_at_peak(engine: Engine, states: Mapping[Unit, int | None]) -> dict[str, int]:
    """Bytes on a rank at the peak of a step of one backward, by kind, without activations.

    "host", "nvme": how many of the model states lie in host memory and on NVMe, if any do.

    Args:
        states: tensors of a parameter's size that the optimizer of each unit keeps, if it has one.
            Where it is not known for some unit, the kind "optimizer" is missing.
    """
    (cluster, _), step = _cluster_of(engine), Step(quantize=_quantize_of(engine))
    offload = engine.config.offload
    assert not isinstance(offload, str), "a configuration makes it a record"
    by_stage: dict[Stage, list[UnitShape]] = {}
    last: dict[Stage, Unit] = {}
    modules = {id(unit.module) for unit in engine.units}
    for unit in engine.units:
        cut = _cut_of(engine, unit)
        shape = replace(
            shape_of(unit, unit.parameters, modules),
            trainable=unit.gradients is not None,
            owners=unit.layout.owners,
            widths=widths_of_dtypes(unit.dtypes, states.get(unit) or 0),
            offload=offload if unit.slice.lane is not None else None,
            joins=cut in last and last[cut].module is unit.module,
        )
        by_stage.setdefault(cut, []).append(shape)
        last[cut] = unit
    total: Counter[str] = Counter()
    for cut, shapes in by_stage.items():
        model = ModelShape(name="", units=tuple(shapes))
        memory = memory_of(model, cut, cluster, estimate.FP32, step)
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
