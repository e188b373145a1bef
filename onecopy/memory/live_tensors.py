"""One tracker of live tensor bytes, for tests and benchmarks alike.

It keeps a weak reference to every storage that operations make while it is active, and reads their
sizes anew whenever it is asked: the engine frees and regrows storages with `resize_`, which no
operation shows, so a size noted when a storage was made says nothing. Views share a storage and
count once. What a single operation frees before it returns is not seen.

A tensor that wraps others, such as a DTensor, has a storage with a size and no bytes: what counts
is what it wraps. Its operations are not seen, but those that they consist of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveTensors", "storage_of", "tensors_in"]

Operator = Callable[..., Any]


class LiveTensors(TorchDispatchMode):
    """`with LiveTensors() as live: ...`, then `live.num_bytes()` and `live.peak_bytes`.

    `largest_bytes` is the largest single storage since the peak was last reset: what the allocator
    must have in one piece. Tensors made before are left out unless given to `watch`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.largest_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def num_bytes(self) -> int:
        """What the tracked storages hold at this moment. A moment that is asked about counts for
        the peak too."""
        alive = (reference() for reference in list(self._storages.values()))
        sizes = [storage.nbytes() for storage in alive if storage is not None]
        total = sum(sizes)
        self.peak_bytes = max(self.peak_bytes, total)
        self.largest_bytes = max(self.largest_bytes, *sizes, 0)
        return total

    def reset_peak(self) -> None:
        """Let the peak start again from what is alive now."""
        self.peak_bytes = self.largest_bytes = 0
        self.num_bytes()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Track tensors that were made before, such as a model's parameters."""
        for tensor in tensors:
            for plain in _unwrapped(tensor):
                self._add(storage_of(plain))
        self.num_bytes()

    def num_storages(self) -> int:
        """How many tracked storages are alive and hold at least one byte."""
        alive = (reference() for reference in list(self._storages.values()))
        return sum(storage is not None and storage.nbytes() > 0 for storage in alive)

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(map(_is_wrapper, types)):
            # The wrapper makes it of operations on what it wraps, and these come here.
            return NotImplemented
        kwargs = kwargs or {}
        # Before the operation: an operation in place returns what it was given.
        given = {id(storage) for storage in map(storage_of, tensors_in((args, kwargs)))}
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if id(storage) not in given:
                self._add(storage)
        self.num_bytes()
        return result

    def _add(self, storage: torch.UntypedStorage | None) -> None:
        if storage is None or id(storage) in self._storages:
            return
        key = id(storage)
        # torch keeps one Python object per storage for as long as the storage lives.
        self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))


def _is_wrapper(kind: type) -> bool:
    """Whether tensors of a class consist of others (torch's protocol for them)."""
    return hasattr(kind, "__tensor_flatten__")


def _unwrapped(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that it consists of; a DTensor names its mesh beside them."""
    if _is_wrapper(type(tensor)):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _unwrapped(getattr(tensor, name))
    elif isinstance(tensor, Tensor):
        yield tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """What holds a tensor's bytes; None where nothing does."""
    if _is_wrapper(type(tensor)):
        return None  # what it wraps is seen by itself
    if tensor.device.type == "meta":  # what a fake tensor is not: it says the device it stands for
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors have none; those that they consist of are seen by themselves
