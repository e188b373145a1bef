"""States in host memory: what of a unit lies there, and the copies that this takes.

The optimizer's work is O(M) for M parameters, that of forward and backward O(M B): so masters,
optimizer states and owned gradients may lie in host memory, and the optimizer run there. What has
to travel is the least of all ways to cut the states between two memories: each owned gradient down
once a backward, each updated value up once a step, both in the dtypes that they have on the wire.

Source: ZeRO-Offload (Ren et al. 2021), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onecopy.core.dtensors import local_of
from onecopy.core.swapped import DiskLane
from onecopy.errors import ConfigError
from onecopy.memory.staging import StagedCopy, Staging
from onecopy.memory.swap_files import SwapFolder
from onecopy.policies import Offload

if TYPE_CHECKING:
    from onecopy.config import Config
    from onecopy.core.unit import UnitSpec
    from onecopy.events import Events

__all__ = ["Arriving", "HostLane", "Placement", "check_offload", "place_units"]

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the states of a unit lie that has some of them in host memory.

    lane: what moves them between the device and host memory.
    optimizer: where masters and optimizer states lie, "device", "host" or "nvme".
    parameters: where what this rank owns of the parameters lies, "device", "host" or "nvme"; each
        gather brings it up from the latter two.
    gradients: where owned gradients lie until the step, likewise.
    disk: what reads and writes files; None where masters and optimizer states are in host memory.
    """

    lane: HostLane
    optimizer: str
    parameters: str
    gradients: str
    disk: DiskLane | None = None


class Arriving:
    """A copy on its way to host memory."""

    def __init__(self, copies: Iterable[StagedCopy] = ()) -> None:
        self._copies = list(copies)

    def wait(self) -> None:
        """Until all values are where they go."""
        while self._copies:
            self._copies.pop(0).finish()


class HostLane:
    """Copies between the device of one model and host memory, reported as events.

    To and from an accelerator they go through pinned memory, on a stream of their own. Without one
    the host's part of the states lies in other memory all the same, and is really copied.

    Args:
        pinned_bytes: how much host memory may be pinned.
        longest: elements of the longest copy.
    """

    def __init__(
        self, device: torch.device, events: Events, *, pinned_bytes: int, longest: int
    ) -> None:
        self._events = events
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._staging = Staging(pinned_bytes, longest * torch.float32.itemsize)

    def up(self, target: torch.Tensor, source: torch.Tensor, unit: str) -> None:
        """Copy host values to the device, rounded to the dtype there before they travel."""
        if self._stream is None:
            target.copy_(source)
        else:
            stream = self._wait_for_compute(self._stream)
            for low, high in self._parts(source.numel(), target.dtype):
                staged = self._staging.take(high - low, target.dtype).copy_(source[low:high])
                with stream:
                    target[low:high].copy_(staged, non_blocking=True)
                    self._staging.begin(StagedCopy(stream.record_event(), staged, None))
            torch.accelerator.current_stream(self._device).wait_stream(stream)
        self._events.emit("swap", unit, num_bytes=target.nbytes, what="up")

    def down(
        self, target: torch.Tensor, source: torch.Tensor, dtype: torch.dtype, unit: str
    ) -> Arriving:
        """Copy values of the device to host memory, rounded to `dtype` before they travel."""
        copies: list[StagedCopy] = []
        if self._stream is None:
            target.copy_(source.to(dtype))
        else:
            stream = self._wait_for_compute(self._stream)
            for low, high in self._parts(source.numel(), dtype):
                staged = self._staging.take(high - low, dtype)
                with stream:
                    staged.copy_(source[low:high].to(dtype), non_blocking=True)
                    copies.append(StagedCopy(stream.record_event(), staged, target[low:high]))
                self._staging.begin(copies[-1])
            source.record_stream(stream)
        num_bytes = source.numel() * dtype.itemsize
        self._events.emit("swap", unit, num_bytes=num_bytes, what="down")
        return Arriving(copies)

    def _parts(self, numel: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        longest = self._staging.part_bytes // dtype.itemsize
        for low in range(0, numel, longest):
            yield low, min(low + longest, numel)

    def _wait_for_compute(self, stream: torch.Stream) -> torch.Stream:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        return stream


def check_offload(optimizers: Iterable[torch.optim.Optimizer], config: Config) -> None:
    """Refuse optimizers that cannot run on the host.

    Raises:
        ConfigError: one is to be captured in a graph of an accelerator.
    """
    offload = config.offload
    if not isinstance(offload, Offload) or offload.optimizer == "device":
        return
    for one in optimizers:
        if any(group.get("capturable") for group in one.param_groups):
            raise ConfigError(
                f"offload and capturable=True: the host runs this {type(one).__name__}, and only "
                "what runs on an accelerator can be captured. Make it with capturable=False"
            )


def place_units(
    specs: Sequence[UnitSpec], config: Config, *, releases: bool, rank: int, events: Events
) -> list[UnitSpec]:
    """The same units, the first ones with states in host memory, as far as `config` wants it.

    Raises:
        ConfigError: what the device keeps whole cannot lie in host memory, or is kept in two parts.
    """
    offload = config.offload
    if not isinstance(offload, Offload) or offload.is_all_on_device:
        return list(specs)
    if offload.parameters != "device" and not releases and not offload.is_all_on_nvme:
        raise ConfigError(
            f'Offload(parameters="{offload.parameters}") at stage {config.stage}, where every '
            "rank keeps whole parameters to compute with: say stage=3, or leave parameters on the "
            "device"
        )
    if offload.optimizer != "device" and any(spec.dtypes.splits_master for spec in specs):
        raise ConfigError(
            'offload and precision.master="bf16+16": that keeps half of each master in the '
            "parameters, on the device. Leave one of both out"
        )
    longest = max(sum(local_of(one).numel() for _, one in spec.parameters) for spec in specs)
    lane = HostLane(specs[0].device, events, pinned_bytes=offload.pinned_bytes, longest=longest)
    placement = Placement(
        lane=lane,
        optimizer=offload.optimizer,
        parameters=offload.parameters,
        # What exists within backward alone has no use for a disk.
        gradients="host" if config.step_in_backward else offload.gradients,
        disk=_disk_lane(offload, events, rank),
    )
    return list(_first_of(specs, offload.fraction, placement))


def _disk_lane(offload: Offload, events: Events, rank: int) -> DiskLane | None:
    if offload.path is None:
        return None
    return DiskLane(SwapFolder(Path(offload.path), rank), offload.buffer_bytes, events)


def _first_of(
    specs: Sequence[UnitSpec], fraction: float, placement: Placement
) -> Iterable[UnitSpec]:
    numels = [sum(one.numel() for _, one in spec.parameters) for spec in specs]
    before, total = 0, sum(numels)
    for spec, numel in zip(specs, numels, strict=True):
        # The part of a unit that would cross the border stays on the device.
        is_chosen = before + numel <= fraction * total
        before += numel
        yield replace(spec, placement=placement) if is_chosen else spec
