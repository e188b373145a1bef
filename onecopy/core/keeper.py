"""Inputs of checkpointed modules: how they are kept until backward, and come back.

torch's checkpointing saves a module's inputs as autograd saves any tensor, so a pair of hooks on
saved tensors decides where they are. Only hidden states are moved: what needs a gradient. What all
blocks share (masks, positions) stays as it is, and what several modules take is kept once.

    forward     part of this rank (P_a) --> device, host or disk
    backward    asked for block k: its own and those of block k-1 begin to come back; then the parts
                of all ranks become the whole

Where other hooks on saved tensors are in force (a checkpoint around this one, somebody's own), they
have the inputs, and nothing is moved.

Source: ZeRO (Rajbhandari et al. 2020), section 6.1.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from onecopy import handle
from onecopy.comm.groups import Group
from onecopy.comm.replicas import collect, fingerprint, group_of, ranks_with_others
from onecopy.core.backward import trains
from onecopy.core.dtensors import is_dtensor, local_of
from onecopy.core.saved_tensors import innermost_hooks, is_only_watched
from onecopy.core.views import is_dense, is_fake
from onecopy.errors import ActivationError, CommunicationError
from onecopy.memory.places import DevicePlace, DiskPlace, HostPlace

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from onecopy.events import Events
    from onecopy.memory.places import Kept, Place
    from onecopy.policies import Activations

__all__ = ["Keeper"]

REMEDIES = {
    "device": 'Fewer tokens at a time, or place="host", take less of the device',
    "host": "Fewer tokens at a time, or partition=, take less host memory",
    "nvme": "The last checkpoint is what to go on from",
}


class Keeper:
    """What is kept for one model.

    Attributes:
        has_warned: of a cache, which is said once.

    Args:
        model: the one whose modules are checkpointed, sharded or not.
        policy: where it is kept.

    Raises:
        ConfigError: the policy's partition is no group that this rank is in.
    """

    def __init__(self, model: nn.Module | None, policy: Activations) -> None:
        self.policy = policy
        self.has_warned = False
        self._model = None if model is None else weakref.ref(model)
        self._group = _group_of(policy)
        self._places: dict[torch.device, Place] = {}
        self._checked: set[str] = set()
        # Must not go before they are copied.
        self._sources: list[torch.Tensor] = []
        self._known = WeakTensorKeyDictionary()
        self._last: weakref.ref[_Inputs] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeper:
        # A memory of its own, for the model that is being copied, if it is the whole of it.
        return Keeper(memo.get(id(self._alive)), self.policy)

    def __reduce__(self) -> Any:
        return Keeper, (self._alive, self.policy)

    @property
    def _alive(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    @property
    def _owner(self) -> Any | None:
        """The handle of the model; None where it is not sharded."""
        model = self._alive
        return None if model is None else handle.find(model)

    @property
    def events(self) -> Events | None:
        """Where to report; None where the model is not sharded."""
        owner = self._owner
        return None if owner is None else owner.events

    @contextmanager
    def keeping(self, name: str, number: int, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around a checkpointed module: what is saved of its inputs inside is kept here.

        Args:
            name: of the module.
            number: its place in the order of the model.
            tensors: the inputs that checkpointing is to save.

        Raises:
            ActivationError: they could not be kept, other ranks have others, or the module has
                changed one.
        """
        outer, policy = innermost_hooks(), self.policy
        if not tensors or not is_only_watched(outer):
            yield
            return
        if policy.place == "device" and self._group is None:
            self._report("keep", name, sum(one.nbytes for one in tensors), "device")
            yield
            return
        versions = [one._version for one in tensors]
        hooks = _Hooks(self, _Inputs(name, number, self._before(number)), outer)
        self._last = weakref.ref(hooks.inputs)
        try:
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                yield
        finally:
            for place in self._places.values():
                place.settle()
            self._sources.clear()
        if versions != [one._version for one in tensors]:
            raise ActivationError(
                f"{name} has changed its own input in place, and could not be computed again from "
                "what is left of it: let it work on a copy, or leave it out, modules=..."
            )

    def _before(self, number: int) -> weakref.ref[_Inputs] | None:
        """The inputs that were kept last, if that was in the same forward."""
        last = None if self._last is None else self._last()
        return None if last is None or last.number >= number else self._last

    def keep(self, tensor: torch.Tensor, inputs: _Inputs) -> _KeptTensor | None:
        """A tensor that was saved; None where it is to stay as it is."""
        known = self._known.get(tensor)
        if known is not None and known[0] == tensor._version and known[1]() is not None:
            shared: _KeptTensor = known[1]()
            return shared
        if not self._moves(tensor):
            return None
        with torch.no_grad():
            kept = self._keep(tensor, inputs)
        self._known[tensor] = tensor._version, weakref.ref(kept)
        return kept

    def _moves(self, tensor: torch.Tensor) -> bool:
        is_known = type(tensor) is torch.Tensor or is_dtensor(tensor) or _is_travelling(tensor)
        if not is_known or not tensor.numel() or is_fake(tensor):
            return False
        # Memory of parameters is the engine's.
        owner = self._owner
        return owner is None or owner.hooks.saved.unit_of(tensor) is None

    def _keep(self, tensor: torch.Tensor, inputs: _Inputs) -> _KeptTensor:
        local = _arrived(local_of(tensor)).detach()
        is_whole = all(one.is_replicate() for one in getattr(tensor, "placements", ()))
        group = self._group if is_whole else None
        dense = _once_each(local)
        dense = dense if is_dense(dense) else dense.contiguous()
        flat = dense.as_strided((dense.numel(),), (1,))
        is_to_check = group is not None and inputs.name not in self._checked
        part = flat if group is None else _part_of(flat, group)
        self._sources.append(part)
        began = time.perf_counter()
        with self._explained(inputs.name, "keep"):
            kept = self._place(local.device).keep(part, inputs.name)
        self._report("keep", inputs.name, part.nbytes, self.policy.place)
        self._report_wait("keep", inputs.name, began)
        spec: DTensorSpec | None = getattr(tensor, "_spec", None)
        mine = fingerprint(flat) if is_to_check else None
        form = _Form(local.size(), local.stride(), part.nbytes, spec, mine)
        return _KeptTensor(self, inputs, kept, form, group)

    def _place(self, device: torch.device) -> Place:
        place = self._places.get(device)
        if place is None:
            match self.policy.place:
                case "device":
                    place = DevicePlace(device)
                case "host":
                    place = HostPlace(device)
                case _:
                    place = DiskPlace(device, Path(str(self.policy.path)), _rank())
            self._places[device] = place
        return place

    def _check(self, mine: torch.Tensor, group: Group, name: str) -> None:
        """The first time: raises where ranks of the group had different inputs.

        Not when they are kept: what never comes to a backward may be anything.
        """
        if name in self._checked or not trains():
            return
        self._checked.add(name)
        others = ranks_with_others(mine, group)
        if others:
            raise ActivationError(
                f"activations.partition: the input of {name} is another one on "
                f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} than on "
                f"rank {group.ranks[0]}, and a whole made of the parts of both would be neither. "
                "Partition over a group whose ranks compute the same (tensor parallelism without "
                "sequence parallelism, and without data parallelism), with the same random state "
                "for dropout; or leave partition out"
            )

    @contextmanager
    def _explained(self, name: str, verb: str) -> Iterator[None]:
        """Errors of places say whose tensor it was."""
        try:
            yield
        except (torch.OutOfMemoryError, CommunicationError):
            raise
        except (RuntimeError, MemoryError, OSError) as error:
            place = self.policy.place
            raise ActivationError(
                f"rank {_rank()} cannot {verb} the input of {name} "
                f"({'on' if verb == 'keep' else 'from'} {place}): {str(error).rstrip('.')}. "
                f"{REMEDIES[place]}"
            ) from error

    def bring(self, one: _KeptTensor) -> torch.Tensor:
        """The values of what was kept, in one row."""
        began = time.perf_counter()
        with self._explained(one.inputs.name, "fetch"):
            values = one.kept.fetch()
        self._report_wait("fetch", one.inputs.name, began)
        if one.group is not None:
            if one.form.fingerprint is not None:
                self._check(one.form.fingerprint, one.group, one.inputs.name)
            values = collect(values, one.group, name=one.inputs.name, events=self.events)
        return values

    def start(self, one: _KeptTensor) -> None:
        """It begins to come back."""
        source = one.kept.source
        if source != "device":
            self._report("fetch", one.inputs.name, one.form.num_bytes, source)
        with self._explained(one.inputs.name, "fetch"):
            one.kept.start_fetch()

    def _report(self, kind: Any, name: str, num_bytes: int, what: str) -> None:
        events = self.events
        if events is not None:
            events.emit(kind, name, num_bytes=num_bytes, what=what)

    def _report_wait(self, what: str, name: str, began: float) -> None:
        events = self.events
        if events is not None and self.policy.place == "nvme":
            events.emit("wait", name, seconds=time.perf_counter() - began, what=what)


