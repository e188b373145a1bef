"""torch.autocast and torch.amp.GradScaler by hand, over fp32 models: what one process computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.events
from onecopy.events import Event
from onecopy.memory.live_tensors import LiveTensors
from onecopy.policies import Precision
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, full_values

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_loss(dtype: torch.dtype, model: nn.Module, batch: models.Batch) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return models.loss(model, batch)


def train(name: str, stage: int, dtype: str, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """A loop as in torch's documentation; `scaling` goes to the GradScaler."""
    torch.manual_seed(0)
    model = models.build(name)
    optimizer = OPTIMIZERS["momentum"](model)
    events: list[Event] = []
    onecopy.shard(model, optimizer, stage=stage, sinks=(events.append,))
    options = dict(scaling or {})
    unscale, limit = options.pop("unscale", False), options.pop("limit", None)
    scaler = torch.amp.GradScaler("cpu", enabled=scaling is not None, **options)
    seen: dict[str, Any] = {"losses": [], "scales": [], "norms": []}
    for step in range(4):
        loss = autocast_loss(DTYPES[dtype], model, models.batch(name, step, dist.get_rank()))
        scaler.scale(loss).backward()
        if unscale:
            [p.grad.norm() for p in model.parameters()]  # of scaled gradients: no longer valid
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
            seen["norms"].append(norm.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen["losses"].append(loss.item())
        seen["scales"].append(scaler.get_scale())
    seen["values"] = full_values(model)
    seen["kinds"] = [event.kind for event in events if event.kind in ("step", "skip")]
    return seen


def expect(name: str, world: int, dtype: str, **options: Any) -> reference.Result:
    return reference.train(
        lambda: models.build(name),
        models.batches(name, 4, world),
        OPTIMIZERS["momentum"],
        loss=lambda model, batch: autocast_loss(DTYPES[dtype], model, batch),
        **options,
    )


def _distance(values: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Between all parameters of two models."""
    return sum(float((values[key] - other).pow(2).sum()) for key, other in others.items()) ** 0.5


@pytest.mark.sampled(
    "name, world, stage, dtype",
    list(itertools.product(("gpt", "tied", "convgn", "nested"), WORLDS, STAGES, DTYPES)),
    4,
    always=[("tied", 2, 3, "bf16")],
)
def test_autocast_equals_one_process(
    pool: Pool, name: str, world: int, stage: int, dtype: str
) -> None:
    """The casts that autocast caches are those of the values of this step, at every stage."""
    expected = expect(name, world, dtype)
    # Where a unit is released between two calls, each casts the weights for itself, and their
    # gradients are added in fp32, not in the lower dtype of one cast: other roundings, no larger.
    is_exact = name != "nested" or stage < 3
    exact = reference.train(
        lambda: models.build(name), models.batches(name, 4, world), OPTIMIZERS["momentum"]
    ).parameters
    error = _distance(expected.parameters, exact)
    for rank, run in enumerate(pool.run(world, train, name, stage, dtype, None)):
        losses = [step[rank][0] for step in expected.losses]
        assert run["losses"] == (losses if is_exact else pytest.approx(losses, rel=5e-2))
        if is_exact:
            assert _distance(run["values"], expected.parameters) == 0.0
        else:
            assert _distance(run["values"], exact) < 1.5 * error


@pytest.mark.sampled(
    "world, stage, unscale",
    list(itertools.product(WORLDS, STAGES, (False, True))),
    4,
    always=[(2, 3, True), (3, 2, False), (2, 0, True)],
)
def test_a_grad_scaler_equals_one_process(
    pool: Pool, world: int, stage: int, unscale: bool
) -> None:
    """Its largest scale overflows first. Unscaled by itself or by the user, who then clips."""
    limit = 0.05
    options: dict[str, Any] = {"init_scale": 2.0**24, "unscale": unscale, "limit": limit}
    expected = expect(
        "tied", world, "fp16", loss_scale=2.0**24, max_grad_norm=limit if unscale else None
    )
    assert expected.scales[0] < 2.0**24, "the first step should overflow"
    finite = [norm for norm in expected.norms if norm < float("inf")]
    for run in pool.run(world, train, "tied", stage, "fp16", options):
        assert run["scales"] == expected.scales
        changes = zip([2.0**24, *expected.scales], expected.scales, strict=False)
        assert run["kinds"] == ["skip" if new < old else "step" for old, new in changes]
        if unscale:
            measured = [norm for norm in run["norms"] if torch.tensor(norm).isfinite()]
            assert measured == pytest.approx(finite, rel=1e-5)
        for key, value in expected.parameters.items():
            if unscale:
                torch.testing.assert_close(run["values"][key], value, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(run["values"][key], value), key


class Two(nn.Module):
    """Two parts for two optimizers; `tiny` is smaller than a world."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.tiny = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.tiny * x.sum()


def two_optimizers(stage: int, kind: str, fused: bool) -> tuple[list[float], list[bool]]:
    """One rank's part of one optimizer's gradients overflows in the second step."""
    torch.manual_seed(0)
    model = Two()
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    optimizers = [
        make(model.left.parameters(), lr=0.1, fused=fused),
        make([model.tiny], lr=0.1, fused=fused),
    ]
    onecopy.shard(model, optimizers, stage=stage, max_grad_norm=1e6)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales, changed = [], []
    before = full_values(model)
    for step in range(4):
        left, tiny = model(torch.ones(2, 4))
        hit = step == 1 and dist.get_rank() == dist.get_world_size() - 1
        loss = left.square().mean() + tiny.sum() * (float("inf") if hit else 1.0)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        after = full_values(model)
        changed.append([not torch.equal(before[name], after[name]) for name in before])
        scales.append(scaler.get_scale())
        before = after
    return scales, [all(one) for one in changed]


@pytest.mark.sampled(
    "world, stage, kind, fused",
    list(itertools.product(WORLDS, STAGES, ("sgd", "adamw"), (False, True))),
    3,
    always=[(3, 3, "adamw", True), (3, 2, "sgd", False)],
)
def test_a_grad_scaler_with_two_optimizers(
    pool: Pool, world: int, stage: int, kind: str, fused: bool
) -> None:
    """All ranks change their scales alike, also those that own nothing of one optimizer."""
    for scales, changed in pool.run(world, two_optimizers, stage, kind, fused):
        assert scales == [64.0, 32.0, 32.0, 64.0]
        assert changed == [True, False, True, True]


def misuse(kind: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = "fp16" if kind == "twice" else None
    onecopy.shard(model, optimizer, stage=2, precision=precision)
    scaler = torch.amp.GradScaler("cpu")
    if kind == "local":
        with onecopy.no_sync(model):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(optimizer)
    else:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if kind == "foreign":
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("twice", "loss_scale=1.0"),
        ("local", "outside of no_sync"),
        ("foreign", "other than torch.amp.GradScaler"),
    ],
)
def test_scaling_that_would_be_wrong_is_refused(pool: Pool, kind: str, message: str) -> None:
    for error in pool.run(2, misuse, kind, expect_failures=True):
        assert error.type_name == "ShardingError", str(error)
        assert message in error.message


def accumulate(stage: int, by_hand: bool) -> dict[str, Tensor]:
    """no_sync up to the last backward, and past it; fp16 compute scaled by a GradScaler."""
    torch.manual_seed(0)
    model = models.build("gpt")
    optimizer = OPTIMIZERS["sgd"](model)
    precision = Precision(compute="fp16", loss_scale=1.0 if by_hand else 256.0)
    onecopy.shard(model, optimizer, stage=stage, precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=by_hand)
    for step in range(2):
        with onecopy.no_sync(model):
            for micro in range(2):
                batch = models.batch("gpt", step, dist.get_rank(), micro)
                scaler.scale(models.loss(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return full_values(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_grad_scaler_in_place_of_the_own_scale(pool: Pool, stage: int) -> None:
    """The same scale gives the same bits, also where the step itself reduces what is left."""
    theirs, ours = (pool.run(2, accumulate, stage, by_hand)[0] for by_hand in (True, False))
    for name, value in ours.items():
        assert torch.equal(theirs[name], value), name


class Checkpointed(nn.Module):
    """Saves no more than one activation for each of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def cast_bytes_in_forward() -> int:
    """What is held at the end of a forward under autocast, beside activations and states."""
    with LiveTensors() as live:
        model = Checkpointed()
        onecopy.shard(model, OPTIMIZERS["sgd"](model), stage=3)
        x = torch.ones(1, 64)
        before = live.num_bytes()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            held = live.num_bytes() - before
        out.float().sum().backward()
    return held


def test_the_cache_of_autocast_holds_no_released_weights(pool: Pool) -> None:
    """It lives until the end of `with autocast`: eight blocks, where one is gathered at a time."""
    one_block = 2 * 64 * 64
    for held in pool.run(2, cast_bytes_in_forward):
        assert held < one_block


def held_after_steps(stage: int, uses_autocast: bool) -> list[int]:
    """Live bytes after each step."""
    sizes = []
    with LiveTensors() as live:
        model = models.build("gpt")
        optimizer = OPTIMIZERS["adamw"](model)
        onecopy.shard(model, optimizer, stage=stage)
        for step in range(3):
            batch = models.batch("gpt", step, dist.get_rank())
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=uses_autocast):
                loss = models.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, batch
            sizes.append(live.num_bytes())
    return sizes


@pytest.mark.parametrize("stage", [2, 3])
def test_no_casts_outlive_the_step(pool: Pool, stage: int) -> None:
    """What autocast made of released weights goes with the graph."""
    plain, cast = (pool.run(2, held_after_steps, stage, on) for on in (False, True))
    assert plain == cast
