"""How the values of a tensor were made, recorded so that they can be made again.

A model under construction runs its own code: operations make tensors, draw random numbers and fill
parameters. Every operation is executed as always, with the random numbers that it would get, and
recorded. A tensor that becomes a parameter is turned into a meta tensor, its bytes are given back
once other parameters are worked on, and what remains is the *cell* of its storage: the last
operation that wrote it, which leads to all others that its values depend on. To make the values
again, these are run once more, in their order, each with the state that its random generator had.
So the values are those of a construction without this file, to the last bit, whatever the
constructor does: initialise in it or afterwards, twice, by `apply`, by arithmetic on random
tensors, by sampling until all values fit.

An operation that touches a meta tensor with a cell works on real memory: the bytes are made again
where they were given back. Only views, copies and casts of it are meta tensors, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from onecopy.core.cells import (
    Cell,
    Constant,
    Draw,
    Operation,
    Store,
    Stores,
    all_cells,
    cell_of,
    is_whole,
    place_of,
    plain_tensors,
    replay,
    stand_in,
    tensors_in,
)
from onecopy.errors import ShardingError

__all__ = ["Recorder"]

# More operations than this in a row are not worth recording: the value itself is kept.
MAX_DEPTH = 256
# Values from outside are copied up to this size, beyond it they are held and must not change.
COPIED_NUMEL = 1 << 16

_aten = torch.ops.aten


def _operators(names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names.split())


# In-place operations that write every element and read none.
_OVERWRITING = _operators(
    "normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ zero_ fill_ copy_"
)
# They look at a tensor's shape, dtype and device only.
_LIKE = _operators(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty "
    "new_empty_strided new_zeros new_ones new_full"
)
_UNINITIALISED = _operators(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided"
)
# Not executed before somebody wants the values: `model.to(...)`, `copy.deepcopy(layer)`.
_POSTPONED = _operators("clone _to_copy")


class Recorder(TorchDispatchMode):
    """While it is entered, every operation is executed and recorded.

    target: where the model will lie that is under construction. None: it is finished, and
        somebody changes it; what he computes beside it is not recorded.
    """

    def __init__(self, target: torch.device | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target = target
        # The bytes of the parameters that the last operation on parameters has used.
        self._awake: dict[Cell, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._handle(func, args, kwargs or {})

    def forget(self) -> None:
        """Give bytes back, and the records of tensors that became no parameters."""
        self._awake.clear()
        for storage, cell in all_cells():
            if storage.device.type != "meta" and cell.meta is None:
                cell.forget(storage)

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        metas = {
            id(tensor): cell
            for tensor in tensors
            if tensor.is_meta and (cell := cell_of(tensor)) is not None
        }
        if not metas:
            if func.overloadpacket is _aten.scalar_tensor:
                # The number in `p[i] = 1.0` would be made on the device of p.
                kwargs = {**kwargs, "device": "cpu"}
            return self._execute(func, args, kwargs, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return _change_view(func, args, kwargs)
        if _returns_view(func):
            return func(*args, **kwargs)
        if func.overloadpacket in _POSTPONED:
            return _postpone(func, args, kwargs, metas[id(args[0])])
        overwritten = _overwritten(func, args)
        self._awake = {one: self._awake[one] for one in metas.values() if one in self._awake}
        originals: dict[int, Tensor] = {}
        used: dict[Cell, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            cell = metas.get(id(leaf))
            if cell is None:
                return leaf
            place = place_of(leaf, cell)
            if func.overloadpacket in _LIKE:
                return torch.empty_strided(
                    place.size, place.stride, dtype=place.dtype, device=place.device
                )
            used[cell] = self._wake(cell, values=cell is not overwritten)
            tensor = place.tensor({cell.number: Store(used[cell])})
            originals[id(tensor)] = leaf
            return tensor

        real_args, real_kwargs = tree_map(real, (args, kwargs))
        self._awake = used or self._awake
        try:
            result = self._execute(func, args, kwargs, real_args, real_kwargs)
        except BaseException:
            self._awake.clear()
            raise
        return tree_map(lambda leaf: originals.get(id(leaf), leaf), result)

    def _wake(self, cell: Cell, *, values: bool) -> torch.UntypedStorage:
        """Real memory of a cell, with its present values unless they are not wanted."""
        storage = cell.real
        if storage is None:
            stores: Stores = {}
            if values and cell.last is not None:
                replay(cell.last, stores, cell.number)
            if cell.number not in stores:
                empty = torch.zeros(cell.num_bytes, dtype=torch.uint8, device=cell.device)
                stores[cell.number] = Store(empty.untyped_storage())
            storage = stores[cell.number].storage
            cell.bind(storage)
        return storage

    def _execute(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        real_args: tuple[Any, ...],
        real_kwargs: dict[str, Any],
    ) -> Any:
        """Run an operation, and record it by its original arguments."""
        reads, recorded = _recorded(func, args, kwargs)
        draw = _draw(func, real_args, real_kwargs)
        given = {_key(tensor) for tensor in plain_tensors(tensors_in((real_args, real_kwargs)))}
        written = [cell for cell in map(cell_of, _written(func, args, kwargs)) if cell is not None]
        result = func(*real_args, **real_kwargs)
        made = [
            None if _key(tensor) in given else self._new_cell(tensor)
            for tensor in plain_tensors(tensors_in(result))
        ]
        if not written and not any(made):
            return result
        if func.overloadpacket in _UNINITIALISED:
            return result
        needs = dict.fromkeys(cell.last for cell in reads if cell.last is not None)
        numbers = tuple(None if cell is None else cell.number for cell in made)
        operation = Operation(func, *recorded, draw, tuple(needs), numbers)
        for cell in (*written, *made):
            if cell is not None:
                _note(cell, operation)
        return result

    def _new_cell(self, tensor: Tensor) -> Cell | None:
        storage = tensor.untyped_storage()
        if self.target is None or storage.device.type == "meta":
            return None
        cell = Cell(storage.nbytes(), tensor.device, self.target)
        cell.bind(storage)
        return cell


def _note(cell: Cell, operation: Operation) -> None:
    """`operation` has written a cell: record that, or keep the value where it has become long."""
    if cell.kept is not None:
        return
    if operation.depth <= MAX_DEPTH:
        cell.last = operation
        return
    storage, cell.last = cell.real, None
    assert storage is not None, "an operation has just written it"
    if cell.meta is None:
        cell.forget(storage)
    else:
        cell.kept = storage


def _recorded(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Cell], tuple[tuple[Any, ...], dict[str, Any]]]:
    """The cells whose values an operation reads, and its arguments as they are recorded."""
    overwritten = _overwritten(func, args)
    reads: list[Cell] = []

    def recorded(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        cell = cell_of(leaf)
        if cell is None or (cell.kept is not None and cell is not overwritten):
            if cell is not None and cell.kept is not None:
                leaf = place_of(leaf, cell).tensor({cell.number: Store(cell.kept)}).clone()
            elif leaf.numel() <= COPIED_NUMEL and not leaf.is_meta:
                leaf = leaf.detach().clone()
            return Constant(leaf, leaf._version)
        if cell is not overwritten and func.overloadpacket not in _LIKE:
            reads.append(cell)
        return place_of(leaf, cell)

    return reads, tree_map(recorded, (args, kwargs))


def _returns_view(func: Any) -> bool:
    """Whether the result is a view of an argument, which is not changed."""
    aliases = [result.alias_info for result in func._schema.returns if result.alias_info]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _overwritten(func: Any, args: tuple[Any, ...]) -> Cell | None:
    """The cell of which an operation leaves no old value, if there is one."""
    if func.overloadpacket not in _OVERWRITING:
        return None
    cell = cell_of(args[0])
    if cell is None or not is_whole(args[0], cell):
        return None
    sources = [cell_of(tensor) for tensor in tensors_in(args[1:])]
    return None if cell in sources else cell


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into, by its schema."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += tensors_in(value)
    return written


def _postpone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Cell) -> Tensor:
    """A copy or cast as a meta tensor that has a cell of its own."""
    device = torch.device(kwargs.get("device") or source.device)
    if device.type == "meta":
        device = source.device
    result: Tensor = func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": device}
    target = source.target if device == source.device else device
    cell = Cell(result.untyped_storage().nbytes(), device, target)
    cell.bind(result.untyped_storage())
    reads, (args, kwargs) = _recorded(func, args, kwargs)
    needs = tuple(one.last for one in reads if one.last is not None)
    cell.last = Operation(func, args, kwargs, None, needs, (cell.number,))
    return result


def _change_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`t_()`, `squeeze_()`, ... change the tensor alone; `set_(other)` lets it share memory."""
    if func.overloadpacket is _aten.set_ and len(args) == 2 and isinstance(args[1], Tensor):
        return func(args[0], stand_in(args[1]), **kwargs)
    if func.overloadpacket in (_aten.set_, _aten.resize_, _aten.resize_as_):
        raise ShardingError(
            f"{func} on a parameter whose values will be made at shard: change its size before it "
            "becomes a parameter, or after shard has made the values"
        )
    return func(*args, **kwargs)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """The random generator that an operation is about to draw from, with its state."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    if given:
        return Draw(given[0], given[0].get_state())
    tensors = tensors_in((args, kwargs))
    device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
    if device.type == "meta":
        return None
    generator = torch.default_generator
    if device.type != "cpu":
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        generator = module.default_generators[index]
    return Draw(generator, generator.get_state())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