class _Inputs:
    """What is kept of one call of a module."""

    def __init__(self, name: str, number: int, before: weakref.ref[_Inputs] | None) -> None:
        self.name, self.number = name, number
        self._before = before
        self._tensors: list[weakref.ref[_KeptTensor]] = []

    def add(self, one: _KeptTensor) -> None:
        """One more."""
        self._tensors.append(weakref.ref(one))

    def ask(self) -> None:
        """One of them is needed now: all begin to come, and those of the call before."""
        self._start()
        before = None if self._before is None else self._before()
        if before is not None:
            before._start()

    def _start(self) -> None:
        for reference in self._tensors:
            one = reference()
            if one is not None:
                one.start()


class _Form(NamedTuple):
    """How to make a tensor of its values.

    size, stride: of the tensor, or of the one inside a DTensor. num_bytes: that this rank keeps.
    spec: of a DTensor. fingerprint: of the values, where they are to be compared over the group.
    """

    size: torch.Size
    stride: tuple[int, ...]
    num_bytes: int
    spec: DTensorSpec | None
    fingerprint: torch.Tensor | None


class _KeptTensor:
    """A tensor that waits. What it takes goes with it.

    group: the ranks that each have a part of it; None where it is whole here.
    """

    def __init__(
        self, keeper: Keeper, inputs: _Inputs, kept: Kept, form: _Form, group: Group | None
    ) -> None:
        self.inputs, self.kept, self.form, self.group = inputs, kept, form, group
        self._keeper = keeper
        # Once it was there nobody is expected to want it again.
        self._is_awaited, self._is_coming = True, False
        inputs.add(self)

    def start(self) -> None:
        """It begins to come, if it is not there yet."""
        if self._is_awaited and not self._is_coming:
            self._is_coming = True
            self._keeper.start(self)

    def fetch(self) -> torch.Tensor:
        """The tensor, outside of any graph."""
        self._is_awaited = True
        self.inputs.ask()
        with torch.no_grad():
            values = _laid_out(self._keeper.bring(self), self.form)
        self._is_awaited = self._is_coming = False
        if self.form.spec is None:
            return values
        from torch.distributed.tensor import DTensor

        return DTensor(values, self.form.spec, requires_grad=False)


