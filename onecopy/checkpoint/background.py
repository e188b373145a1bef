"""async_save(): training waits for a copy to host memory, a thread writes the copy.

What the thread touches is its own: the copies, the bytes of everything else that is saved, and the
process group of checkpoints. The group is free for others when the thread has ended; until then
`PendingSave.settle` stands before whatever wants to use it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch

from onecopy import handle
from onecopy.checkpoint.folder import path_of
from onecopy.checkpoint.naming import Models, Named, Optimizers, meet, name_all
from onecopy.checkpoint.ranges import MAX_ITEM_BYTES, Range
from onecopy.checkpoint.saving import Job, Options, prepare
from onecopy.checkpoint.together import together
from onecopy.comm.compare import gather_objects
from onecopy.comm.groups import Group, end_host_group
from onecopy.errors import CheckpointError, ConfigError, OneCopyError, SavePendingError
from onecopy.events import Events
from onecopy.memory.host_buffer import HostBuffer

if TYPE_CHECKING:
    from onecopy.core.swapped import DiskLane

__all__ = ["PendingSave", "async_save"]

IfBusy = Literal["wait", "refuse"]


def async_save(  # noqa: PLR0913
    root: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    keep_every: int | None = None,
    frozen: bool = True,
    if_busy: IfBusy = "wait",
) -> PendingSave:
    """Save as `onecopy.save` does, and let training go on while the checkpoint is written.

    The call returns when this rank's part has been copied to host memory; what training changes
    from then on is not in the checkpoint. A thread writes the copy. It needs no attention: the next
    save or load of the model, `unshard` and the end of the program wait for it, also after
    `destroy_process_group()`. All ranks must call it together, between two steps.

    The copy takes as many bytes of host memory as this rank's part of the checkpoint has: what it
    holds of masters and optimizer states, 12 bytes per parameter over the number of ranks for Adam
    in fp32, plus buffers on the first rank. The memory is kept for the next call until `unshard`.
    Of states on disk the copy is made there, and takes as much room again.

    Where writing fails, a warning says so at once on the rank where it failed and on the first one.
    The error is raised on all ranks by `PendingSave.wait()`, or else by the next save or load of
    the model; one that nobody has asked for is printed when the program ends.

    Args:
        root, model, optimizer, step, extra, keep, keep_every, frozen: see `onecopy.save`.
            Checkpoints beyond `keep` are removed when the new one is complete.
        if_busy: where an earlier save of these models is still being written, "wait" for it, or
            "refuse" by raising SavePendingError on all ranks, on whichever it is.

    Returns:
        the save that is under way.

    Raises:
        CheckpointError: an earlier save of these models has failed, or there is no memory for the
            copy; see `onecopy.save` for what else. Nothing is under way then.
        SavePendingError: see `if_busy`; it is a CheckpointError.
        ShardingError: a model is not sharded, or an optimizer not attached.
    """
    begin = time.perf_counter()
    if if_busy not in ("wait", "refuse"):
        raise ConfigError(f'async_save(if_busy={if_busy!r}): give "wait" or "refuse"')
    if if_busy == "refuse":
        _refuse_if_busy(name_all(model, optimizer))
    options = Options(step, extra, keep, keep_every, frozen)
    named, job = prepare(root, model, optimizer, options, "onecopy.async_save")
    events = [one.engine.events for one in named.models]
    pending = PendingSave(_copied(named, job), named.group, events)
    for one in named.models:
        handle.of(one.module).pending_save = pending
    pending.start()
    seconds = time.perf_counter() - begin
    for sinks in events:
        sinks.emit("stage", num_bytes=job.states.num_bytes, seconds=seconds)
    return pending


class PendingSave:
    """A checkpoint that is being written while training goes on; made by `async_save`."""

    def __init__(self, job: Job, group: Group, events: Sequence[Events]) -> None:
        self._name = f"the checkpoint of step {job.step} under {job.root}"
        self._folder = path_of(job.root, job.step)
        self._group = group
        self._is_written = False
        # What to say, and what has led to it.
        self._failure: tuple[str, BaseException] | None = None
        # The ranks fail together; each may or may not ask what has become of the save.
        self._is_agreed = False
        self._was_raised = self._was_raised_everywhere = False
        # Not a daemon: the interpreter waits for it, and the last checkpoint is not lost.
        self._thread = threading.Thread(
            target=self._run, args=(job, events), name=f"onecopy writes step {job.step}"
        )

    def start(self) -> None:
        """Begin to write; once."""
        self._thread.start()

    @property
    def folder(self) -> Path:
        """Where the checkpoint is when it is complete."""
        return self._folder

    @property
    def is_done(self) -> bool:
        """Whether this rank has ended, well or not; others may differ for a moment."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete, and return its folder.

        Each rank may call it when it likes, as often as it likes.

        Args:
            timeout: in seconds; None waits for as long as it takes.

        Raises:
            CheckpointError: it could not be written, on whichever rank.
            TimeoutError: it is not complete yet.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._name} is still being written after {timeout} seconds")
        if self._failure is not None:
            self._was_raised = True
            _unasked.discard(self)
            text, cause = self._failure
            # A new one each time: its trace would keep what the loop has at hand.
            raise CheckpointError(text) from cause
        if not self._is_written:
            raise CheckpointError(f"{self._name} is written by the process that this one left")
        return self._folder

    def settle(self) -> None:
        """Wait, before something else uses the group; all ranks together.

        Raises:
            CheckpointError: it could not be written, and a rank has not raised that yet.
        """
        self._thread.join()
        if self._failure is None or self._was_raised_everywhere:
            return
        # Whoever has been told goes on; but all ranks must, or none.
        told = self._is_agreed and all(together(self._group, lambda: self._was_raised))
        self._was_raised_everywhere = True
        if not told:
            self.wait()

    def raise_if_lost(self) -> None:
        """Before anything is done together: has a rank been lost, so that it cannot be?

        Raises:
            CheckpointError: for want of a rank it could not be written; once.
        """
        is_lost = self.is_done and self._failure is not None and not self._is_agreed
        if is_lost and not self._was_raised_everywhere:
            self.settle()

    def _run(self, job: Job, events: Sequence[Events]) -> None:
        begin = time.perf_counter()
        try:
            job.write(self._group)
        # Whatever it is, the training loop must hear of it.
        except BaseException as error:
            _forget_values(error)
            self._fail(error)
            return
        self._is_written = True
        _ended.add(self)
        seconds = time.perf_counter() - begin
        for sinks in events:
            sinks.emit("save", num_bytes=job.states.num_bytes, seconds=seconds, what="background")

    def _fail(self, error: BaseException) -> None:
        self._is_agreed = isinstance(error, CheckpointError)
        if self._is_agreed:
            _ended.add(self)
        is_own = isinstance(error, OneCopyError)
        reason = str(error) if is_own else f"{type(error).__name__}: {error}"
        text = (
            f"{self._name} could not be written while training went on: {reason}. Training is not "
            "affected; correct this and save again"
        )
        happened_here = not self._is_agreed or error.__cause__ is not None
        self._failure = text, error.with_traceback(None)
        if happened_here or self._group.rank == 0:
            _unasked.add(self)
            warnings.warn(text, stacklevel=2)

    def end_group(self) -> None:
        """Nothing is saved any more: see `end_host_group`."""
        end_host_group(self._group)

    def report(self) -> None:
        """Print the error; the last chance that somebody reads it."""
        if self._failure is not None:
            print(f"onecopy: {self._failure[0]}", file=sys.stderr)


