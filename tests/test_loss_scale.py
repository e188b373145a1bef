"""fp16 with dynamic loss scaling equals one-process training with the same scale, and overflow
on any rank skips the step on all.
"""

from __future__ import annotations

import itertools
import re
import threading
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.events
import onecopy.handle
from onecopy.core.backward import _running_backwards
from onecopy.core.loss_scale import INITIAL, LossScale, loss_scale_of
from onecopy.errors import ShardingError
from onecopy.events import Event
from onecopy.policies import Precision
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, Run, full_values, train

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)


def run_both(pool: Pool, world: int, plan: Plan) -> tuple[list[Run], reference.Result]:
    runs = pool.run(world, train, plan, timeout=120)
    expected = reference.train(
        partial(models.build, plan.name, plan.seed),
        models.batches(plan.name, plan.steps, world, plan.backwards),
        OPTIMIZERS[plan.optimizer],
        no_sync=plan.no_sync,
        precision="fp16",
        loss_scale=INITIAL,
        max_grad_norm=plan.max_grad_norm or plan.settings.get("max_grad_norm"),
    )
    return runs, expected


@pytest.mark.sampled(
    "case",
    [
        (name, world, stage, optimizer, *accumulation)
        for name in ("gpt", "tied", "convgn", "nested", "frozen", "unused", "odd")
        for world, stage in itertools.product(WORLDS, STAGES)
        for optimizer in ("sgd", "adamw")
        for accumulation in ((1, False), (3, False), (3, True))
    ],
    6,
    # The largest scale overflows in the first steps of these two.
    always=[("nested", 2, 3, "sgd", 1, False), ("tied", 3, 2, "adamw", 3, True)],
)
def test_equals_one_process_with_the_same_scale(
    pool: Pool, case: tuple[str, int, int, str, int, bool]
) -> None:
    """Bit for bit: scales are powers of two, and sums are made in fp32.

    Stage 0 on several ranks rounds the sum once more, to the wire's fp16.
    """
    name, world, stage, optimizer, backwards, no_sync = case
    plan = Plan(
        name=name,
        stage=stage,
        optimizer=optimizer,
        steps=4,
        backwards=backwards,
        no_sync=no_sync,
        settings={"precision": "fp16"},
        keep_events=True,
    )
    runs, expected = run_both(pool, world, plan)
    changes = [new for old, new in itertools.pairwise([INITIAL, *expected.scales]) if new != old]
    for rank, run in enumerate(runs):
        assert [event.value for event in run.events if event.kind == "scale"] == changes
        is_exact = stage > 0 or world == 1
        if is_exact:
            assert run.losses == [step[rank] for step in expected.losses]
        for key, value in expected.parameters.items():
            # Frozen ones have no masters.
            value = value.to(run.parameters[key].dtype)
            if is_exact:
                assert torch.equal(run.parameters[key], value), key
            elif optimizer == "sgd":
                torch.testing.assert_close(run.parameters[key], value, rtol=2e-2, atol=2e-3)
            assert torch.equal(run.parameters[key], runs[0].parameters[key])


@pytest.mark.sampled("world, stage", list(itertools.product((1, 2, 3), STAGES)), 2)
@pytest.mark.parametrize("by", ["call", "setting"])
def test_clipping_sees_gradients_that_are_not_scaled(
    pool: Pool, world: int, stage: int, by: str
) -> None:
    limit = 0.05
    plan = Plan(name="tied", stage=stage, optimizer="sgd", settings={"precision": "fp16"})
    if by == "call":
        plan = replace(plan, max_grad_norm=limit)
    else:
        plan = replace(plan, settings={**plan.settings, "max_grad_norm": limit})
    runs, expected = run_both(pool, world, plan)
    finite = [norm for norm in expected.norms if norm < float("inf")]
    assert finite and min(finite) > limit
    for run in runs:
        # At overflow the engine's own norm is not finite either, and the step is skipped.
        measured = [norm for norm in run.norms if norm < float("inf")]
        assert by == "setting" or measured == pytest.approx(finite, rel=1e-2)
        for key, value in expected.parameters.items():
            torch.testing.assert_close(run.parameters[key], value, rtol=1e-2, atol=1e-3)


