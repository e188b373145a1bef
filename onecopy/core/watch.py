"""Tensors that nobody may change, or change unseen, while somebody works with their values.

While watched they wear a guard (see guard.py), so that whatever function of torch is about to use
them is heard of first, those included that torch does not count as changes (`tensor.data`, numpy).
What was counted, put elsewhere or shared with others meanwhile is found by looking again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onecopy.core.guard import guard_class
from onecopy.memory import buffers

__all__ = ["Guards", "Watch"]

# Gradients are measured, in order to clip them, before the step.
_ONLY_READ = (torch._foreach_norm,)
# `num_owners` of a storage that one tensor has.
_NUM_OWN_OWNERS = 1


class Watch:
    """Of some tensors together.

    Attributes:
        is_touched: somebody has used one.

    Args:
        guarded: wear the guard.
        others: are looked at again.
        num_hidden: for each storage how many more tensors of it are known, by its address.
    """

    def __init__(
        self,
        guarded: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        num_hidden: Counter[int],
    ) -> None:
        self.is_touched = False
        self._guarded = [(tensor, type(tensor)) for tensor in guarded]
        self._tensors = [*guarded, *others]
        self._marks = self._look()
        shared = Counter(address_of(tensor) for tensor in self._tensors) + num_hidden
        self._num_owners = [_NUM_OWN_OWNERS + shared[address_of(one)] for one in self._tensors]

    @property
    def is_shared(self) -> bool:
        """Somebody else has a tensor of one of the storages, and could change it unseen."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [buffers.num_owners(tensor) for tensor in self._tensors]
        return found != self._num_owners

    @property
    def is_unchanged(self) -> bool:
        """Nobody has used, changed or moved anything, as far as can be seen from here."""
        return not self.is_touched and self._look() == self._marks

    @property
    def is_intact(self) -> bool:
        """Nobody has used, changed or moved anything, or could do so unseen."""
        return self.is_unchanged and not self.is_shared

    def begin(self, guards: Guards) -> None:
        """Put the guards on."""
        for tensor, kind in self._guarded:
            guards.put_on(tensor, kind, self)

    def end(self, guards: Guards) -> None:
        """Take the guards off."""
        for tensor, kind in self._guarded:
            guards.take_off(tensor, kind)

    def _look(self) -> list[tuple[int, int]]:
        with torch._C.DisableTorchFunctionSubclass():
            return [(tensor._version, tensor.data_ptr()) for tensor in self._tensors]


class Guards:
    """The guards of watched tensors, and which watch each belongs to."""

    def __init__(self) -> None:
        self._classes: dict[type[torch.Tensor], type[torch.Tensor]] = {}
        self._watches: dict[int, Watch] = {}

    def put_on(self, tensor: torch.Tensor, kind: type[torch.Tensor], watch: Watch) -> None:
        """Let a tensor of this class wear its guard."""
        if kind not in self._classes:
            self._classes[kind] = guard_class(kind, weakref.ref(self))
        self._watches[id(tensor)] = watch
        tensor.__class__ = self._classes[kind]

    def take_off(self, tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
        """Let it be what it was."""
        if self._watches.pop(id(tensor), None) is not None:
            tensor.__class__ = kind

    def touch(self, tensors: Iterable[torch.Tensor], function: Callable[..., Any]) -> None:
        """`function` is about to use tensors: unless it only reads, their watch is over."""
        if function in _ONLY_READ:
            return
        for tensor in tensors:
            watch = self._watches.get(id(tensor))
            if watch is not None:
                watch.is_touched = True
                watch.end(self)

    def is_released(self, parameter: torch.Tensor) -> bool:
        """Whether a tensor should wear its guard."""
        return id(parameter) in self._watches


def address_of(tensor: torch.Tensor) -> int:
    """Of its storage."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()
