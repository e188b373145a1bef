"""A unit: parameters that are gathered, computed with and released together.

The parameters are views of one flat buffer in the compute dtype, of which this rank owns a slice.
This is the only file that changes a unit's state:

    SHARDED --start_gather--> GATHERING --finish_gather--> GATHERED --release--> SHARDED
                                  ^                         |    ^
                                  `------- refresh ---------'    |
                                    (after a step, stages 1, 2)  |
                                 SHARDED <--forget-- KEPT <------'  release(keep=True), resume

SHARDED: only the owned slice holds values; parameters wear the guard.
GATHERING: the ranks' slices are under way into the flat buffer; parameters wear the guard.
GATHERED: parameters hold their values.
KEPT: as SHARDED for everybody, but the flat buffer keeps its bytes for the next gather, which sends
    nothing (inside parallel.keep_gathered).

Tensor roles (n = padded_numel of the layout, s of them in this rank's slice):
    flat    (n,) compute dtype; parameters are its views; its storage is freed while SHARDED
    slice   (s,) what this rank owns of it: see owned_slice.py
    secondary  (part_numel,) compute dtype; where stage.keeps_secondary: what the ranks of this
            node hold together of `flat`, this rank's part; from the first gather after the values
            have changed until they change again, so that gathers in between leave no node

The secondary exists on all ranks or on none, and on all it is what the masters round to: what may
change masters drops it where all ranks do the same (a step, a load, a touch outside of forward). A
forward that writes into its parameters is known here alone: see `has_news`.
"""

from __future__ import annotations

import time
import warnings
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy.core import build
from onecopy.core.compiling import show_offsets
from onecopy.core.dtensors import is_dtensor, local_of, local_values
from onecopy.core.gradients import Gradients
from onecopy.core.guard import Gatherer, guard_class
from onecopy.core.layout import ALIGNMENT_BYTES, Layout
from onecopy.core.owned_slice import OwnedSlice
from onecopy.core.views import view_of
from onecopy.errors import ShardingError, UnitStateError
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.comm.coding import Coding
    from onecopy.comm.collectives import Collectives, Pending
    from onecopy.core.backward import Call
    from onecopy.core.offload import Placement
    from onecopy.core.precision import Dtypes
    from onecopy.core.stages import Stage

__all__ = ["Unit", "UnitSpec", "UnitState"]

# A backend's thread lets go of a finished transfer a moment later, when the machine lets it run.
TRANSFER_LINGERS = 2e-3
LOOKS_FOR_LINGERING = 100


class UnitState(Enum):
    """Where a unit's values are; see the module's docstring."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """What a unit will consist of, before any memory is touched.

    name: the module's name, with a suffix where one module has several units.
    module: the module around whose forward the unit is gathered.
    parameters: (full name, parameter), all of one device, compute dtype and trainability.
    device: where the unit will lie; unmade parameters (see build.py) are on none yet.
    is_whole: no parameter may be cut, for the sake of the optimizer.
    owners: where no parameter may be cut, the slice that holds each, once assigned.
    stays: parameters stay gathered at every stage.
    placement: where states lie that are offloaded; None keeps all on the device.
    coding: how what is frozen is kept by its owner; None keeps it as it is.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    device: torch.device
    dtypes: Dtypes
    trainable: bool
    is_whole: bool = False
    owners: tuple[int, ...] | None = None
    stays: bool = False
    placement: Placement | None = None
    coding: Coding | None = None


