"""The slice of one unit that this rank owns: its master, and the pieces that the optimizer sees.

Tensor roles (s elements in this rank's slice):
    own     (s,) compute dtype; the part of the unit's flat buffer that this rank owns
    master  (s,) master dtype; the same memory as `own` where the flat buffer stays and the dtypes
            are equal; where it is split, `own` and a remainder hold its values until somebody wants
            them; where states are offloaded, in host memory
    kept    (s,) compute dtype; where they are and the flat buffer is released: the values on the
            device, which gathers send
    pieces  views of master, one for each parameter that overlaps the slice: 1-D, or shaped like
            the parameter where the layout keeps parameters whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy.core.offload import HOST
from onecopy.core.split import SplitMaster
from onecopy.core.views import view_of
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.comm.groups import Groups
    from onecopy.core.layout import Layout, Piece
    from onecopy.core.offload import HostLane, Placement

__all__ = ["OwnedSlice"]


class OwnedSlice:
    """See the module's docstring.

    Attributes:
        own: see the module's docstring.
        pieces: by number of the parameter in the unit.
        is_in_update: an update under way is changing the master; see delayed.py.
        rank: number of the slice that this rank owns.
    """

    def __init__(
        self,
        layout: Layout,
        groups: Groups,
        own: torch.Tensor,
        master: torch.Tensor,
        views: Sequence[torch.Tensor],
        trainable: Sequence[bool],
    ) -> None:
        """Cut the pieces.

        Args:
            views: the parameters' places in the flat buffer, shaped like them.
            trainable: for each parameter whether it requires a gradient.
        """
        self.own = own
        self.rank = groups.shard.rank
        self._layout = layout
        self._replica = groups.replica
        self._master = master
        self._views = views
        self._split: SplitMaster | None = None
        self._placement: Placement | None = None
        self._kept: torch.Tensor | None = None
        # The device has not had the master's values since somebody may have changed them; whether
        # it keeps them at all.
        self._is_stale = False
        self._stays = True
        self.is_in_update = False
        self.pieces: dict[int, nn.Parameter] = {
            piece.index: nn.Parameter(self._part(piece), requires_grad=trainable[piece.index])
            for piece in layout.pieces(self.rank)
        }

    # The master -------------------------------------------------------------------------------

    @property
    def master(self) -> torch.Tensor:
        """(s,) the values in master precision."""
        self.join_master()
        return self._master

    def master_part(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the master: a view, or a copy where it is split."""
        if self._split is not None:
            return self._split.part(start, stop)
        return self._master[start:stop]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What holds the master, as it is now."""
        found = (self._master,) if self._kept is None else (self._master, self._kept)
        return found if self._split is None else (*found, *self._split.tensors)

    @property
    def device(self) -> torch.device:
        """Where the master lies, and with it gradients and optimizer states."""
        return self._master.device

    def offload(self, placement: Placement, name: str, *, releases: bool) -> None:
        """From now on the master lies in host memory.

        Args:
            name: of the unit.
            releases: the flat buffer does not keep the values.
        """
        self._placement, self._name = placement, name
        self._stays = not releases or placement.keeps_values
        if releases and placement.keeps_values:
            self._kept = self._master.to(self.own.dtype)
        self._take_master(torch.empty_like(self._master, device=HOST).copy_(self._master))

    @property
    def lane(self) -> HostLane | None:
        """What moves gradients and values; None where the master lies on the device."""
        return None if self._placement is None else self._placement.lane

    def begin_split(self) -> None:
        """From now on the master is kept as the bf16 slice and a remainder."""
        self._split = SplitMaster(self.own, self._master, self.pieces.values())
        self._split.split()

    @property
    def is_split(self) -> bool:
        """The master is kept as the bf16 slice and a remainder."""
        return self._split is not None

    def join_master(self) -> None:
        """Before the master is looked at or changed.

        Raises:
            ShardingError: an update is changing it.
        """
        if self.is_in_update:
            raise ShardingError(
                f"values of unit {self._name} were asked for, or changed, while they are being "
                "updated (delayed_update): call onecopy.flush(model) on all ranks before"
            )
        self._is_stale = True
        if self._split is not None:
            self._split.join()

    def split_master(self) -> None:
        """After that: parameters get the rounded values where a remainder is kept beside them."""
        if self._split is not None:
            self._split.split()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, the master can be looked at and changed; afterwards it is as it was before."""
        was_split = self._split is not None and not self._split.is_joined
        self.join_master()
        yield
        if was_split:
            self.split_master()

    def convert(self, dtype: torch.dtype) -> None:
        """Keep the master in another dtype; pieces stay who they are."""
        if dtype != self._master.dtype:
            self._take_master(self._master.to(dtype))

    def _take_master(self, master: torch.Tensor) -> None:
        self._master = master
        for place in self._layout.pieces(self.rank):
            self.pieces[place.index].data = self._part(place)

    def rounded(self) -> torch.Tensor:
        """(s,) the values in the compute dtype; in the flat buffer where that is kept."""
        if self._placement is not None:
            if not self._stays:
                self._placement.lane.up(self.own, self._master, self._name)
            self.send_up()
            return self.own if self._kept is None else self._kept
        if self._split is not None:
            self._split.split()
            return self.own
        if self._master.dtype != self.own.dtype:
            return self.own.copy_(self._master)
        return self._master

    def send_up(self) -> None:
        """Where the master is in host memory: let the device have its values, if it keeps them."""
        if self._placement is not None and self._stays and self._is_stale:
            values = self.own if self._kept is None else self._kept
            self._placement.lane.up(values, self._master, self._name)
            self._is_stale = False

    @property
    def has_own_values(self) -> bool:
        """The flat buffer's values lie beside the master, not in it."""
        is_elsewhere = self.is_in_update or (self._split is not None and not self._split.is_joined)
        return self._master is not self.own and not is_elsewhere

    @property
    def has_changed(self) -> bool:
        """Whether the flat buffer's values are not what the master rounds to."""
        rounded = self._master.to(self.own.dtype)
        return self.has_own_values and not torch.equal(self.own.to(self.device), rounded)

    @property
    def is_only_read(self) -> bool:
        """An update changes the master, and the gathered values are what the device keeps."""
        if not self.is_in_update or self._kept is None:
            return False
        return torch.equal(self.own, self._kept)

    def take_values(self) -> None:
        """Make the master hold the values of the flat buffer.

        Only elements that differ from the master's rounded value are taken over, so that reading
        and writing back never costs a master its precision.
        """
        if self.is_in_update:
            self.join_master()
        if not self.has_own_values:
            return
        master, own = self._master, self.own.to(self.device)
        changed = own != master.to(own.dtype)
        master.copy_(torch.where(changed, own.to(master.dtype), master))
        self._is_stale = True

    def load(self, index: int, value: torch.Tensor) -> None:
        """Give the piece of parameter `index` values that were loaded into it, unrounded.

        Only where they agree with what the parameter holds: code of the model's own may have
        loaded something else.
        """
        place, compute = self.place_of(index), self.own.dtype
        values = self.own_part(index, value)
        with self.joined():
            master = self._master[place.start : place.start + place.numel]
            loaded = values.to(master)
            master.copy_(torch.where(loaded.to(compute) == master.to(compute), loaded, master))

    # Places -----------------------------------------------------------------------------------

    def place_of(self, index: int) -> Piece:
        """Where the piece of parameter `index` lies; there must be one."""
        return next(piece for piece in self._layout.pieces(self.rank) if piece.index == index)

    def pieces_of_replica(self) -> tuple[Piece, ...]:
        """The slice's pieces, cut further: ranks that hold the same slice have a part of it each.

        `start` counts from the start of the slice.
        """
        low, high = self._layout.borders[self.rank : self.rank + 2]
        first, last = (
            low + (high - low) * number // self._replica.size
            for number in (self._replica.rank, self._replica.rank + 1)
        )
        return tuple(
            replace(piece, start=piece.start + first - low)
            for piece in self._layout.pieces_between(first, last)
        )

    def in_memory_order(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """A tensor shaped like parameter `index`, 1-D, in the order of the flat buffer."""
        stride = self._views[index].stride()
        if value.stride() != stride:
            value = value.new_empty_strided(value.size(), stride).copy_(value)
        return value.as_strided((value.numel(),), (1,))

    def own_part(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor shaped like parameter `index`, 1-D, in memory order."""
        place = self.place_of(index)
        return self.in_memory_order(index, value)[place.offset : place.offset + place.numel]

    def from_piece(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """What is shaped like the piece of parameter `index`, 1-D, in memory order."""
        return self.in_memory_order(index, values) if self._layout.is_whole else values

    def as_piece(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """1-D values of parameter `index`, in memory order, in the shape that its pieces have."""
        return view_of(values, 0, self._views[index]) if self._layout.is_whole else values

    def _part(self, place: Piece) -> torch.Tensor:
        return self.as_piece(place.index, self._master[place.start : place.start + place.numel])
