"""The optimizer within backward: a unit is updated as soon as its gradients are reduced.

So no owned gradient outlives the backward, and at most one unit's exists at a time. A unit is
*taken* (its pieces updated, its gradients dropped) once its mean is here and nothing in this
backward can bring it another gradient or read its values: every parameter of it has its gradient,
and autograd accumulates once for each parameter. Other units are taken when the backward ends.

Reentrant checkpointing is a backward within the backward, and weights that several of its segments
share get several gradients. Which ones is learnt from the first such backward, which takes all
units at its end.

Autograd is told that values have changed. What would read them all the same (a retained graph, a
detached alias) raises, as it does after any change in place.

Clipping needs the norm of the whole gradient before the first update. It is that of the step
before; in the first step gradients are kept, and clipped by their own norm. Exact at the price of
a second forward and backward is `run_twice`: a first pass that only measures.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.unit import UnitState
from onecopy.errors import ConfigError, ShardingError

if TYPE_CHECKING:
    from onecopy.config import Config
    from onecopy.core.engine import Engine
    from onecopy.core.gradients import Gradients
    from onecopy.core.optimizer import Binding
    from onecopy.core.unit import Unit, UnitSpec

__all__ = [
    "StepInBackward",
    "check_step_in_backward",
    "clip_factor",
    "norms_by_limit",
    "run_twice",
    "total_norm",
]

TWO_PASS = "two-pass"


def check_step_in_backward(config: Config, specs: Iterable[UnitSpec]) -> None:
    """Refuse loss scaling, which must see all gradients before it lets any be applied.

    Raises:
        ConfigError: a unit computes or sends in fp16, and scaling is not switched off.
    """
    if not config.step_in_backward or config.precision_policy.loss_scale == 1.0:
        return
    for spec in specs:
        if spec.trainable and torch.float16 in (spec.dtypes.compute, spec.dtypes.reduce):
            raise ConfigError(
                f"step_in_backward with fp16 (unit {spec.name}): whether a step overflows, and is "
                "to be skipped, is known only after the backward that would already have made it. "
                'Use precision="bf16", or step_in_backward=False'
            )


def total_norm(engines: Iterable[Engine], norm_type: float = 2.0) -> torch.Tensor:
    """0-d tensor, the same on all ranks: the norm of all gradients of these models together.

    Those of their other pipeline stages included.
    """
    is_largest, engines = norm_type == float("inf"), list(engines)
    for engine in engines:
        # Before others of them talk to other pipeline stages.
        engine.owned.sum_ties()
    found = []
    for engine in engines:
        norm: torch.Tensor = torch.linalg.vector_norm(
            engine.owned.counted_norms(norm_type), norm_type
        )
        if engine.collectives.groups.pipeline:
            power = norm if is_largest else norm**norm_type
            engine.collectives.over_model(power, maximum=is_largest, pipeline_only=True)
            norm = power if is_largest else power ** (1.0 / norm_type)
        found.append(norm)
    return found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found), norm_type)


def norms_by_limit(engines: Iterable[Engine]) -> dict[float | None, torch.Tensor]:
    """The common norm of the models that are clipped to the same value, for each such value."""
    engines = list(engines)
    limits = dict.fromkeys(engine.config.max_grad_norm for engine in engines)
    return {
        limit: total_norm(one for one in engines if one.config.max_grad_norm == limit)
        for limit in limits
        if limit is not None
    }


def clip_factor(total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """0-d tensor, at most 1: what gradients of norm `total` are multiplied by."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


