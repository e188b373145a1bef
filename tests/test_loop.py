"""Every loop of tests/loops.py, sharded against plain, and what may differ between ranks."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from tests import models
from tests.loops import LOOPS, Failing, Side, data, net, sgd
from tests.pool import Pool

EVERY = list(itertools.product(LOOPS, (1, 2, 3, 4), (0, 1, 2, 3)))


def run_loop(name: str, stage: int | None) -> list[Tensor]:
    """What a loop returns."""
    return LOOPS[name](Side(stage))


@cache
def _expected(name: str) -> list[Tensor]:
    return run_loop(name, None)


@pytest.mark.sampled(
    "name, world, stage", EVERY, len(LOOPS) + 5, always=[(name, 2, 3) for name in LOOPS]
)
def test_means_what_it_means_in_plain_pytorch(
    pool: Pool, name: str, world: int, stage: int
) -> None:
    """The same values on every rank."""
    for values in pool.run(world, run_loop, name, stage, timeout=120):
        assert len(values) == len(_expected(name))
        torch.testing.assert_close(values, _expected(name), rtol=1e-5, atol=1e-6)


def differently(stage: int) -> list[Tensor]:
    """Ranks run other modules, and other numbers of forwards; gradients are the mean of all."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.ModuleDict({"text": net(0), "image": net(1)})
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage)
    for step in range(4):
        part = model["text" if (rank + step) % 2 else "image"]
        for extra in range(rank):
            with torch.no_grad():
                model["text"](data(extra))
        part(data(step)).square().mean().backward()
        for extra in range(2 * rank):
            model["image"](data(extra))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return Side(stage).values(model)


def _differently_in_one_process() -> list[Tensor]:
    model = nn.ModuleDict({"text": net(0), "image": net(1)})
    optimizer = sgd(model)
    for step in range(4):
        for rank in range(2):
            part = model["text" if (rank + step) % 2 else "image"]
            (part(data(step)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return Side(None).values(model)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_may_run_different_modules(pool: Pool, stage: int) -> None:
    """Where parameters stay: a text batch here, an image batch there."""
    expected = _differently_in_one_process()
    for values in pool.run(2, differently, stage):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def generate(stage: int) -> tuple[list[list[int]], list[Tensor]]:
    """Each rank generates another number of tokens, between training steps."""
    rank = dist.get_rank()
    model = models.build("hf_llama")
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage)
    texts = []
    for step in range(2):
        models.loss(model, models.batch("hf_llama", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with onecopy.full_parameters(model), torch.no_grad():
            prompt = torch.full((1, 2), 5 + step)
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=2 + 3 * rank,
                do_sample=False,
                pad_token_id=0,
            )
        texts.append(tokens[0].tolist())
    return texts, Side(stage).values(model)


@pytest.mark.sampled("stage", [0, 1, 2, 3], 2, always=[3])
def test_generation_of_different_lengths(pool: Pool, stage: int) -> None:
    """full_parameters gathers once; nothing inside is a collective."""
    (short, values), (long, others) = pool.run(2, generate, stage)
    for few, many in zip(short, long, strict=True):
        assert len(few) == 4 and len(many) == 7 and many[:4] == few
    torch.testing.assert_close(values, others, rtol=0, atol=0)


def fail_on_one_rank(stage: int, failing: bool) -> list[Tensor]:
    """The step raises on rank 1 after it has changed values; both ranks go on."""
    model = net()
    optimizer = sgd(model)
    boom = Failing()
    optimizer.register_step_post_hook(boom)
    onecopy.shard(model, optimizer, stage=stage)
    for step in range(4):
        model(data(step)).square().mean().backward()
        boom.is_armed = failing and dist.get_rank() == 1 and step == 1
        with suppress(torch.OutOfMemoryError):
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(data(step))
    return Side(stage).values(model)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_raises_on_one_rank(pool: Pool, stage: int) -> None:
    """Its new values still reach the others."""
    expected = pool.run(2, fail_on_one_rank, stage, False)
    for values, others in zip(pool.run(2, fail_on_one_rank, stage, True), expected, strict=True):
        torch.testing.assert_close(values, others, rtol=0, atol=0)
