"""Pinned host memory of constant size, through which copies to and from an accelerator go.

Only pinned memory is read and written while the host goes on, and what is pinned is taken from
every other program. So there are few parts, used in turn: a longer copy goes through them piece by
piece, and who takes a part waits for the copy that it was last used for.
"""

from __future__ import annotations

import torch

__all__ = ["StagedCopy", "Staging"]

# One is filled while others travel.
NUM_PARTS = 4
PAGE_BYTES = 4096


class StagedCopy:
    """A copy through one part that is under way.

    Args:
        event: the accelerator has read the part, or written it.
        target: where in host memory the values go from there; None on the way up.
    """

    def __init__(
        self, event: torch.Event, staged: torch.Tensor, target: torch.Tensor | None
    ) -> None:
        self._event: torch.Event | None = event
        self._staged, self._target = staged, target

    def finish(self) -> None:
        """Wait until the part is free, and the values are where they go."""
        if self._event is None:
            return
        self._event.synchronize()
        if self._target is not None:
            self._target.copy_(self._staged)
        self._event = self._target = None


class Staging:
    """The parts; each is pinned when it is first used.

    Attributes:
        part_bytes: of each part; a power of two, because torch pins no other sizes.

    Args:
        pinned_bytes: how much may be pinned, at least a page for each part.
        longest: bytes of the longest copy: more for each part is of no use.
    """

    def __init__(self, pinned_bytes: int, longest: int) -> None:
        largest_power = 1 << ((pinned_bytes // NUM_PARTS).bit_length() - 1)
        enough = 1 << (max(longest, PAGE_BYTES) - 1).bit_length()
        self.part_bytes = min(largest_power, enough)
        self._parts: list[torch.Tensor] = []
        self._copies: list[StagedCopy | None] = [None] * NUM_PARTS
        self._next = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) of the next part, for the copy that `begin` is told of; they fit into one."""
        before = self._copies[self._next]
        if before is not None:
            before.finish()
        if self._next == len(self._parts):
            part = torch.empty(self.part_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._parts.append(part)
        return self._parts[self._next][: numel * dtype.itemsize].view(dtype)

    def begin(self, copy: StagedCopy) -> None:
        """The part that was taken last is used for this."""
        self._copies[self._next] = copy
        self._next = (self._next + 1) % NUM_PARTS
