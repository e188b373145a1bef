"""States on disk: what rests there, and the reads and writes that this takes.

Between two steps masters, optimizer states and gradients of such a unit hold no memory: each kind
lies in a file, in the order of the owned slice. The tensors that stand for them have empty storages
and wear a guard, so that whoever touches one finds its values, read at that moment; what was
touched is written back with the next step.

    resting --join--> in memory --rest--> (being written) --> resting

Of what was touched the longest ago goes back to disk when more is in memory than buffers may hold:
a loop over all states of a model never has all of them.

Source: ZeRO-Infinity (Rajbhandari et al. 2021), sections 5.1 and 6.3.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.resting import Resting
from onecopy.errors import ParameterReleasedError, SwapError
from onecopy.memory import buffers

if TYPE_CHECKING:
    from onecopy.events import Events
    from onecopy.memory.swap_files import SwapArray, SwapFolder, Transfer

__all__ = ["DiskLane", "Kind", "Moving", "SliceFiles", "Swapped"]

# A kind of state, "master" or what an optimizer calls its own, and its dtype.
Kind = tuple[str, torch.dtype]


class Moving:
    """A read or a write that is under way, reported when somebody has waited for it."""

    def __init__(self, transfer: Transfer, unit: str, what: str, lane: DiskLane) -> None:
        self._transfer, self._unit, self._what, self._lane = transfer, unit, what, lane
        self._is_reported = False

    def wait(self) -> None:
        """Until it has ended.

        Raises:
            SwapError: it has failed; names the file and the unit.
        """
        began, transfer = time.perf_counter(), self._transfer
        with self._lane.watch():
            transfer.wait()
        if self._is_reported:
            return
        self._is_reported = True
        now = time.perf_counter()
        if transfer.ended > began:
            self._lane.events.emit("wait", self._unit, seconds=now - began, what="swap")
        self._lane.events.emit(
            "swap",
            self._unit,
            num_bytes=transfer.num_bytes,
            seconds=transfer.seconds,
            what=self._what,
            value=now - transfer.ended,
        )


class DiskLane:
    """Reads and writes of one model's states, reported as events.

    Attributes:
        folder: where the files are.
        buffer_bytes: how much host memory may be read ahead, written behind, or kept after a touch.
        events: where they are reported.
    """

    def __init__(self, folder: SwapFolder, buffer_bytes: int, events: Events) -> None:
        self.folder = folder
        self.buffer_bytes = buffer_bytes
        self.events = events
        self._failure: SwapError | None = None
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        # Bytes that are taken, and that are free for the next.
        self._num_taken = self._num_free = 0
        self._behind: deque[Swapped] = deque()
        self._spare: dict[tuple[str, int, torch.dtype], SwapArray] = {}
        # In the order of their last touch.
        self._touched: dict[Resting, None] = {}
        weakref.finalize(self, folder.close)

    def write_behind(self, one: Swapped) -> None:
        """Its write has begun; those before it are waited for as far as memory is to be bounded."""
        self._behind.append(one)
        while sum(each.whole.nbytes for each in self._behind) > self.buffer_bytes // 2:
            self._behind.popleft().finish()

    def drain(self) -> None:
        """Wait for all writes that are behind."""
        while self._behind:
            self._behind.popleft().finish()

    def note_touch(self, one: Resting, tensors: Collection[torch.Tensor]) -> None:
        """It is in memory now; others rest again, but for those that are used together."""
        self._touched.pop(one, None)
        self._touched[one] = None
        total = sum(each.whole.nbytes for each in self._touched if each.is_joined)
        for each in list(self._touched):
            if total <= self.buffer_bytes:
                return
            if each is not one and not any(map(each.stands_for, tensors)):
                total -= each.whole.nbytes if each.is_joined else 0
                each.rest()
                del self._touched[each]

    def spare(self, name: str, numel: int, dtype: torch.dtype) -> SwapArray:
        """Room for a copy of something that rests on disk, kept for the next copy of it.

        Raises:
            SwapError: the disk has no room for it.
        """
        found = self._spare.get((name, numel, dtype))
        if found is None:
            kind = f"copies.{str(dtype).removeprefix('torch.')}"
            found = self.folder.array(kind, name, numel, dtype)
            self._spare[name, numel, dtype] = found
        return found

    def read_now(self, array: SwapArray, start: int, stop: int) -> torch.Tensor:
        """Elements of an array, in memory of their own; from any thread, and no event."""
        values = torch.empty(stop - start, dtype=array.dtype)
        array.read(start, values).wait()
        return values

    def forget(self, one: Resting) -> None:
        """It does not rest again."""
        self._touched.pop(one, None)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) host memory for direct transfers, which `give_back` takes again."""
        num_bytes = numel * dtype.itemsize
        self._num_taken += num_bytes
        free = self._free.get((numel, dtype))
        if free:
            self._num_free -= num_bytes
            return free.pop()
        return self.folder.buffer(numel * dtype.itemsize)[: numel * dtype.itemsize].view(dtype)

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether so much more may be taken before somebody waits for it."""
        return self._num_taken + num_bytes <= self.buffer_bytes

    def give_back(self, memory: torch.Tensor) -> None:
        """Nothing is under way into it or out of it."""
        self._num_taken -= memory.nbytes
        self._num_free += memory.nbytes
        if self._num_free > self.buffer_bytes:
            # Sizes of units that come no more, perhaps.
            self._free.clear()
            self._num_free = memory.nbytes
        self._free.setdefault((memory.numel(), memory.dtype), []).append(memory)

    def read(self, array: SwapArray, start: int, target: torch.Tensor) -> Moving:
        """Begin to read elements of an array, from number `start` on, into host memory."""
        with self.watch():
            return Moving(array.read(start, target), array.unit, "read", self)

    def write(self, array: SwapArray, start: int, source: torch.Tensor) -> Moving:
        """Begin to write elements of an array, from number `start` on."""
        with self.watch():
            return Moving(array.write(start, source), array.unit, "write", self)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, something is done to files; nothing is done any more once that has failed.

        Some states may have been updated and others not: to go on would be to train with both.
        """
        if self._failure is not None:
            raise SwapError(f"states on disk are of no use since this: {self._failure}")
        try:
            yield
        except SwapError as error:
            self._failure = error
            raise


