"""The optimizer within backward: the same training, without gradients that are kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.handle
from onecopy import Config, Precision
from onecopy.errors import ConfigError, ShardingError
from onecopy.memory.live_tensors import LiveTensors
from onecopy.planner import estimate
from onecopy.report import memory
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, full_values, train
from tests.test_memory import Deep
from tests.test_parity import check
from tests.test_whole_parameters import check as check_matrix

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
LEAN = Precision(compute="bf16", master="bf16+16", gradient="bf16")
IN_BACKWARD = {"step_in_backward": True}


# The same training ------------------------------------------------------------------------------


@pytest.mark.sampled(
    "name, optimizer, world, stage",
    list(
        itertools.product(
            ("gpt", "tied", "unused", "odd", "frozen", "convbn"),
            ("sgd", "adamw_fused"),
            WORLDS,
            STAGES,
        )
    ),
    5,
    always=[
        ("gpt", "adamw_fused", 2, 3),
        ("unused", "adamw_fused", 3, 2),
        ("odd", "sgd", 2, 1),
        ("tied", "sgd", 2, 0),
    ],
)
def test_equals_one_process(pool: Pool, name: str, optimizer: str, world: int, stage: int) -> None:
    """Bit for bit."""
    check(pool, world, Plan(name=name, stage=stage, optimizer=optimizer, settings=IN_BACKWARD))


@pytest.mark.sampled(
    "name, world, stage",
    list(itertools.product(("gpt", "unused", "odd"), (2, 3), STAGES)),
    3,
    always=[("gpt", 2, 3), ("unused", 3, 1)],
)
def test_accumulation(pool: Pool, name: str, world: int, stage: int) -> None:
    """no_sync for all backwards of a step but the last, which makes the step."""
    plan = Plan(name=name, stage=stage, optimizer="momentum", settings=IN_BACKWARD)
    check(pool, world, replace(plan, backwards=3, no_sync=True))


@pytest.mark.sampled("world, stage", list(itertools.product((2, 3), STAGES)), 3, always=[(2, 2)])
def test_with_everything_else_that_is_lean(pool: Pool, world: int, stage: int) -> None:
    """A split master and bf16 gradients: as in the step."""
    plan = Plan(name="gpt", stage=stage, optimizer="adamw_fused", backwards=2, no_sync=True)
    plain = pool.run(world, train, replace(plan, settings={"precision": LEAN}))
    lean = pool.run(world, train, replace(plan, settings={"precision": LEAN, **IN_BACKWARD}))
    for one, other in zip(plain, lean, strict=True):
        assert one.losses == other.losses
        for key, value in one.parameters.items():
            assert torch.equal(value, other.parameters[key]), key


@pytest.mark.sampled("stage", STAGES, 1)
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_matrix_optimizers(pool: Pool, optimizer: str, stage: int) -> None:
    """Whole matrices are updated by their owner, two optimizers on one model among them."""
    check_matrix(pool, 3, optimizer, "gpt", {"stage": stage, **IN_BACKWARD})


class PreviousNormSGD(torch.optim.SGD):
    """SGD that clips whole gradients by the norm of the step before; the first by its own."""

    limit = 0.05

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Clip, then step."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        clips_by = vars(self).get("previous", norm)
        nn.utils.clip_grads_with_norm_(parameters, self.limit, clips_by)
        vars(self)["previous"] = norm
        return super().step(closure)


@pytest.mark.sampled("world, stage", list(itertools.product(WORLDS, STAGES)), 4, always=[(2, 3)])
def test_clipping_by_the_norm_before(pool: Pool, world: int, stage: int) -> None:
    """As one process that does the same."""
    settings = {**IN_BACKWARD, "max_grad_norm": PreviousNormSGD.limit}
    plan = Plan(name="tied", stage=stage, optimizer="sgd", steps=4, settings=settings)
    expected = reference.train(
        partial(models.build, plan.name, plan.seed),
        models.batches(plan.name, plan.steps, world),
        lambda model: PreviousNormSGD(model.parameters(), lr=0.1),
    )
    for run in pool.run(world, train, plan):
        for key, value in expected.parameters.items():
            torch.testing.assert_close(run.parameters[key], value, rtol=1e-5, atol=1e-6)


def norms_with_two_optimizers(stage: int) -> list[float]:
    """What clips each backward of a model with an optimizer for its head."""
    torch.manual_seed(0)
    model = Wide()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (model.blocks, model.head)]
    onecopy.shard(model, optimizers, stage=stage, max_grad_norm=0.01, **IN_BACKWARD)
    norms = []
    for _ in range(3):
        _backward(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        norms.append(onecopy.handle.of(model).backward.stepper.norm.item())
    return norms


def test_the_norm_before_is_that_before_clipping(pool: Pool) -> None:
    """Also where the first step, which keeps gradients, is made by two optimizers."""
    for first, *later in pool.run(2, norms_with_two_optimizers, 2):
        assert first > 0.01
        assert later == [pytest.approx(first)] * 2


class Noisy(nn.Module):
    """Dropout, and a batch norm whose running statistics each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6) -> (rows, 1)
        x = self.norm(torch.tanh(self.blocks(self.first(x))))
        return self.last(F.dropout(x, 0.3, self.training))


