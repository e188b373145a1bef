"""A plain torch.optim optimizer on owned slices.

The optimizer stays the user's object. Its param_groups keep their identity, order and
hyper-parameters; only their `params` become the *pieces* that this rank owns: views of the master
slices, 1-D or, for optimizers that look at whole parameters, shaped like the parameters. Step hooks
do the rest: gradients are complete, clipped and in place before the step; changed slices are sent
around after it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onecopy.core.compiling import not_compiled
from onecopy.core.delayed import DelayedUpdate
from onecopy.core.grad_scaler import LEAVES_TO_OPTIMIZER, agree_by_hand, is_stepping
from onecopy.core.loss_scale import agree_on_overflow
from onecopy.core.optimizer_modes import show_modes, unshow_modes
from onecopy.core.optimizer_state import register_state_hooks, slice_state
from onecopy.core.speculative import SpeculativeStep
from onecopy.core.step_in_backward import clip_factor, norms_by_limit, run_twice, total_norm
from onecopy.core.unit_step import UnitSteps
from onecopy.core.update_rules import check_optimizer, needs_whole_parameters
from onecopy.errors import ShardingError
from onecopy.policies import Offload

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from onecopy.core.backward import Backward
    from onecopy.core.engine import Engine
    from onecopy.core.gradients import Gradients
    from onecopy.core.unit import Unit

__all__ = [
    "Binding",
    "clip_gradients",
    "refuse_strangers",
    "refuse_unattached",
]


def _place(number: int, index: int, parameter: torch.Tensor) -> str:
    return f"number {index} of group {number} (shape {tuple(parameter.shape)})"


def refuse_strangers(
    groups: Iterable[dict[str, Any]], is_known: Callable[[torch.Tensor], bool], first_group: int = 0
) -> None:
    """Check that param_groups hold parameters of the given models only.

    Raises:
        ShardingError: some belong to none; names their places in the optimizer.
    """
    strangers = [
        _place(number, index, parameter)
        for number, group in enumerate(groups, first_group)
        for index, parameter in enumerate(group["params"])
        if parameter.numel() and not is_known(parameter)
    ]
    if strangers:
        raise ShardingError(
            f"the optimizer holds {len(strangers)} parameters that belong to none of the given "
            f"models, for example {strangers[0]}: their gradients would never be averaged over "
            "the ranks. Make the optimizer from model.parameters() of the models you pass, after "
            "whatever replaces parameters (parallelize_module does), or pass all its models, "
            "shard([model_a, model_b], optimizer)"
        )


class Binding:
    """One optimizer on the owned slices of one or several models."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engines: Sequence[tuple[Engine, Backward]],
    ) -> None:
        self.optimizer = check_optimizer(optimizer)
        self.engines = engines
        self.units: dict[Unit, Engine] = {}
        # For each group the user's parameters in their order, pieces or not, and their names where
        # the optimizer was made from named parameters.
        self.parameters: list[list[nn.Parameter]] = []
        self.names: list[list[str] | None] = []
        self._handles: list[RemovableHandle] = register_state_hooks(self)
        # The models whose last backward has not made this step already.
        self._behind: list[Engine] = []
        self.unit_steps = UnitSteps(optimizer)
        # Steps that were made, in this process and before the checkpoint that it has loaded.
        self.num_steps = 0
        self.adopt_new_groups()
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        for _, backward in engines:
            if backward.stepper is not None:
                backward.stepper.bindings.append(self)
        # Gradients that no_sync keeps on this rank are no piece's: the optimizer cannot see them.
        vars(optimizer)["zero_grad"] = partial(_zero_grad, weakref.ref(self))
        show_modes(self)
        # The last step has left everything as it was: gradients had overflowed.
        self.is_skipped = False
        self._began = 0.0
        self._delayed = self._make_delayed()
        for engine, _ in engines:
            engine.updates.append(self.publish)
        self._ahead = self._make_speculative()
        self._decides_itself = vars(optimizer).get(LEAVES_TO_OPTIMIZER)
        setattr(optimizer, LEAVES_TO_OPTIMIZER, True)

    def remove(self) -> None:
        """Take the step hooks away; nothing is under way."""
        for engine, _ in self.engines:
            engine.updates.remove(self.publish)
            if self._ahead is not None and self._ahead.arrived in engine.arrivals:
                engine.arrivals.remove(self._ahead.arrived)
        if self._ahead is not None:
            self._ahead.close()
        if self._delayed is not None:
            self._delayed.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for _, backward in self.engines:
            if backward.stepper is not None:
                backward.stepper.bindings.remove(self)
        vars(self.optimizer).pop("zero_grad", None)
        unshow_modes(self)
        if self._decides_itself is None:
            delattr(self.optimizer, LEAVES_TO_OPTIMIZER)
        else:
            setattr(self.optimizer, LEAVES_TO_OPTIMIZER, self._decides_itself)

    # Pieces -----------------------------------------------------------------------------------

    def _find(self, parameter: torch.Tensor) -> tuple[Engine, Unit, int] | None:
        for engine, _ in self.engines:
            found = engine.find(parameter)
            if found is not None:
                return (engine, *found)
        return None

    def _check_parameters(self, first_group: int) -> None:
        """Refuse strangers, and parameters that are here already: torch only compares pieces."""
        known = {id(one) for group in self.parameters for one in group}
        new_groups = self.optimizer.param_groups[first_group:]
        for number, group in enumerate(new_groups, first_group):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in known:
                    raise ShardingError(
                        f"parameter {_place(number, index, parameter)} is in another group of the "
                        "optimizer already and would be stepped twice: leave it out of the group "
                        "that add_param_group is given"
                    )
        refuse_strangers(new_groups, lambda one: self._find(one) is not None, first_group)
        if needs_whole_parameters(self.optimizer):
            for group in new_groups:
                self._refuse_cut(group["params"])

    def _refuse_cut(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse parameters that slice borders may cut, frozen ones too: they can be unfrozen."""
        for parameter in parameters:
            found = self._find(parameter)
            if found is None:
                continue
            _, unit, number = found
            if parameter.numel() and not unit.layout.is_whole:
                raise ShardingError(
                    f"{type(self.optimizer).__name__} needs whole parameters, but the ranks own "
                    f"pieces of {unit.names[number]}, cut anywhere: pass the optimizer to the call "
                    "of shard that partitions the model, or say whole_parameters=True there if "
                    "the optimizer is made later"
                )

    def _adopt_group(self, group: dict[str, Any]) -> None:
        """Put this rank's pieces in the place of a group's parameters, states included."""
        state = self.optimizer.state
        parameters, names = group["params"], group.get("param_names")
        pieces, kept_names = [], []
        for index, parameter in enumerate(parameters):
            found = self._find(parameter)
            old = state.pop(parameter, None)
            if found is None:
                continue
            engine, unit, number = found
            self.units[unit] = engine
            piece = unit.slice.pieces.get(number)
            if piece is None:
                continue
            self.unit_steps.add(unit, len(self.parameters), piece)
            pieces.append(piece)
            if names is not None:
                kept_names.append(names[index])
            if old:
                state[piece] = slice_state(old, unit, number)
        self.parameters.append(list(parameters))
        group["params"] = pieces
        self.names.append(names)
        if names is not None:
            group["param_names"] = kept_names

    def find_piece(self, parameter: torch.Tensor) -> tuple[Unit, int] | None:
        """The unit of a parameter and its number there, if this rank owns a part of it."""
        found = self._find(parameter)
        if found is None or found[2] not in found[1].slice.pieces:
            return None
        return found[1:]

    def adopt_new_groups(self) -> None:
        """Take over groups that add_param_group has brought since."""
        first = len(self.parameters)
        if first == len(self.optimizer.param_groups):
            return
        self._check_parameters(first)
        for group in self.optimizer.param_groups[first:]:
            self._adopt_group(group)
        self.unit_steps.settle_states()

    # Step -------------------------------------------------------------------------------------

    @not_compiled
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make the gradients ready; with a closure, after the closure's backward."""
        # After a step that raised they may still be hidden.
        self.unit_steps.show()
        self.adopt_new_groups()
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        passes = [
            (engine, backward.stepper)
            for engine, backward in self.engines
            if backward.stepper is not None and backward.stepper.needs_passes
        ]
        if self._ahead is not None:
            self._ahead.is_paused = True
            if closure is not None:
                self._ahead.drop()
        if passes and closure is None:
            raise ShardingError(
                'optimizer.step() without a closure: step_in_backward="two-pass" runs forward and '
                "backward twice. Put them into a function and call optimizer.step(function)"
            )
        if closure is None:
            self._make_ready()
            return None

        def closure_then_ready() -> Any:
            loss = run_twice(passes, self._flush, closure) if passes else closure()
            self._make_ready()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_ready}
        return (args[0], closure_then_ready, *args[2:]), kwargs

    def _make_ready(self) -> None:
        self._began = time.perf_counter()
        self.is_skipped = were_local = False
        for engine, backward in self.engines:
            engine.recover()
            if engine.is_held:
                raise ShardingError(
                    "optimizer.step() inside full_parameters: the step would change masters whose "
                    "gathered values are written back afterwards. Step outside of it"
                )
            if engine.keeps:
                raise ShardingError(
                    "optimizer.step() inside keep_gathered or micro_batches: the values that are "
                    "kept gathered would be those of before. Step after the block"
                )
            engine.check_parameters()
            were_local |= backward.flush()
            engine.owned.sum_ties()
            backward.begin_step(is_scaled_by_hand=is_stepping(self.optimizer))
            # Units gathered on touch would keep the values from before the step.
            engine.rest()
            engine.events.phase = "step"
        self._behind = [
            engine
            for engine, backward in self.engines
            if backward.stepper is None or not backward.stepper.finish(self)
        ]
        if is_stepping(self.optimizer) and len(self._behind) < len(self.engines):
            raise ShardingError(
                "a GradScaler with step_in_backward: the backward has updated the parameters with "
                "gradients that were still scaled. Load a checkpoint, and leave one of both away: "
                'precision="bf16" needs no scaling'
            )
        if self._have_overflowed(were_local=were_local):
            self._skip()
            return
        self._clip()
        for engine in self._behind:
            engine.finish_failed_step = self._make_visible
        if self._delayed is not None and self.num_steps >= self._delayed.first_steps:
            self.publish()
            self._behind = []
            pieces = self.unit_steps.with_gradients()
            for engine, _ in self.engines:
                engine.owned.hand_over(self.units)
            self._delayed.start(pieces)
        elif any(unit.steps_alone for unit in self.units):
            (self._ahead or self.unit_steps).run(self.units)
            self.unit_steps.hide(self.units)

    def _make_speculative(self) -> SpeculativeStep | None:
        engines = [
            engine
            for engine, _ in self.engines
            if isinstance(engine.config.offload, Offload) and engine.config.offload.speculative_step
        ]
        if not engines:
            return None
        ahead = SpeculativeStep(self.optimizer, self.unit_steps, self.units)
        for engine in engines:
            engine.arrivals.append(ahead.arrived)
        return ahead

    def _make_delayed(self) -> DelayedUpdate | None:
        offloads = [engine.config.offload for engine, _ in self.engines]
        delayed = [one for one in offloads if isinstance(one, Offload) and one.is_delayed]
        if not delayed:
            return None
        if len({repr(one) for one in offloads}) > 1:
            raise ShardingError(
                f"the {type(self.optimizer).__name__} updates several models, of which some have "
                "offload with delayed_update and others not: give all of them the same"
            )
        return DelayedUpdate(self.optimizer, delayed[0].delayed_update)

    def publish(self) -> None:
        """Bring an update that is under way into the parameters; all ranks together."""
        if self._ahead is not None:
            # Between backward and step: what is looked at, or saved, are the states of before.
            self._ahead.drop()
        if self._delayed is None or not self._delayed.is_under_way:
            return
        for engine, _ in self.engines:
            # What is gathered has the values of before, and would be taken for newer ones.
            engine.check_parameters()
            engine.rest()
        self._delayed.finish()
        self._show_values(engine for engine, _ in self.engines)

    def join_update(self) -> None:
        """Wait until an update that is under way has been computed; its states are there then."""
        if self._delayed is not None:
            self._delayed.join()
        if self._ahead is not None:
            # States are looked at, or replaced.
            self._ahead.drop()

    def _have_overflowed(self, *, were_local: bool) -> bool:
        """Whether gradients are too large for this step, on any rank."""
        parts = self._parts()
        if is_stepping(self.optimizer):
            return agree_by_hand(self.optimizer, parts, were_local=were_local)
        return agree_on_overflow(parts)

    def _flush(self) -> None:
        for _, backward in self.engines:
            backward.flush()

    def _clip(self) -> None:
        """Clip by the common norm of the models that have the same limit."""
        with torch.no_grad():
            norms = norms_by_limit(engine for engine, _ in self.engines)
            for engine, backward in self.engines:
                limit = engine.config.max_grad_norm
                if limit is None:
                    continue
                if engine in self._behind:
                    engine.owned.scale(clip_factor(norms[limit], limit))
                if backward.stepper is not None:
                    backward.stepper.note_norm(norms[limit])

    def _parts(self) -> list[tuple[Engine, list[Gradients]]]:
        """The gradients that this optimizer steps, by model."""
        return [
            (
                engine,
                [
                    unit.gradients
                    for unit, owner in self.units.items()
                    if owner is engine and unit.gradients is not None
                ],
            )
            for engine, _ in self.engines
        ]

    def _skip(self) -> None:
        """Nothing to step with: the optimizer leaves values and states alone."""
        self.is_skipped = True
        if self._ahead is not None:
            self._ahead.skip()
        for _, of_model in self._parts():
            for gradients in of_model:
                gradients.clear()

    @not_compiled
    def _after_step(self, *_: Any) -> None:
        """Changed slices become visible: at once where they stay, by a refresh where not."""
        self.unit_steps.show()
        if self._ahead is not None:
            self._ahead.is_paused = False
        if not self.is_skipped:
            self.num_steps += 1
            self._make_visible()
        seconds, name = time.perf_counter() - self._began, type(self.optimizer).__name__
        owners = set(self.units.values())
        for engine, _backward in self.engines:
            engine.events.num_steps = max(engine.events.num_steps, self.num_steps)
            if not self.is_skipped:
                engine.events.emit("step", seconds=seconds, what=name)
            elif engine in owners:
                engine.events.emit("skip", seconds=seconds, what=name)
            engine.events.phase = "api"

    def _make_visible(self) -> None:
        """Send new values around; also after a step that raised and may have changed some."""
        self.unit_steps.show()
        for engine in self._behind:
            engine.finish_failed_step = None
        self._show_values(self._behind)

    def show_values(self) -> None:
        """Let the models compute with what the pieces are now; all ranks together."""
        self._show_values([engine for engine, _ in self.engines])

    def _show_values(self, engines: Iterable[Engine]) -> None:
        with torch.no_grad():
            for engine in engines:
                units = [unit for unit, owner in self.units.items() if owner is engine]
                for unit in units:
                    if not unit.steps_alone:
                        unit.slice.take_back()
                    unit.note_update()
                engine.refresh(units)


