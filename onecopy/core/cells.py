"""Cells: what is known of the values of a storage, so that they can be made again.

A cell holds the last operation that wrote its storage, which leads to all others that the values
depend on. To make the values again, these are run once more, in their order, each with the state
that its random generator had. recorder.py fills cells.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from onecopy.core.views import is_dense
from onecopy.errors import ShardingError

__all__ = [
    "Cell",
    "Constant",
    "Draw",
    "Operation",
    "Place",
    "Store",
    "all_cells",
    "cell_of",
    "check_constants",
    "is_whole",
    "place_of",
    "plain_tensors",
    "record",
    "replay",
    "shadow",
    "stand_in",
    "tensors_in",
]

_numbers = itertools.count()


class Store(NamedTuple):
    """Real memory of a cell: a storage, and the byte in it at which the cell begins."""

    storage: torch.UntypedStorage
    first_byte: int = 0


Stores = dict[int, Store]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor as a part of a cell."""

    cell: int
    num_bytes: int
    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self, stores: Stores) -> Tensor:
        """The tensor in real memory, which is taken (and zeroed) where there is none so far."""
        if self.cell not in stores:
            empty = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)
            stores[self.cell] = Store(empty.untyped_storage())
        storage, first_byte = stores[self.cell]
        offset = first_byte // self.dtype.itemsize + self.offset
        flat = torch.empty(0, dtype=self.dtype, device=self.device)
        return flat.set_(storage, offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor from outside, whose values an operation has used."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        """The tensor, if it is still what it was."""
        if self.tensor._version != self.version:
            raise ShardingError(
                f"a tensor of shape {tuple(self.tensor.shape)}, from which parameters were "
                "initialised, was changed in place before shard, so their values cannot be made "
                "again: initialise them from a copy, t.clone()"
            )
        return self.tensor


class Draw(NamedTuple):
    """A random generator and its state before an operation drew from it."""

    generator: torch.Generator
    state: Tensor


@dataclass(slots=True, eq=False)
class Operation:
    """One executed operation; tensors among its arguments are places and constants.

    needs: the operations that made what it read.
    results: for each tensor that it returns the number of the cell that it made, or None.
    order: operations are run again in the order in which they were recorded.
    dtype: torch's default at that moment.
    depth: length of the longest chain of needs.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    draw: Draw | None = None
    needs: tuple[Operation, ...] = ()
    results: tuple[int | None, ...] = ()
    order: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        self.order = next(_numbers)
        self.dtype = torch.get_default_dtype()
        self.depth = 1 + max((need.depth for need in self.needs), default=0)

    def places(self) -> Iterator[Place]:
        """The places among the arguments."""
        return (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Place))

    def run(self, stores: Stores) -> None:
        """Do it again, on and into these stores."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return leaf.tensor(stores)
            return leaf.value() if isinstance(leaf, Constant) else leaf

        args, kwargs = tree_map(real, (self.args, self.kwargs))
        if self.draw is not None:
            self.draw.generator.set_state(self.draw.state)
        torch.set_default_dtype(self.dtype)
        results = plain_tensors(tensors_in(self.function(*args, **kwargs)))
        for number, tensor in zip(self.results, results, strict=False):
            if number is not None:
                stores[number] = Store(tensor.untyped_storage())


class Cell:
    """What is known of one storage.

    last: the last operation that wrote it; None while nothing has.
    kept: the storage itself, where its values cannot be made again.
    device: where the values are made. target: where they will be used.
    """

    def __init__(self, num_bytes: int, device: torch.device, target: torch.device) -> None:
        self.number = next(_numbers)
        self.num_bytes = num_bytes
        self.device = device
        self.target = target
        self.last: Operation | None = None
        self.kept: torch.UntypedStorage | None = None
        self._real: weakref.ref[torch.UntypedStorage] | None = None
        self._meta: weakref.ref[torch.UntypedStorage] | None = None

    def bind(self, storage: torch.UntypedStorage) -> None:
        """From now on `storage`, real or meta, is this cell's, for as long as it lives."""
        _cells[storage] = self
        if storage.device.type == "meta":
            self._meta = weakref.ref(storage)
        else:
            self._real = weakref.ref(storage)

    @property
    def real(self) -> torch.UntypedStorage | None:
        """Real memory with the present values, if there is any."""
        return self.kept or (None if self._real is None else self._real())

    @property
    def meta(self) -> torch.UntypedStorage | None:
        """The storage of the meta tensors of this cell, if there are any."""
        return None if self._meta is None else self._meta()

    def forget(self, storage: torch.UntypedStorage | None) -> None:
        """`storage` is not this cell's any more."""
        if storage is not None:
            del _cells[storage]

    def give_up_values(self) -> None:
        """Forget the present values: others are about to be recorded."""
        self.last = self.kept = self._real = None

    @property
    def is_known(self) -> bool:
        """Something has given it values."""
        return self.last is not None or self.kept is not None