def clipped_by_its_own_norm(stage: int, step_in_backward: bool | str) -> dict[str, Tensor]:
    """Three steps of two micro-batches each, in a closure; parameters and buffers."""
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    onecopy.shard(
        model,
        optimizer,
        stage=stage,
        max_grad_norm=0.1,
        step_in_backward=step_in_backward,
    )
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        x = torch.sin(torch.arange(24.0).view(4, 6) + step + dist.get_rank())

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            with onecopy.no_sync(model):
                model(x).sum().backward()
            loss = model(x + 1).pow(2).sum()
            loss.backward()
            return loss.detach()

        loss = optimizer.step(closure)
        assert loss.item() > 0
    return {**full_values(model), **{key: one.clone() for key, one in model.named_buffers()}}


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_in_two_passes(pool: Pool, stage: int) -> None:
    """Bit for bit what keeping the gradients gives: the same norm, random numbers and buffers."""
    plain = pool.run(2, clipped_by_its_own_norm, stage, False)
    lean = pool.run(2, clipped_by_its_own_norm, stage, "two-pass")
    for one, other in zip(plain, lean, strict=True):
        for key, value in one.items():
            assert torch.equal(value, other[key]), key


# What a loop does beside --------------------------------------------------------------------------

X = torch.linspace(-1, 1, 24).view(3, 8)
Model, Optimizer = nn.Module, torch.optim.Optimizer
Script = Callable[[Model, Optimizer], None]


class Wide(nn.Module):
    """Blocks, run under checkpoints of either kind, and weights that two segments share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)
        self.reentrant: bool | None = None
        self.is_shared = False

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 1, 2, 3, 1] if self.is_shared else [0, 1, 2, 3]
        for number in order:
            block = self.blocks[number]
            if self.reentrant is None:
                x = torch.tanh(block(x))
            else:
                x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return self.head(x)


def _step(model: Model, optimizer: Optimizer, times: int = 1) -> None:
    for _ in range(times):
        model(X.clone().requires_grad_()).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(model: Model, optimizer: Optimizer) -> None:
    """Segments without a backward of their own."""
    model.reentrant = False  # type: ignore[assignment]
    _step(model, optimizer, 3)


def checkpointed_reentrant(model: Model, optimizer: Optimizer) -> None:
    """A backward within the backward for each segment."""
    model.reentrant = True  # type: ignore[assignment]
    _step(model, optimizer, 3)


def shared_by_segments(model: Model, optimizer: Optimizer) -> None:
    """Two gradients for one weight in one backward."""
    model.reentrant = model.is_shared = True  # type: ignore[assignment]
    _step(model, optimizer, 3)


def shared_plainly(model: Model, optimizer: Optimizer) -> None:
    """A block that is used twice gets one gradient."""
    model.is_shared = True  # type: ignore[assignment]
    _step(model, optimizer, 3)


def scheduled(model: Model, optimizer: Optimizer) -> None:
    """Learning rates of the next backward; an added group; a frozen block."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        _step(model, optimizer)
        scheduler.step()
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.3
    model.blocks[1].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    _step(model, optimizer, 2)
    model.blocks[1].weight.requires_grad_(True)  # type: ignore[index, union-attr]
    _step(model, optimizer, 2)


def unfrozen_later(model: Model, optimizer: Optimizer) -> None:
    """A block that was frozen at shard, see `run_script`, is trained in the end."""
    _step(model, optimizer, 2)
    model(X).pow(2).sum().backward()
    model.blocks[2].requires_grad_(True)  # type: ignore[index, union-attr]
    model(X)
    optimizer.step()
    optimizer.zero_grad()
    _step(model, optimizer, 2)


def read_and_written(model: Model, optimizer: Optimizer) -> None:
    """Evaluation anywhere, values read and written between steps, states loaded."""
    _step(model, optimizer)
    with torch.no_grad():
        model(X)
    with _whole(model), torch.no_grad():
        model.head.weight.mul_(0.5)
    _step(model, optimizer)
    model.load_state_dict(model.state_dict())
    _step(model, optimizer)