# Failed saves whose error nobody has asked for, on the ranks that tell.
_unasked: set[PendingSave] = set()


# Those after which nothing is under way in their group.
_ended: WeakSet[PendingSave] = WeakSet()


@atexit.register
def _end() -> None:
    """Runs when the threads have ended, and before the interpreter goes."""
    for pending in list(_unasked):
        pending.report()
    for pending in list(_ended):
        pending.end_group()


def _forget() -> None:
    """In a process that was forked: threads and groups are those of the other one."""
    _unasked.clear()
    _ended.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _forget_values(error: BaseException | None) -> None:
    """What the functions of a trace had at hand would live as long as the error: the copies."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _refuse_if_busy(named: Named) -> None:
    """Raises SavePendingError on all ranks if a rank still writes a checkpoint of the models."""
    meet(named, 'onecopy.async_save(if_busy="refuse")')
    owners = [handle.of(one.module) for one in named.models]
    pending = [owner.pending_save for owner in owners if owner.pending_save is not None]
    world = named.groups.world
    busy = [(world.ranks[world.rank], str(one.folder)) for one in pending if not one.is_done]
    # Through the groups of training: that of checkpoints may be in use.
    for group in (world, *named.groups.model):
        busy = sorted({one for theirs in gather_objects(group, busy) for one in theirs})
    if busy:
        rank, folder = busy[0]
        raise SavePendingError(
            f'rank {rank} is still writing {folder}: save later, or with if_busy="wait"'
        )


# Copies ---------------------------------------------------------------------------------------


def _copied(named: Named, job: Job) -> Job:
    """The same checkpoint with all values copied to host memory, so that training may go on.

    What rests on disk is copied there.

    Raises:
        CheckpointError: a rank has no memory for it, or no room on the drive; on all ranks.
    """
    owner = handle.of(named.models[0].module)
    copies: list[Range] = []

    def copy() -> None:
        in_memory = [one for one in job.states.ranges if one.lane is None]
        num_bytes = sum(one.num_bytes for one in in_memory)
        if owner.host_buffer is None or owner.host_buffer.num_bytes < num_bytes:
            # First give back, then take.
            owner.host_buffer = None
            devices = {u.flat.device.type for m in named.models for u in m.engine.units}
            owner.host_buffer = HostBuffer(num_bytes, pinned=devices != {"cpu"})
        copies.extend(_copy_ranges(in_memory, owner.host_buffer))
        copies.extend(_copy_on_disk(one, one.lane) for one in job.states.ranges if one.lane)

    together(named.group, copy)
    return replace(job, states=replace(job.states, ranges=copies, objects={}))


def _copy_ranges(ranges: Sequence[Range], buffer: HostBuffer) -> list[Range]:
    """The ranges, with values in the buffer, where they lie without gaps."""
    copies, position = [], 0
    devices = set()
    # Large elements first: so each lies at a multiple of its size.
    for one in sorted(ranges, key=lambda one: -one.dtype.itemsize):
        target = buffer.tensor(position, one.numel, one.dtype)
        position += one.num_bytes
        for start, values in _parts(one):
            target.write(start, values)
            devices.add(values.device)
        copies.append(replace(one, values=target.read))
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()
    return copies


def _copy_on_disk(one: Range, lane: DiskLane) -> Range:
    """A range with values in another place of the same drive, and a part of them in memory."""
    # The tiles of one parameter have its name, and their own places in it.
    corner = () if one.within is None else one.within.offsets
    array = lane.spare(f"{one.key} {corner} {one.offset}", one.numel, one.dtype)
    for start, values in _parts(one):
        array.write(start, values).wait()
    return replace(one, values=partial(lane.read_now, array))


def _parts(one: Range) -> Iterator[tuple[int, torch.Tensor]]:
    """The values in parts that are not too large, each with its first place."""
    length = MAX_ITEM_BYTES // one.dtype.itemsize
    for start in range(0, one.numel, length):
        yield start, one.values(start, min(start + length, one.numel)).detach()
