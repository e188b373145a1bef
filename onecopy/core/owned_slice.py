"""The slice of one unit that this rank owns: its master, and the pieces that the optimizer sees.

Tensor roles (s elements in this rank's slice):
    own     (s,) compute dtype; the part of the unit's flat buffer that this rank owns
    master  (s,) master dtype; the same memory as `own` where the flat buffer stays and the dtypes
            are equal; where it is split, `own` and a remainder hold its values until somebody wants
            them; where states are offloaded, in host memory, or on disk until somebody wants them
    kept    (s,) compute dtype; where they are and the flat buffer is released, or has what codes
            make of the values: the values on the device, or in host memory, which gathers send
    pieces  views of master, one for each parameter that overlaps the slice: 1-D, or shaped like
            the parameter where the layout keeps parameters whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy.core.coded import CodedMaster
from onecopy.core.offload import HOST
from onecopy.core.slice_on_disk import SliceOnDisk
from onecopy.core.split import SplitMaster
from onecopy.core.step_alone import bring_home
from onecopy.core.swapped import SliceFiles
from onecopy.core.views import is_fake, view_of
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.comm.coding import Coding
    from onecopy.comm.groups import Groups
    from onecopy.core.layout import Layout, Piece
    from onecopy.core.offload import Arriving, HostLane, Placement
    from onecopy.core.swapped import Moving, Swapped

__all__ = ["OwnedSlice"]


class OwnedSlice:
    """See the module's docstring.

    Attributes:
        own: see the module's docstring.
        pieces: by number of the parameter in the unit.
        places: where they lie, in order.
        is_offloaded: the master lies in host memory, or on disk.
        is_in_update: an update under way is changing the master; see delayed.py.
        rank: number of the slice that this rank owns.
        as_sent: what quantization makes of values, where the flat buffer has that, and not the
            values as the master rounds to them.
    """

    as_sent: Callable[[torch.Tensor], torch.Tensor] | None = None
    # (s,) where that is set: the flat buffer's values when what was written there was last taken.
    # Codes of the new master would differ in the whole block.
    _taken: torch.Tensor | None = None

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
        self.places = layout.pieces(self.rank)
        self._by_index = {place.index: place for place in self.places}
        self._replica = groups.replica
        self._master = master
        self._views = views
        self._resting: CodedMaster | SplitMaster | Swapped | None = None
        # Where states are on disk.
        self.disk: SliceOnDisk | None = None
        self._placement: Placement | None = None
        self._kept: torch.Tensor | None = None
        # The device has not had the master's values since somebody may have changed them; whether
        # it keeps them at all.
        self._is_stale = False
        self._stays = True
        self.is_in_update = self.is_offloaded = False
        self._arriving: Arriving | None = None
        self.pieces: dict[int, nn.Parameter] = {
            piece.index: nn.Parameter(self._part(piece), requires_grad=trainable[piece.index])
            for piece in self.places
        }

    def renew(self, as_sent: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """The flat buffer gets new values, what `as_sent` makes of the masters if it is set."""
        self.as_sent, self._taken = as_sent, None

    # The master -------------------------------------------------------------------------------

    @property
    def master(self) -> torch.Tensor:
        """(s,) the values in master precision."""
        self.join_master()
        return self._master

    def master_part(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the master: a view, or a copy where it is split."""
        if self._resting is not None:
            return self._resting.part(start, stop)
        return self._master[start:stop]

    def put_part(self, start: int, values: torch.Tensor) -> None:
        """Give elements of a master on disk new values, without the others in memory."""
        assert self.disk is not None, "only there parts are written"
        self._is_stale = True
        self.disk.master.put(start, values)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What holds the master, as it is now."""
        found = (self._master,) if self._kept is None else (self._master, self._kept)
        return found if self._resting is None else (*found, *self._resting.tensors)

    @property
    def on_host(self) -> tuple[torch.Tensor, ...]:
        """What of that lies in host memory."""
        if not self._has_copy:
            return ()
        kept = () if self._kept is None or self._stays else (self._kept,)
        return (self._master, *kept) if self.is_offloaded else kept

    @property
    def device(self) -> torch.device:
        """Where the master lies, and with it the optimizer's states."""
        return self._master.device

    def offload(self, placement: Placement, name: str, *, releases: bool, is_trained: bool) -> None:
        """From now on states lie where they are to be: the master, and what gathers send.

        Args:
            name: of the unit.
            releases: the flat buffer does not keep the values.
            is_trained: there is something to update: what is frozen has only values.

        Raises:
            SwapError: the disk has no room for it, or fails.
        """
        self._placement, self._name = placement, name
        parameters = placement.parameters if releases else "device"
        self._stays, compute = parameters == "device", self.own.dtype
        self._kept = None
        files = self._leave_disk()
        if is_trained and placement.optimizer == "device":
            self._keep_master_on_device()
            return
        if (releases or self.as_sent is not None) and self._stays:
            self._kept = self._master.to(compute, copy=True)
        master = torch.empty_like(self._master, device=HOST).copy_(self._master)
        self._take_master(master)
        self.is_offloaded = True
        if placement.disk is None:
            return
        if parameters == "host":
            self._kept = master.to(compute, copy=True)
        values = compute if parameters == "nvme" else None
        self.disk = SliceOnDisk(
            files or SliceFiles(placement.disk, name, self._layout.strides[self.rank]),
            master,
            self.pieces.values(),
            values=values,
            has_gradients=placement.gradients == "nvme",
        )
        self._resting = self.disk.master

    def _leave_disk(self) -> SliceFiles | None:
        """Bring back what was frozen, and lay with the values; the files are free for others."""
        disk, self.disk = self.disk, None
        if disk is None:
            return None
        disk.let_go()
        self.join_master()
        disk.master.retire()
        self._resting = None
        return disk.files

    def _keep_master_on_device(self) -> None:
        """Only gradients, or what gathers send, are elsewhere."""
        if self.is_offloaded:
            # It was frozen, and lay with the values.
            self._take_master(self._master.to(self.own.device, copy=True))
            self.is_offloaded = False
        if not self._stays:
            self._kept = torch.empty_like(self._master, dtype=self.own.dtype, device=HOST)
            self._is_stale = True

    @property
    def placement(self) -> Placement | None:
        """Where states of this slice lie; None where all are on the device."""
        return self._placement

    @property
    def lane(self) -> HostLane | None:
        """What moves states between the device and host memory; None where none is elsewhere."""
        return None if self._placement is None else self._placement.lane

    def begin_split(self) -> None:
        """From now on the master is kept as the bf16 slice and a remainder."""
        self._resting = SplitMaster(self.own, self._master, self.pieces.values())
        self._resting.rest()

    def begin_coded(self, coding: Coding) -> None:
        """From now on the master, which nobody trains, is kept as codes."""
        self._resting = CodedMaster(self._master, self.pieces.values(), coding)
        self._resting.rest()

    def end_coded(self) -> None:
        """Somebody trains it: from now on it is kept as what the codes say."""
        if isinstance(self._resting, CodedMaster):
            self._resting.join()
            self._resting = None

    @property
    def is_split(self) -> bool:
        """The master is kept as the bf16 slice and a remainder."""
        return isinstance(self._resting, SplitMaster)

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
        if self._resting is not None:
            self._resting.join()

    def rest(self) -> None:
        """After that: the master takes the form in which it is kept between steps."""
        if self._resting is not None:
            self._resting.rest()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, the master can be looked at and changed; afterwards it is as it was before."""
        was_split = self._resting is not None and not self._resting.is_joined
        self.join_master()
        yield
        if was_split:
            self.rest()

    def take_back(self) -> None:
        """Pieces that an optimizer has given other memory lie here again, with their values.

        Only while the master is in memory.
        """
        first, width = self._master.data_ptr(), self._master.itemsize
        for place in self.places:
            piece = self.pieces[place.index]
            if piece.data_ptr() != first + place.start * width:
                bring_home(piece, self._part(place))

    def convert(self, dtype: torch.dtype) -> None:
        """Keep the master in another dtype; pieces stay who they are."""
        if dtype != self._master.dtype:
            self._take_master(self.master.to(dtype))

    def _take_master(self, master: torch.Tensor) -> None:
        self._master = master
        for place in self.places:
            self.pieces[place.index].data = self._part(place)

    @property
    def master_tensor(self) -> torch.Tensor:
        """(s,) what holds the master where that is in host memory; not to be changed."""
        return self._master

    def exchange_master(self, other: torch.Tensor) -> torch.Tensor:
        """Let another tensor of the same form hold the master; pieces stay who they are.

        Returns the one of before.
        """
        before = self._master
        self._take_master(other)
        return before

    def rounded(self) -> torch.Tensor:
        """(s,) the values in the compute dtype; in the flat buffer where that is kept."""
        if self._has_copy:
            assert self._placement is not None, "values beside the master have a place"
            self.settle()
            if self._stays:
                return self.own if self._kept is None else self._kept
            self._placement.lane.up(self.own, self._fetched(), self._name)
            if self.disk is not None:
                self.disk.let_go()
            return self.own
        if self._resting is not None:
            self._resting.rest()
            if isinstance(self._resting, CodedMaster):
                return self._resting.write(self.own)
            return self.own
        if self._master.dtype != self.own.dtype:
            return self.own.copy_(self._master)
        return self._master

    def _fetched(self) -> torch.Tensor:
        """What gathers send where the device does not keep it."""
        if self.disk is not None and self.disk.is_read_by_gathers:
            return self.disk.fetch()
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        return self._master if self._kept is None else self._kept

    @property
    def _has_copy(self) -> bool:
        """What gathers send is not made from a master on the device."""
        return self.is_offloaded or (self._placement is not None and not self._stays)

    def start_fetch(self) -> None:
        """A gather will come: begin to read what it sends, where that is on disk."""
        if self.disk is not None:
            self.settle()
            self.disk.start_fetch()

    def settle(self) -> None:
        """Masters that somebody has touched go back to disk; gathers will send what they are."""
        if self.disk is not None and self.disk.master.is_joined:
            self._is_stale = True
            self.disk.master.rest()
        self.send_up()

    def send_up(self) -> None:
        """Where the master is elsewhere: let what gathers send have its values."""
        if not self._has_copy or not self._is_stale:
            return
        self._is_stale = False
        if self.disk is None:
            if self._stays or not self.is_offloaded:
                self.publish(0, self._master)
            return
        self.disk.let_go()
        for low, values in self.disk.parts():
            moving = self.publish(low, values)
            if moving is not None:
                moving.wait()

    def publish(self, low: int, masters: torch.Tensor) -> Moving | None:
        """Let what gathers send have new masters, from element `low` on; a write to wait for."""
        assert self._placement is not None, "the master is elsewhere"
        high = low + masters.numel()
        if self._stays:
            values = self.own if self._kept is None else self._kept
            self._placement.lane.up(values[low:high], masters, self._name)
        elif self._kept is not None and self.is_offloaded:
            self._kept[low:high].copy_(masters)
        elif self._kept is not None:
            # Waited for when it is to be gathered.
            lane, kept = self._placement.lane, self._kept[low:high]
            self._arriving = lane.down(kept, masters, kept.dtype, self._name)
        elif self.disk is not None and self.disk.has_values:
            return self.disk.write_values(low, masters)
        return None

    @property
    def has_own_values(self) -> bool:
        """The flat buffer's values lie beside the master, not in it."""
        is_halved = self.is_split and self._resting is not None and not self._resting.is_joined
        return self._master is not self.own and not is_halved and not self.is_in_update

    @property
    def has_changed(self) -> bool:
        """Whether the flat buffer's values are not what the master rounds to.

        A simulation has none.
        """
        if not self.has_own_values or is_fake(self.own):
            return False
        own, coded = self.own.to(self.device), self._coded()
        parts = self._parts()
        return any(bool(_changed(own, coded, low, values).any()) for low, values in parts)

    @property
    def is_only_read(self) -> bool:
        """An update changes the master, and the gathered values are what the device keeps."""
        if not self.is_in_update or self._kept is None:
            return False
        kept = self._kept if self.as_sent is None else self.as_sent(self._kept.to(self.own.device))
        return torch.equal(self.own, kept)

    def take_values(self, index: int | None = None) -> None:
        """Make the master hold the values of the flat buffer.

        Only elements that differ from the master's rounded value, and from what codes make of it
        where they do, are taken over, so that reading and writing back never costs a master its
        precision.

        Args:
            index: at least the values of this parameter, where each is asked for by itself.
        """
        if self.is_in_update:
            self.join_master()
        if not self.has_own_values:
            return
        is_whole_in_memory = self.disk is None and not isinstance(self._resting, CodedMaster)
        if index is not None and is_whole_in_memory and self.as_sent is None:
            self._take_values_of(index)
        else:
            self._take_all_values()

    def _take_all_values(self) -> None:
        if isinstance(self._resting, CodedMaster):
            self._resting.join()
        whole, coded = self.own.to(self.device), self._coded()
        if coded is not None and not torch.equal(whole, coded):
            self._taken = whole.clone()
        for low, master in self._parts():
            own = whole[low : low + master.numel()]
            changed = _changed(whole, coded, low, master)
            if self.disk is not None and not bool(changed.any()):
                continue
            master.copy_(torch.where(changed, own.to(master.dtype), master))
            self._is_stale = True
            if self.disk is not None:
                self.disk.keep(low, master)
        if self.disk is None:
            self._is_stale = True
        if isinstance(self._resting, CodedMaster):
            self._resting.rest()

    def _take_values_of(self, index: int) -> None:
        if index not in self._by_index:
            return
        place = self._by_index[index]
        master = self._master[place.start : place.start + place.numel]
        own = self.own[place.start : place.start + place.numel].to(self.device)
        master.copy_(torch.where(_changed(own, None, 0, master), own.to(master.dtype), master))
        self._is_stale = True

    def _coded(self) -> torch.Tensor | None:
        """(s,) what the flat buffer has where nobody has written, if codes have made it."""
        if self.as_sent is None:
            return None
        if self._taken is not None:
            return self._taken
        rounded = torch.empty_like(self.own, device=self.device)
        for low, master in self._parts():
            rounded[low : low + master.numel()].copy_(master)
        # Where it is gathered: another kind of device need not round in the same way.
        return self.as_sent(rounded.to(self.own.device)).to(self.device)

    def _parts(self) -> Iterable[tuple[int, torch.Tensor]]:
        """The master in parts, each with its first element; copies where it rests."""
        if isinstance(self._resting, CodedMaster):
            return ((0, self._resting.part(0, self._master.numel())),)
        return ((0, self._master),) if self.disk is None else self.disk.parts()

    def load(self, index: int, value: torch.Tensor, *, is_gathered: bool) -> None:
        """Give the piece of parameter `index` values that were loaded into it, unrounded.

        Only where they agree with what the parameter holds: code of the model's own may have
        loaded something else.

        Args:
            is_gathered: the flat buffer says what that is, else the master does.
        """
        place, compute = self.place_of(index), self.own.dtype
        values = self.own_part(index, value)
        with self.joined():
            master = self._master[place.start : place.start + place.numel]
            loaded = values.to(master)
            held = self.own[place.start : place.start + place.numel] if is_gathered else master
            agrees = loaded.to(compute) == held.to(master.device, compute)
            master.copy_(torch.where(agrees, loaded, master))

    # Steps in chunks --------------------------------------------------------------------------

    def chunks(self, longest: int) -> Iterator[tuple[int, int]]:
        """The slice in chunks of at most so many elements; whole pieces where none may be cut."""
        if not self._layout.is_whole:
            end = max((place.start + place.numel for place in self.places), default=0)
            for low in range(0, end, longest):
                yield low, min(low + longest, self._master.numel())
            return
        low = high = 0
        for place in self.places:
            end = place.start + place.numel
            if high > low and end - low > longest:
                yield low, high
                low = place.start
            high = end
        if high > low:
            yield low, high

    # Places -----------------------------------------------------------------------------------

    def place_of(self, index: int) -> Piece:
        """Where the piece of parameter `index` lies; there must be one."""
        return self._by_index[index]

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


def _changed(
    own: torch.Tensor, coded: torch.Tensor | None, low: int, master: torch.Tensor
) -> torch.Tensor:
    """Where the values beside a part of the master, from element `low` on, are somebody else's.

    Neither what it rounds to, nor what codes make of that.
    """
    own = own[low : low + master.numel()]
    changed = own != master.to(own.dtype)
    if coded is None:
        return changed
    coded = coded[low : low + master.numel()]
    # One value that is not finite makes NaNs of its block, which are no writes.
    return changed & (own != coded) & ~(own.isnan() & coded.isnan())