def measured_between(model: Model, optimizer: Optimizer) -> None:
    """torch.autograd.grad makes no step, before, between and after."""
    first = model.blocks[0].bias  # type: ignore[index, union-attr]
    for reentrant in (None, False):
        model.reentrant = reentrant  # type: ignore[assignment]
        for _ in range(2):
            torch.autograd.grad(model(X).sum(), [first])
            model(X).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.autograd.grad(model(X).sum(), [first])


def all_of_a_step_under_no_sync(model: Model, optimizer: Optimizer) -> None:
    """Then it is the step that makes the step."""
    for _ in range(2):
        with onecopy.no_sync(model) if onecopy.handle.find(model) else nullcontext():
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    _step(model, optimizer, 2)


def with_closures(model: Model, optimizer: Optimizer) -> None:
    """`optimizer.step(closure)` runs the closure once."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def _whole(model: Model) -> Any:
    return onecopy.full_parameters(model) if onecopy.handle.find(model) else nullcontext()


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        checkpointed,
        checkpointed_reentrant,
        shared_by_segments,
        shared_plainly,
        scheduled,
        unfrozen_later,
        read_and_written,
        measured_between,
        all_of_a_step_under_no_sync,
        with_closures,
    )
}


def run_script(name: str, settings: dict[str, Any] | None) -> list[Tensor]:
    """Whole parameters, and momentum, after a script; plain PyTorch where settings are None."""
    torch.manual_seed(0)
    model = Wide()
    model.blocks[2].requires_grad_(name != "unfrozen_later")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.1)
    if settings is not None:
        onecopy.shard(model, optimizer, **settings)
    SCRIPTS[name](model, optimizer)
    if settings is not None:
        onecopy.unshard(model)
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    momenta = [
        optimizer.state[parameter].get("momentum_buffer") for parameter in model.parameters()
    ]
    return parameters + [one for one in momenta if one is not None]


@pytest.mark.sampled(
    "name, stage, limit",
    list(itertools.product(SCRIPTS, STAGES, (None, 1e6))),
    12,
    always=[(name, 3, None) for name in SCRIPTS] + [("unfrozen_later", 1, 1e6)],
)
def test_as_in_plain_pytorch(pool: Pool, name: str, stage: int, limit: float | None) -> None:
    """All ranks see the same data, so the mean is each one's gradient. No norm is that large."""
    expected = run_script(name, None)
    settings = {"stage": stage, "max_grad_norm": limit, **IN_BACKWARD}
    for values in pool.run(2, run_script, name, settings):
        assert len(values) == len(expected)
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def two_models_two_optimizers(settings: dict[str, Any]) -> list[Tensor]:
    """One optimizer over parts of two models, another over the rest of the first."""
    torch.manual_seed(0)
    first, second = Wide(), Wide()
    shared = torch.optim.AdamW([*first.blocks.parameters(), *second.parameters()], lr=0.01)
    other = torch.optim.SGD(first.head.parameters(), lr=0.1)
    onecopy.shard([first, second], [shared, other], **settings)
    for _ in range(3):
        for model in (first, second):
            model(X + dist.get_rank()).pow(2).sum().backward()
        for optimizer in (shared, other):
            optimizer.step()
            optimizer.zero_grad()
    return [*full_values(first).values(), *full_values(second).values()]


