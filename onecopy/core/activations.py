"""Activation checkpointing with a place: modules keep only their inputs until backward.

What is inside of a checkpointed module is computed again in backward, from its inputs. The module
stays what it is, with its class, name and parameters: only its `forward` is another one.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onecopy import handle
from onecopy.core.compiling import not_compiled
from onecopy.core.keeper import Keeper
from onecopy.core.partition import chosen_modules
from onecopy.core.precision import map_tensors
from onecopy.errors import ConfigError, ShardingError
from onecopy.policies import Activations

if TYPE_CHECKING:
    from inspect import Signature

__all__ = ["checkpoint_activations"]

# Stands where a tensor was among arguments.
_HOLE = torch.empty(0)


def checkpoint_activations(
    model: nn.Module, policy: Activations | str | None = None, **settings: Any
) -> Callable[[], None]:
    """Let modules of a model keep only their inputs until backward, which computes the rest again.

    Before or after `shard`. Values and gradients are the same to the last bit: dropout draws the
    same numbers again, autocast is as it was. Without gradients (`torch.no_grad`) nothing changes.
    The recomputation of a unit shares the gather of its backward.

    Called again on the same model it takes the place of the call before: what is checkpointed from
    then on is what the last call has chosen.

    Args:
        model: a plain model, or the one that was given to `shard`.
        policy: which modules, and where their inputs are kept; see `onecopy.policies.Activations`.
            "device" (the default), "host" and "nvme:/folder" are short forms.
        **settings: fields of `Activations`, in the place of a policy: place="host", every=2, ...

    Returns:
        a function that makes the modules plain again.

    Raises:
        ConfigError: a setting is unknown or does not fit, or the model has no such modules.

    Source: ZeRO (Rajbhandari et al. 2020), section 6.1.
    """
    if not isinstance(model, nn.Module):
        raise ShardingError(
            f"checkpoint_activations: the model is a {type(model).__name__}, not a torch.nn.Module"
        )
    policy, model = _policy_of(policy, settings), handle.inner(model)
    chosen = _chosen(model, policy)
    keeper = Keeper(model, policy)
    _undo(model.modules(), lambda _: True)
    for number, (name, module) in enumerate(chosen):
        vars(module)["forward"] = _Forward(
            module, vars(module).get("forward"), keeper, name, number
        )
    reference = weakref.ref(model)

    def undo() -> None:
        """Make the modules plain again, as far as no later call has chosen them."""
        alive = reference()
        if alive is not None:
            _undo(alive.modules(), lambda one: one.keeper is keeper)

    return undo


def _policy_of(policy: Activations | str | None, settings: Mapping[str, Any]) -> Activations:
    """The policy, of an object or a short form, or of its fields."""
    if policy is not None and settings:
        raise ConfigError(
            f"checkpoint_activations: give a policy, or its settings ({', '.join(settings)}), not "
            "both"
        )
    if isinstance(policy, str):
        place, _, path = policy.partition(":")
        settings = {"place": place, "path": path or None}
    elif policy is not None:
        if not isinstance(policy, Activations):
            raise ConfigError(
                f"checkpoint_activations: the policy is {policy!r}; give an Activations, "
                '"device", "host", or "nvme:/folder"'
            )
        return policy
    made = Activations(**settings)
    return made


def _chosen(model: nn.Module, policy: Activations) -> list[tuple[str, nn.Module]]:
    """The modules to checkpoint, in the order of the model."""
    path = policy.path
    if path is not None and not (os.path.isdir(path) and os.access(path, os.W_OK)):
        raise ConfigError(
            f"activations.path={str(path)!r} is no folder that can be written: make it first, on "
            "every node"
        )
    wanted = policy.modules
    if callable(wanted):
        named = [(name, one) for name, one in model.named_modules() if name and wanted(name, one)]
    else:
        named = chosen_modules(model, "activations.modules", wanted)
    if not named:
        raise ConfigError(
            f"this {type(model).__name__} has no module to checkpoint: "
            + (
                "the function in modules= has chosen none"
                if callable(wanted)
                else "no container of alike blocks was found. Say which modules, "
                'modules=("layers.*",), or modules=lambda name, module: isinstance(module, Block)'
            )
        )
    ids = {id(module) for _, module in named}
    inside = {id(one) for _, module in named for one in module.modules() if one is not module}
    order = [(name, one) for name, one in model.named_modules() if id(one) in ids - inside]
    return order[:: policy.every]


def _undo(modules: Any, which: Callable[[_Forward], bool]) -> None:
    for module in modules:
        found = vars(module).get("forward")
        if isinstance(found, _Forward) and which(found):
            if found.inner is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = found.inner


class _Forward:
    """What is called in the place of the forward of one module.

    Attributes:
        inner: the forward that somebody else had put on the module; None for that of its class.
        keeper: see keeper.py.
    """

    def __init__(
        self,
        module: nn.Module,
        inner: Callable[..., Any] | None,
        keeper: Keeper,
        name: str,
        number: int,
    ) -> None:
        self.inner, self.keeper = inner, keeper
        self._module = weakref.ref(module)
        self._name, self._number = name, number

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        # A copied module computes with itself.
        module = memo.get(id(self._alive), self._alive)
        inner, keeper = copy.deepcopy(self.inner, memo), copy.deepcopy(self.keeper, memo)
        return _Forward(module, inner, keeper, self._name, self._number)

    def __reduce__(self) -> Any:
        return _Forward, (self._alive, self.inner, self.keeper, self._name, self._number)

    @property
    def __signature__(self) -> Signature:
        return inspect.signature(self._plain)

    @property
    def _alive(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the module {self._name} of this forward no longer exists")
        return module

    @property
    def _plain(self) -> Callable[..., Any]:
        """The forward as it was."""
        if self.inner is not None:
            return self.inner
        module = self._alive
        found: Callable[..., Any] = type(module).forward.__get__(module)
        return found

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        arguments = _Arguments(*self._without_caches(args, kwargs))
        # What is called again later must not hold them.
        states = arguments.take_states()
        given = states or arguments.others
        with self.keeper.keeping(self._name, self._number, states):
            return checkpoint(_Call(self._alive, plain, arguments), *given, use_reentrant=False)

    def _without_caches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Caches of keys and values, which transformers fills in training too, would get them
        twice.
        """
        found = [one for one in (*args, *kwargs.values()) if _is_cache(one)]
        if not found:
            return args, kwargs
        if not self.keeper.has_warned:
            self.keeper.has_warned = True
            warnings.warn(
                f"{self._name} gets a {type(found[0]).__name__}, which recomputation would fill "
                "twice: it goes without while gradients are computed. Say "
                "model.config.use_cache = False",
                stacklevel=2,
            )
        args = tuple(None if _is_cache(one) else one for one in args)
        kwargs = {name: None if _is_cache(one) else one for name, one in kwargs.items()}
        return args, {**kwargs, "use_cache": False} if "use_cache" in kwargs else kwargs


