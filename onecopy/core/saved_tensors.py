"""A net under the hooks: watches what autograd saves, and gathers on unpacking where no hook has.

Hooks on outputs cannot see outputs inside opaque objects, or losses on weights. The net sees every
use of a parameter's memory in backward. It is spread while a forward, or the backward that may
follow it, is not yet recorded, and stays once it was needed.

torch applies only the innermost pair of saved-tensors hooks. So where others are in force
(checkpointing, offloading of activations) a net wraps them: it hands each tensor to their pack, and
takes it back from their unpack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from onecopy.core.compiling import not_compiled
from onecopy.core.dtensors import local_of
from onecopy.core.unit import UnitState

if TYPE_CHECKING:
    from onecopy.core.backward import Backward
    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["SavedTensors", "innermost_hooks", "is_only_watched"]


class _Packed(NamedTuple):
    """A saved tensor.

    kept: the tensor, or what the hooks around the net made of it.
    version: to notice modifications in place; None where other hooks keep the tensor.
    unit: the unit whose memory it is a view of.
    """

    kept: Any
    version: int | None
    unit: Unit | None


class SavedTensors:
    """The nets of one model, one for each running module that needs its own."""

    def __init__(self, engine: Engine, backward: Backward) -> None:
        self.is_needed = False
        self._has_graph = False
        self._engine = engine
        self._backward = backward
        self._is_watching = False
        self._open: list[tuple[nn.Module, Any]] = []
        self._units = {unit.flat.untyped_storage()._cdata: unit for unit in engine.units}

    def begin(self) -> None:
        """An outermost forward begins: is it to be watched?"""
        schedule = self._engine.schedule
        is_known = schedule.knows(self._backward.segment_key()) and not schedule.is_recording
        always = self._engine.config.saved_tensors == "always"
        self._is_watching = always or self.is_needed or not is_known
        self._has_graph = torch.is_grad_enabled()

    def need(self) -> None:
        """A unit was used where no hook would have gathered it: watch the forwards to come."""
        self.is_needed = self.is_needed or self._has_graph

    def enter(self, module: nn.Module) -> None:
        """A module runs: spread a net, unless the innermost hooks are one already."""
        outer = innermost_hooks()
        if self._is_watching and not _is_net(outer):
            self._spread(module, outer)

    @property
    def is_watched(self) -> bool:
        """What autograd saves now goes through a net."""
        return _is_net(innermost_hooks())

    def enter_recomputation(self, module: nn.Module) -> None:
        """A module runs within backward. Reentrant checkpointing, which has no hooks of its own,
        runs a backward through what it recomputes here: always watched.
        """
        if innermost_hooks() is None:
            self._spread(module, None)

    def _spread(self, module: nn.Module, outer: Any) -> None:
        net = _Net(self, outer)
        context = torch.autograd.graph.saved_tensors_hooks(net.pack, net.unpack)
        context.__enter__()
        self._open.append((module, context))

    def leave(self, module: nn.Module) -> None:
        """A module has run: take its net away, if it has one."""
        if self._open and self._open[-1][0] is module:
            _, context = self._open.pop()
            context.__exit__(None, None, None)

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit whose memory this is a view of."""
        tensor = local_of(tensor)
        if tensor.layout is not torch.strided:
            return None
        return self._units.get(tensor.untyped_storage()._cdata)

    def unpacked(self, unit: Unit) -> None:
        """Backward is about to use values of a unit."""
        if torch.is_grad_enabled():
            unit.keep_for_graph()
        if unit.state is not UnitState.GATHERED:
            self.is_needed = True
            self._backward.enter()
            self._engine.demand(unit)


def innermost_hooks() -> Any:
    """The pair of hooks on saved tensors that is in force here, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _is_net(hooks: Any) -> bool:
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), _Net)


def is_only_watched(hooks: Any) -> bool:
    """Whether what is saved under a pair of hooks (or None) stays where it is."""
    return hooks is None or (_is_net(hooks) and hooks[0].__self__.outer is None)


class _Net:
    """One pair of hooks, inside the pair that was in force before (or None)."""

    def __init__(self, saved: SavedTensors, outer: tuple[Callable[..., Any], ...] | None) -> None:
        self._saved = saved
        self.outer = outer

    @not_compiled
    def pack(self, tensor: torch.Tensor) -> _Packed:
        unit = self._saved.unit_of(tensor)
        if self.outer is not None:
            return _Packed(self.outer[0](tensor), None, unit)
        # A tensor saved by its own node would keep that node alive for ever.
        kept = tensor.detach() if tensor.grad_fn is not None else tensor
        return _Packed(kept, tensor._version, unit)

    @not_compiled
    def unpack(self, packed: _Packed) -> torch.Tensor:
        kept, version, unit = packed
        tensor: torch.Tensor = kept if self.outer is None else self.outer[1](kept)
        if unit is not None:
            self._saved.unpacked(unit)
        if version is not None and tensor._version != version:
            # With hooks torch does not check this itself.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {list(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version}"
            )
        return tensor
