"""The units of a real module, as `shard` would make them. The planner's only file that needs torch.

The module may lie on the meta device; nothing of it is read but shapes.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from onecopy.config import Config
from onecopy.core.partition import find_units
from onecopy.planner.estimate import ElementWidths, widths_of
from onecopy.planner.shapes import UnitShape

if TYPE_CHECKING:
    from torch import nn

    from onecopy.core.precision import Dtypes
    from onecopy.core.unit import UnitSpec
    from onecopy.planner.options import PlanOptions

__all__ = ["units_of", "widths_of_dtypes"]


def units_of(model: nn.Module, options: PlanOptions) -> tuple[UnitShape, ...]:
    """The units of a model in their order; neighbours that are alike are one record.

    Raises:
        ConfigError: a name in the precision's keep_fp32 does not fit the model.
        ShardingError: a parameter cannot be sharded, as `shard` would say.
    """
    specs = find_units(model, Config(precision=options.policy), lambda _: None)
    modules = {id(spec.module) for spec in specs}
    states = options.optimizer_states
    usual = widths_of(options.policy, states)
    shapes = [_shape(spec, modules, usual, states) for spec in specs]
    units = []
    for _, alike in groupby(shapes, key=lambda unit: (unit.numels, unit.widths, unit.trainable)):
        first, *more = alike
        units.append(
            UnitShape(
                name=first.name,
                numels=first.numels,
                count=1 + len(more),
                trainable=first.trainable,
                surrounds=first.surrounds,
                widths=first.widths,
            )
        )
    return tuple(units)


def _shape(
    spec: UnitSpec, modules: set[int], usual: ElementWidths, optimizer_states: int
) -> UnitShape:
    widths = widths_of_dtypes(spec.dtypes, optimizer_states)
    inner = {id(module) for module in spec.module.modules()} - {id(spec.module)}
    return UnitShape(
        name=spec.name,
        numels=tuple(parameter.numel() for _, parameter in spec.parameters),
        trainable=spec.trainable,
        surrounds=bool(inner & modules),
        # Units that follow the plan's precision follow it to other precisions, too.
        widths=None if widths == usual or not spec.trainable else widths,
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