# Overflow -------------------------------------------------------------------------------------


def _mlp(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onecopy.shard(model, optimizer, **settings)
    return model, optimizer


def _norms(model: nn.Module) -> list[float]:
    return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]


def overflow(stage: int) -> dict[str, Any]:
    """The last rank alone overflows, in the second of three steps."""
    events: list[Event] = []
    model, optimizer = _mlp(stage=stage, precision="fp16", sinks=(events.append,))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    scale = loss_scale_of(model)
    scale.load_state_dict({"value": 1024.0, "good_steps": 5})
    seen: dict[str, Any] = {"counts": [], "values": [], "norms": []}
    for step in range(3):
        loss = model(torch.ones(3, 4)).square().mean()
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * 1e30
        loss.backward()
        seen["norms"].append(_norms(model))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        seen["counts"].append({int(state["step"]) for state in optimizer.state.values()})
        seen["values"].append(full_values(model))
    seen["scale"] = scale.state_dict()
    seen["events"] = [(e.kind, e.value) for e in events if e.kind in ("step", "skip", "scale")]
    return seen


@pytest.mark.sampled("world, stage", list(itertools.product(WORLDS, STAGES)), 3, always=[(2, 3)])
def test_overflow_on_one_rank_skips_the_step_on_all(pool: Pool, world: int, stage: int) -> None:
    """Values, states and counts stay; the scheduler does not complain; the scale is halved."""
    for seen in pool.run(world, overflow, stage):
        first, second, third = seen["values"]
        for name in first:
            assert torch.equal(first[name], second[name])
            assert not torch.equal(second[name], third[name])
        # A rank that owns nothing counts nothing.
        assert seen["counts"] in ([{1}, {1}, {2}], [set()] * 3)
        assert seen["scale"] == {"value": 512.0, "good_steps": 1}
        kinds = [("step", 0.0), ("scale", 512.0), ("skip", 0.0), ("step", 0.0)]
        assert seen["events"] == kinds
        assert all(norm < 100 for norm in seen["norms"][0]), "norms are those without scale"


def grow() -> list[float]:
    model, optimizer = _mlp(precision="fp16")
    scale = loss_scale_of(model)
    scale.load_state_dict({"value": 8.0, "good_steps": 1998})
    values = []
    for _ in range(3):
        # Two backwards are one step.
        for _ in range(2):
            model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(scale.value)
    return values


def test_the_scale_grows_after_good_steps(pool: Pool) -> None:
    for values in pool.run(2, grow):
        assert values == [8.0, 16.0, 16.0]


def fall(stage: int, settings: dict[str, Any]) -> tuple[float, list[str]]:
    """Two steps of which nothing can be saved, from the lowest scale on."""
    model, optimizer = _mlp(stage=stage, precision=Precision(compute="fp16", **settings))
    scale = loss_scale_of(model)
    scale.load_state_dict({"value": 1.0, "good_steps": 0})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = model(torch.ones(3, 4))
            # Behind the first layer alone: the bias of the last is the first to be seen.
            (out * float("inf")).sum().backward() if dist.get_rank() == 0 else out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return scale.value, [str(one.message) for one in caught]


@pytest.mark.parametrize(("settings", "value"), [({}, 1.0), ({"loss_scale": 64.0}, 64.0)])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_lowest_scale_warns_and_names_a_parameter(
    pool: Pool, stage: int, settings: dict[str, Any], value: float
) -> None:
    """Not an abort: the next batch may be fine."""
    first, second = pool.run(2, fall, stage, settings)
    assert first[0] == second[0] == value
    assert len(first[1]) == 2 and not second[1], "the first rank alone warns"
    assert "gradient of 0.weight is not finite" in first[1][0]