class StepInBackward:
    """See the module's docstring.

    Attributes:
        bindings: the optimizers of the model.
        is_measuring: gradients are measured and dropped, nothing is updated.
        norm: 0-d tensor, the norm of the whole gradient that clips this backward; None where it is
            not known yet.
    """

    def __init__(self, engine: Engine) -> None:
        self.bindings: list[Binding] = []
        self.is_measuring = False
        self.norm: torch.Tensor | None = None
        self._engine = engine
        self._limit = engine.config.max_grad_norm
        self.needs_passes = engine.config.step_in_backward == TWO_PASS
        self.is_in_pass = False
        # What this backward has taken so far, and which gradients have come in it.
        self._taken: dict[Unit, None] = {}
        self._seen: set[tuple[Gradients, int]] = set()
        self._is_nested = False
        # Learnt from nested backwards.
        self._knows_nested = False
        self._repeated: set[Unit] = set()
        # Optimizers that have not been told to step since the last backward, and whether that
        # backward has made their step.
        self._unstepped: set[Binding] = set()
        self._are_applied = False
        # The norm is that of the last backward.
        self._is_noted = False

    # Moments of a backward --------------------------------------------------------------------

    def begin(self) -> None:
        """A backward that accumulates begins.

        Raises:
            ShardingError: it would make a step that nobody has asked for.
        """
        if not self.bindings:
            return
        if self._unstepped:
            raise ShardingError(
                "a second backward before optimizer.step(): with step_in_backward each backward "
                "makes an optimizer step. To accumulate, run all backwards of a step but the last "
                "inside onecopy.no_sync(model); else call optimizer.step() after each backward"
            )
        if self._engine.is_held:
            raise ShardingError(
                "backward inside full_parameters: with step_in_backward it would change masters "
                "whose gathered values are written back afterwards. Run it outside"
            )
        if self._engine.keeps:
            raise ShardingError(
                "backward inside keep_gathered or micro_batches: with step_in_backward it would "
                "change values that are kept gathered. Shard without step_in_backward, or run it "
                "outside"
            )
        if self.needs_passes and not self.is_in_pass:
            raise ShardingError(
                'backward outside of a closure: step_in_backward="two-pass" measures gradients in '
                "one pass and applies them in another. Put forward and backward into a function "
                "and call optimizer.step(function), or say step_in_backward=True, which clips by "
                "the norm of the step before"
            )
        self._forget()
        self._is_noted = False
        self._engine.owned.begin_backward(measures=self._limit is not None)

    def arrived(self, gradients: Gradients, index: int, *, is_nested: bool) -> None:
        """Autograd has a gradient of one parameter.

        Raises:
            ShardingError: its unit has been updated in this backward already.
        """
        self._is_nested |= is_nested
        key = (gradients, index)
        if key not in self._seen:
            self._seen.add(key)
            return
        self._repeated.add(gradients.unit)
        self.refuse_taken((gradients.unit,))

    def refuse_taken(self, units: Iterable[Unit]) -> None:
        """Units are needed again within the backward.

        Raises:
            ShardingError: one has been updated in it.
        """
        for unit in units:
            if unit in self._taken:
                self._repeated.add(unit)
                raise ShardingError(
                    f"unit {unit.name} ({unit.names[0]}, ...) is needed again after it was updated "
                    "in this backward (step_in_backward): its weights are used by several "
                    "checkpointed segments, or through detach(). It will be updated at the end of "
                    "backwards from now on; this one has failed half-way"
                )

    def reduced(self, gradients: Gradients, *, is_done: bool) -> None:
        """The mean of a unit is with its owners.

        Args:
            is_done: every parameter of the unit has its gradient.
        """
        if self._keeps or not is_done or gradients.unit in self._repeated:
            return
        if self._is_nested and not self._knows_nested:
            return
        self._take(gradients.unit)

    def end(self) -> bool:
        """The end of a backward, all units reduced; whether gradients have been applied."""
        self._unstepped = set(self.bindings)
        self._are_applied = bool(self.bindings) and not self._keeps
        if self._are_applied:
            for gradients in self._engine.gradients:
                self._take(gradients.unit)
            self._knows_nested |= self._is_nested
            if not self.is_measuring:
                self._engine.refresh(unit for one in self.bindings for unit in one.units)
        self._forget()
        return self._are_applied

    def failed(self, numbers: Collection[int]) -> None:
        """A backward has failed: units that any rank has updated are updated on all ranks."""
        numbers = set(numbers)
        updated = [unit for unit in self._engine.units if unit.number in numbers]
        for unit in updated:
            self._take(unit)
        self._unstepped.clear()
        self._forget()
        if updated and not self.is_measuring:
            self._engine.refresh(updated)
            warnings.warn(
                f"a backward failed after {len(updated)} of {len(self._engine.gradients)} units "
                "had been updated (step_in_backward): these have made this step, the others have "
                "not. Training goes on from there; load a checkpoint for a clean state",
                stacklevel=2,
            )

    @property
    def taken(self) -> list[int]:
        """Numbers of the units that this backward has taken so far."""
        return [unit.number for unit in self._taken]

    # Around the step --------------------------------------------------------------------------

    def finish(self, binding: Binding) -> bool:
        """The user's `optimizer.step()`; whether the backward before it has made this step."""
        is_made = self._are_applied and binding in self._unstepped
        self._unstepped.discard(binding)
        return is_made

    def note_norm(self, norm: torch.Tensor) -> None:
        """The norm of the step that is made; clips the next backward."""
        if not self.needs_passes and not self._is_noted:
            # A second optimizer would measure what the first has clipped.
            self.norm, self._is_noted = norm, True

    def begin_pass(self, *, norm: torch.Tensor | None) -> None:
        """The first pass of two where there is no norm yet, which it measures; else the second."""
        self.is_in_pass, self.is_measuring, self.norm = True, norm is None, norm
        self._unstepped.clear()

    def end_pass(self) -> None:
        """No backward may follow outside of a pass."""
        self.is_in_pass = self.is_measuring = False
        self.norm = None

    # Details ----------------------------------------------------------------------------------

    @property
    def _keeps(self) -> bool:
        """Gradients are kept for the step, which clips them by their own norm."""
        return self._limit is not None and self.norm is None and not self.is_measuring

    def _forget(self) -> None:
        """What has been taken says nothing of other backwards, `torch.autograd.grad` among them."""
        self._taken.clear()
        self._seen.clear()
        self._is_nested = False

    def _take(self, unit: Unit) -> None:
        bindings = [one for one in self.bindings if unit in one.units]
        if unit in self._taken or unit.gradients is None or not bindings:
            return
        owned = self._engine.owned
        if self._limit is not None:
            owned.measure(unit)
        if not self.is_measuring:
            if self._limit is not None and self.norm is not None:
                owned.scale(clip_factor(self.norm, self._limit), unit)
            if unit.state is UnitState.GATHERED:
                unit.keep_changes()
            for binding in bindings:
                self._update(binding, unit)
            unit.note_update()
        unit.gradients.clear()
        self._taken[unit] = None

    def _update(self, binding: Binding, unit: Unit) -> None:
        began = time.perf_counter()
        binding.unit_steps.run((unit,))
        name = type(binding.optimizer).__name__
        seconds = time.perf_counter() - began
        self._engine.events.emit("update", unit.name, seconds=seconds, what=name)


