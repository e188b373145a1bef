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

__all__ = ["Placed", "SizedUnit", "added", "sized"]

NOTHING = StateBytes(parameters=0, gradients=0, optimizer=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Model states by the tier in which they lie."""

    device: StateBytes = NOTHING
    host: StateBytes = NOTHING
    nvme: StateBytes = NOTHING

    @property
    def total(self) -> int:
        """Bytes in all tiers."""
        return self.device.total + self.host.total + self.nvme.total


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
        if offload is None or offload.is_all_on_device:
            return None
        return offload if self.unit.trainable or offload.parameters != "device" else None

    def owned(self, stage: int, rank: int, devices: int) -> Placed:
        """What a rank owns of a unit with whole parameters more than the mean over ranks."""
        mean = -(-self.layout.padded_numel // devices)
        more = self.layout.slice_numels[rank] - mean
        own, widths, offload = self.stage(stage), self.state_widths, self.offload
        all_ = estimate.owned_bytes(own, more, widths, offload)
        host, nvme = (
            estimate.tier_bytes(tier, own, more, widths, offload) for tier in ("host", "nvme")
        )
        return Placed(device=_less(all_, host, nvme), host=host, nvme=nvme)

    def gradients_kept(self, stage: int) -> int:
        """Bytes of local gradients that stay between steps."""
        keeps = STAGES[self.stage(stage)].keeps_gradient_buffer
        return self.layout.gradient_numel * self.state_widths.wire if keeps else 0

    def mean_kept(self, stage: int, devices: int) -> int:
        """Bytes of the mean gradient that a device has of it after a backward."""
        return self.states(stage, devices).device.gradients - self.gradients_kept(stage)

    def slice_numel(self, stage: int, devices: int) -> int:
        """Elements of the unit that a rank owns, with its flags: as long as a mean gradient."""
        owners = devices if STAGES[self.stage(stage)].shards_anything else 1
        return -(-self.layout.gradient_numel // owners)

    def states(self, stage: int, devices: int) -> Placed:
        """Of one such unit."""
        widths, stage, offload = self.state_widths, self.stage(stage), self.offload
        owners = devices if STAGES[stage].shards_anything else 1
        # Gradient buffers are longer, by the flags that ride along.
        flat, wide = self.layout.padded_numel, self.layout.gradient_numel
        all_, with_flags = (
            estimate.state_bytes(stage, numel, devices, widths, offload) for numel in (flat, wide)
        )

        def placed(tier: str) -> StateBytes:
            states, longer = (
                estimate.tier_bytes(tier, stage, -(-numel // owners), widths, offload)
                for numel in (flat, wide)
            )
            return StateBytes(
                parameters=states.parameters,
                gradients=longer.gradients,
                optimizer=states.optimizer,
            )

        host, nvme = placed("host"), placed("nvme")
        all_ = replace(all_, gradients=with_flags.gradients)
        return Placed(device=_less(all_, host, nvme), host=host, nvme=nvme)


def _less(states: StateBytes, *others: StateBytes) -> StateBytes:
    """What lies on the device of these states, of which those of `others` do not."""
    return StateBytes(
        parameters=states.parameters - sum(one.parameters for one in others),
        gradients=states.gradients - sum(one.gradients for one in others),
        optimizer=states.optimizer - sum(one.optimizer for one in others),
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