@pytest.mark.parametrize("stage", [1, 3])
def test_models_and_optimizers_may_mix(pool: Pool, stage: int) -> None:
    """Bit for bit what they give without."""
    plain = pool.run(2, two_models_two_optimizers, {"stage": stage})
    lean = pool.run(2, two_models_two_optimizers, {"stage": stage, **IN_BACKWARD})
    for one, other in zip(plain, lean, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


# Bytes --------------------------------------------------------------------------------------------


@dataclass
class Held:
    """What one rank saw of a backward."""

    gradients: int  # bytes after it
    peak: int  # bytes above those before it
    flat: int  # elements of all flat buffers
    gradient: int  # elements of all gradient buffers


def bytes_of_backward(depth: int, settings: dict[str, Any]) -> Held:
    """The third backward of a model of equal blocks."""
    with LiveTensors() as live:
        model = Deep(depth, 128)
        optimizer = OPTIMIZERS["adamw_fused"](model)
        onecopy.shard(model, optimizer, **settings)
        for _ in range(3):
            loss = model(torch.ones(1, 128)).sum()
            before = live.num_bytes()
            live.reset_peak()
            loss.backward()
            peak = live.peak_bytes - before
            held = memory.measure(model, optimizer)
            pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
            has_gradients = any(piece.grad is not None for piece in pieces)
            assert has_gradients != settings["step_in_backward"]
            optimizer.step()
            optimizer.zero_grad()
        gradient = sum(one.layout.gradient_numel for one in onecopy.handle.of(model).engine.units)
        return Held(held.gradients, peak, memory.padded_numel(model), gradient)


@pytest.mark.sampled("world, stage", list(itertools.product((2, 4), STAGES)), 2, always=[(2, 3)])
def test_no_gradient_is_kept(pool: Pool, world: int, stage: int) -> None:
    """Beside the full local buffer of stage 1: nothing after backward, a few units' during it."""
    settings = {"stage": stage, "step_in_backward": True}
    deeper = pool.run(world, bytes_of_backward, 20, settings)
    lean = pool.run(world, bytes_of_backward, 10, settings)
    plain = pool.run(world, bytes_of_backward, 10, {**settings, "step_in_backward": False})
    cut = world if stage else 1
    for more, one, other in zip(deeper, lean, plain, strict=True):
        full = 4 * one.gradient if stage == 1 else 0
        assert one.gradients == full
        # At stage 1 the means lie in that buffer otherwise, too.
        mean = 0 if stage == 1 else 4 * one.gradient // cut
        assert other.gradients == full + mean
        widths = estimate.ElementWidths(gradient=0)
        planned = estimate.state_bytes(stage, one.flat, world, widths).gradients
        assert one.gradients - planned == (full - 4 * one.flat if stage == 1 else 0)
        assert not mean or one.peak <= other.peak - 0.6 * mean
        # As high in a model twice as deep, but for activations.
        assert more.peak <= one.peak + 10 * 8 * 128


# What is refused ----------------------------------------------------------------------------------


def _backward(model: Model) -> None:
    model(X).pow(2).sum().backward()


def second_backward(model: Model, optimizer: Optimizer) -> None:
    """Each would be a step."""
    _backward(model)
    _backward(model)


def second_backward_under_no_sync(model: Model, optimizer: Optimizer) -> None:
    """Its gradients would be a second step."""
    _backward(model)
    with onecopy.no_sync(model):
        _backward(model)


def clipped_by_hand(model: Model, optimizer: Optimizer) -> None:
    """There is nothing left to clip."""
    _backward(model)
    onecopy.clip_grad_norm_(model, 1.0)


def clipped_by_torch(model: Model, optimizer: Optimizer) -> None:
    """Nor for torch."""
    _backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def within_full_parameters(model: Model, optimizer: Optimizer) -> None:
    """What is gathered there is written back."""
    with onecopy.full_parameters(model):
        _backward(model)


REFUSED: dict[str, tuple[Script, str]] = {
    "second backward": (second_backward, "second backward before optimizer.step"),
    "second backward, no_sync": (second_backward_under_no_sync, "second backward before"),
    "clip_grad_norm_": (clipped_by_hand, "these gradients exist no more"),
    "torch's clip_grad_norm_": (clipped_by_torch, "these gradients exist no more"),
    "full_parameters": (within_full_parameters, "inside full_parameters"),
}


def refused(stage: int) -> dict[str, str]:
    """What each script raises, and that the model trains on after it."""
    messages = {}
    for name, (script, _) in REFUSED.items():
        model = Wide()
        optimizer = torch.optim.AdamW(model.parameters())
        onecopy.shard(model, optimizer, stage=stage, **IN_BACKWARD)
        _step(model, optimizer)
        try:
            script(model, optimizer)
        except ShardingError as error:
            messages[name] = str(error)
        optimizer.step()
        _step(model, optimizer, 2)
    return messages


@pytest.mark.parametrize("stage", [1, 3])
def test_refused_by_name(pool: Pool, stage: int) -> None:
    """Each with what to do instead."""
    for messages in pool.run(2, refused, stage, record_warnings=True):
        for name, (_, part) in REFUSED.items():
            assert part in messages[name], name


class Detached(nn.Module):
    """A block whose weight is read once more, past autograd's notice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.first(x) @ self.blocks[2].weight.detach())


def needed_again(stage: int) -> str:
    """What autograd, or the engine, says."""
    model = Detached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage, **IN_BACKWARD)
    with pytest.raises((RuntimeError, ShardingError)) as caught:
        _backward(model)
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_updated_values_are_not_read_in_the_same_backward(pool: Pool, stage: int) -> None:
    """Never silently wrong: autograd knows that they have changed."""
    for message in pool.run(2, needed_again, stage):
        assert "modified by an inplace operation" in message


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"step_in_backward": "two-pass"}, "give max_grad_norm too"),
        ({"step_in_backward": "twopass", "max_grad_norm": 1.0}, "Did you mean 'two-pass'"),
        ({"step_in_backward": 2}, "is not one of"),
    ],
)
def test_settings_that_fit_nothing(settings: dict[str, Any], match: str) -> None:
    """Before any work is lost."""
    with pytest.raises(ConfigError, match=match):
        Config(**settings)


def refused_at_shard_and_after() -> list[str]:
    """fp16, and two passes without a closure."""
    messages = []
    model = Wide()
    with pytest.raises(ConfigError) as caught:
        onecopy.shard(model, precision="fp16", **IN_BACKWARD)
    messages.append(str(caught.value))
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer, max_grad_norm=1.0, step_in_backward="two-pass")
    for call in (optimizer.step, partial(_backward, model)):
        with pytest.raises(ShardingError) as refused_:
            call()
        messages.append(str(refused_.value))
    optimizer.step(partial(_backward, model))
    return messages


def test_what_two_passes_need(pool: Pool) -> None:
    """A closure, and nothing outside of it."""
    for fp16, step, backward in pool.run(1, refused_at_shard_and_after):
        assert "known only after the backward" in fp16
        assert "without a closure" in step
        assert "outside of a closure" in backward


# Exceptions ---------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Raises in backward before the first block, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == 2 and self.fails:
                x.register_hook(_boom)
        return x


def _boom(_: Tensor) -> None:
    raise ValueError("on purpose")


def fail_half_way(stage: int, failing_rank: int) -> tuple[list[Tensor], list[bool]]:
    """Parameters at the end, and which blocks the failed backward has updated."""
    torch.manual_seed(0)
    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage, **IN_BACKWARD)
    x = X + dist.get_rank()
    for step in range(4):
        model.fails = step == 2 and failing_rank in (dist.get_rank(), -1)
        before = full_values(model)
        with suppress(ValueError) if failing_rank == -1 else nullcontext():
            with suppress(ValueError) if model.fails else nullcontext():
                model(x).pow(2).sum().backward()
        if step == 2:
            after = full_values(model)
            changed = [
                not torch.equal(before[f"blocks.{number}.weight"], after[f"blocks.{number}.weight"])
                for number in range(6)
            ]
        optimizer.step()
        optimizer.zero_grad()
    return list(full_values(model).values()), changed


class Fragile(torch.optim.SGD):
    """Raises at one of the units that it is run on."""

    # Of the class: attributes of the optimizer itself count steps, not units.
    fails_at = -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step, or an error before it."""
        type(self).fails_at -= 1
        if self.fails_at == 0:
            raise ValueError("on purpose")
        return super().step(closure)


def fail_in_the_optimizer(stage: int, unit: int) -> tuple[list[Tensor], int]:
    """Parameters after a step that raised and three more, and how many blocks it has updated."""
    torch.manual_seed(0)
    model = Failing()
    optimizer = Fragile(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage, precision=LEAN, **IN_BACKWARD)
    before = full_values(model)
    Fragile.fails_at = unit
    with pytest.raises(ValueError, match="on purpose"):
        _backward(model)
    after = full_values(model)
    changed = sum(not torch.equal(before[name], after[name]) for name in before if "weight" in name)
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    _step(model, optimizer)
    assert all(piece.grad is None for piece in pieces)
    _step(model, optimizer, 2)
    return list(full_values(model).values()), changed


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_raises(pool: Pool, stage: int) -> None:
    """In the middle of a backward, and where the last unit is updated, at its end."""
    for unit, updated in ((3, 2), (6, 5)):
        runs = pool.run(2, fail_in_the_optimizer, stage, unit, record_warnings=True)
        for values, changed in runs:
            assert changed == updated
            assert all(torch.equal(a, b) for a, b in zip(values, runs[0][0], strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_fails_half_way(pool: Pool, stage: int) -> None:
    """Units that were updated are so on all ranks, the rest is as before, training goes on."""
    runs = pool.run(2, fail_half_way, stage, -1, record_warnings=True)
    for values, changed in runs:
        assert changed[0] is False
        assert changed[5] is True
        for one, other in zip(values, runs[0][0], strict=True):
            assert torch.equal(one, other)
    for warned in pool.warnings:
        assert any("units had been updated" in one.message for one in warned)
