"""Units laid out as the runtime would lay them, and the bytes of each state of one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from onecopy.core.layout import ALIGNMENT_BYTES, Layout
from onecopy.core.stages import Stage
from onecopy.planner import estimate
from onecopy.planner.cluster import Cluster
from onecopy.planner.estimate import AnyStage, ElementWidths
from onecopy.planner.shapes import ModelShape, UnitShape
from onecopy.policies import Offload
from onecopy.report.states import StateBytes

__all__ = ["Placed", "SizedUnit", "added", "row_for", "sized"]

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
    """A kind of unit, laid out for ranks in nodes.

    cut: the row of the table for it: parameters that stay are not cut.
    is_coded: gathers and refreshes bring what codes make of its values.
    """

    unit: UnitShape
    layout: Layout
    widths: ElementWidths
    cut: Stage
    cluster: Cluster
    is_coded: bool = False

    @property
    def values(self) -> int:
        """Bytes of the whole unit's parameters in the compute dtype."""
        return self.layout.padded_numel * self.widths.compute

    @property
    def gradients(self) -> int:
        """Bytes of the whole unit's gradients, as they are sent."""
        return self.layout.gradient_numel * self.widths.wire if self.unit.trainable else 0

    @property
    def incoming(self) -> int:
        """Bytes that its reduce takes at most beside what is sent and the mean that comes of it.

        Parts of others to be summed, and, where they go in two hops, the sums between these.
        """
        cluster, devices = self.cluster, self.cluster.devices
        if not self.unit.trainable:
            return 0
        if cluster.num_nodes == 1 or not self.cut.shards_anything:
            return self.gradients * (devices - 1) // devices
        wire, width, others = self.widths.wire, max(4, self.widths.master), cluster.num_nodes - 1
        part, own = self.part_of(self.layout.strides), max(self.layout.strides)
        summed, sent = part * width, 0 if wire == width else part * wire
        inside = part * (cluster.devices_per_node - 1) * wire + (summed if sent else 0)
        if self.cut.optimizer == "world":
            return max(inside, summed + sent + own * others * wire)
        # The replicas sum equal parts of it, and collect them in a buffer of their own.
        chunk = own // cluster.num_nodes
        return max(inside, summed + sent + chunk * others * wire, 2 * own * wire + chunk * width)

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
        """A frozen parameter is its own master and has neither gradient nor states.

        Where parameters that stay are not exact, masters are, whole and beside them.
        """
        widths = self.widths
        if not self.unit.trainable:
            compute = widths.compute
            widths = ElementWidths(
                compute=compute, master=compute, gradient=0, optimizer=0, reduce=0
            )
        return replace(widths, remainder=widths.master) if self.is_coded else widths

    @property
    def offload(self) -> Offload | None:
        """What is frozen has nothing to step: it may only be offloaded as a parameter."""
        offload = self.unit.offload
        if offload is None or offload.is_all_on_device:
            return None
        return offload if self.unit.trainable or offload.parameters != "device" else None

    def owned(self, number: int) -> Placed:
        """What the owner of a slice owns of whole parameters more than the mean over slices."""
        cut, widths, offload = self.cut, self.state_widths, self.offload
        more = self.layout.slice_numels[number] - self._share_of(self.layout.padded_numel)
        all_ = estimate.owned_bytes(cut, more, widths, offload)
        host, nvme = (
            estimate.tier_bytes(tier, cut, more, widths, offload) for tier in ("host", "nvme")
        )
        return Placed(device=_less(all_, host, nvme), host=host, nvme=nvme)

    def node_sum(self, rank: int | None = None) -> int:
        """Bytes of the sums of earlier backwards that wait in its node for the last one."""
        if not self.cut.sums_at_boundary or not self.unit.trainable:
            return 0
        return self.part_of(self.layout.strides, rank) * max(4, self.widths.master)

    @property
    def gradients_kept(self) -> int:
        """Bytes of local gradients that stay between steps."""
        return self._kept(0).gradients

    @property
    def mean_kept(self) -> int:
        """Bytes of the mean gradient that a device has of it after a backward."""
        return self.states().device.gradients - self.gradients_kept

    @property
    def mean_in_buffer(self) -> int:
        """Bytes of the mean gradient where it lies in the buffer of local ones after a backward."""
        widths = self.state_widths
        is_there = estimate.shares_buffer(self.cut, widths, self.offload)
        return self.slice_numel * widths.gradient if is_there else 0

    @property
    def slice_numel(self) -> int:
        """Elements of the unit that a rank owns, with its flags: as long as a mean gradient."""
        return self._share_of(self.layout.gradient_numel)

    @property
    def num_owners(self) -> int:
        """Over how many ranks its masters are shared out."""
        return self.cluster.num_owners(self.cut.optimizer)

    def part_of(self, slices: Sequence[int], rank: int | None = None) -> int:
        """How many elements a rank holds for its node; None means the most.

        Args:
            slices: elements of each slice of the buffer.
        """
        if self.cut.optimizer != "world":
            return self._share_of(sum(slices))
        ranks = range(self.cluster.devices) if rank is None else (rank,)
        handled = {self.cluster.handled(one) for one in ranks}
        return max(sum(slices[one.start : one.stop]) for one in handled)

    def states(self, rank: int | None = None) -> Placed:
        """Of one such unit; None means the rank that has most."""
        cut, widths, offload = self.cut, self.state_widths, self.offload
        # Gradient buffers are longer, by the flags that ride along.
        flat, wide = self._share_of(self.layout.padded_numel), self.slice_numel
        all_, with_flags = (
            estimate.owned_bytes(cut, numel, widths, offload) for numel in (flat, wide)
        )

        def placed(tier: str) -> StateBytes:
            states, longer = (
                estimate.tier_bytes(tier, cut, numel, widths, offload) for numel in (flat, wide)
            )
            return StateBytes(
                parameters=states.parameters,
                gradients=longer.gradients,
                optimizer=states.optimizer,
            )

        host, nvme = placed("host"), placed("nvme")
        all_ = replace(all_, gradients=with_flags.gradients)
        on_device = added([(1, _less(all_, host, nvme)), (1, self._kept(rank))])
        return Placed(device=on_device, host=host, nvme=nvme)

    def _kept(self, rank: int | None) -> StateBytes:
        """What lies on a device beside the states that it owns."""
        flat, wide = self.layout.padded_numel, self.layout.gradient_numel
        in_part = self.part_of(self.layout.slice_numels, rank)
        return estimate.kept_bytes(self.cut, flat, wide, in_part, self.state_widths)

    def _share_of(self, numel: int) -> int:
        return -(-numel // self.num_owners)


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
    model: ModelShape, stage: AnyStage, cluster: Cluster, widths: ElementWidths
) -> Iterator[SizedUnit]:
    """The units of a model at a stage, on ranks in nodes."""
    cut = row_for(stage, cluster)
    num_slices = cluster.num_owners(cut.optimizer)
    groups = num_slices, cluster.devices // num_slices
    for unit in model.units:
        if not unit.count or not sum(unit.numels):
            continue
        own = unit.widths or widths
        alignment = ALIGNMENT_BYTES // min(own.compute, own.master)
        layout = _layout(unit.numels, unit.owners, *groups, alignment)
        own_cut = cut.with_whole_parameters if unit.stays else cut
        yield SizedUnit(unit, layout, own, own_cut, cluster)


def row_for(stage: AnyStage, cluster: Cluster) -> Stage:
    """The row of the table that a stage names; one node has no other cuts than the world's."""
    cut = estimate.row_of(stage)
    return cut if cluster.num_nodes > 1 else cut.on_one_node


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