class _Stayed(NamedTuple):
    """A tensor that stays as it is, and its version: with hooks torch does not look at that."""

    tensor: torch.Tensor
    version: int


class _Hooks:
    """The pair of hooks around one call of a module."""

    def __init__(self, keeper: Keeper, inputs: _Inputs, outer: Any) -> None:
        self.inputs = inputs
        self._keeper, self._outer = keeper, outer

    def pack(self, tensor: torch.Tensor) -> Any:
        kept = self._keeper.keep(tensor, self.inputs)
        if kept is None and self._outer is None:
            return _Stayed(tensor.detach(), tensor._version)
        return self._outer[0](tensor) if kept is None else kept

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _KeptTensor):
            return packed.fetch()
        if not isinstance(packed, _Stayed):
            tensor: torch.Tensor = self._outer[1](packed)
            return tensor
        if packed.tensor._version != packed.version:
            raise ActivationError(
                f"an input of {self.inputs.name} has been modified by an inplace operation since "
                "it was kept: let that work on a copy"
            )
        return packed.tensor


def _group_of(policy: Activations) -> Group | None:
    if policy.partition is None:
        return None
    group = group_of(policy.partition, "activations.partition")
    return group if group.size > 1 else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_travelling(tensor: torch.Tensor) -> bool:
    """Whether it is the result of a transfer that nobody has waited for (tensor parallelism)."""
    return type(tensor).__name__ == "AsyncCollectiveTensor"


def _arrived(tensor: Any) -> torch.Tensor:
    arrived: torch.Tensor = tensor.wait() if _is_travelling(tensor) else tensor
    return arrived


def _once_each(tensor: torch.Tensor) -> torch.Tensor:
    """Of what is expanded, each element once."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _laid_out(row: torch.Tensor, form: _Form) -> torch.Tensor:
    """The values as they lay before: operators choose their way by strides, and save other tensors
    or round otherwise on another one.
    """
    size = [length if step else 1 for length, step in zip(form.size, form.stride, strict=True)]
    if is_dense(torch.empty_strided(size, form.stride, device="meta")):
        values = row.as_strided(size, form.stride)
    else:
        values = row.new_empty_strided(size, form.stride)
        values.copy_(row[: values.numel()].view(size))
    return values.expand(form.size)


def _part_of(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's of as many equal parts as there are ranks; the last ones may end in zeros."""
    length = -(-flat.numel() // group.size)
    part = flat[group.rank * length : (group.rank + 1) * length]
    if part.numel() == length:
        return part
    padded = flat.new_zeros(length)
    padded[: part.numel()] = part
    return padded
