"""The optimizer's step where its states are on disk: in chunks of constant size.

Each kind of state of a unit (master, gradient, whatever the optimizer keeps) is a file in the order
of the owned slice, so that elements [low, high) of all of them are what one step of these elements
needs. While chunk k is updated, chunk k+1 is being read and chunk k-1 written; the memory is that
of three chunks, however large the model or a unit of it is.

The optimizer is the user's: an object of its class updates stand-ins of the pieces, views of the
buffers that were read. What it keeps is found out, not known: a state that has the shape of its
piece goes to disk, everything else (counters) stays in `optimizer.state`.

Source: ZeRO-Infinity (Rajbhandari et al. 2021), sections 5.1.2 and 6.2.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.core.guard import is_guarded
from onecopy.core.optimizer_state import COUNTERS
from onecopy.core.swapped import Swapped
from onecopy.core.worker import Worker
from onecopy.errors import ConfigError, ShardingError, SwapError
from onecopy.memory.direct_io import ALIGNMENT, aligned

if TYPE_CHECKING:
    from onecopy.core.offload import Arriving
    from onecopy.core.slice_on_disk import SliceOnDisk
    from onecopy.core.swapped import DiskLane, Kind, Moving
    from onecopy.core.unit import Unit

__all__ = ["ChunkedStep"]

# Pieces to update, by unit and number of their group.
Work = dict["Unit", dict[int, list[nn.Parameter]]]

# Read, updated, written.
NUM_SLOTS = 3
# Before the first step nobody knows what the optimizer keeps: two tensors like the master, as Adam.
EXPECTED_STATES = 2


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements [first, last) of a piece, counted in the piece; `start` is where in the slice."""

    piece: nn.Parameter
    index: int
    group: int
    start: int
    first: int
    last: int


@dataclass(slots=True)
class _Chunk:
    """Elements [low, high) of one unit's slice, with the parts of pieces to be updated there."""

    unit: Unit
    low: int
    high: int
    parts: list[_Part]
    memory: _Slot
    # What is read, and written again.
    kinds: list[Kind]
    reads: list[Moving | Arriving] = field(default_factory=list)
    # (high - low,) each, of what is read or made.
    tensors: dict[Kind, torch.Tensor] = field(default_factory=dict)
    # (high - low,) where the mean rests, on disk or on the device.
    gradient: torch.Tensor | None = None

    def of(self, kind: Kind, part: _Part) -> torch.Tensor:
        """The part's elements of one kind, shaped like its piece where that is whole."""
        return self.cut(self.tensors[kind], part)

    def cut(self, values: torch.Tensor, part: _Part) -> torch.Tensor:
        """The part's elements of a tensor like the chunk, likewise."""
        low = part.start - self.low
        values = values[low : low + part.last - part.first]
        return self.unit.slice.as_piece(part.index, values)


