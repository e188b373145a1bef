"""Host memory for what is on its way: between device and host, and between host and NVMe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from onecopy.planner.sized import SizedUnit

__all__ = ["staged_bytes"]

PAGE = 4096
# Of `Offload.buffer_bytes`: one chunk is read, one updated, one written.
CHUNKS = 3
# Units whose values are read from NVMe before they are gathered, and the one in use.
READ_AHEAD = 3
# Sums are made in fp32.
SUM = 4


def staged_bytes(units: Sequence[SizedUnit], stage: int, devices: int) -> int:
    """Bytes of a rank's buffers in host memory, at most; 0 where nothing is offloaded.

    Beside the chunks, the largest gradient that arrives, as it is on the wire and as a sum, or the
    largest value that goes up.
    """
    moved = [one for one in units if one.offload is not None]
    arriving = [
        one.slice_numel(stage, devices) * (one.widths.wire + SUM)
        for one in moved
        if one.unit.trainable
    ]
    leaving = [one.slice_numel(stage, devices) * one.widths.compute for one in moved]
    on_the_way = max([*arriving, *leaving], default=0)
    return on_the_way + _chunks(moved) + _read_ahead(moved, devices)


def _chunks(units: Sequence[SizedUnit]) -> int:
    """One set for a model, however many units it has."""
    sizes = [
        one.offload.buffer_bytes
        for one in units
        if one.offload is not None and one.offload.optimizer == "nvme"
    ]
    return CHUNKS * _whole_pages(max(sizes) // CHUNKS) if sizes else 0


def _read_ahead(units: Sequence[SizedUnit], devices: int) -> int:
    """Buffers are used again by units of their own size alone."""
    counts: Counter[int] = Counter()
    for one in units:
        offload = one.offload
        if offload is not None and offload.parameters == "nvme":
            owned = one.layout.padded_numel // devices
            counts[_whole_pages(owned * one.widths.compute)] += one.unit.count
    return sum(size * min(count, 1 + READ_AHEAD) for size, count in counts.items())


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
