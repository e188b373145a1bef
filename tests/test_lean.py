"""Masters and gradients that take fewer bytes: exact where they promise it, and how many bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.handle
from onecopy import Precision
from onecopy.core.split import SplitMaster
from onecopy.errors import ConfigError
from onecopy.memory.live_tensors import LiveTensors
from onecopy.planner import estimate
from onecopy.report.dtypes import describe
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, full_values, train
from tests.test_memory import Deep, after_backward
from tests.test_parity import check

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
SPLIT = Precision(compute="bf16", master="bf16+16")
LEAN = Precision(compute="bf16", master="bf16+16", gradient="bf16")
BF16_GRADIENT = Precision(compute="bf16", gradient="bf16")
PURE = Precision(compute="bf16", master="bf16")
NEAR_HALF_WAY = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def _bits() -> Tensor:
    """All bf16 values with the lower halves that matter, and random ones: (n,) int32."""
    upper = torch.arange(-(1 << 15), 1 << 15) << 16
    random = torch.randint(-(1 << 31), 1 << 31, ((1 << 18) + 37,))
    return torch.cat([*(upper + lower for lower in NEAR_HALF_WAY), random]).to(torch.int32)


def _split(values: Tensor) -> tuple[SplitMaster, Tensor, nn.Parameter]:
    own, piece = values.to(torch.bfloat16), nn.Parameter(values)
    split = SplitMaster(own, values, [piece])
    split.rest()
    return split, own, piece


def test_a_split_master_comes_back_to_the_last_bit() -> None:
    """Every bf16 value is met from both sides, halfway included; a NaN stays one."""
    torch.manual_seed(0)
    before = _bits().view(torch.float32)
    split, own, _ = _split(before.clone())
    assert torch.equal(own.isnan(), before.isnan())
    split.join()
    is_nan = before.isnan()
    assert torch.equal(split.whole.isnan(), is_nan)
    assert torch.equal(split.whole[~is_nan].view(torch.int32), before[~is_nan].view(torch.int32))


def test_a_piece_of_a_split_master_joins_at_a_touch() -> None:
    """Its values are never read while their memory is away; its metadata needs none."""
    split, _, piece = _split(torch.full((8,), 1.001))
    assert (piece.shape, piece.dtype, piece.grad) == ((8,), torch.float32, None)
    assert not split.is_joined
    assert piece.sum().item() == pytest.approx(8.008)
    assert split.is_joined
    assert type(piece) is nn.Parameter


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), -2.5])
def test_values_written_beside_a_remainder(value: float) -> None:
    """Whatever is written into the bf16 slice, the master rounds to it: no NaN out of a zero."""
    for near in (1.001, 0.999, -1.001, -0.999):
        split, own, _ = _split(torch.full((8,), near))
        own.fill_(value)
        split.join()
        assert torch.equal(split.whole.to(torch.bfloat16), own), near


def _run(plan: Plan, precision: Precision | str) -> Plan:
    return replace(plan, settings={"precision": precision})


@pytest.mark.sampled(
    "name, optimizer, world, stage",
    list(itertools.product(("gpt", "tied", "odd"), ("momentum", "adamw_fused"), WORLDS, STAGES)),
    4,
    always=[("gpt", "adamw_fused", 2, 1), ("odd", "momentum", 3, 2), ("tied", "momentum", 2, 0)],
)
def test_a_split_master_trains_like_an_fp32_one(
    pool: Pool, name: str, optimizer: str, world: int, stage: int
) -> None:
    """Losses and masters are equal, bit for bit."""
    plan = Plan(name=name, stage=stage, optimizer=optimizer, backwards=2, max_grad_norm=0.5)
    plain = pool.run(world, train, _run(plan, "bf16"))
    lean = pool.run(world, train, _run(plan, SPLIT))
    for one, other in zip(plain, lean, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        for key, value in one.parameters.items():
            assert torch.equal(value, other.parameters[key]), key


@pytest.mark.sampled(
    "name, world, stage, no_sync",
    list(itertools.product(("gpt", "unused", "odd"), WORLDS, (1, 2, 3), (False, True))),
    5,
    always=[("gpt", 2, 3, False), ("unused", 3, 1, False), ("odd", 2, 2, True)],
)
def test_gradients_kept_in_bf16(
    pool: Pool, name: str, world: int, stage: int, no_sync: bool
) -> None:
    """Sums are made in fp32 and rounded once for each reduce; Adam updates in fp32."""
    plan = Plan(name=name, stage=stage, optimizer="adamw_fused", backwards=2, no_sync=no_sync)
    check(pool, world, _run(plan, LEAN), precision="bf16", gradient_dtype=torch.bfloat16)


def test_fp32_training_with_bf16_gradients(pool: Pool) -> None:
    """The two choices are independent."""
    plan = Plan(name="odd", stage=2, optimizer="momentum", backwards=3)
    precision = Precision(gradient="bf16")
    check(pool, 2, _run(plan, precision), gradient_dtype=torch.bfloat16)


@pytest.mark.sampled(
    "world, stage", list(itertools.product(WORLDS, (1, 2, 3))), 3, always=[(2, 3), (3, 1)]
)
def test_no_fp32_at_all(pool: Pool, world: int, stage: int) -> None:
    """Parameters, gradients and momentum in bf16, as a model in bf16 trains in plain PyTorch."""
    plan = _run(Plan(name="gpt", stage=stage, optimizer="momentum", backwards=2), PURE)
    runs = pool.run(world, train, plan)
    expected = reference.train(
        lambda: models.build(plan.name, plan.seed).bfloat16(),
        models.batches(plan.name, plan.steps, world, plan.backwards),
        OPTIMIZERS["momentum"],
        precision="bf16",
        gradient_dtype=torch.bfloat16,
    )
    for run in runs:
        for key, value in expected.parameters.items():
            assert run.parameters[key].dtype == torch.bfloat16
            assert torch.equal(run.parameters[key], value), key


@pytest.mark.sampled(
    "world, stage", list(itertools.product(WORLDS, STAGES)), 3, always=[(2, 3), (3, 1)]
)
def test_clipping_of_bf16_gradients(pool: Pool, world: int, stage: int) -> None:
    """The norm is measured in fp32, and is that of the gradients that are kept."""
    plan = _run(Plan(name="tied", stage=stage, optimizer="sgd", max_grad_norm=0.05), LEAN)
    runs = pool.run(world, train, plan)
    expected = reference.train(
        partial(models.build, plan.name, plan.seed),
        models.batches(plan.name, plan.steps, world),
        OPTIMIZERS["sgd"],
        precision="bf16",
        gradient_dtype=torch.bfloat16,
        max_grad_norm=0.05,
    )
    for run in runs:
        assert run.norms == pytest.approx(expected.norms, rel=2e-2)
        assert run.norms[0] == pytest.approx(expected.norms[0], rel=1e-5 if stage else 1e-2)
        for key, value in expected.parameters.items():
            torch.testing.assert_close(run.parameters[key], value, rtol=1e-2, atol=1e-3)


# Bytes ----------------------------------------------------------------------------------------


@pytest.mark.sampled(
    "world, stage, precision",
    list(itertools.product(WORLDS, STAGES, (SPLIT, LEAN, BF16_GRADIENT, PURE))),
    6,
    always=[(2, stage, LEAN) for stage in STAGES] + [(3, 3, PURE)],
)
def test_bytes_equal_the_formula(pool: Pool, world: int, stage: int, precision: Precision) -> None:
    """After backward: a remainder of 2 bytes in place of a master of 4, gradients of 2."""
    master = 2 if precision is PURE else 4
    is_split = precision.master == "bf16+16" and stage < 3
    gradient = 2 if precision in (LEAN, BF16_GRADIENT, PURE) else 4
    widths = estimate.ElementWidths(
        compute=2,
        master=master,
        gradient=gradient,
        optimizer=2 * master,
        remainder=2 if precision.master == "bf16+16" else None,
    )
    for sizes in pool.run(world, after_backward, "gpt", stage, precision):
        cut = world if stage else 1
        whole = 0 if stage == 3 else 2 * sizes.flat
        kept = 2 if is_split else 0 if precision is PURE and stage < 3 else master
        # The places that lie halfway between two bf16 values, 8 bytes each.
        ties = sizes.held.parameters - whole - kept * sizes.flat // cut
        assert 0 <= ties <= (64 if is_split else 0)
        full_gradients = 2 * sizes.gradient if stage == 1 else 0
        # Which the means lie in, where they are as wide.
        mean = 0 if full_gradients and gradient == 2 else gradient * sizes.gradient // cut
        assert sizes.held.gradients == full_gradients + mean
        planned = estimate.state_bytes(
            stage=stage, num_parameters=sizes.flat, world_size=world, widths=widths
        )
        padding = planned.optimizer - sizes.held.optimizer
        assert 0 <= padding < 2 * master * sizes.flat // cut
        trailers = sizes.gradient - sizes.flat
        assert abs(planned.total - sizes.held.total) <= padding + 8 * trailers + 64 + ties
        beside = sizes.tracked - sizes.held.total
        assert 0 <= beside < 0.02 * sizes.held.total + 4096, beside


PAGE = Path(__file__).resolve().parent.parent / "docs/memory-lean.md"


def test_the_page_says_what_the_formula_gives() -> None:
    """Each row of the table in docs/memory-lean.md, at each stage."""
    rows = re.findall(r"^\| (nothing else|`.*?`) \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 7
    for settings, cells in rows:
        is_pure = 'master="bf16"' in settings
        widths = estimate.ElementWidths(
            compute=2,
            master=2 if is_pure else 4,
            gradient=0 if "step" in settings else 2 if is_pure or "gradient" in settings else 4,
            optimizer=4 if is_pure else 8,
            remainder=2 if "bf16+16" in settings else None,
        )
        for stage, cell in zip(STAGES, cells.split("|")[:4], strict=True):
            fixed, _, cut = cell.strip().partition(" + ") if "+" in cell else (cell, "", "0/N")
            if "/N" in fixed:
                fixed, cut = "0", fixed.strip()
            bytes_said = int(fixed) * 24 + int(cut.removesuffix("/N")) * 24 // 3
            assert estimate.state_bytes(stage, 24, 3, widths).total == bytes_said, (settings, stage)


def peak_of_step(precision: Precision, depth: int) -> tuple[int, int]:
    """How far the live bytes rise in `optimizer.step()`, and the elements of one owned slice."""
    with LiveTensors() as live:
        model = Deep(depth, 128)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        onecopy.shard(model, optimizer, stage=2, precision=precision)
        for _ in range(2):
            model(torch.ones(1, 128)).sum().backward()
            held = live.num_bytes()
            live.reset_peak()
            optimizer.step()
            peak = live.peak_bytes - held
            optimizer.zero_grad()
        unit = onecopy.handle.of(model).engine.units[0]
        return peak, unit.layout.slice_numels[unit.slice.rank]


@pytest.mark.parametrize("depth", [4, 12])
def test_a_step_needs_memory_for_one_unit(pool: Pool, depth: int) -> None:
    """fp32 values and gradients exist for one unit at a time, however deep the model is."""
    for peak, numel in pool.run(2, peak_of_step, LEAN, depth):
        assert peak <= 16 * numel, peak / numel


# With everything else ---------------------------------------------------------------------------

X = torch.linspace(-1, 1, 24).view(3, 8)
Script = Callable[[nn.Module, torch.optim.Optimizer], None]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        model(X).float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def groups_and_clipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Several groups, a changed learning rate, torch's clipping, a frozen layer."""
    _step(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.02
    model[0].bias.requires_grad_(False)
    model(X).float().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    _step(model, optimizer)


def looked_at(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reading pieces, parameters and states changes nothing."""
    _step(model, optimizer, 2)
    sum(piece.sum() for group in optimizer.param_groups for piece in group["params"])
    model.state_dict()
    optimizer.state_dict()
    with onecopy.full_parameters(model):
        [parameter.sum() for parameter in model.parameters()]
    _step(model, optimizer, 2)


def changed_inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Elements that were written inside full_parameters, and no others, reach the masters."""
    _step(model, optimizer, 2)
    with onecopy.full_parameters(model), torch.no_grad():
        model[0].weight[1:3] = 0.0
        model[2].weight.mul_(0.5)
    _step(model, optimizer, 2)
    model.load_state_dict(model.state_dict())
    _step(model, optimizer)


def failed_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that raises leaves what it was given."""
    _step(model, optimizer)
    model(X).float().sum().backward()
    optimizer.param_groups[0]["lr"], lr = "a word", optimizer.param_groups[0]["lr"]
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    _step(model, optimizer)


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (groups_and_clipping, looked_at, changed_inside, failed_step)
}


def run_script(name: str, stage: int, precision: Precision | str) -> dict[str, Any]:
    """Masters after a script, those that unshard gives back, and optimizer states."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    weights, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.05, momentum=0.9
    )
    onecopy.shard(model, optimizer, stage=stage, precision=precision)
    SCRIPTS[name](model, optimizer)
    found: dict[str, Any] = full_values(model)
    onecopy.unshard(model)
    for key, parameter in model.named_parameters():
        assert torch.equal(found[key], parameter)
        found[f"state of {key}"] = optimizer.state[parameter].get("momentum_buffer")
    return found


@pytest.mark.sampled(
    "name, stage", list(itertools.product(SCRIPTS, STAGES)), 6, always=[(s, 1) for s in SCRIPTS]
)
def test_scripts_with_a_split_master(pool: Pool, name: str, stage: int) -> None:
    """What a loop does beside training gives the bits that it gives with fp32 masters."""
    plain = pool.run(2, run_script, name, stage, "bf16")
    for one, other in zip(plain, pool.run(2, run_script, name, stage, SPLIT), strict=True):
        for key, value in one.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, other[key]), key
            else:
                assert value == other[key], key