class _Slot:
    """The memory of one chunk."""

    def __init__(self, lane: DiskLane) -> None:
        self.num_bytes = lane.buffer_bytes // NUM_SLOTS // ALIGNMENT * ALIGNMENT
        self._folder = lane.folder
        self._memory = lane.folder.buffer(self.num_bytes)
        self._used = 0
        # Addresses of what was taken: of the memory, and of what was too large for it.
        self._storages = {self._memory.untyped_storage().data_ptr()}
        self.writes: list[Moving] = []

    def begin(self) -> None:
        """What was to be written from here is written; all of it is free."""
        while self.writes:
            self.writes.pop().wait()
        self._used = 0
        self._storages = {self._memory.untyped_storage().data_ptr()}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for some elements; more than there is where states are met for the first time."""
        num_bytes = aligned(numel * dtype.itemsize)
        begin, self._used = self._used, self._used + num_bytes
        if self._used > self._memory.numel():
            memory = self._folder.buffer(num_bytes)
            self._storages.add(memory.untyped_storage().data_ptr())
            return memory[: numel * dtype.itemsize].view(dtype)
        return self._memory[begin : begin + numel * dtype.itemsize].view(dtype)

    def holds(self, value: torch.Tensor) -> bool:
        """Whether a tensor lies in memory of this chunk."""
        return value.untyped_storage().data_ptr() in self._storages


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """Stands for a state that has gone to disk."""

    dtype: torch.dtype


class ChunkedStep:
    """Of one optimizer; see the module's docstring."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # What of `optimizer.state` is on disk, by piece and name.
        self._on_disk: dict[nn.Parameter, dict[str, Swapped]] = {}
        # What the chunks of a piece have left so far in this step, by the names of its state.
        self._left: dict[nn.Parameter, dict[str, Any]] = {}
        self._slots: list[_Slot] = []
        # By piece how many other optimizers had it before this one.
        self._numbers: dict[nn.Parameter, int] = {}

    def add(self, unit: Unit, piece: nn.Parameter) -> None:
        """The optimizer has this piece, and others may have it, too.

        Raises:
            ConfigError: it may not be cut, and is larger than a chunk.
        """
        self.check_room(unit, piece)
        self._numbers[piece] = _disk_of(unit).files.claim(piece)

    def check_room(self, unit: Unit, piece: nn.Parameter) -> None:
        """Refuse a piece that may not be cut and is larger than a chunk.

        Raises:
            ConfigError: says how large the buffers must be.
        """
        if not unit.layout.is_whole:
            return
        lane, dtypes = _disk_of(unit).files.lane, unit.dtypes
        bytes_each = (EXPECTED_STATES + 1) * dtypes.master.itemsize + dtypes.gradient.itemsize
        need = piece.numel() * bytes_each * NUM_SLOTS
        if need > lane.buffer_bytes:
            index = next(one for one, own in unit.slice.pieces.items() if own is piece)
            raise ConfigError(
                f"offload.buffer_bytes={lane.buffer_bytes:,} is too small for "
                f"{unit.names[index]}, which {type(self._optimizer).__name__} updates as a whole: "
                f"with its states and gradient, {NUM_SLOTS} times (read, updated, written), it "
                f"takes {need:,} bytes. Say Offload(..., buffer_bytes={need})"
            )

    def run(self, work: Work) -> None:
        """Update pieces, by unit and number of their group, by the gradients that they have.

        Raises:
            SwapError: a read or a write has failed; names the file and the unit.
            ShardingError: the optimizer keeps something that cannot be cut.
        """
        if not work:
            return
        for unit, pieces in work.items():
            self.settle(unit, (piece for group in pieces.values() for piece in group))
            _disk_of(unit).let_go()
        self._make_slots(_disk_of(next(iter(work))).files.lane)
        free, waiting = deque(self._slots), deque[_Chunk]()
        try:
            for unit, low, high, parts in self._places(work):
                waiting.append(self._read(unit, low, high, parts, free.popleft()))
                if len(waiting) == NUM_SLOTS - 1:
                    # Into its memory goes the chunk after the next: its write has until then.
                    free.append(self._update(waiting.popleft()))
            while waiting:
                self._update(waiting.popleft())
        except SwapError:
            # To wait for the other writes would raise that, too, and hide what came first.
            for slot in self._slots:
                slot.writes.clear()
            raise
        finally:
            for slot in self._slots:
                slot.begin()
            self._left.clear()
        for unit in work:
            self._follow(unit)

    # What is where ----------------------------------------------------------------------------

    def find(self, piece: nn.Parameter, name: str) -> Swapped | None:
        """The state of a piece that is on disk, if it is the one that the optimizer has."""
        known = self._on_disk.get(piece, {}).get(name)
        value = self._optimizer.state.get(piece, {}).get(name)
        return known if known is not None and known.stands_for(value) else None

    def settle(self, unit: Unit, pieces: Iterable[nn.Parameter]) -> None:
        """Bring to disk what somebody has touched, loaded or put into `optimizer.state` since."""
        unit.slice.settle()
        if unit.gradients is not None:
            unit.gradients.mean.settle()
        self.settle_states(unit, pieces)

    def settle_states(self, unit: Unit, pieces: Iterable[nn.Parameter]) -> None:
        """The same for what the optimizer keeps."""
        for piece in pieces:
            for name, value in list(self._optimizer.state.get(piece, {}).items()):
                found = self.find(piece, name)
                if found is not None:
                    found.rest()
                elif _is_like(name, value, piece):
                    self._adopt(unit, piece, name, value)

    def _adopt(self, unit: Unit, piece: nn.Parameter, name: str, value: torch.Tensor) -> None:
        """A state in memory goes to disk."""
        index = next(one for one, own in unit.slice.pieces.items() if own is piece)
        flat = unit.slice.from_piece(index, value.detach())
        self.keep(piece, name, self.make(unit, index, name, value.dtype))
        self._on_disk[piece][name].put(0, flat.contiguous().cpu())

    def make(self, unit: Unit, index: int, name: str, dtype: torch.dtype) -> Swapped:
        """A state of the piece of parameter `index`, at rest; its values are junk.

        The optimizer does not have it until `keep`, but it may have another one that rests in the
        same place.
        """
        files, place = _disk_of(unit).files, unit.slice.place_of(index)
        whole = torch.empty(place.numel, dtype=dtype)
        view = unit.slice.as_piece(index, whole.detach())
        state = Swapped(files, self._kind(unit.slice.pieces[index], name, dtype), place.start)
        state.take(whole, (view,))
        state.leave()
        return state

    def keep(self, piece: nn.Parameter, name: str, state: Swapped) -> None:
        """The optimizer has this state of a piece now, whatever it had before."""
        known = self._on_disk.setdefault(piece, {})
        if name in known and known[name] is not state:
            known[name].retire()
        known[name] = state
        self._optimizer.state[piece][name] = state.view

    def _follow(self, unit: Unit) -> None:
        """Somebody may hold views of what has changed on disk."""
        _disk_of(unit).master.follow()
        for piece in unit.slice.pieces.values():
            for state in self._on_disk.get(piece, {}).values():
                state.follow()

    # Chunks -----------------------------------------------------------------------------------

    def _make_slots(self, lane: DiskLane) -> None:
        """Memory for three chunks, once."""
        if not self._slots:
            self._slots = [_Slot(lane) for _ in range(NUM_SLOTS)]

    def _places(self, work: Work) -> Iterator[tuple[Unit, int, int, list[_Part]]]:
        for unit, pieces in work.items():
            groups = {
                piece: number
                for number, group in pieces.items()
                for piece in group
                if piece.grad is not None
            }
            longest = self._longest(unit, groups)
            for low, high in unit.slice.chunks(longest):
                parts = list(_parts(unit, groups, low, high))
                if parts:
                    yield unit, low, high, parts

    def _longest(self, unit: Unit, pieces: Iterable[nn.Parameter]) -> int:
        """Elements of a chunk that fit into a slot."""
        states = {kind for piece in pieces for kind in self._kinds_of(piece)}
        bytes_each = sum(dtype.itemsize for _, dtype in states)
        dtypes = unit.dtypes
        if len(states) < EXPECTED_STATES:
            bytes_each = EXPECTED_STATES * dtypes.master.itemsize
        bytes_each += dtypes.master.itemsize + dtypes.gradient.itemsize
        # Chunks of so many elements begin where direct transfers may, whatever their size.
        return max(self._slots[0].num_bytes // bytes_each // ALIGNMENT, 1) * ALIGNMENT

    def _kind(self, piece: nn.Parameter, name: str, dtype: torch.dtype) -> Kind:
        """The kind of what the optimizer calls so: others may have a state of this name, too."""
        return f"optimizer{self._numbers.get(piece) or ''}.{name}", dtype

    def _kinds_of(self, piece: nn.Parameter) -> list[Kind]:
        on_disk = self._on_disk.get(piece, {})
        return [
            self._kind(piece, name, on_disk[name].whole.dtype)
            for name in self._optimizer.state.get(piece, {})
            if name in on_disk
        ]

    def _read(self, unit: Unit, low: int, high: int, parts: list[_Part], slot: _Slot) -> _Chunk:
        """Begin to read elements [low, high) of what the update of these parts needs."""
        slot.begin()
        files = _disk_of(unit).files
        kinds = [_disk_of(unit).master_kind]
        kinds += dict.fromkeys(kind for part in parts for kind in self._kinds_of(part.piece))
        chunk = _Chunk(unit, low, high, parts, slot, kinds)
        for kind in kinds:
            target = chunk.tensors[kind] = slot.take(high - low, kind[1])
            chunk.reads.append(files.lane.read(files.array(*kind), low, target))
        resting = unit.gradients.mean.resting if unit.gradients is not None else None
        if resting is not None:
            chunk.gradient = slot.take(high - low, resting.whole.dtype)
            chunk.reads.append(resting.read(low, chunk.gradient))
        return chunk

    def _update(self, chunk: _Chunk) -> _Slot:
        """Step a chunk that has been read, and begin to write it; returns its memory."""
        for moving in chunk.reads:
            moving.wait()
        kind = _disk_of(chunk.unit).master_kind
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        twins: dict[int, list[nn.Parameter]] = {}
        gradients: dict[nn.Parameter, torch.Tensor] = {}
        for part in chunk.parts:
            twin = nn.Parameter(chunk.of(kind, part), requires_grad=part.piece.requires_grad)
            gradients[twin] = self._gradient(chunk, part)
            if part.piece in self._optimizer.state:
                state[twin] = self._state_of(chunk, part)
            twins.setdefault(part.group, []).append(twin)
        Worker(self._optimizer, state, self._optimizer.param_groups).step(twins, gradients)
        self._refuse_hidden_states(gradients)
        made = [
            one
            for part, twin in zip(chunk.parts, gradients, strict=True)
            for one in self._keep(chunk, part, twin, state.get(twin, {}))
        ]
        return self._write(chunk, made)

    def _refuse_hidden_states(self, twins: Iterable[nn.Parameter]) -> None:
        """What is kept outside of `state` would be lost with the stand-ins that it belongs to."""
        for name, value in vars(self._optimizer).items():
            if isinstance(value, dict) and value is not self._optimizer.state:
                if any(twin in value for twin in twins):
                    raise ShardingError(
                        f"{type(self._optimizer).__name__} keeps something for each parameter in "
                        f"its attribute {name!r}, where it cannot be found and kept on disk. Keep "
                        'it in self.state[parameter], or say optimizer="host" in Offload'
                    )

    def _gradient(self, chunk: _Chunk, part: _Part) -> torch.Tensor:
        gradient, gradients = part.piece.grad, chunk.unit.gradients
        assert gradient is not None and gradients is not None, "only such parts are in a chunk"
        resting = gradients.mean.resting
        if chunk.gradient is not None and resting is not None and resting.stands_for(gradient):
            return chunk.cut(chunk.gradient, part)
        owned = chunk.unit.slice
        flat = owned.from_piece(part.index, gradient)[part.first : part.last]
        return owned.as_piece(part.index, flat)

    def _state_of(self, chunk: _Chunk, part: _Part) -> dict[str, Any]:
        """What the optimizer has kept for a part; of counters a copy, other parts need them too."""
        on_disk = self._on_disk.get(part.piece, {})
        return {
            name: chunk.of(self._kind(part.piece, name, on_disk[name].whole.dtype), part)
            if name in on_disk
            else copy.deepcopy(value)
            for name, value in self._optimizer.state[part.piece].items()
        }

    def _keep(
        self, chunk: _Chunk, part: _Part, twin: nn.Parameter, state: dict[str, Any]
    ) -> list[tuple[Kind, _Part]]:
        """Take what the optimizer keeps for a part; returns what is new and must be written."""
        made: list[tuple[Kind, _Part]] = []
        left = self._left.setdefault(part.piece, {})
        for name, value in self._apart(chunk, part, state, twin).items():
            if not _is_like(name, value, twin):
                self._refuse_uncut(chunk, part, name, value)
                left[name] = value
                continue
            kind = self._kind(part.piece, name, value.dtype)
            left[name] = _OnDisk(value.dtype)
            if kind not in chunk.tensors:
                chunk.tensors[kind] = chunk.memory.take(chunk.high - chunk.low, value.dtype)
            if kind not in chunk.kinds:
                made.append((kind, part))
            target = chunk.of(kind, part)
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
        if part.last == part.piece.numel():
            self._finish(chunk.unit, part, self._left.pop(part.piece))
        return made

    def _apart(
        self, chunk: _Chunk, part: _Part, state: dict[str, Any], twin: nn.Parameter
    ) -> dict[str, Any]:
        """What the optimizer keeps, so that putting one state into its place changes no other.

        One may lie where another belongs: `state["a"], state["b"] = state["b"], state["a"]`.
        """
        apart = dict(state)
        for name, value in state.items():
            if not _is_like(name, value, twin):
                continue
            kind = self._kind(part.piece, name, value.dtype)
            is_there = kind in chunk.tensors and chunk.of(kind, part).data_ptr() == value.data_ptr()
            if not is_there and chunk.memory.holds(value):
                apart[name] = value.clone()
        return apart

    def _refuse_uncut(self, chunk: _Chunk, part: _Part, name: str, value: Any) -> None:
        """What belongs to a whole piece cannot be kept of its parts."""
        is_all = part.last - part.first == part.piece.numel()
        if is_all or not isinstance(value, torch.Tensor) or value.numel() <= 1:
            return
        raise ShardingError(
            f"{type(self._optimizer).__name__} keeps {name!r} for "
            f"{chunk.unit.names[part.index]}, a {type(value).__name__} of shape "
            f"{tuple(value.shape)}: not one value for each element, so that it cannot be updated "
            'in chunks. Say optimizer="host" in Offload, or whole_parameters=True at shard'
        )

    def _finish(self, unit: Unit, part: _Part, left: dict[str, Any]) -> None:
        """All parts of a piece are updated: its state is what they have left."""
        piece = part.piece
        if not left and piece not in self._optimizer.state:
            return
        state, known = self._optimizer.state[piece], self._on_disk.setdefault(piece, {})
        before = dict(state)
        state.clear()
        for name, value in left.items():
            if not isinstance(value, _OnDisk):
                state[name] = value
            elif name in before.keys() & known.keys() and known[name].whole.dtype == value.dtype:
                state[name] = before[name]
            else:
                self.keep(piece, name, self.make(unit, part.index, name, value.dtype))
        for name in known.keys() - state.keys():
            known.pop(name).retire()

    def _write(self, chunk: _Chunk, made: Iterable[tuple[Kind, _Part]]) -> _Slot:
        disk, slot = _disk_of(chunk.unit), chunk.memory
        files, lane = disk.files, disk.files.lane
        for kind in chunk.kinds:
            array = files.array(*kind)
            slot.writes.append(lane.write(array, chunk.low, chunk.tensors[kind]))
        for kind, part in made:
            # Other pieces may have states of this kind in the same chunk, which were not read.
            low = part.start - chunk.low
            values = chunk.tensors[kind][low : low + part.last - part.first]
            slot.writes.append(lane.write(files.array(*kind), part.start, values))
        published = chunk.unit.slice.publish(chunk.low, chunk.tensors[disk.master_kind])
        if published is not None:
            slot.writes.append(published)
        return slot


def _disk_of(unit: Unit) -> SliceOnDisk:
    disk = unit.slice.disk
    assert disk is not None, "only units that are on disk are stepped in chunks"
    return disk


def _parts(unit: Unit, groups: Mapping[nn.Parameter, int], low: int, high: int) -> Iterator[_Part]:
    """The parts of these pieces that lie in elements [low, high) of the slice."""
    for index, piece in unit.slice.pieces.items():
        place = unit.slice.place_of(index)
        first, last = max(place.start, low), min(place.start + place.numel, high)
        if piece in groups and first < last:
            begin, end = first - place.start, last - place.start
            yield _Part(piece, index, groups[piece], first, begin, end)


def _is_like(name: str, value: Any, piece: nn.Parameter) -> bool:
    """Whether a state has a value for each element of its piece."""
    # Other classes of tensors hold their values in ways of their own.
    is_plain = type(value) in (torch.Tensor, nn.Parameter) or is_guarded(value)
    if not is_plain or value.shape != piece.shape:
        return False
    return bool(value.dim()) or name not in COUNTERS
