"""Dynamic loss scaling for fp16, without a change to the training loop.

fp16 ends at 6e-8: small gradients vanish. So what flows backward through the model is multiplied
by a scale, a power of two, where it enters the model's outputs, and divided by it again where it
leaves: exactly, in the owned fp32 slice, before anything else sees the gradients (norms, clipping,
accumulation), and at inputs that require a gradient, so that chains of models stay right.

Where scaled gradients overflow on any rank, no rank steps, and the scale is halved; after many
good steps it is doubled. The skipped step finds no gradients and changes nothing.

A gradient that reaches parameters past the model's outputs (a penalty on weights computed outside
forward) was never scaled; `refuse_bypass` finds it in the graph and names the parameter.

Source: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onecopy import handle
from onecopy.errors import ConfigError, ShardingError

if TYPE_CHECKING:
    from torch import nn

    from onecopy.core.engine import Engine
    from onecopy.core.gradients import Gradients

__all__ = [
    "LossScale",
    "agree_on_overflow",
    "loss_scale_of",
    "make_loss_scale",
    "refuse_bypass",
    "scale_gradient",
]

INITIAL, MINIMUM, MAXIMUM = 2.0**16, 1.0, 2.0**24
GOOD_STEPS_TO_GROW = 2000


class LossScale:
    """The scale of one model, and how it changes.

    Attributes:
        value: gradients inside the model are this many times too large.
        good_steps: steps without overflow since the value last changed.
        is_fixed: the value was given by the user and stays.
    """

    def __init__(self, fixed: float | None = None) -> None:
        self.value = INITIAL if fixed is None else fixed
        self.is_fixed = fixed is not None
        self.good_steps = 0
        # What the steps since the last backward have said; several optimizers count as one step.
        self._outcome: bool | None = None

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the scale of a checkpoint; a fixed scale stays as it is."""
        if not self.is_fixed:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])

    @property
    def is_lowest(self) -> bool:
        """An overflow cannot lower the scale any more."""
        return self.is_fixed or self.value <= MINIMUM

    def begin_backward(self) -> None:
        """New gradients: the next step counts."""
        self._outcome = None

    def note_step(self, *, overflowed: bool) -> bool:
        """Count a step; returns whether the scale has changed."""
        before, was = self._outcome, self.value
        self._outcome = overflowed or bool(before)
        if self.is_fixed or self._outcome == before:
            return False
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, MINIMUM), 0
        elif before is None:
            self.good_steps += 1
            if self.good_steps >= GOOD_STEPS_TO_GROW:
                self.value, self.good_steps = min(self.value * 2, MAXIMUM), 0
        return self.value != was

    def unscale(self, gradients: Sequence[torch.Tensor], found: torch.Tensor) -> None:
        """Divide gradients by the scale, in place; set `found` to 1 where one is not finite.

        Args:
            found: 0-d fp32 tensor.
        """
        inverse = found.new_tensor(1.0 / self.value)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, inverse)


def make_loss_scale(gradients: Sequence[Gradients], fixed: float | None) -> LossScale | None:
    """The scale of the gradients of one model; None where none of them is fp16.

    Args:
        fixed: the user's; 1.0 scales nothing.

    Raises:
        ConfigError: there is nothing for the user's scale to scale.
    """
    dtypes = {dtype for one in gradients for dtype in (one.unit.dtypes.compute, one.buffer.dtype)}
    if torch.float16 not in dtypes or fixed == 1.0:
        if gradients and fixed not in (None, 1.0):
            raise ConfigError(
                f"precision.loss_scale={fixed} scales fp16 gradients, and nothing in this model "
                'is fp16: leave it out, or say compute="fp16"'
            )
        return None
    scale = LossScale(fixed)
    for one in gradients:
        one.scale_by(scale)
    return scale


def loss_scale_of(model: nn.Module) -> LossScale:
    """The loss scale of a sharded model, to read it and to save it.

    Raises:
        ShardingError: the model is not sharded, or scales nothing.
    """
    found: LossScale | None = handle.of(model).engine.loss_scale
    if found is None:
        raise ShardingError(
            f'this {type(model).__name__} has no loss scale: only precision="fp16" scales'
        )
    return found


