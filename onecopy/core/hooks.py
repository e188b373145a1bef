"""Module and autograd moments of one sharded model, turned into verbs.

Registered once, at shard: a pair of forward hooks on each module that has units and on the root,
and one hook per trainable parameter. Hooks on outputs, which bring the moments of backward, are
registered in each forward, and only where parameters are released.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from onecopy.core.backward import Call
from onecopy.core.border import Border
from onecopy.core.compiling import not_compiled
from onecopy.core.kept import add_casts
from onecopy.core.saved_tensors import SavedTensors
from onecopy.errors import OneCopyError
from onecopy.handle import NotCopied

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from onecopy.core.backward import Backward
    from onecopy.core.engine import Engine
    from onecopy.core.gradients import Gradients
    from onecopy.core.unit import Unit

__all__ = ["Hooks", "is_hooked"]


class Hooks(NotCopied):
    """The hooks of one model; `remove` takes all of them away again."""

    def __init__(self, engine: Engine, backward: Backward) -> None:
        self._engine = engine
        self._backward = backward
        self._stack: list[nn.Module] = []
        self.saved = SavedTensors(engine, backward)
        engine.touch.connect(backward, self.saved)
        self._border = Border(engine, backward)
        self.handles: list[RemovableHandle] = []
        self._names = {module: name for name, module in engine.model.named_modules()}
        modules = {id(unit.module): unit.module for unit in engine.units}
        modules[id(engine.model)] = engine.model
        for module in modules.values():
            self._add_module(module)
        for unit in engine.units:
            unit.has_hidden_writes = _names_data(unit.module)
        self.handles += add_casts(engine.model, engine.config.precision_policy)
        for gradients in engine.gradients:
            self._add_gradients(gradients)

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _add_module(self, module: nn.Module) -> None:
        units = self._engine.units_of(module)
        before: Callable[..., Any] = partial(self._before_forward, units)
        after: Callable[..., Any] = partial(self._after_forward, units)
        self.handles.append(
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        )
        self.handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _add_gradients(self, gradients: Gradients) -> None:
        for index, parameter in enumerate(gradients.unit.parameters):
            if not gradients.unit.views[index].numel():
                continue
            hook = partial(
                _gradient_arrived, weakref.ref(self._backward), weakref.ref(gradients), index
            )
            with torch._C.DisableTorchFunctionSubclass():
                # A parameter without requires_grad takes no such hook, and may need it later.
                requires_grad = parameter.requires_grad
                parameter.requires_grad_(True)
                self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
                parameter.requires_grad_(requires_grad)

    # Forward ----------------------------------------------------------------------------------

    @not_compiled
    def _before_forward(
        self, units: tuple[Unit, ...], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Gather the module's units, and cast the inputs of the root."""
        engine = self._engine
        if _in_backward():
            self._before_recomputation(units, module)
        else:
            if not self._stack:
                self._begin(module)
            self._stack.append(module)
            if engine.stage.releases and torch.is_grad_enabled():
                self.saved.enter(module)
            for unit in units:
                engine.note_use(unit)
                engine.demand(unit)
            if engine.events.close_looks:
                self._report("enter", units)
        if module is engine.model and self._border.changes_inputs:
            inputs: tuple[Any, Any] = self._border.enter((args, kwargs))
            return inputs
        return None

    def _before_recomputation(self, units: tuple[Unit, ...], module: nn.Module) -> None:
        """A forward within backward (checkpointing)."""
        self._backward.before_recomputation(units)
        if self._engine.stage.releases and torch.is_grad_enabled():
            self.saved.enter_recomputation(module)

    @not_compiled
    def _after_forward(
        self, units: tuple[Unit, ...], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """Hook the outputs for backward and release. Called after an exception too.

        Returns the outputs where they change, else None.
        """
        failed = output is None and sys.exc_info()[0] is not None
        changed: Any = None
        if module is self._engine.model and self._border.changes_outputs and not failed:
            output = changed = self._border.leave(output)
        if _in_backward():
            self.saved.leave(module)
            if self._engine.stage.releases and torch.is_grad_enabled():
                # Reentrant checkpointing runs a backward of its own through what it recomputes.
                self._hook_outputs(units, (args, kwargs), output)
            return changed
        if not self._stack or self._stack[-1] is not module:
            return changed
        self._stack.pop()
        self.saved.leave(module)
        engine = self._engine
        with_graph = torch.is_grad_enabled()
        if engine.events.close_looks:
            self._report("leave", units)
        if with_graph and not failed and self._follows_outputs:
            self._hook_outputs(units, (args, kwargs), output)
        for unit in units:
            unit.look_for_hidden_writes(is_foreseen=not engine.schedule.is_recording)
            # A graph that lives holds views too.
            engine.release(unit, settled=not with_graph and not unit.open_calls)
        if not self._stack:
            if failed:
                self._border.explain(sys.exc_info()[1])
            self._end(failed=failed)
        return changed

    @property
    def _follows_outputs(self) -> bool:
        """Backward has something to do, or to report, where it comes to a module that ends now."""
        engine = self._engine
        return engine.stage.releases or not self._stack or engine.events.close_looks > 0

    def _report(self, kind: Literal["enter", "leave"], units: tuple[Unit, ...]) -> None:
        for unit in units:
            self._engine.events.emit(kind, unit.name)

    def _begin(self, module: nn.Module) -> None:
        engine = self._engine
        self._backward.recover()
        engine.recover()
        kind = "forward" if torch.is_grad_enabled() else "forward without gradients"
        key: Hashable = f"{kind} of {self._names[module] or type(module).__name__}"
        if engine.is_held:
            # It uses no unit, which says nothing of the others.
            key = f"{key} inside full_parameters"
        if torch.is_grad_enabled():
            engine.refuse_strangers()
            self._look_at_trainability()
            engine.owned.suspend()
            engine.forwards.append(key)
        engine.events.phase = "forward"
        engine.events.emit("pass", what="gather" if engine.gathers else "")
        engine.begin_segment(key)
        self.saved.begin()

    def _look_at_trainability(self) -> None:
        new = self._engine.look_at_trainability()
        for gradients in new:
            self._add_gradients(gradients)
        if new:
            self._backward.reduces.forget_order()

    def _end(self, *, failed: bool) -> None:
        # After a lost connection rest fails too; the first error is the one to see.
        with suppress(OneCopyError) if failed else nullcontext():
            self._engine.rest()
        self._engine.schedule.end(failed=failed)
        self._engine.owned.resume()
        self._engine.events.phase = "api"
        if failed and self._engine.forwards:
            self._engine.forwards.pop()

    def _hook_outputs(self, units: tuple[Unit, ...], inputs: Any, output: Any) -> None:
        """Backward enters a module's units when a gradient reaches one of its outputs.

        The hook goes on the node of the output's base: a view that is later modified in place
        would lose its own. Outputs that were inputs belong to another module's backward.
        """
        earlier = {node for tensor in _tensors(inputs) if (node := _node(tensor)) is not None}
        call = Call(units)
        for unit in units:
            unit.open_calls.add(call)
        hook = partial(self._backward.before_call, call)
        for tensor in _tensors(output):
            node = _node(tensor)
            if node is not None and node not in earlier:
                node.register_prehook(hook)


@not_compiled
def _gradient_arrived(
    backward: weakref.ref[Backward],
    gradients: weakref.ref[Gradients],
    index: int,
    parameter: torch.Tensor,
) -> None:
    """The hook on a parameter. Weak: Python's collector does not see what a tensor's hooks hold,
    so a cycle through them would keep a deleted model for ever.
    """
    alive, of_unit = backward(), gradients()
    if alive is not None and of_unit is not None:
        alive.gradient_arrived(of_unit, index, parameter)


def _names_data(module: nn.Module) -> bool:
    """Whether the code of a forward inside says `.data`, through which writes are not counted."""
    forwards = {type(one).forward for one in module.modules()}
    return any("data" in one.__code__.co_names for one in forwards if hasattr(one, "__code__"))


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether a parameter belongs to a sharded model's units already."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, "func", None) is _gradient_arrived for hook in hooks.values())


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _node(tensor: torch.Tensor) -> Any | None:
    base = tensor._base
    return (base if base is not None else tensor).grad_fn


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested dicts, lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
