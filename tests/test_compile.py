"""torch.compile, of the model or its blocks, before or after shard: same values, compiled once."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.handle
from tests import models, reference
from tests.pool import Pool
from tests.runs import full_values

STEPS = 5
Backend = Callable[..., Any]
Step = Callable[[models.Batch], Tensor]


class Counter:
    """The aot_eager backend, which keeps every bit, and how often it was asked to compile."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.compiled = 0
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.compiled += 1
        return self._backend(graph, inputs)


def _blocks_in_place(model: nn.Module, backend: Backend) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def _blocks_wrapped(model: nn.Module, backend: Backend) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)
    return model


def _whole_in_place(model: nn.Module, backend: Backend) -> nn.Module:
    model.compile(backend=backend)
    return model


def _whole_wrapped(model: nn.Module, backend: Backend) -> nn.Module:
    return torch.compile(model, backend=backend)


WAYS: dict[str, Callable[[nn.Module, Backend], nn.Module]] = {
    "blocks in place": _blocks_in_place,
    "blocks wrapped": _blocks_wrapped,
    "whole in place": _whole_in_place,
    "whole wrapped": _whole_wrapped,
}


def train(name: str, stage: int, way: str, when: str, evaluates: bool) -> Any:
    """Parameters, and how much had been compiled after the second step and after the last."""
    torch._dynamo.reset()
    counter = Counter()
    compiled = model = models.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if when == "before":
        compiled = WAYS[way](model, counter)
    assert onecopy.shard(compiled, optimizer, stage=stage) is compiled
    if when == "after":
        compiled = WAYS[way](model, counter)
    counts = []
    for step in range(STEPS):
        batch = models.batch(name, step, dist.get_rank())
        models.loss(compiled, batch).backward()
        optimizer.step()
        compiled.zero_grad()
        if evaluates:
            with torch.no_grad():
                models.loss(compiled, batch)
        counts.append(counter.compiled)
    torch._dynamo.reset()
    values = {name.replace("_orig_mod.", ""): value for name, value in full_values(model).items()}
    return values, counts[1], counts[-1]


def _expected(name: str, world: int) -> dict[str, Tensor]:
    result = reference.train(
        partial(models.build, name),
        models.batches(name, STEPS, world),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    return result.parameters


EVERY = list(itertools.product((1, 2, 3), (0, 1, 2, 3), WAYS, ("before", "after")))
MUST = [(2, 3, "whole wrapped", "before"), (2, 3, "blocks in place", "after")]


@pytest.mark.sampled("world, stage, way, when", EVERY, 2, always=MUST)
def test_compiled_training(pool: Pool, world: int, stage: int, way: str, when: str) -> None:
    """Bit for bit what one process computes, and nothing is compiled after the second step."""
    expected = _expected("tied", world)
    for values, early, late in pool.run(world, train, "tied", stage, way, when, True):
        assert 0 < early == late
        for name, value in expected.items():
            assert torch.equal(values[name], value), name


@pytest.mark.sampled("name", ["mlp", "nested", "convbn", "unused"], 1)
def test_other_models_compiled_whole(pool: Pool, name: str) -> None:
    """Modules of torch.nn at the root, blocks called twice, buffers, gradients on some ranks."""
    expected = _expected(name, 2)
    for values, _, _ in pool.run(2, train, name, 3, "whole in place", "after", False):
        for key, value in expected.items():
            assert torch.equal(values[key], value), key


def train_in_one_function(stage: int) -> Any:
    """The user compiles a function that holds forward, backward and the step."""
    torch._dynamo.reset()
    counter = Counter()
    model = models.build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    onecopy.shard(model, optimizer, stage=stage)

    @partial(torch.compile, backend=counter)
    def step(batch: models.Batch) -> None:
        models.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    counts = []
    for number in range(STEPS):
        step(models.batch("gpt", number, dist.get_rank()))
        counts.append(counter.compiled)
    torch._dynamo.reset()
    return full_values(model), counts[2], counts[-1]


@pytest.mark.sampled("stage", [0, 1, 2, 3], 1)
def test_a_whole_step_compiled(pool: Pool, stage: int) -> None:
    """Communication stays outside of the graphs."""
    expected = _expected("gpt", 2)
    for values, early, late in pool.run(2, train_in_one_function, stage, record_warnings=True):
        assert 0 < early == late
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-7)


class Borrowing(nn.Module):
    """Uses a weight of a block's outside of the block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.blocks[0][0].weight)


def borrow(stage: int | None) -> tuple[list[float], list[int]]:
    """Losses, and how much had been compiled after each step; plain and eager without a stage."""
    torch._dynamo.reset()
    counter = Counter()
    compiled = model = Borrowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage)
        compiled = torch.compile(model, backend=counter)
    losses, counts = [], []
    for step in range(STEPS):
        loss = compiled(torch.ones(2, 4) * (step + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts.append(counter.compiled)
    torch._dynamo.reset()
    return losses, counts


@pytest.mark.parametrize("stage", [2, 3])
def test_a_borrowed_weight(pool: Pool, stage: int) -> None:
    """Gathering on touch happens between graphs, too."""
    expected, _ = borrow(None)
    for losses, counts in pool.run(2, borrow, stage):
        assert losses == expected
        assert 0 < counts[2] == counts[-1]


def fullgraph() -> str:
    """A graph over several units cannot be one."""
    torch._dynamo.reset()
    model = models.build("gpt")
    onecopy.shard(model, stage=3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    try:
        models.loss(compiled, models.batch("gpt", 0, 0))
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    return ""


def test_one_graph_over_units_says_what_to_do(pool: Pool) -> None:
    """The compiler's own error carries our advice."""
    (said,) = pool.run(1, fullgraph)
    assert "compile each block by itself" in said


def lives_on_the_module() -> bool:
    """Of a compiled model, the module inside is sharded; both names work, also to undo it."""
    model = models.build("mlp")
    compiled = torch.compile(model, backend="eager")
    onecopy.shard(compiled, stage=3)
    assert onecopy.handle.of(compiled) is onecopy.handle.of(model)
    with onecopy.full_parameters(compiled), compiled.no_sync(), onecopy.no_sync(compiled):
        shapes = [parameter.detach().shape for parameter in compiled.parameters()]
    onecopy.unshard(compiled)
    assert shapes == [parameter.detach().shape for parameter in model.parameters()]
    return onecopy.handle.find(model) is None


def test_the_handle_of_a_compiled_model(pool: Pool) -> None:
    """torch.compile(model) and model are the same to onecopy."""
    assert pool.run(2, lives_on_the_module) == [True, True]


def train_with_inductor(stage: int) -> tuple[list[float], list[float]]:
    """Losses with inductor, sharded and not."""
    losses: dict[bool, list[float]] = {False: [], True: []}
    for sharded in (False, True):
        torch._dynamo.reset()
        model = models.build("gpt")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            onecopy.shard(model, optimizer, stage=stage)
        compiled = torch.compile(model)
        for step in range(3):
            loss = models.loss(compiled, models.batch("gpt", step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[sharded].append(loss.item())
    torch._dynamo.reset()
    return losses[False], losses[True]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: g++")
@pytest.mark.parametrize("stage", [2, 3])
def test_inductor(pool: Pool, stage: int) -> None:
    """Its kernels are fused otherwise than in the whole model: equal but for rounding."""
    results = pool.run(1, train_with_inductor, stage, timeout=240, record_warnings=True)
    plain, sharded = results[0]
    torch.testing.assert_close(sharded, plain, rtol=1e-5, atol=1e-6)
