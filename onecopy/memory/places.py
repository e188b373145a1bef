"""Where tensors wait that nobody needs for a while: on the device, in host memory, or on disk.

    place.keep(values) -> Kept          a copy is made, and values may be given back
    kept.start_fetch()                  they begin to come back
    kept.fetch() -> values              they are there, on the device

All of them lie in arenas, that is in memory that is taken once; what a `Kept` takes there is free
again when nobody refers to it any more. To and from an accelerator, copies run on a stream of
their own, through pinned memory.

Source: ZeRO (Rajbhandari et al. 2020), sections 6.1 and 6.3; ZeRO-Infinity (Rajbhandari et al.
2021), section 5.1.2.
"""

from __future__ import annotations

import weakref
from collections import deque
from pathlib import Path
from typing import Protocol

import torch

from onecopy.memory.arena import Arena, Slot
from onecopy.memory.direct_io import ALIGNMENT as PAGE_BYTES
from onecopy.memory.direct_io import aligned, host_memory
from onecopy.memory.swap_files import SwapArray, SwapFolder, Transfer

__all__ = ["DevicePlace", "DiskPlace", "HostPlace", "Kept", "Place"]

CHUNK_BYTES = 16 << 20
# What was kept last is needed first: it is still in memory then, and not written at all.
KEPT_BEHIND = 2


class Kept(Protocol):
    """A tensor that waits.

    Attributes:
        source: where it comes from when it is fetched next: "device", "host" or "nvme".
    """

    @property
    def source(self) -> str:
        """See the class."""

    def start_fetch(self) -> None:
        """Its values begin to come back, if they have not begun."""

    def fetch(self) -> torch.Tensor:
        """(n,) on the device; not to be changed. May be called again."""


class Place(Protocol):
    """See the module's docstring."""

    def keep(self, values: torch.Tensor, name: str) -> Kept:
        """Keep a copy of (n,) contiguous values of the device.

        They may not be changed before `settle`, nor may their memory be given back.

        Args:
            name: of what they are, for errors.
        """

    def settle(self) -> None:
        """What the device does from now on happens after all copies from it."""


class DevicePlace:
    """Slots in an arena of the device."""

    def __init__(self, device: torch.device) -> None:
        self._arena = Arena(
            lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device)
        )

    def keep(self, values: torch.Tensor, name: str) -> _OnDevice:
        """See `Place`."""
        slot = self._arena.take(values.nbytes)
        view_of(slot, values.dtype).copy_(values)
        return _OnDevice(slot, values.dtype)

    def settle(self) -> None:
        """See `Place`."""


class _OnDevice:
    source = "device"

    def __init__(self, slot: Slot[torch.Tensor], dtype: torch.dtype) -> None:
        self._slot, self._dtype = slot, dtype

    def start_fetch(self) -> None:
        """It is there."""

    def fetch(self) -> torch.Tensor:
        """Its own memory: to be used before it is given back."""
        return view_of(self._slot, self._dtype)