_cells = WeakIdKeyDictionary(ref_type=weakref.ref)


def all_cells() -> list[tuple[torch.UntypedStorage, Cell]]:
    """Every storage with a cell."""
    return list(_cells.items())


def cell_of(tensor: Tensor) -> Cell | None:
    """The cell of a tensor's storage; None where nothing was recorded of it."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors and wrappers have none
    found: Cell | None = _cells.get(storage)
    return found


def is_whole(tensor: Tensor, cell: Cell) -> bool:
    """Whether `tensor` covers its cell."""
    is_as_long = tensor.numel() * tensor.itemsize == cell.num_bytes
    return is_as_long and tensor.storage_offset() == 0 and is_dense(tensor)


def place_of(tensor: Tensor, cell: Cell) -> Place:
    """Where `tensor` lies in its cell."""
    return Place(
        cell.number,
        cell.num_bytes,
        cell.device,
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
    )


def shadow(tensor: Tensor, cell: Cell) -> Tensor:
    """A meta tensor that stands for `tensor`, a part of this cell."""
    storage = cell.meta
    if storage is None:
        empty = torch.empty(cell.num_bytes, dtype=torch.uint8, device="meta")
        storage = empty.untyped_storage()
        cell.bind(storage)
    flat = torch.empty(0, dtype=tensor.dtype, device="meta")
    return flat.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def record(cell: Cell, function: Callable[[Tensor], object], place: Place) -> None:
    """Say that `function(tensor)` gives a whole cell its values, without calling it."""
    cell.give_up_values()
    cell.last = Operation(function, (place,))


def replay(last: Operation, stores: Stores, wanted: int) -> None:
    """Run `last` and all that it needs again, for the values of cell `wanted` in `stores`.

    Changes neither the random generators nor the default dtype.
    """
    operations = _needed(last)
    final_use = {
        number: index
        for index, operation in enumerate(operations)
        for number in (*(place.cell for place in operation.places()), *operation.results)
    }
    with torch.no_grad(), _settings_restored(operations):
        for index, operation in enumerate(operations):
            operation.run(stores)
            for number in [number for number in stores if final_use.get(number) == index]:
                if number != wanted:
                    del stores[number]


def check_constants(cell: Cell) -> None:
    """See to it that the values of a cell can be made.

    Raises:
        ShardingError: a tensor from outside that they depend on has been changed.
    """
    for operation in _needed(cell.last) if cell.last is not None else ():
        for leaf in tree_leaves((operation.args, operation.kwargs)):
            if isinstance(leaf, Constant):
                leaf.value()


def _needed(last: Operation) -> list[Operation]:
    found, waiting = {last}, [last]
    while waiting:
        for need in waiting.pop().needs:
            if need not in found:
                found.add(need)
                waiting.append(need)
    return sorted(found, key=lambda operation: operation.order)


@contextmanager
def _settings_restored(operations: list[Operation]) -> Iterator[None]:
    generators = {operation.draw.generator for operation in operations if operation.draw}
    states = [(generator, generator.get_state()) for generator in generators]
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for generator, state in states:
            generator.set_state(state)


def stand_in(tensor: Tensor) -> Tensor:
    """A meta tensor that stands for a real one, whose values are kept where none made them."""
    cell = cell_of(tensor)
    if tensor.is_meta:
        return tensor
    if cell is None:
        storage = tensor.untyped_storage()
        cell = Cell(storage.nbytes(), tensor.device, tensor.device)
        cell.kept = storage
        cell.bind(storage)
    return shadow(tensor, cell)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def plain_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Those with a storage of their own: not sparse ones."""
    return [tensor for tensor in tensors if tensor.layout is torch.strided]
