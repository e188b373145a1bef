"""Values that rest elsewhere than the tensors that stand for them.

On disk (swapped.py), in another memory (resting_mean.py), or in two halves (split.py). Meanwhile
these tensors hold no memory: their storage is empty, and they wear a guard, so that whoever touches
one finds its values.

    resting --join--> in memory --leave--> resting
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onecopy.core.guard import guard_class
from onecopy.memory import buffers

__all__ = ["Resting"]

# The tuple of views, the name in a loop over it, and the argument of sys.getrefcount.
NUM_OWN_REFERENCES = 3


class Resting(ABC):
    """See the module's docstring; what is made of it says where the values are.

    Attributes:
        whole: 1-D, what the values are in; its storage is empty while they rest.
        views: those of its views that wear the guard then.
        is_joined: they are in memory, and somebody may have changed them.
    """

    def __init__(self) -> None:
        self.whole = torch.empty(0)
        self.views: tuple[torch.Tensor, ...] = ()
        self.is_joined = False
        self._plain: list[type[torch.Tensor]] = []
        self._guards: dict[type[torch.Tensor], type[torch.Tensor]] = {}
        self._holders = (0, 0)

    @abstractmethod
    def _bring(self) -> None:
        """Fill `whole`, whose storage may still be empty, with the values."""

    @abstractmethod
    def rest(self) -> None:
        """What somebody may have changed counts; then the values rest again."""

    def take(self, whole: torch.Tensor, views: Iterable[torch.Tensor]) -> None:
        """Stand for these values, which are in memory, from now on.

        Args:
            whole: 1-D, with a storage of its own.
        """
        self.leave_to_holders()
        self.whole, self.views = whole, tuple(views)
        self.is_joined = True
        self._plain = [type(view) for view in self.views]
        for kind in set(self._plain) - self._guards.keys():
            self._guards[kind] = guard_class(kind, weakref.ref(self))
        self._holders = self._count_holders()

    def leave_to_holders(self) -> None:
        """Whoever holds a tensor that stands for the values keeps them: others are to come."""
        if not self.is_joined and any(
            sys.getrefcount(one) > NUM_OWN_REFERENCES for one in self.views
        ):
            self.join()

    def stands_for(self, value: object) -> bool:
        """Whether this is the very tensor."""
        return any(view is value for view in self.views)

    def touch(self, tensors: Sequence[torch.Tensor], function: Callable[..., Any]) -> None:
        """Views are about to be used (see `guard.Gatherer`)."""
        self.join()

    def is_released(self, parameter: torch.Tensor) -> bool:
        """Whether a view should wear its guard."""
        return not self.is_joined

    def join(self) -> None:
        """Bring the values into memory; nothing happens where they are there."""
        if self.is_joined:
            return
        self._bring()
        self.is_joined = True
        for view, plain in zip(self.views, self._plain, strict=True):
            view.__class__ = plain

    def leave(self) -> None:
        """Give the memory back of values that are where they rest; not while it is held."""
        if self.is_joined and self._can_leave():
            self._put_guards()
            buffers.free(self.whole)

    def _can_leave(self) -> bool:
        """Nobody else has a view of the memory, or its storage (torch.save has, until its end)."""
        now = self._count_holders()
        is_held = any(count > known for count, known in zip(now, self._holders, strict=True))
        return not is_held and self.whole.untyped_storage().resizable()

    def _count_holders(self) -> tuple[int, int]:
        return buffers.num_owners(self.whole), buffers.num_references(self.whole)

    def _put_guards(self) -> None:
        self.is_joined = False
        for view, plain in zip(self.views, self._plain, strict=True):
            view.__class__ = self._guards[plain]