class HostPlace:
    """Slots in an arena of host memory, pinned where there is an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._arena = Arena(self._take_chunk, chunk_bytes=CHUNK_BYTES, alignment=PAGE_BYTES)

    def _take_chunk(self, num_bytes: int) -> torch.Tensor:
        if self.stream is None:
            return host_memory(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def slot(self, numel: int, dtype: torch.dtype) -> _OnHost:
        """Room whose values are undefined."""
        return _OnHost(self, self._arena.take(numel * dtype.itemsize), dtype)

    def keep(self, values: torch.Tensor, name: str) -> _OnHost:
        """See `Place`."""
        kept = self.slot(values.numel(), values.dtype)
        if self.stream is None:
            kept.tensor.copy_(values)
        else:
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))
            with self.stream:
                kept.tensor.copy_(values, non_blocking=True)
                kept.copied = self.stream.record_event()
        return kept

    def settle(self) -> None:
        """See `Place`."""
        if self.stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self.stream)


class _OnHost:
    """
    copied: the copy from the device, or the last one to it, has ended.
    """

    source = "host"

    def __init__(self, place: HostPlace, slot: Slot[torch.Tensor], dtype: torch.dtype) -> None:
        self.tensor = view_of(slot, dtype)
        self.copied: torch.Event | None = None
        self._place, self._slot = place, slot
        self._fetched: torch.Tensor | None = None

    @property
    def pages(self) -> torch.Tensor:
        """Its bytes, and those up to the end of the page."""
        start = self._slot.start
        return self._slot.block[start : start + aligned(self._slot.num_bytes)]

    def start_fetch(self) -> None:
        """See `Kept`."""
        stream = self._place.stream
        if self._fetched is not None:
            return
        self._fetched = torch.empty_like(self.tensor, device=self._place.device)
        if stream is None:
            self._fetched.copy_(self.tensor)
            return
        stream.wait_stream(torch.accelerator.current_stream(self._place.device))
        with stream:
            self._fetched.copy_(self.tensor, non_blocking=True)
            self.copied = stream.record_event()
        # Nobody may ever come for it.
        self._fetched.record_stream(stream)

    def fetch(self) -> torch.Tensor:
        """See `Kept`."""
        self.start_fetch()
        values, self._fetched = self._fetched, None
        assert values is not None, "start_fetch has made it"
        if self.copied is not None:
            torch.accelerator.current_stream(self._place.device).wait_event(self.copied)
        return values

    def wait(self) -> None:
        """Until the device has read or written it."""
        if self.copied is not None:
            self.copied.synchronize()


class DiskPlace:
    """Slots in files, and a little host memory through which they go.

    What is kept is written when the next one is, and stays in host memory until the one after
    that; so do reads that nobody has come for. Host memory is bounded by few such tensors.

    Raises:
        SwapError: there is no folder at `path`, or it cannot be written.
    """

    def __init__(self, device: torch.device, path: Path, rank: int) -> None:
        self._host = HostPlace(device)
        self._folder = SwapFolder(path, rank)
        self._name = ""
        self._arena = Arena(self._take_chunk, chunk_bytes=CHUNK_BYTES, alignment=PAGE_BYTES)
        self._behind: deque[_Written] = deque()
        self._reads: list[_Read] = []
        weakref.finalize(self, self._folder.close)

    def _take_chunk(self, num_bytes: int) -> SwapArray:
        return self._folder.array("activations", self._name, num_bytes, torch.uint8)

    def keep(self, values: torch.Tensor, name: str) -> _OnDisk:
        """See `Place`.

        Raises:
            SwapError: the disk has no room, or an earlier write has failed.
        """
        self.forget_reads()
        for one in self._behind:
            one.start()
        while len(self._behind) >= KEPT_BEHIND:
            self._behind.popleft().finish()
        self._name = name
        kept = _OnDisk(self, self._arena.take(values.nbytes), self._host.keep(values, name))
        self._behind.append(kept.written)
        return kept

    def settle(self) -> None:
        """See `Place`."""
        self._host.settle()

    def read(self, slot: Slot[SwapArray], numel: int, dtype: torch.dtype) -> _Read:
        """Begin to read what was written to a slot."""
        self.forget_reads()
        read = _Read(slot, self._host.slot(numel, dtype))
        self._reads.append(read)
        return read

    def forget_reads(self) -> None:
        """The memory of those that are over, or that nobody will come for, is free again."""
        for one in [one for one in self._reads if one.is_over]:
            one.end()
            self._reads.remove(one)


class _Written:
    """A write that begins later, unless nobody wants it any more then."""

    def __init__(self, owner: _OnDisk, slot: Slot[SwapArray], host: _OnHost) -> None:
        self._owner = weakref.ref(owner)
        self._slot = slot
        self._transfer: Transfer | None = None
        # None when it is written.
        self.host: _OnHost | None = host

    def start(self) -> None:
        """Unless it has begun."""
        if self._transfer is None and self.host is not None and self._owner() is not None:
            self.host.wait()
            self._transfer = self._slot.block.write(self._slot.start, self.host.pages)

    def finish(self) -> None:
        """Wait for it; what was in host memory is not any more."""
        if self._transfer is not None:
            self._transfer.wait()
        if self.host is not None:
            # A copy to the device may be under way still.
            self.host.wait()
        self.host = None


class _Read:
    def __init__(self, slot: Slot[SwapArray], host: _OnHost) -> None:
        self._slot, self._host = slot, host
        self._transfer = slot.block.read(slot.start, host.pages)
        self.is_over = False

    def fetch(self) -> torch.Tensor:
        """Wait for it, and bring it up."""
        self._transfer.wait()
        return self._host.fetch()

    def end(self) -> None:
        """Until neither disk nor device use its memory any more."""
        self._transfer.wait()
        self._host.wait()


class _OnDisk:
    def __init__(self, place: DiskPlace, slot: Slot[SwapArray], host: _OnHost) -> None:
        self.written = _Written(self, slot, host)
        self._place, self._slot = place, slot
        self._numel, self._dtype = host.tensor.numel(), host.tensor.dtype
        self._read: _Read | None = None

    @property
    def source(self) -> str:
        """See `Kept`."""
        return "nvme" if self.written.host is None else "host"

    def start_fetch(self) -> None:
        """See `Kept`."""
        if self.written.host is not None:
            self.written.host.start_fetch()
        elif self._read is None:
            self._read = self._place.read(self._slot, self._numel, self._dtype)

    def fetch(self) -> torch.Tensor:
        """See `Kept`.

        Raises:
            SwapError: it could not be written, or cannot be read.
        """
        self.start_fetch()
        if self._read is None:
            assert self.written.host is not None, "in memory, or being read"
            return self.written.host.fetch()
        read, self._read = self._read, None
        try:
            return read.fetch()
        finally:
            read.is_over = True

    def __del__(self) -> None:
        if self._read is not None:
            self._read.is_over = True


def view_of(slot: Slot[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """(n,) the memory of a slot."""
    return slot.block[slot.start : slot.start + slot.num_bytes].view(dtype)
