"""Values for meta tensors that torch itself made, `with torch.device("meta"): model = Big()`.

Nothing was recorded of these. So the modules' own initialisers are run when the model is sharded,
in the order in which constructors end: `reset_parameters` of each module, Hugging Face's
initialisation of each of its models, and at last a model's own `_init_weights`, the habit of many
GPT scripts, if its constructor has called it. They work on unmade parameters (see build.py): what
they do is recorded, and done unit by unit.

How often constructors write a tensor is found by running the initialisers once on the meta device,
where they compute nothing. A tensor with another count has been initialised, copied or moved to the
meta device by somebody else, which left no trace but this count: that is refused, rather than lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.core import build
from onecopy.core.cells import Cell, cell_of, check_constants
from onecopy.core.recorder import Recorder
from onecopy.errors import ShardingError

__all__ = ["copy_count", "prepare"]


@dataclass(slots=True, eq=False)
class _Bare:
    """A meta tensor without a record.

    written: how often it has been written since it was made.
    resets: how often resets write it. has_reset: its module has a reset.
    inits: how often the model's `_init_weights` writes it.
    """

    name: str
    module: nn.Module
    tensor: Tensor
    original: Tensor
    written: int
    resets: int = 0
    inits: int = 0
    has_reset: bool = False

    @property
    def cell(self) -> Cell:
        """What is recorded of it."""
        cell = cell_of(self.tensor)
        assert cell is not None, "it was exposed"
        return cell


def prepare(model: nn.Module) -> None:
    """See to it that the values of every meta tensor of a model can be made.

    Raises:
        ShardingError: names one whose module has no initialiser, or which was changed in ways
            that cannot be told any more; or the model is still being built.
    """
    build.refuse_while_building()
    for _, tensor in build.unmade(model):
        # On all ranks, before the first one makes values and the others wait for them.
        if (cell := cell_of(tensor)) is not None:
            check_constants(cell)
    bare: dict[int, _Bare] = {}
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_meta or cell_of(tensor) or id(tensor) in bare:
                continue
            bare[id(tensor)] = _put_aside(f"{path}.{key}" if path else key, module, tensor)
    if not bare:
        return
    try:
        was_called = _initialise(model, bare)
        for one in bare.values():
            _check(one, was_called)
    except BaseException:
        for one in bare.values():
            build.unmark(one.tensor)
            build.swap(one.tensor, one.original)
        raise


def copy_count(tensor: Tensor, original: Tensor) -> None:
    """A meta tensor takes the place of another: let it have been written as often."""
    if cell_of(original) is None:
        with torch.no_grad():
            for _ in range(original._version - tensor._version):
                tensor.zero_()


def _put_aside(name: str, module: nn.Module, tensor: Tensor) -> _Bare:
    """The tensor becomes a new one, and can become what it was again."""
    original = torch.empty_like(tensor).requires_grad_(tensor.requires_grad)
    written = tensor._version
    build.swap(tensor, original)
    return _Bare(name, module, tensor, original, written)


def _initialise(model: nn.Module, bare: dict[int, _Bare]) -> bool:
    """Run the model's own initialisers for these tensors, as its constructors would have done.

    Returns whether these have called a model's `_init_weights`.
    """
    affected = [
        module
        for module in _children_first(model)
        if any(id(tensor) in bare for tensor in (*module.parameters(), *module.buffers()))
    ]
    with torch.no_grad(), _others_aside(model, bare):
        was_called = _count_writes(model, affected, bare)
        recorder = Recorder(build.default_device())
        for one in bare.values():
            build.expose(one.tensor)
        with recorder:
            # Hugging Face initialises before it ties, and not at all on the meta device.
            with _ties_cut(model, bare):
                for module in affected:
                    _reset(module)
                    if hasattr(module, "initialize_weights"):
                        module.initialize_weights()  # type: ignore[operator]
            if was_called:
                _apply_init_weights(model)
        recorder.forget()
    return was_called


def _count_writes(model: nn.Module, affected: list[nn.Module], bare: dict[int, _Bare]) -> bool:
    """Note how often initialisers write each tensor; says if constructors call `_init_weights`."""
    with torch.random.fork_rng(devices=[]), _ties_cut(model, bare):
        for module in affected:
            if _reset(module):
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if id(tensor) in bare:
                        bare[id(tensor)].has_reset = True
        for one in bare.values():
            one.resets = one.tensor._version
    with torch.random.fork_rng(devices=[]):
        _apply_init_weights(model)
    for one in bare.values():
        one.inits = one.tensor._version - one.resets
    return any(
        one.resets and one.inits and one.written == one.resets + one.inits for one in bare.values()
    )


def _reset(module: nn.Module) -> bool:
    methods = [name for name in ("reset_parameters", "_reset_parameters") if hasattr(module, name)]
    for name in methods:
        getattr(module, name)()
    return bool(methods)


def _apply_init_weights(model: nn.Module) -> None:
    for owner in _initialising_modules(model):
        owner.apply(owner._init_weights)  # type: ignore[arg-type]


def _check(one: _Bare, was_called: bool) -> None:
    """Refuse a tensor that nothing has initialised, or somebody besides its constructor."""
    expected = one.resets + (one.inits if was_called else 0)
    # Constructors of modules without a reset write as often as they like.
    if one.has_reset and one.written != expected:
        raise ShardingError(
            f"{one.name} was written {one.written} times on the meta device, and the constructor "
            f"of its module, as far as can be told, explains {expected}: it has been initialised, "
            "copied or moved there in a way that leaves no trace on the meta device, and would get "
            "other values. Do all of that inside onecopy.init_sharded(), without "
            'torch.device("meta"): there it is recorded. Or initialise after shard, inside '
            "onecopy.full_parameters(model)"
        )
    if not one.cell.is_known and one.tensor.numel():
        raise ShardingError(
            f"{one.name} is on the meta device, and nothing says which values it should have: its "
            f"module, of class {type(one.module).__name__}, has no reset_parameters(), and the "
            "model no _init_weights(module) that covers it. Build the model inside "
            'onecopy.init_sharded(), without torch.device("meta"): it does what the constructor '
            "does. Or read the values with onecopy.load_pretrained before shard"
        )


@contextmanager
def _others_aside(model: nn.Module, bare: Collection[int]) -> Iterator[None]:
    """Put throw-away tensors in the places of all that have values: initialisers change those."""

    def throw_away(tensor: Tensor) -> Tensor:
        other: Any = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            build.expose(other)
        # Hugging Face's initialisers leave alone what is marked like this.
        other._is_hf_initialized = True
        return other  # type: ignore[no-any-return]

    with _replaced(
        (held, key, throw_away(tensor))
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and id(tensor) not in bare
    ):
        yield


@contextmanager
def _ties_cut(model: nn.Module, bare: Collection[int]) -> Iterator[None]:
    """Let only the first module that holds a tied parameter initialise it.

    The others draw random numbers of their own, as they did before they were tied.
    """
    seen: set[int] = set()
    changes = []
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in seen and id(parameter) in bare and parameter is not None:
                other = nn.Parameter(torch.empty_like(parameter, device="meta"))
                build.expose(other)
                changes.append((module._parameters, key, other))
            seen.add(id(parameter))
    with _replaced(changes):
        yield


@contextmanager
def _replaced(changes: Any) -> Iterator[None]:
    """Exchange tensors in the dictionaries of modules for the time of the block."""
    before = [(held, key, held[key], other) for held, key, other in changes]
    for held, key, _, other in before:
        held[key] = other
    try:
        yield
    finally:
        for held, key, tensor, _ in before:
            held[key] = tensor


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Every module after its children, as constructors end."""
    found: dict[nn.Module, None] = {}

    def visit(one: nn.Module) -> None:
        for child in one.children():
            if child not in found:
                visit(child)
        found[one] = None

    visit(module)
    return iter(found)


def _initialising_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules, not Hugging Face's, whose method initialises the modules inside."""
    initialise = getattr(module, "_init_weights", None)
    if hasattr(module, "initialize_weights"):
        return
    if callable(initialise) and len(inspect.signature(initialise).parameters) == 1:
        yield module
        return
    for child in module.children():
        yield from _initialising_modules(child)
