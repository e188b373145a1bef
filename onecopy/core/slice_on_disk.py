"""What of an owned slice is on disk: its master, and the values that gathers send."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy.core.swapped import Swapped

if TYPE_CHECKING:
    from onecopy.core.swapped import Kind, Moving, SliceFiles

__all__ = ["SliceOnDisk"]

# Elements that are looked at at once where a whole slice is gone through.
PART = 1 << 20


class SliceOnDisk:
    """See the module's docstring.

    Attributes:
        files: those of the unit.
        master: the masters, at rest between steps.
        master_kind: the kind of state that they are.
        has_gradients: owned gradients are to rest on disk, too.

    Args:
        master: (s,) in host memory; its values go to disk.
        pieces: its views.
        values: the dtype of the values that gathers read from disk; None where memory has them.
    """

    def __init__(
        self,
        files: SliceFiles,
        master: torch.Tensor,
        pieces: Collection[nn.Parameter],
        *,
        values: torch.dtype | None,
        has_gradients: bool,
    ) -> None:
        self.has_gradients = has_gradients
        self.files = files
        self.master_kind: Kind = ("master", master.dtype)
        self.master = Swapped(self.files, self.master_kind)
        self.master.take(master, pieces)
        # What gathers read; the masters themselves where they have its dtype.
        self._values: Kind | None = None if values is None else ("values", values)
        if values == master.dtype:
            self._values = self.master_kind
        self._numel = master.numel()
        self._ahead: tuple[torch.Tensor, Moving] | None = None
        if self.has_values:
            self.write_values(0, master).wait()
        self.master.rest()

    @property
    def is_read_by_gathers(self) -> bool:
        """The values that gathers send are read from disk."""
        return self._values is not None

    @property
    def has_values(self) -> bool:
        """There is a file of rounded values, which follows the masters."""
        return self._values is not None and self._values != self.master_kind

    @property
    def num_bytes(self) -> int:
        """Of the masters that rest on disk, and of the values."""
        masters = 0 if self.master.is_joined else self.master.whole.nbytes
        values = self._values if self.has_values else None
        return masters + (0 if values is None else self._numel * values[1].itemsize)

    def write_values(self, low: int, values: torch.Tensor) -> Moving:
        """Begin to write what masters round to, from element `low` on."""
        assert self._values is not None, "gathers read from disk"
        array = self.files.array(*self._values)
        return self.files.lane.write(array, low, values.to(array.dtype))

    def start_fetch(self, *, must: bool = False) -> None:
        """Begin to read what the next gather sends; nothing happens where that is under way.

        Nor where the buffers are full, unless the gather comes now (`must`).
        """
        if self._values is None or self._ahead is not None:
            return
        lane, array = self.files.lane, self.files.array(*self._values)
        if not must and not lane.has_room_for(self._numel * array.dtype.itemsize):
            return
        target = lane.take(self._numel, array.dtype)
        self._ahead = target, lane.read(array, 0, target)

    def fetch(self) -> torch.Tensor:
        """(s,) what a gather sends, in host memory, until `let_go`."""
        self.start_fetch(must=True)
        assert self._ahead is not None, "begun just now"
        values, moving = self._ahead
        moving.wait()
        return values

    def let_go(self) -> None:
        """What was fetched is not needed, or has changed on disk."""
        if self._ahead is not None:
            (values, moving), self._ahead = self._ahead, None
            moving.wait()
            self.files.lane.give_back(values)

    def keep(self, low: int, masters: torch.Tensor) -> None:
        """Masters have changed, from element `low` on: a part that `parts` has given."""
        if not self.master.is_joined:
            self.master.put(low, masters)

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The masters in parts, each with the number of its first element; views or copies."""
        for low in range(0, self._numel, PART):
            yield low, self.master.part(low, min(low + PART, self._numel))