def _is_cache(value: object) -> bool:
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


class _Call:
    """One call of a module's forward, which is made in forward and again in backward."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any], arguments: _Arguments) -> None:
        self._module, self._plain, self._arguments = module, plain, arguments
        self._is_again = False

    def __call__(self, *states: torch.Tensor) -> Any:
        args, kwargs = self._arguments.args(states), self._arguments.kwargs(states)
        if not self._is_again:
            self._is_again = True
            return self._plain(*args, **kwargs)
        with _same_statistics(self._module):
            return self._plain(*args, **kwargs)


@contextmanager
def _same_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, batch norms count a batch that they have counted before: in copies."""
    counting = [one for one in module.modules() if getattr(one, "track_running_stats", False)]
    before = [one._buffers for one in counting]
    for one in counting:
        one._buffers = {
            name: None if buffer is None else buffer.clone()
            for name, buffer in one._buffers.items()
        }
    try:
        yield
    finally:
        for one, buffers in zip(counting, before, strict=True):
            one._buffers = buffers


class _Arguments:
    """What a module was called with: hidden states apart from all the rest.

    Hidden states are tensors that need a gradient and are no parameters, each of them once.

    Attributes:
        others: all other tensors. torch learns from what it is given on which device random numbers
            are drawn, so without hidden states it is given these.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.others: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        places: dict[int, int] = {}
        self._args = [self._without_states(one, places) for one in args]
        self._kwargs = {name: self._without_states(one, places) for name, one in kwargs.items()}

    def take_states(self) -> list[torch.Tensor]:
        """The hidden states; nothing here refers to them any more."""
        states, self._states = self._states, []
        return states

    def args(self, states: Sequence[torch.Tensor]) -> list[Any]:
        """Arguments by place, with these hidden states."""
        return [_filled(one, states) for one in self._args]

    def kwargs(self, states: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Arguments by name, likewise."""
        return {name: _filled(one, states) for name, one in self._kwargs.items()}

    def _without_states(self, value: Any, places: dict[int, int]) -> _Holed:
        """What has no hidden states stays the same object."""
        found: list[int | None] = []

        def hole(one: torch.Tensor) -> torch.Tensor:
            if not one.requires_grad or isinstance(one, nn.Parameter):
                found.append(None)
                self.others.append(one)
                return one
            number = places.setdefault(id(one), len(self._states))
            if number == len(self._states):
                self._states.append(one)
            found.append(number)
            return _HOLE

        holed = map_tensors(value, hole)
        has_states = any(number is not None for number in found)
        return _Holed(holed, found) if has_states else _Holed(value, None)


class _Holed(NamedTuple):
    """An argument, with holes where hidden states were; for each tensor in it which one it was."""

    value: Any
    numbers: list[int | None] | None


def _filled(holed: _Holed, states: Sequence[torch.Tensor]) -> Any:
    if holed.numbers is None:
        return holed.value
    left = iter(holed.numbers)

    def fill(one: torch.Tensor) -> torch.Tensor:
        number = next(left)
        return one if number is None else states[number]

    return map_tensors(holed.value, fill)
