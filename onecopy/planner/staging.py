"""What swapping takes beside the states: buffers in host memory, whole pages of files on NVMe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from onecopy.planner.estimate import values_beside_masters
from onecopy.planner.sized import SizedUnit

__all__ = ["file_bytes", "staged_bytes"]

PAGE = 4096
# Of `Offload.buffer_bytes`: one chunk is read, one updated, one written.
CHUNKS = 3
# Units whose values are read from NVMe before they are gathered, and the one in use.
READ_AHEAD = 3
# Sums are made in fp32.
SUM = 4


def staged_bytes(units: Sequence[SizedUnit]) -> int:
    """Bytes of a rank's buffers in host memory, at most; 0 where nothing is offloaded.

    Beside the chunks, the largest gradient that arrives, as it is on the wire and as a sum, or the
    largest value that goes up. On its way to NVMe a gradient is there once more, and the one before
    may still be being written. With speculative_step there is a second copy of masters and states.
    """
    moved = [one for one in units if one.offload is not None]
    arriving = [
        one.slice_numel * (one.widths.wire + SUM + _written(one))
        for one in moved
        if one.unit.trainable and not _comes_in_chunks(one)
    ]
    leaving = [one.slice_numel * one.widths.compute for one in moved]
    on_the_way = max([*arriving, *leaving], default=0)
    buffers = on_the_way + _chunks(moved) + _read_ahead(moved)
    return buffers + sum(_made_ahead(one) for one in moved)


def _comes_in_chunks(one: SizedUnit) -> bool:
    """Gradients wait on the device, and come down into the chunks of the step."""
    offload = one.offload
    return offload is not None and offload.optimizer == "nvme" and offload.gradients == "device"


def _written(one: SizedUnit) -> int:
    """Bytes per element of gradients that go to NVMe."""
    is_written = one.offload is not None and one.offload.gradients == "nvme"
    return 2 * one.widths.gradient if is_written else 0


def file_bytes(units: Sequence[SizedUnit], rank: int) -> int:
    """Bytes that a rank reserves on NVMe: of each unit and kind of state whole pages.

    Every kind is as long as a mean gradient, flags included.
    """
    return sum(one.unit.count * _pages_of(one, rank) for one in units)


def _pages_of(one: SizedUnit, rank: int) -> int:
    offload, widths = one.offload, one.state_widths
    if offload is None or offload.optimizer != "nvme":
        return 0
    numel = one.slice_numel
    if one.layout.is_whole and one.cut.shards_anything:
        numel = one.layout.strides[one.cluster.slice_of(rank, one.cut.optimizer)]
    kinds = [widths.master] * (1 + widths.optimizer // widths.master)
    if offload.gradients == "nvme":
        kinds.append(widths.gradient)
    if offload.parameters == "nvme":
        kinds.append(values_beside_masters(one.cut, widths, offload))
    return sum(_whole_pages(numel * width) for width in kinds)


def _chunks(units: Sequence[SizedUnit]) -> int:
    """One set for a model, however many units it has."""
    sizes = [
        one.offload.buffer_bytes
        for one in units
        if one.offload is not None and one.offload.optimizer == "nvme"
    ]
    return CHUNKS * (max(sizes) // CHUNKS // PAGE * PAGE) if sizes else 0


def _made_ahead(one: SizedUnit) -> int:
    """Where updates are made ahead of the step, what masters and states are exchanged with."""
    if one.offload is None or not one.offload.speculative_step or not one.unit.trainable:
        return 0
    widths = one.widths
    numel = one.slice_numel
    return one.unit.count * numel * (widths.master + widths.optimizer)


def _read_ahead(units: Sequence[SizedUnit]) -> int:
    """Buffers are used again by units of their own size alone."""
    counts: Counter[int] = Counter()
    for one in units:
        offload = one.offload
        releases = one.cut.releases
        if offload is not None and offload.parameters == "nvme" and releases:
            owned = one.layout.padded_numel // one.num_owners
            counts[_whole_pages(owned * one.widths.compute)] += one.unit.count
    return sum(size * min(count, 1 + READ_AHEAD) for size, count in counts.items())


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
