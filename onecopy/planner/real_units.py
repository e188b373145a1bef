"""What the real units of models take, with the real dtypes and optimizers: at `shard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from onecopy.config import Config
from onecopy.core.partition import assign_owners
from onecopy.core.stages import STAGES
from onecopy.planner import estimate
from onecopy.planner.cluster import Cluster
from onecopy.planner.estimate import AnyStage
from onecopy.planner.memory import Memory, Step, memory_of
from onecopy.planner.modules import shapes_of, widths_of_dtypes
from onecopy.planner.optimizers import groups_of, num_states
from onecopy.planner.options import IN_NODES
from onecopy.planner.shapes import ModelShape
from onecopy.planner.sized import row_for, sized
from onecopy.planner.staging import file_bytes
from onecopy.policies import Offload, Quantize

if TYPE_CHECKING:
    import torch

    from onecopy.core.unit import UnitSpec
    from onecopy.planner.estimate import ElementWidths

__all__ = ["OptimizerOf", "RealModels", "possible_stages"]

OptimizerOf = Callable[["torch.nn.Parameter"], "torch.optim.Optimizer | None"]


class RealModels:
    """Models that train at once.

    Attributes:
        all_known: the states of every optimizer are known.

    Args:
        models: the units of each.
        optimizer_of: what updates a parameter, if that is known yet.
        assumes: where the states of an optimizer are not known, the usual number is counted; else
            none.
    """

    def __init__(
        self,
        models: Sequence[Sequence[UnitSpec]],
        optimizer_of: OptimizerOf,
        config: Config,
        *,
        assumes: bool = True,
    ) -> None:
        self._models, self._config = models, config
        quantize = config.quantize
        # What is not decided yet may come to this.
        self._quantize = Quantize() if isinstance(quantize, str) else quantize
        rules = [_rules_of(specs, config, optimizer_of, assumes) for specs in models]
        self._widths = [[one for one, _ in model] for model in rules]
        self.all_known = all(is_known for model in rules for _, is_known in model)

    def memory(self, stage: AnyStage, cluster: Cluster, rank: int | None = None) -> Memory:
        """Of a rank that trains all of the models; None means the fullest.

        Each kind is at its most in all of them at once.
        """
        step = Step(prefetch_bytes=self._config.prefetch_bytes, quantize=self._quantize)
        parts = [
            memory_of(shape, stage, cluster, estimate.FP32, step, rank)
            for shape in self._shapes(stage, cluster)
        ]
        return sum(parts[1:], start=parts[0])

    def file_bytes(self, stage: AnyStage, cluster: Cluster, rank: int) -> int:
        """Bytes that a rank reserves on NVMe."""
        return sum(
            file_bytes(list(sized(shape, stage, cluster, estimate.FP32)), rank)
            for shape in self._shapes(stage, cluster)
        )

    def _shapes(self, stage: AnyStage, cluster: Cluster) -> list[ModelShape]:
        num_slices = cluster.num_owners(row_for(stage, cluster).optimizer)
        offload = self._config.offload
        assert not isinstance(offload, str), "a configuration makes it a record"
        return [
            ModelShape(
                name="", units=shapes_of(assign_owners(specs, num_slices), own)
            ).with_offload(offload)
            for specs, own in zip(self._models, self._widths, strict=True)
        ]


def possible_stages(config: Config, cluster: Cluster) -> tuple[int | str, ...]:
    """The stages that can be chosen: what ranks keep whole on their devices cannot be offloaded.

    Where there are several nodes, all of one size, those that cut some states inside them, too.
    """
    is_even = len(set(cluster.node_sizes)) == 1
    stages = (*STAGES, *(IN_NODES if cluster.num_nodes > 1 and is_even else ()))
    offload = config.offload
    if not isinstance(offload, Offload) or offload.is_all_on_nvme or offload.parameters == "device":
        return stages
    return tuple(stage for stage in stages if row_for(stage, cluster).releases)


def _rules_of(
    specs: Sequence[UnitSpec], config: Config, optimizer_of: OptimizerOf, assumes: bool
) -> list[tuple[ElementWidths, bool]]:
    """Bytes of each state of each unit, and whether its optimizer's states are known."""
    found, groups = [], {}
    for spec in specs:
        parameters = [parameter for _, parameter in spec.parameters]
        optimizer = optimizer_of(parameters[0])
        if optimizer not in groups:
            groups[optimizer] = groups_of(optimizer)
        states, is_known = num_states(optimizer, parameters, groups[optimizer])
        widths = widths_of_dtypes(spec.dtypes, states if is_known or assumes else 0)
        if config.step_in_backward:
            widths = replace(widths, gradient=0)
        found.append((widths, is_known or not spec.trainable))
    return found
