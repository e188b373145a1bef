"""Models that do not fit one device: built without values, which are made unit by unit at shard.

    with onecopy.init_sharded():
        model = Big(config)            # parameters are meta tensors, buffers are real
    onecopy.shard(model, optimizer)    # values are made, cut and freed, one unit after the other

The values are those of a construction without `init_sharded` with the same seed; recorder.py says
how. A parameter without values is *unmade*: a meta tensor whose class lets everything that is done
to it be recorded, also between construction and shard, so that nothing is lost.

Meta tensors that torch itself made (`with torch.device("meta")`) have no record: see initialise.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onecopy.core.cells import (
    Cell,
    Store,
    cell_of,
    is_whole,
    place_of,
    record,
    replay,
    shadow,
    stand_in,
)
from onecopy.core.dtensors import is_dtensor, like
from onecopy.core.recorder import Recorder
from onecopy.errors import ShardingError
from onecopy.memory import buffers
from onecopy.memory.tensor_files import StoredTensor

__all__ = [
    "adopt",
    "default_device",
    "device_of",
    "expose",
    "has_values",
    "init_sharded",
    "make_buffers",
    "read_later",
    "refuse_while_building",
    "source_of",
    "sources_of",
    "swap",
    "unmade",
    "unmark",
    "write_values",
]

_GET_DEVICE = torch.Tensor.device.__get__
_GET_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# They read memory without an operation.
_READING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_NEW_PARAMETER = nn.Parameter.__new__.__code__


def refuse_while_building() -> None:
    """Raises ShardingError inside init_sharded, where everything is recorded."""
    if _current_recorder() is not None:
        raise ShardingError(
            "shard inside init_sharded: only the construction belongs there. Leave the block, then "
            "make the optimizer and call shard"
        )


@contextmanager
def init_sharded(device: torch.device | str | int | None = None) -> Iterator[None]:
    """Inside, modules are built without the memory of their parameters; `shard` makes the values.

    Constructors run as always, on the device that they ask for (CPU by default), and draw the
    random numbers that they would draw; of their parameters only one at a time has memory. At
    `shard` the first rank makes the values again, unit by unit, and every rank keeps its slices:
    the same values as without `init_sharded`, bit for bit, for at most one unit of memory beside
    the slices. Initialisation that is applied between here and `shard` is replayed there, too.

    Buffers are real tensors. So are parameters whose values come from outside of torch (numpy, a
    file): they are moved into their slices at `shard`.

    Args:
        device: where the model will be trained; None for the current accelerator, or the CPU
            where there is none.

    Raises:
        ShardingError: the default device is meta, where nothing has values.
    """
    if torch.get_default_device().type == "meta":
        raise ShardingError(
            'init_sharded inside torch.device("meta"): leave torch.device("meta") out. '
            "init_sharded builds without memory by itself, and runs the initialisation, which "
            "libraries leave out on the meta device"
        )
    if _current_recorder() is not None:
        yield
        return
    target = default_device() if device is None else torch.empty(0, device=device).device
    # Until shard: one parameter after another is made here, and forgotten.
    buffers.return_freed_blocks()
    current = Recorder(target)
    handle = register_module_parameter_registration_hook(_on_registration)
    try:
        with current:
            yield
    finally:
        handle.remove()
        current.forget()


def default_device() -> torch.device:
    """The current accelerator, or the CPU where there is none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "an accelerator is available"
    return torch.device(kind.type, torch.accelerator.current_device_index())


# Unmade tensors -------------------------------------------------------------------------------


class Unmade(Tensor):
    """A view or a copy of an unmade parameter, unmade itself."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _touch(func, args, kwargs or {})


@cache
def _unmade_class(base: Any) -> type[nn.Parameter]:
    class UnmadeParameter(base):  # type: ignore[misc]
        """A parameter whose values will be made at shard."""

        plain_class = base

        def __new__(cls, data: Tensor, requires_grad: bool = True) -> Any:
            return torch.Tensor._make_subclass(cls, data, requires_grad)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return _touch(func, args, kwargs or {})

    return UnmadeParameter


def _touch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Something is done to an unmade tensor: let it be recorded, and mark what it returns."""
    current = _current_recorder()
    is_building = current is not None and current.target is not None
    if func is torch.Tensor.__reduce_ex__:
        raise ShardingError(
            f"a tensor of shape {tuple(args[0].shape)} of a model built inside init_sharded has no "
            "values to save yet: call onecopy.shard(model) first"
        )
    caller = sys._getframe(2)
    with torch._C.DisableTorchFunctionSubclass():
        if func == _GET_IS_META and (is_building or _is_torch_nn(caller)):
            # Initialisers and load_state_dict would leave a meta tensor alone.
            return False
        if func == _GET_DEVICE and is_building and (cell := cell_of(args[0])) is not None:
            # Constructors make buffers on the device of their weights.
            return cell.device
        if func == _SET_DATA and args[0].is_meta:
            args = (args[0], stand_in(args[1]))
        if func in _READING and args[0].is_meta:
            values = torch.empty(args[0].size(), dtype=args[0].dtype)
            write_values(values, args[0])
            args = (values, *args[1:])
        recording: AbstractContextManager[Any] = nullcontext()
        if current is None:
            recording = Recorder(None)
        with recording:
            result = func(*args, **kwargs)
        for value in result if isinstance(result, list | tuple) else (result,):
            if type(value) is Tensor and value.is_meta and cell_of(value) is not None:
                # nn.Parameter(p) wants a detached p of its own class.
                value.__class__ = type(args[0]) if caller.f_code is _NEW_PARAMETER else Unmade
        return result


def _is_torch_nn(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("torch.nn.")


def _current_recorder() -> Recorder | None:
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Recorder):
            return mode
    return None