@not_compiled
def _zero_grad(reference: weakref.ref[Binding], set_to_none: bool = True) -> None:
    """`optimizer.zero_grad()`: the pieces' gradients, and what this rank keeps beside them."""
    binding = reference()
    if binding is None:
        return
    if binding._ahead is not None:
        binding._ahead.drop()
    for engine, backward in binding.engines:
        engine.owned.clear(binding.units, set_to_none=set_to_none)
        backward.give_up()
    type(binding.optimizer).zero_grad(binding.optimizer, set_to_none)
    for unit in binding.units:
        if unit.gradients is None:
            continue
        if unit.gradients.has_local:
            unit.gradients.clear(keep_means=True)
        unit.gradients.drop_sum()
        unit.gradients.mean.note_removal()
        unit.gradients.forget_overflow()


def clip_gradients(
    engines: Iterable[Engine], max_norm: float | None, norm_type: float = 2.0
) -> torch.Tensor:
    """The norm of all gradients of these models together, and gradients scaled down to max_norm.

    Args:
        max_norm: no scaling where None.
        norm_type: p of the p-norm; inf for the largest magnitude.

    Returns:
        0-d tensor, the same on all ranks, the norm before clipping.
    """
    engines = list(engines)
    with torch.no_grad():
        total = total_norm(engines, norm_type)
        if max_norm is not None:
            factor = clip_factor(total, max_norm)
            for engine in engines:
                engine.owned.scale(factor)
    return total


def refuse_unattached(
    reference: weakref.ref[Engine], is_attached: Callable[[torch.optim.Optimizer], bool]
) -> RemovableHandle:
    """Watch all optimizers for steps on whole parameters of a sharded model.

    Such a step would find no gradients and leave the model as it is, silently.
    """

    @not_compiled
    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        engine = reference()
        if engine is None or is_attached(optimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found = engine.find(parameter)
                if found is not None and found[0].parameters[found[1]] is parameter:
                    raise ShardingError(
                        f"this {type(optimizer).__name__} was never attached: it holds whole "
                        f"parameters of a sharded model ({found[0].names[found[1]]}), whose "
                        "gradients are with their owners. Call onecopy.shard(model, optimizer) "
                        "once, with this optimizer; on a sharded model it only attaches"
                    )

    return register_optimizer_step_pre_hook(check)