class Unit:
    """See the module's docstring."""

    def __init__(
        self,
        number: int,
        spec: UnitSpec,
        stage: Stage,
        collectives: Collectives,
        gatherer: Gatherer,
    ) -> None:
        self.number = number
        self.name = spec.name
        self.module = spec.module
        self.names = [name for name, _ in spec.parameters]
        self.parameters = [parameter for _, parameter in spec.parameters]
        self.dtypes = spec.dtypes
        self.state = UnitState.GATHERED
        self._stage = stage
        # Parameters are gathered before use and released after it.
        self.releases = stage.releases
        self._collectives = collectives
        self._events = collectives.events
        self._pending: Pending | None = None
        self._lay_flat(spec)
        self._classes = [type(parameter) for parameter in self.parameters]
        # Weak: Python's collector does not see what a tensor's class holds.
        guards = {kind: guard_class(kind, weakref.ref(gatherer)) for kind in set(self._classes)}
        self._guards = [guards[kind] for kind in self._classes]
        self._has_dtensors = any(map(is_dtensor, self.parameters))
        self._versions = self._count_writes()
        # Calls in forward whose outputs no gradient has reached so far.
        self.open_calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._warned = False
        self._is_aliased = False
        # Values may be changed in ways that torch does not count (p.data, numpy).
        self._expects_writes = False
        # They were, by the model's own code: look after each forward.
        self.has_hidden_writes = False
        self.secondary: torch.Tensor | None = None
        # The masters have values that the secondary lacks, which other ranks may not know of: to be
        # agreed on before the next gather.
        self.has_news = False
        # Released, while somebody who may write into it has a tensor of it.
        self._is_lent = False
        # Of values that are kept: nobody but a user's alias holds them.
        self._is_settled = False
        self._num_owners = buffers.num_owners(self.flat)
        if stage.releases:
            # Before gradients take memory: no more than one unit's at a time.
            self._drop_values()
        self.gradients: Gradients | None = None
        if spec.trainable:
            self.gradients = Gradients(self, collectives, stage)

    # Construction -----------------------------------------------------------------------------

    def _lay_flat(self, spec: UnitSpec) -> None:
        """Lay the parameters into one flat buffer, equal on all ranks, and keep the own slice."""
        shard, replica = self._collectives.groups.shard, self._collectives.groups.replica
        dtypes = self.dtypes
        self.layout = Layout(
            tuple(local_of(parameter).numel() for parameter in self.parameters),
            num_slices=shard.size,
            num_replicas=replica.size,
            alignment=ALIGNMENT_BYTES // min(dtypes.compute.itemsize, dtypes.master.itemsize),
            owners=spec.owners,
        )
        low, high = self.layout.borders[shard.rank : shard.rank + 2]
        self.flat, of_slice = self._values(spec.device, low, high)
        self.views = [
            view_of(self.flat, start, local_of(parameter))
            for start, parameter in zip(self.layout.starts, self.parameters, strict=True)
        ]
        for parameter, view in zip(self.parameters, self.views, strict=True):
            build.adopt(parameter, view)
        show_offsets(self.parameters)
        trainable = [parameter.requires_grad for parameter in self.parameters]
        own, groups = self.flat[low:high], self._collectives.groups
        self.slice = OwnedSlice(
            self.layout, groups, own, own if of_slice is None else of_slice, self.views, trainable
        )
        if self._collectives.quantizes_values and not self._stage.releases:
            self.show_as_sent()
        self._placement = spec.placement
        self._place_master(is_trained=spec.trainable)
        if spec.coding is not None and not self.slice.is_offloaded:
            self.slice.begin_coded(spec.coding)

    def _values(
        self, device: torch.device, low: int, high: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The flat buffer, and the master of the slice, or None where that is a part of it."""
        compute, dtype = self.dtypes.compute, self.dtypes.master
        source = self._first_values(device)
        if self._stage.releases:
            # Values come with each gather; until then the flat buffer needs no bytes of its own.
            if source is None:
                master = torch.zeros(high - low, dtype=dtype, device=device)
            else:
                master = source[low:high].clone()
                # The transfer may hold it for a moment longer.
                buffers.free(source)
            return torch.empty(self.layout.padded_numel, dtype=compute, device=device), master
        if source is None:
            source = torch.zeros(self.layout.padded_numel, dtype=dtype, device=device)
        if compute == dtype and not self._collectives.quantizes_values:
            return source, None
        flat, master = source.to(compute), source[low:high].clone()
        if flat is not source:
            buffers.free(source)
        return flat, master

    def _place_master(self, *, is_trained: bool) -> None:
        """Give the master the form and the place in which it is kept."""
        placement = self._placement
        if placement is not None:
            # What is frozen has nothing to step: it may only be offloaded as a parameter.
            if is_trained or placement.parameters != "device":
                self.slice.offload(
                    placement, self.name, releases=self._stage.releases, is_trained=is_trained
                )
        # What is quantized does not hold the upper halves: a whole master takes no more then.
        is_coded = self._collectives.quantizes_values
        if self.dtypes.splits_master and not self._stage.releases and not is_coded:
            self.slice.begin_split()

    def unfreeze(self, dtypes: Dtypes) -> Gradients:
        """Parameters that were frozen at shard are trained from now on; pieces stay who they are.

        Args:
            dtypes: as they would have been if the parameters had been trainable at shard.
        """
        self.drop_secondary()
        self.slice.end_coded()
        self.slice.convert(dtypes.master)
        self.dtypes = dtypes
        for index, piece in self.slice.pieces.items():
            piece.requires_grad_(self.parameters[index].requires_grad)
        self._place_master(is_trained=True)
        self.gradients = Gradients(self, self._collectives, self._stage)
        return self.gradients

    @property
    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """What holds the values and the masters, as it is now."""
        secondary = () if self.secondary is None else (self.secondary,)
        return self.flat, *self.slice.tensors, *secondary

    @property
    def steps_alone(self) -> bool:
        """What an optimizer needs of this unit is made for its step and given back after it."""
        is_apart = self.slice.is_split or self.slice.lane is not None
        return is_apart or self.dtypes.gradient != self.dtypes.master

    def _first_values(self, device: torch.device) -> torch.Tensor | None:
        """The whole flat buffer in master precision, as the first rank has it.

        Values that are in files count as zeros: each rank will read its pieces. None where all are.
        """
        made = [build.source_of(parameter) is None for parameter in self.parameters]
        if not any(made):
            return None
        # The masters keep what the user's parameters hold, before any cast to the compute dtype.
        source = torch.zeros(self.layout.padded_numel, dtype=self.dtypes.master, device=device)
        is_first = self._collectives.groups.world.rank == 0
        for start, parameter, is_made in zip(
            self.layout.starts, self.parameters, made, strict=True
        ):
            # Unmade parameters cost work: only the rank whose values count makes them.
            if is_made and (is_first or not parameter.is_meta):
                values = local_of(parameter)
                build.write_values(view_of(source, start, values), values)
        self._collectives.broadcast(source)
        return source

    # Verbs ------------------------------------------------------------------------------------

    def start_gather(self, *, exactly: bool = False) -> None:
        """Begin to collect all ranks' slices into the flat buffer.

        Args:
            exactly: not as quantization makes them.
        """
        self._expect("start_gather", UnitState.SHARDED)
        self._take_late_writes()
        if buffers.is_freed(self.flat):
            buffers.grow(self.flat)
        self._send_own("gather", exactly=exactly)

    def finish_gather(self) -> None:
        """Wait until all slices are here; the parameters hold their values."""
        self._expect("finish_gather", UnitState.GATHERING)
        assert self._pending is not None, "a gathering unit has a transfer under way"
        pending, self._pending = self._pending, None
        try:
            pending.finish()
        except BaseException:
            # The connection is broken, but a peer may still be writing: the bytes must stay.
            self._drop_values(keep_bytes=True)
            self.drop_secondary()
            raise
        self._remove_guard()

    @property
    def is_exact(self) -> bool:
        """The gathered values are what the masters round to, not what codes make of that."""
        return self.slice.as_sent is None

    def gather_exactly(self) -> None:
        """Show the exact values in the place of those that codes have made; a collective."""
        if not self.is_exact:
            self.take_values()
            self._put_guard()
            self._send_own("gather", exactly=True)
            self.finish_gather()

    def show_as_sent(self) -> None:
        """Where parameters stay: have what codes make of them again, as all ranks do; no transfer.

        The gathered values are exact, and the masters have what was written into them.
        """
        if self._collectives.quantizes_values:
            self.slice.renew(self._collectives.as_sent)
            for part in self.flat.split_with_sizes(list(self.layout.slice_numels)):
                part.copy_(self._collectives.as_sent(part))

    def release(self, *, settled: bool, keep: bool = False) -> None:
        """Give the gathered values back; changes made to them go to the masters first.

        Args:
            settled: no autograd graph can hold views of the parameters, so that any other owner
                of the storage is an alias of the user's, for whom the bytes are then kept.
            keep: the bytes stay for the next use, see `resume`; all ranks say the same.
        """
        self._expect("release", UnitState.GATHERED)
        expects_writes = self._expects_writes
        self.keep_changes()
        if keep:
            self._is_lent, self._is_settled = expects_writes, settled
            self._put_guard()
            self.state = UnitState.KEPT
            return
        has_aliases = self._has_aliases(settled=settled)
        self._is_lent = expects_writes and has_aliases
        self._drop_values(keep_bytes=has_aliases)
        self._events.emit("release", self.name)

    def resume(self) -> None:
        """Use the values that were kept, without a transfer."""
        self._expect("resume", UnitState.KEPT)
        self._take_late_writes()
        self._remove_guard()

    def forget(self) -> None:
        """Give back the values that were kept; nothing happens where there are none."""
        if self.state is UnitState.KEPT:
            self.resume()
            self.release(settled=self._is_settled)

    def keep_for_graph(self) -> None:
        """A graph that no hook watches may hold this unit's values: their bytes stay with it."""
        self._is_aliased = True

    def expect_writes(self) -> None:
        """Somebody outside the model's modules uses this gathered unit: look for changes later."""
        self._expects_writes = True

    @property
    def is_aliased(self) -> bool:
        """Somebody beside this unit holds its memory: autograd, or a tensor of the user's."""
        if buffers.num_owners(self.flat) > self._num_owners:
            return True
        # A graph holds a parameter that it saved as it is, not a view of it. A graph that was run
        # through holds trainable ones too, as the places where gradients go.
        with torch._C.DisableTorchFunctionSubclass():
            return any(
                one._use_count() > 1 + one.requires_grad  # type: ignore[attr-defined]
                for one in self.parameters
            )

    def tidy(self) -> None:
        """Free bytes that were kept for aliases, or for a graph, which are gone now."""
        self._take_late_writes()
        if self._is_aliased and self.state is UnitState.SHARDED:
            if not self._has_aliases(settled=False):
                self._drop_values()

    def refresh(self) -> None:
        """After a step that changed the masters: begin to send the new values around."""
        self._expect("refresh", UnitState.GATHERED)
        if self._collectives.groups.shard.size > 1:
            self._put_guard()
            self._send_own("refresh")
        else:
            self.slice.rounded()

    def keep_changes(self) -> None:
        """Take over into the master what was written into the gathered parameters since."""
        versions = self._count_writes()
        is_known = versions != self._versions or self._is_repointed()
        if not is_known and not self._expects_writes:
            return
        self._expects_writes = False
        # Before what may raise: what was refused once is not refused for ever.
        self._versions = versions
        if is_known or not self.slice.is_only_read:
            self.take_values()
            self.has_news = self.secondary is not None

    def look_for_hidden_writes(self, *, is_foreseen: bool) -> None:
        """A forward has run. Has it written in ways that torch does not count?

        `self.weight.data *= mask` is one. Looked for where the forward is not foreseen; what does
        so once is taken to do so in each forward.
        """
        if self.state is not UnitState.GATHERED:
            # The forward has failed: ranks did not agree on gathering it.
            return
        if not is_foreseen and not self.has_hidden_writes and self.slice.has_own_values:
            versions = self._count_writes()
            is_counted = versions != self._versions
            self.has_hidden_writes = not is_counted and self.slice.has_changed
        self._expects_writes = self._expects_writes or self.has_hidden_writes

    def _take_late_writes(self) -> None:
        """What was written into tensors of it since it was released."""
        if self._is_lent and self.state in (UnitState.SHARDED, UnitState.KEPT):
            self._is_lent = False
            if not buffers.is_freed(self.flat) and not self.slice.is_only_read:
                self.slice.take_values()
                self.has_news = self.secondary is not None

    def drop_secondary(self) -> None:
        """The masters change, or may: on all ranks alike, as the next gather leaves the node."""
        self.forget()
        self.secondary, self.has_news = None, False

    def note_update(self) -> None:
        """The masters have changed: autograd shall refuse what it saved before, as it always does.

        Of released parameters, too: backward would gather the new values.
        """
        self.drop_secondary()
        torch.autograd.graph.increment_version(self.parameters)
        if self.state is UnitState.GATHERED:
            self._versions = self._count_writes()

    def _count_writes(self) -> list[int]:
        """How often parameters have been written to: as they are, or what is inside of DTensors."""
        versions = [parameter._version for parameter in self.parameters]
        if self._has_dtensors:
            versions += [local_of(parameter)._version for parameter in self.parameters]
        return versions

    def _is_repointed(self, index: int | None = None) -> bool:
        """Whether somebody has given a parameter, or this one, other memory (`p.data = ...`)."""
        base, itemsize = self.flat.data_ptr(), self.flat.itemsize
        if index is not None:
            local = local_of(self.parameters[index])
            is_home = local.data_ptr() == base + self.layout.starts[index] * itemsize
            return bool(local.numel()) and not is_home
        found = map(local_of, self.parameters) if self._has_dtensors else self.parameters
        for start, local in zip(self.layout.starts, found, strict=True):
            if local.numel() and local.data_ptr() != base + start * itemsize:
                return True
        return False

    def _take_back(self) -> None:
        """Parameters with memory of their own: their values go into the flat buffer, they too."""
        for name, parameter, view in zip(self.names, self.parameters, self.views, strict=True):
            if parameter.dtype != self.flat.dtype or parameter.device != self.flat.device:
                raise ShardingError(
                    f"parameter {name} was moved to {parameter.dtype} on {parameter.device} after "
                    f"shard, which laid it out in {self.flat.dtype} on {self.flat.device}: convert "
                    "the model before shard, or say precision=... there"
                )
            local = local_of(parameter)
            if local.numel() and local.data_ptr() != view.data_ptr():
                view.copy_(local.data)
                build.point(parameter, view)

    def take_values(self, index: int | None = None) -> None:
        """Make the master hold the values of the gathered flat buffer.

        Args:
            index: at least those of this parameter, where each is asked for by itself.
        """
        if self._is_repointed(index):
            self._take_back()
        self.slice.take_values(index)

    def detach_parameters(self) -> None:
        """Give the gathered parameters memory of their own, in master precision; no way back."""
        self._expect("detach_parameters", UnitState.GATHERED)
        whole = self.gather_master()
        for start, parameter in zip(self.layout.starts, self.parameters, strict=True):
            build.point(parameter, view_of(whole, start, local_of(parameter)).clone())

    def gather_master(self) -> torch.Tensor:
        """(padded_numel,) the masters of all ranks; a collective where they are not the values.

        The flat buffer itself is returned where the master has its dtype.
        """
        self._expect("gather_master", UnitState.GATHERED)
        if self.dtypes.master == self.dtypes.compute and self.is_exact:
            return self.flat
        self.take_values()
        whole = self.flat.new_empty(self.flat.numel(), dtype=self.dtypes.master)
        numels, own = self.layout.slice_numels, self.slice.master_part(0, self.slice.own.numel())
        self._collectives.gather(whole, own.to(whole.device), numels, self.number).finish()
        return whole

    def load_master(self, index: int, value: torch.Tensor) -> None:
        """Give this rank's piece of parameter `index` values that were loaded into it, unrounded.

        Only where they agree with what the parameter holds: code of the model's own may have
        loaded something else.
        """
        if self.state is UnitState.GATHERED:
            self.take_values(index)
        is_rounded = self.dtypes.master != self.dtypes.compute or not self.is_exact
        value = local_values(self.parameters[index], value)
        has_its_shape = value.size() == self.views[index].size()
        if is_rounded and has_its_shape and index in self.slice.pieces:
            self.slice.load(index, value, is_gathered=self.state is UnitState.GATHERED)

    def is_value_of(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the gathered parameter `index`, or a view of all of it."""
        tensor = local_of(tensor)
        return (
            tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata == self.flat.untyped_storage()._cdata
            and int(tensor.storage_offset()) == self.layout.starts[index]
            and tensor.size() == self.views[index].size()
        )

    def gather_value(self, index: int) -> torch.Tensor:
        """What this rank's data group has of one parameter of a gathered unit: the whole value,
        but for DTensors. A copy in master precision.

        A collective where the gathered values are rounded.
        """
        self._expect("gather_value", UnitState.GATHERED)
        parameter = self.parameters[index]
        if self.dtypes.master == self.dtypes.compute and self.is_exact:
            return local_of(parameter).detach().clone()
        self.take_values(index)
        start, stop = 0, 0
        if index in self.slice.pieces:
            place = self.slice.place_of(index)
            start, stop = place.start, place.start + place.numel
        return self.gather_pieces(index, self.slice.master_part(start, stop))

    def gather_pieces(self, index: int, own: torch.Tensor) -> torch.Tensor:
        """What the owners of parameter `index` have for it, shaped like it; a collective.

        Args:
            own: 1-D, in memory order; empty where this rank owns nothing of the parameter.
        """
        numels = self.layout.numels_of(index)
        own = own.to(self.flat.device)
        whole = own.new_empty(self.views[index].numel())
        self._collectives.gather(whole, own, numels, self.number).finish()
        return view_of(whole, 0, self.views[index])

    # Moves ------------------------------------------------------------------------------------

    def _expect(self, verb: str, state: UnitState) -> None:
        if self.state is not state:
            raise UnitStateError(
                f"unit {self.name}: {verb} needs a unit that is {state.value}, this one is "
                f"{self.state.value}. If your code calls verbs of units itself, look there; "
                "otherwise please report it"
            )

    def _send_own(self, kind: str, *, exactly: bool = False) -> None:
        numels, is_coded = self.layout.slice_numels, self._collectives.quantizes_values
        if is_coded and exactly:
            # What the node has together is what codes have made.
            self.drop_secondary()
            self.slice.renew(None)
            own = self.slice.rounded()
            self._pending = self._collectives.gather(self.flat, own, numels, self.number)
        else:
            self.slice.renew(self._collectives.as_sent if is_coded else None)
            # The node has all values together already?
            found = None if self.secondary is not None else self.slice.rounded()
            if found is not None and self._stage.keeps_secondary:
                self.secondary = self.flat.new_empty(self._collectives.part_numel(numels))
            self._pending = self._collectives.gather_values(
                self.flat, found, numels, self.number, verb=kind, secondary=self.secondary
            )
        self.state = UnitState.GATHERING
        self._events.emit(
            "refresh" if kind == "refresh" else "gather",
            self.name,
            num_bytes=self._pending.num_bytes,
            group="shard",
            across_bytes=self._pending.across_bytes,
        )

    def _drop_values(self, *, keep_bytes: bool = False) -> None:
        self._put_guard()
        # A storage that was lent to numpy cannot be resized any more.
        if not keep_bytes and self.flat.untyped_storage().resizable():
            buffers.free(self.flat)
        self.state = UnitState.SHARDED

    def _put_guard(self) -> None:
        for parameter, guard in zip(self.parameters, self._guards, strict=True):
            parameter.__class__ = guard

    def _remove_guard(self) -> None:
        for parameter, plain in zip(self.parameters, self._classes, strict=True):
            parameter.__class__ = plain
        self._versions = self._count_writes()
        self.state = UnitState.GATHERED

    def _has_aliases(self, *, settled: bool) -> bool:
        """Whether somebody else holds the storage: then its bytes must stay (see docs).

        Only a settled release finds aliases, the others would count what autograd holds; once
        found, they are respected until nobody holds the storage.
        """
        if not settled:
            self._is_aliased = self._is_aliased and self.is_aliased
            return self._is_aliased
        self._is_aliased = buffers.num_owners(self.flat) > self._num_owners
        looks = 0 if self._warned else LOOKS_FOR_LINGERING
        while self._is_aliased and looks:
            time.sleep(TRANSFER_LINGERS)
            self._is_aliased = buffers.num_owners(self.flat) > self._num_owners
            looks -= 1
        if self._is_aliased and not self._warned:
            self._warned = True
            warnings.warn(
                f"a tensor outside the model still shares memory with parameters of unit "
                f"{self.name} ({', '.join(self.names[:3])}...): its bytes stay allocated for that "
                "tensor's sake. Take copies instead, for example p.detach().clone()",
                stacklevel=2,
            )
        return self._is_aliased