class _ScaleGradient(torch.autograd.Function):
    """The same values in `dtype`, in memory of their own; the gradient times a factor."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, factor: Callable[[], float]
    ) -> torch.Tensor:
        ctx.is_border = True
        ctx.factor = factor
        ctx.dtype = tensor.dtype
        return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # In the wider of both dtypes: before it becomes fp16, after it was.
        wide = gradient.to(torch.promote_types(gradient.dtype, ctx.dtype))
        return (wide * ctx.factor()).to(ctx.dtype), None, None


def scale_gradient(
    tensor: torch.Tensor, dtype: torch.dtype, factor: Callable[[], float]
) -> torch.Tensor:
    """`tensor` in `dtype`; in backward its gradient is multiplied by `factor()`.

    A copy also where the dtype is the same: a view of it could not be changed in place.
    """
    scaled: torch.Tensor = _ScaleGradient.apply(tensor, dtype, factor)  # type: ignore[no-untyped-call]
    return scaled


def refuse_bypass(roots: Iterable[Any], engine: Engine) -> None:
    """Follow the graph of a backward from its roots to the borders of models.

    Raises:
        ShardingError: it reaches a parameter of this model before any border.
    """
    nodes = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or getattr(node, "is_border", False):
            continue
        # Kept, so that no other node takes its address.
        seen.add(node)
        found = engine.find(node.variable) if hasattr(node, "variable") else None
        if found is not None and found[0].gradients is not None:
            raise ShardingError(
                f"a gradient reaches parameter {found[0].names[found[1]]} past the outputs of the "
                "sharded model, where loss scaling (fp16) multiplies gradients: it would be wrong "
                "by that factor. Compute this part of the loss inside the model's forward, or use "
                'precision="bf16", which needs no scaling'
            )
        nodes.extend(follower for follower, _ in node.next_functions)


def agree_on_overflow(parts: Sequence[tuple[Engine, Sequence[Gradients]]]) -> bool:
    """Whether any rank has a gradient that is not finite: then nobody steps. A collective.

    Args:
        parts: models and those of their gradients that are about to be stepped.
    """
    scaled = [(engine, of_model) for engine, of_model in parts if engine.loss_scale and of_model]
    found = [(engine, _any_rank_overflowed(engine, of_model)) for engine, of_model in scaled]
    skips = any(overflowed for _, overflowed in found)
    for engine, overflowed in found:
        scale = engine.loss_scale
        if scale is None or overflowed != skips:
            # The step of a model that is fine was skipped for another's sake: no news of it.
            continue
        if overflowed and scale.is_lowest:
            _warn_of_lowest(engine, scale)
        if scale.note_step(overflowed=overflowed):
            engine.events.emit("scale", value=scale.value)
    return skips


def _any_rank_overflowed(engine: Engine, gradients: Sequence[Gradients]) -> bool:
    found = [one.found_inf for one in gradients if one.found_inf is not None]
    device = engine.units[0].flat.device
    flag = torch.stack([torch.zeros((), device=device), *(one.to(device) for one in found)]).amax()
    flag = engine.collectives.sum_of(flag, maximum=True, what="overflow")
    flag = engine.collectives.over_model(flag, maximum=True)
    return engine.collectives.read(flag.view(1), [False])[0]


def _warn_of_lowest(engine: Engine, scale: LossScale) -> None:
    names = [
        (name, unit, unit.slice.pieces.get(index))
        for unit in engine.units
        for index, name in enumerate(unit.names)
    ]
    bad = [
        number
        for number, (_, unit, piece) in enumerate(names)
        if piece is not None
        and piece.grad is not None
        and unit.gradients is not None
        and not unit.gradients.mean.at_rest(piece.grad).isfinite().all()
    ]
    last = len(names) - 1
    # The smallest number of any rank.
    first = torch.tensor(float(last - bad[0] if bad else -1), device=engine.units[0].flat.device)
    first = engine.collectives.sum_of(first, maximum=True, what="overflow")
    if engine.collectives.groups.world.rank == 0:
        name = names[last - int(first)][0]
        how = "is fixed" if scale.is_fixed else "cannot go lower"
        warnings.warn(
            f"the gradient of {name} is not finite at a loss scale of {scale.value:g}, which "
            f"{how}: this step is skipped. Look at what that parameter computes; keep its module "
            'in fp32 (Precision(keep_fp32=...)), or use precision="bf16"',
            stacklevel=2,
        )
