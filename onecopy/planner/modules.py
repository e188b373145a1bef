"""The units of a real module, as `shard` would make them.

The module may lie on the meta device; nothing of it is read but shapes. Of the planner's files only
this one and choose.py need torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from onecopy.config import Config
from onecopy.core.dtensors import local_of
from onecopy.core.partition import find_units
from onecopy.planner.estimate import ElementWidths, widths_of
from onecopy.planner.shapes import UnitShape

if TYPE_CHECKING:
    from torch import nn

    from onecopy.core.precision import Dtypes
    from onecopy.core.unit import Unit, UnitSpec
    from onecopy.planner.options import PlanOptions

__all__ = ["shape_of", "shapes_of", "units_of", "widths_of_dtypes"]


def units_of(model: nn.Module, options: PlanOptions) -> tuple[UnitShape, ...]:
    """The units of a model in their order; neighbours that are alike are one record.

    Raises:
        ConfigError: a name in the precision's keep_fp32 does not fit the model.
        ShardingError: a parameter cannot be sharded, as `shard` would say.
    """
    specs = find_units(model, Config(precision=options.policy), lambda _: None)
    states = options.optimizer_states
    usual = widths_of(options.policy, states)
    widths = [widths_of_dtypes(spec.dtypes, states) for spec in specs]
    # Units that follow the plan's precision follow it to other precisions, too.
    own = [
        None if one == usual or not spec.trainable else one
        for spec, one in zip(specs, widths, strict=True)
    ]
    return shapes_of(specs, own)


def shapes_of(
    specs: Sequence[UnitSpec], widths: Sequence[ElementWidths | None]
) -> tuple[UnitShape, ...]:
    """Units as the planner sees them; neighbours that are alike are one record.

    Args:
        widths: bytes of each state of each unit; None where the plan's precision says it.
    """
    modules = {id(spec.module) for spec in specs}
    shapes = [_shape(spec, modules, own) for spec, own in zip(specs, widths, strict=True)]
    for number, (before, spec) in enumerate(pairwise(specs), 1):
        if spec.module is before.module:
            shapes[number] = replace(shapes[number], joins=True)
    units = []
    for _, alike in groupby(shapes, key=lambda unit: replace(unit, name="")):
        first, *more = alike
        units.append(replace(first, count=1 + len(more)))
    return tuple(units)


def _shape(spec: UnitSpec, modules: set[int], widths: ElementWidths | None) -> UnitShape:
    return replace(
        shape_of(spec, [parameter for _, parameter in spec.parameters], modules),
        trainable=spec.trainable,
        stays=spec.stays,
        owners=spec.owners,
        widths=widths,
    )


def shape_of(
    unit: Unit | UnitSpec, parameters: Iterable[nn.Parameter], modules: set[int]
) -> UnitShape:
    """The sizes of a unit and its place among others; `modules` are the ids of all units' own."""
    inner = {id(module) for module in unit.module.modules()} - {id(unit.module)}
    return UnitShape(
        name=unit.name,
        numels=tuple(local_of(parameter).numel() for parameter in parameters),
        surrounds=bool(inner & modules),
    )


def widths_of_dtypes(dtypes: Dtypes, optimizer_states: int) -> ElementWidths:
    """Bytes of each state of a unit; optimizer states are as wide as what is updated."""
    compute, master = dtypes.compute.itemsize, dtypes.master.itemsize
    return ElementWidths(
        compute=compute,
        master=master,
        gradient=dtypes.gradient.itemsize,
        optimizer=optimizer_states * master,
        remainder=master - compute if dtypes.splits_master else None,
        reduce=dtypes.reduce.itemsize,
    )
