"""Units laid out as the runtime would lay them, and the bytes of each state of one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from onecopy.config import Offload
from onecopy.core.layout import ALIGNMENT_BYTES, Layout
from onecopy.core.stages import STAGES
from onecopy.planner import estimate
from onecopy.planner.estimate import ElementWidths
from onecopy.planner.shapes import ModelShape, UnitShape
from onecopy.report.states import StateBytes

__all__ = ["SizedUnit", "added", "sized"]


@dataclass(frozen=True, slots=True)
class SizedUnit:
    """A kind of unit, laid out for a number of ranks."""

    unit: UnitShape
    layout: Layout
    widths: ElementWidths

    @property
    def values(self) -> int:
        """Bytes of the whole unit's parameters in the compute dtype."""
        return self.layout.padded_numel * self.widths.compute

    @property
    def gradients(self) -> int:
        """Bytes of the whole unit's gradients, as they are sent."""
        return self.layout.gradient_numel * self.widths.wire if self.unit.trainable else 0

    @property
    def mean(self) -> int:
        """Bytes of the owned part of the unit's mean gradient, as it is summed."""
        return max(self.layout.strides) * max(4, self.widths.master) if self.unit.trainable else 0

    @property
    def gradient_of_autograd(self) -> int:
        """Bytes of the largest gradient as autograd hands it over.

        Weights that embedding and head share lie at the root: autograd adds up two gradients.
        """
        if not self.unit.trainable:
            return 0
        return max(self.unit.numels) * self.widths.compute * (2 if self.unit.surrounds else 1)

    @property
    def lasts(self) -> bool:
        """Its gradients are reduced when a backward ends, those of others on the way."""
        return self.unit.surrounds or self.unit.stays

    @property
    def state_widths(self) -> ElementWidths:
        """A frozen parameter is its own master and has neither gradient nor states."""
        if self.unit.trainable:
            return self.widths
        compute = self.widths.compute
        return ElementWidths(compute=compute, master=compute, gradient=0, optimizer=0, reduce=0)

    def stage(self, of_model: int) -> int:
        """The stage of this unit: parameters that stay are not cut."""
        if not self.unit.stays:
            return of_model
        own = STAGES[of_model].with_whole_parameters
        return next(number for number, cut in STAGES.items() if cut == own)

    @property
    def offload(self) -> Offload | None:
        """What is frozen has nothing to step: it may only be offloaded as a parameter."""
        offload = self.unit.offload
        if offload is None or offload.optimizer == "device":
            return None
        return offload if self.unit.trainable or offload.parameters == "host" else None

    def owned(self, stage: int, rank: int, devices: int) -> tuple[StateBytes, StateBytes]:
        """What a rank owns of a unit with whole parameters more than the mean over ranks.

        On the device, and in host memory.
        """
        mean = -(-self.layout.padded_numel // devices)
        more = self.layout.slice_numels[rank] - mean
        all_ = estimate.owned_bytes(self.stage(stage), more, self.state_widths, self.offload)
        host = estimate.host_bytes(more, self.state_widths, self.offload)
        return _less(all_, host), host

    def gradients_kept(self, stage: int) -> int:
        """Bytes of local gradients that stay between steps."""
        keeps = STAGES[self.stage(stage)].keeps_gradient_buffer
        return self.layout.gradient_numel * self.state_widths.wire if keeps else 0

    def mean_kept(self, stage: int, devices: int) -> int:
        """Bytes of the mean gradient that a device has of it after a backward."""
        on_device, _ = self.states(stage, devices)
        return on_device.gradients - self.gradients_kept(stage)

    def states(self, stage: int, devices: int) -> tuple[StateBytes, StateBytes]:
        """Of one such unit, on the device and in host memory."""
        widths, stage, offload = self.state_widths, self.stage(stage), self.offload
        owners = devices if STAGES[stage].shards_anything else 1
        # Gradient buffers are longer, by the flags that ride along.
        flat, wide = self.layout.padded_numel, self.layout.gradient_numel
        all_, with_flags = (
            estimate.state_bytes(stage, numel, devices, widths, offload) for numel in (flat, wide)
        )
        host, host_with_flags = (
            estimate.host_bytes(-(-numel // owners), widths, offload) for numel in (flat, wide)
        )
        on_host = StateBytes(
            parameters=host.parameters,
            gradients=host_with_flags.gradients,
            optimizer=host.optimizer,
        )
        return _less(replace(all_, gradients=with_flags.gradients), on_host), on_host


def _less(states: StateBytes, host: StateBytes) -> StateBytes:
    """What lies on the device of these states, of which those of `host` do not."""
    return StateBytes(
        parameters=states.parameters - host.parameters,
        gradients=states.gradients - host.gradients,
        optimizer=states.optimizer - host.optimizer,
    )


def added(parts: Iterable[tuple[int, StateBytes]]) -> StateBytes:
    """The sum of states, each so many times."""
    parts = list(parts)
    return StateBytes(
        parameters=sum(count * one.parameters for count, one in parts),
        gradients=sum(count * one.gradients for count, one in parts),
        optimizer=sum(count * one.optimizer for count, one in parts),
    )


def sized(
    model: ModelShape, stage: int, devices: int, widths: ElementWidths
) -> Iterator[SizedUnit]:
    is_cut = STAGES[stage].shards_anything
    for unit in model.units:
        if not unit.count or not sum(unit.numels):
            continue
        own = unit.widths or widths
        groups = (devices, 1) if is_cut else (1, devices)
        alignment = ALIGNMENT_BYTES // min(own.compute, own.master)
        yield SizedUnit(unit, _layout(unit.numels, unit.owners, *groups, alignment), own)


@lru_cache(maxsize=1024)
def _layout(
    numels: tuple[int, ...],
    owners: tuple[int, ...] | None,
    shard: int,
    replica: int,
    alignment: int,
) -> Layout:
    """As the runtime would lay it out; a plan asks for the same ones again and again."""
    return Layout(
        numels, num_slices=shard, num_replicas=replica, alignment=alignment, owners=owners
    )