def two_optimizers() -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Overflow in one optimizer's part skips that step alone, and halves once."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model.forward = lambda x, y: (model["a"](x), model["b"](y))  # type: ignore[method-assign]
    optimizers = [torch.optim.Adam(model[key].parameters(), lr=0.1) for key in "ab"]
    onecopy.shard(model, optimizers, stage=2, precision="fp16")
    scale = loss_scale_of(model)
    scale.load_state_dict({"value": 64.0, "good_steps": 0})
    before = full_values(model)
    scales, changed = [], []
    for factors in ((1.0, 1e30), (1e30, 1e30), (1.0, 1.0)):
        out = model(torch.ones(2, 4), torch.ones(2, 4))
        (out[0].sum() * factors[0] + out[1].sum() * factors[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scales.append(scale.value)
        after = full_values(model)
        changed.append(sum(not torch.equal(before[name], after[name]) for name in before))
        before = after
    return scales, changed, after


def test_several_optimizers_count_once(pool: Pool) -> None:
    for scales, changed, _ in pool.run(2, two_optimizers):
        assert scales == [32.0, 16.0, 16.0]
        assert changed == [2, 0, 4]


def closure() -> list[float]:
    model, optimizer = _mlp(precision="fp16", stage=3)
    loss_scale_of(model).load_state_dict({"value": 256.0, "good_steps": 0})
    losses = []
    for step in range(4):

        def again(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean() * (1e30 if step == 1 else 1.0)
            loss.backward()
            return loss

        losses.append(optimizer.step(again).item())
    return losses


def test_a_step_with_a_closure_is_skipped_too(pool: Pool) -> None:
    for losses in pool.run(2, closure):
        assert losses[0] > losses[2] > losses[3]
        assert losses[1] == pytest.approx(losses[2] * 1e30, rel=1e-2)


# Where gradients enter and leave --------------------------------------------------------------


class Picky(nn.Module):
    """Ends in a model that is not sharded; also returns its hidden values and its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x))
        out = self.last(hidden)
        return {"hidden": hidden, "out": out, "loss": out.float().square().mean()}


def enter(stage: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    """All ways in and out at once: outputs made from one another, inputs with a gradient."""
    torch.manual_seed(0)
    first, second, plain = Picky(), Picky(), nn.Linear(2, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5)
    precision = Precision(compute="fp16", **settings)
    onecopy.shard([first, second], optimizer, stage=stage, precision=precision)
    x = torch.ones(3, 4, requires_grad=True)
    one = first(x)
    two = second(plain(one["out"]))
    loss = two["loss"] + one["hidden"].square().mean()
    loss += one["loss"] + two["out"].mean()
    loss /= 2.0
    loss.backward()
    result = {"x": x.grad, "plain": plain.weight.grad}
    optimizer.step()
    result |= {f"first.{name}": value for name, value in full_values(first).items()}
    result |= {f"second.{name}": value for name, value in full_values(second).items()}
    return {name: value.clone() for name, value in result.items() if value is not None}


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_scaled_inside_only(pool: Pool, stage: int) -> None:
    """Chains of models, models beside them, inputs: all as without a scale."""
    plain = pool.run(2, enter, stage, {"loss_scale": 1.0})[0]
    for settings in ({"loss_scale": 1024.0}, {}):
        for scaled in pool.run(2, enter, stage, settings):
            assert set(scaled) == set(plain)
            for name, value in plain.items():
                torch.testing.assert_close(scaled[name], value, rtol=5e-3, atol=2e-4)


class Opaque:
    """Something that nobody looks into."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Hides(nn.Linear):
    """Returns its output inside an object."""

    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))


def bypass(stage: int, kind: str) -> tuple[str, float]:
    """What the error says, and how much the loss falls in a step after it."""
    model: nn.Module = nn.Sequential(
        nn.Linear(4, 4), Hides(4, 4) if kind == "opaque" else nn.ReLU()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage, precision="fp16")
    with pytest.raises(ShardingError) as caught:
        if kind == "submodule":
            model[0](torch.ones(2, 4, dtype=torch.float16)).float().sum().backward()
        out = model(torch.ones(2, 4))
        if kind == "opaque":
            out.y.float().sum().backward()
        (out.sum() + 0.1 * model[0].weight.float().square().sum()).backward()
    losses = []
    for _ in range(2 if kind != "opaque" else 0):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return str(caught.value), losses[0] - losses[1] if losses else 1.0


@pytest.mark.parametrize(
    ("stage", "kind"),
    [(0, "weights"), (2, "weights"), (3, "weights"), (3, "opaque"), (2, "submodule")],
)
def test_a_gradient_past_the_outputs_is_refused(pool: Pool, stage: int, kind: str) -> None:
    """It was not scaled, and dividing it by the scale would make it vanish without a word."""
    for message, progress in pool.run(2, bypass, stage, kind):
        assert re.search(r"reaches parameter [01]\.(weight|bias) past the outputs", message), (
            message
        )
        assert progress > 0, "the model trains on"


@pytest.mark.parametrize("accumulates", [True, False])
def test_runs_are_found_from_the_threads_of_the_engine(accumulates: bool) -> None:
    """On accelerators hooks run in other threads than the one that has called backward."""
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    seen: list[Any] = []

    def hook(_: Tensor) -> None:
        thread = threading.Thread(target=lambda: seen.append(_running_backwards()))
        thread.start()
        thread.join()

    x.register_hook(hook)
    if accumulates:
        y.backward()
    else:
        torch.autograd.grad(y, x)
    ((count, found, roots, is_split),) = seen
    assert (count, found, is_split) == (0, accumulates, False)
    assert len(roots) == 1 and roots[0] is y


def local_gradients(stage: int) -> list[float]:
    model, _ = _mlp(stage=stage, precision="fp16")
    loss = model(torch.ones(3, 4)).square().mean()
    norms = [float(g.float().norm()) for g in torch.autograd.grad(loss, list(model.parameters()))]
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    return [*norms, *_norms(model)]


def test_autograd_grad_is_not_scaled(pool: Pool) -> None:
    """It hands gradients to its caller, who knows of no scale."""
    (norms,) = pool.run(1, local_gradients, 2)
    assert norms[:4] == pytest.approx(norms[4:], rel=1e-2)


class Checkpoints(nn.Sequential):
    """A block that may run under a checkpoint of its own, inside the model."""

    def __init__(self, kind: str, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not self.kind.startswith("blocks"):
            return super().forward(x)
        is_reentrant = self.kind == "blocks reentrant"
        return checkpoint(super().forward, x, use_reentrant=is_reentrant)


def recompute(kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Checkpoints(kind, nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    onecopy.shard(model, optimizer, stage=3, precision="fp16")
    for step in range(3):
        x = torch.full((2, 8), 0.1 * (step + 1 + dist.get_rank()), requires_grad=True)
        if kind in ("reentrant", "not reentrant"):
            out = checkpoint(model, x, use_reentrant=kind == "reentrant")
        else:
            out = model(x)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


@pytest.mark.parametrize(
    "kind", ["reentrant", "not reentrant", "blocks reentrant", "blocks not reentrant"]
)
def test_a_checkpointed_model(pool: Pool, kind: str) -> None:
    """What recomputation puts through the model enters and leaves once."""
    plain, again = pool.run(2, recompute, "plain")[0], pool.run(2, recompute, kind)[0]
    for name, value in plain.items():
        assert torch.equal(again[name], value), name


# The state ------------------------------------------------------------------------------------


def test_the_state_of_a_scale() -> None:
    """A checkpoint continues with it; a fixed scale stays what the user said."""
    scale, other, fixed = LossScale(), LossScale(), LossScale(32.0)
    assert scale.note_step(overflowed=True)
    other.load_state_dict(scale.state_dict())
    fixed.load_state_dict(scale.state_dict())
    assert (other.value, other.good_steps, fixed.value) == (INITIAL / 2, 0, 32.0)
    other.begin_backward()
    assert not fixed.note_step(overflowed=True) and fixed.value == 32.0


def no_scale(settings: dict[str, Any]) -> None:
    model, _ = _mlp(**settings)
    loss_scale_of(model)


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16"}, {"precision": Precision(compute="fp16", loss_scale=1.0)}],
)
def test_only_fp16_has_a_scale(pool: Pool, settings: dict[str, Any]) -> None:
    (error,) = pool.run(1, no_scale, settings, expect_failures=True)
    assert error.type_name == ShardingError.__name__ and "has no loss scale" in error.message


def scale_nothing() -> None:
    _mlp(precision=Precision(compute="bf16", loss_scale=8.0))


def test_a_scale_for_nothing_is_refused(pool: Pool) -> None:
    (error,) = pool.run(1, scale_nothing, expect_failures=True)
    assert error.type_name == "ConfigError" and "nothing in this model is fp16" in error.message