def run_twice(
    parts: Sequence[tuple[Engine, StepInBackward]], flush: Callable[[], None], closure: Any
) -> Any:
    """Run a closure (forward and backward) to measure its gradients, and again to apply them.

    The second run sees the random numbers of torch and the buffers of the models as the first did.

    Args:
        parts: the models of one optimizer.
        flush: reduces what no_sync has left.

    Returns:
        what the closure returns in the second run.
    """
    device = parts[0][0].units[0].flat.device
    on_device = None if device.type == "cpu" else torch.get_device_module(device)
    random = torch.get_rng_state()
    random_on_device = None if on_device is None else on_device.get_rng_state(device)
    buffers = [(one, one.clone()) for engine, _ in parts for one in engine.model.buffers()]
    try:
        for _, stepper in parts:
            stepper.begin_pass(norm=None)
        closure()
        flush()
        for _, stepper in parts:
            stepper.end()
        with torch.no_grad():
            norms = norms_by_limit(engine for engine, _ in parts)
            for one, value in buffers:
                one.copy_(value)
        torch.set_rng_state(random)
        if on_device is not None:
            on_device.set_rng_state(random_on_device, device)
        for engine, stepper in parts:
            stepper.begin_pass(norm=norms[engine.config.max_grad_norm])
        return closure()
    finally:
        for _, stepper in parts:
            stepper.end_pass()