class SliceFiles:
    """The files of one unit: for each kind of state an array like the owned slice.

    Attributes:
        lane: what reads and writes them.
    """

    def __init__(self, lane: DiskLane, unit: str, numel: int) -> None:
        self.lane = lane
        self._unit, self._numel = unit, numel
        self._arrays: dict[Kind, SwapArray] = {}
        self._claims: Counter[torch.Tensor] = Counter()

    def claim(self, piece: torch.Tensor) -> int:
        """How many optimizers have had this piece before; its states must not lie in theirs."""
        self._claims[piece] += 1
        return self._claims[piece] - 1

    def array(self, kind: str, dtype: torch.dtype) -> SwapArray:
        """That of one kind, made where there is none yet.

        Raises:
            SwapError: the disk has no room for it.
        """
        found = self._arrays.get((kind, dtype))
        if found is None:
            name = f"{kind}.{str(dtype).removeprefix('torch.')}"
            with self.lane.watch():
                found = self.lane.folder.array(name, self._unit, self._numel, dtype)
            self._arrays[kind, dtype] = found
        return found


class Swapped(Resting):
    """Values that rest on disk; see the module's docstring.

    Attributes:
        array: where they rest, from element `start` on.
        lane: what reads and writes them.
    """

    def __init__(self, files: SliceFiles, kind: Kind, start: int = 0) -> None:
        super().__init__()
        self.array, self.start = files.array(*kind), start
        self.lane = files.lane
        self._writing: Moving | None = None

    def leave_to_holders(self) -> None:
        """Whoever holds a tensor that stands for the values keeps them: others are to come."""
        super().leave_to_holders()
        self.finish()

    @property
    def view(self) -> torch.Tensor:
        """What stands for the values, where it is one tensor."""
        (view,) = self.views
        return view

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is held in memory."""
        return (self.whole,)

    @property
    def is_being_written(self) -> bool:
        """The values are on their way to disk, and still in memory."""
        return self._writing is not None

    def touch(self, tensors: Sequence[torch.Tensor], function: Callable[..., Any]) -> None:
        """Views are about to be used (see `guard.Gatherer`).

        Raises:
            ParameterReleasedError: it stands for others by now.
        """
        guards = tuple(self._guards.values())
        if any(type(one) in guards and not self.stands_for(one) for one in tensors):
            raise ParameterReleasedError(
                f"a {self.array.name} of unit {self.array.unit} that others have taken the place "
                "of was touched: its values exist no more. Keep a copy of what you want to look at "
                "later, tensor.detach().clone()"
            )
        super().touch(tensors, function)
        self.lane.note_touch(self, tensors)

    def _bring(self) -> None:
        if self._writing is not None:
            (writing, self._writing) = (self._writing, None)
            writing.wait()
        else:
            buffers.grow(self.whole)
            self.read(0, self.whole).wait()

    def rest(self, *, behind: bool = False) -> None:
        """Write the values, and give their memory back.

        Args:
            behind: the write may go on; `finish` waits for it.
        """
        if not self.is_joined:
            if not behind:
                self.finish()
            return
        writing = self.lane.write(self.array, self.start, self.whole)
        if not self._can_leave():
            writing.wait()
            return
        self._put_guards()
        self._writing = writing
        if behind:
            self.lane.write_behind(self)
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for the write, if one is under way."""
        if self._writing is not None:
            (writing, self._writing) = (self._writing, None)
            writing.wait()
            buffers.free(self.whole)

    @contextmanager
    def at_hand(self, *, changes: bool) -> Iterator[None]:
        """Inside, the values are in memory; afterwards they are where they were before."""
        was_joined = self.is_joined
        self.join()
        yield
        if was_joined:
            return
        if changes:
            self.rest(behind=True)
        else:
            self.leave()

    def follow(self) -> None:
        """The file has new values: who holds a view of the memory sees them, too."""
        if self.is_joined:
            self.read(0, self.whole).wait()

    def read(self, low: int, target: torch.Tensor) -> Moving:
        """Begin to read elements from number `low` on."""
        return self.lane.read(self.array, self.start + low, target)

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements of it: a view, or a copy while they rest."""
        if self.is_joined:
            return self.whole[start:stop]
        self.finish()
        values = torch.empty(stop - start, dtype=self.whole.dtype)
        self.read(start, values).wait()
        return values

    def put(self, start: int, values: torch.Tensor) -> None:
        """Take values for the elements from number `start` on, without the others in memory."""
        if self.is_joined:
            self.whole[start : start + values.numel()].copy_(values)
            return
        self.finish()
        self.lane.write(self.array, self.start + start, values).wait()

    def retire(self) -> None:
        """Something else rests in its place from now on; it keeps what is in memory."""
        self.finish()
        self.lane.forget(self)