def _on_registration(module: nn.Module, name: str, parameter: Any) -> None:
    """A module gets a parameter: from now on it is a meta tensor."""
    if type(parameter) is Unmade:
        parameter.__class__ = _unmade_class(nn.Parameter)  # type: ignore[assignment]
        return
    kind: Any = type(parameter)
    is_plain = (
        kind.__torch_function__ is nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ is nn.Parameter.__torch_dispatch__
    )
    if not is_plain or parameter.is_meta or parameter.layout is not torch.strided:
        return
    cell = cell_of(parameter)
    if cell is None:
        return
    meta = shadow(parameter, cell).requires_grad_(parameter.requires_grad)
    swap(parameter, meta)
    parameter.__class__ = _unmade_class(kind)


def swap(parameter: Tensor, other: Tensor) -> None:
    """Let two tensors exchange what they are; the first stays the same object with its hooks."""
    hooks, late_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, other)
    if hooks is not None:
        parameter._backward_hooks = hooks
    if late_hooks is not None:
        parameter._post_accumulate_grad_hooks = late_hooks


# At shard -------------------------------------------------------------------------------------


def unmade(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model that have no values yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            yield name, tensor


def device_of(model: nn.Module) -> torch.device | None:
    """Where a model with unmade parameters will lie; None where all have values."""
    for _, tensor in unmade(model):
        cell = cell_of(tensor)
        return default_device() if cell is None else cell.target
    return None


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has memory, whatever it says inside init_sharded."""
    with torch._C.DisableTorchFunctionSubclass():
        return not tensor.is_meta


def source_of(tensor: Tensor) -> StoredTensor | None:
    """The tensor in a file from which the values of an unmade one come, if they do."""
    cell = cell_of(tensor) if tensor.is_meta else None
    if cell is None or cell.last is None:
        return None
    source = getattr(cell.last.function, "__self__", None)
    return source if isinstance(source, StoredTensor) else None


def sources_of(model: nn.Module) -> dict[int, StoredTensor]:
    """By id, what unmade parameters are read from."""
    sources = ((id(parameter), source_of(parameter)) for parameter in model.parameters())
    return {key: source for key, source in sources if source is not None}


def read_later(tensor: Tensor, source: StoredTensor) -> None:
    """Let the values of a meta tensor come from a file."""
    cell = cell_of(tensor) or expose(tensor)
    record(cell, source.read, place_of(tensor, cell))


def write_values(view: Tensor, parameter: Tensor) -> None:
    """Write the values of a parameter, made now where it is unmade, into `view`, shaped like it."""
    if not parameter.is_meta:
        view.copy_(parameter.detach())
        return
    cell = cell_of(parameter)
    assert cell is not None, "prepare() has seen to it"
    place = place_of(parameter, cell)
    here = Store(view.untyped_storage(), int(view.storage_offset()) * view.itemsize)
    stores = {}
    if cell.real is not None:
        stores[cell.number] = Store(cell.real)
    elif cell.last is not None:
        is_like = (view.dtype, view.device) == (place.dtype, place.device)
        if is_like and is_whole(parameter, cell) and view.stride() == place.stride:
            # Made where they will lie.
            stores[cell.number] = here
        replay(cell.last, stores, cell.number)
    if stores.get(cell.number) != here:
        view.copy_(place.tensor(stores))


def expose(tensor: Tensor) -> Cell:
    """Let what is done to a meta tensor that torch made be recorded from now on."""
    storage = tensor.untyped_storage()
    cell = Cell(storage.nbytes(), torch.device("cpu"), default_device())
    cell.bind(storage)
    is_parameter = isinstance(tensor, nn.Parameter)
    kind: Any = _unmade_class(type(tensor)) if is_parameter else Unmade
    tensor.__class__ = kind
    return cell


def adopt(parameter: nn.Parameter, view: Tensor) -> None:
    """Let a parameter, which may be unmade, have the memory of `view` from now on."""
    unmark(parameter)
    if not parameter.is_meta:
        point(parameter, view)
        return
    real = nn.Parameter(view.new_empty(0), requires_grad=parameter.requires_grad)
    real.data = view
    swap(parameter, real)


def point(parameter: nn.Parameter, memory: Tensor) -> None:
    """Let a parameter, or the tensor inside it where it is a DTensor, have this memory."""
    if not is_dtensor(parameter):
        parameter.data = memory
        return
    # Its own count of writes, as `.data` has it.
    memory, inside = memory.data, cast(Any, parameter)
    if memory.dtype != parameter.dtype or memory.device != parameter.device:
        # A DTensor's own dtype and device are for ever: it becomes another.
        other: Any = nn.Parameter(like(parameter, memory), requires_grad=parameter.requires_grad)
        inside._spec = other._spec
        swap(parameter, other)
    inside._local_tensor = memory


def unmark(tensor: Tensor) -> None:
    """Give a tensor the class back that it had before it was unmade."""
    kind: Any = getattr(type(tensor), "plain_class", type(tensor))
    if kind is Unmade:
        kind = nn.Parameter if getattr(tensor, "_is_param", False) else Tensor
    tensor.__class__ = kind


def make_buffers(model: nn.Module, device: torch.device) -> None:
    """Give unmade buffers values and let all lie on `device`, and parameters without elements."""
    for parameter in model.parameters():
        if not parameter.numel():
            # No unit may have them.
            adopt(parameter, torch.empty_like(parameter, device=device))
    for buffer in model.buffers():
        if buffer.is_meta:
            values = torch.zeros_like(buffer, device=device)
            write_values(values, buffer)
            unmark(buffer)
            swap(buffer, values)
        elif buffer.device != device:
            buffer.data = buffer.to(device)