class CountingSGD(torch.optim.SGD):
    """Counts in its param_groups, and calls its parent's step, which torch hooks again."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One more step."""
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def one_step_for_hooks(precision: Precision) -> tuple[int, int, list[int]]:
    """How often hooks fire and counters count in two steps, with a scheduler."""
    model = models.build("gpt")
    optimizer = CountingSGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=2, precision=precision)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(2):
        models.loss(model, models.batch("gpt", step, dist.get_rank())).backward()
        optimizer.step()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        assert all(gradient is not None for gradient in gradients), "as after any step"
        optimizer.zero_grad()
        scheduler.step()
    return len(calls), optimizer.param_groups[0]["count"], scheduler.get_last_lr()


def test_hooks_and_counters_see_one_step(pool: Pool) -> None:
    """However many units are stepped one by one. (The parent's hooks fire again, as in torch.)"""
    for calls, count, rates in pool.run(2, one_step_for_hooks, LEAN):
        assert (calls, count) == (4, 2)
        assert rates == [pytest.approx(0.1 * 0.1**2)]


def made_on_the_meta_device(stage: int, is_meta: bool) -> tuple[dict[str, Tensor], str]:
    """Masters after a step of a model whose units are made one by one, and what is printed."""
    torch.manual_seed(0)
    with onecopy.init_sharded() if is_meta else nullcontext():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer, stage=stage, precision=SPLIT if is_meta else "bf16")
    _step(model, optimizer)
    return full_values(model), str(describe(onecopy.handle.of(model).engine))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_made_on_the_meta_device(pool: Pool, stage: int) -> None:
    """The same bits again; at stage 3 the choice changes nothing, and is not said."""
    ((expected, _),) = pool.run(1, made_on_the_meta_device, stage, False)
    ((values, printed),) = pool.run(1, made_on_the_meta_device, stage, True)
    for key, value in expected.items():
        assert torch.equal(value, values[key]), key
    assert ("16 more bits" in printed) == (stage == 2)


def test_settings_that_fit_nothing() -> None:
    """Named, with what to say instead."""
    with pytest.raises(ConfigError, match='say compute="bf16"'):
        Precision(compute="fp32", master="bf16+16")
    with pytest.raises(ConfigError, match="no parameter of this model computes in bf16"):
        onecopy.shard(nn.Linear(2, 2), precision=Precision(master="bf16+16"))
    with pytest.raises(ConfigError, match="is not one of 'fp32', 'bf16\\+16'"):
        Precision(compute="bf16", master="bf16+8")
