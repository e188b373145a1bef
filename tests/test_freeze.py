"""Freezing and unfreezing at any time, and LoRA, mean what they mean in plain PyTorch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.handle
from tests import models
from tests.pool import Pool
from tests.runs import full_values

NAME = "tied"
Script = Callable[[nn.Module], Iterator[torch.optim.Optimizer]]
EVERY = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradually(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """From the last block to the embedding, each joins the optimizer when it is unfrozen."""
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    optimizer = _sgd(_trainable(model))
    yield optimizer
    for part in (*reversed(model.blocks), model.tokens):
        part.requires_grad_(True)
        optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.05})
        yield optimizer


def one_parameter_of_a_unit(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """The optimizer has all parameters from the start; some are trained, then others."""
    for block in model.blocks:
        block.requires_grad_(False)
    optimizer = _sgd(model.parameters())
    yield optimizer
    model.blocks[1].up.bias.requires_grad_(True)
    yield optimizer
    model.blocks[1].up.requires_grad_(True)
    model.blocks[2].down.weight.requires_grad_(True)
    yield optimizer


def to_and_fro(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """Blocks take turns, as in block coordinate descent."""
    optimizer = _sgd(model.parameters())
    model.blocks.requires_grad_(False)
    for number in (0, 1, 0, 2):
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index == number)
        yield optimizer


def an_optimizer_of_its_own(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """What is unfrozen is trained by an optimizer that is attached late."""
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    yield _sgd(_trainable(model))
    model.norm.requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    yield torch.optim.SGD(_trainable(model), lr=0.05)


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (gradually, one_parameter_of_a_unit, to_and_fro, an_optimizer_of_its_own)
}


def train(name: str, stage: int | None, settings: dict[str, Any] | None = None) -> Any:
    """All parameters at the end; all ranks see the same data; plain where stage is None."""
    model = models.build(NAME)
    settings = dict(settings or {})
    step, seen = 0, set()
    for optimizer in SCRIPTS[name](model):
        if id(optimizer) not in seen:
            seen.add(id(optimizer))
            if stage is not None:
                onecopy.shard(model, optimizer, **({} if step else {"stage": stage, **settings}))
        for _ in range(2):
            models.loss(model, models.batch(NAME, step, 0)).backward()
            step += 1
            optimizer.step()
            optimizer.zero_grad()
    if stage is not None:
        values = full_values(model)
        onecopy.unshard(model)
        assert all(torch.equal(value, values[key]) for key, value in model.named_parameters())
        models.loss(model, models.batch(NAME, step, 0)).backward()
        optimizer.step()
        return values
    return dict(model.named_parameters())


@pytest.mark.sampled("world, stage", EVERY, 2, always=[(2, 3)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_unfreezing(pool: Pool, name: str, world: int, stage: int) -> None:
    """As in one process, and nobody has to say anything to onecopy."""
    expected = train(name, None)
    for values in pool.run(world, train, name, stage):
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=1e-5, atol=1e-6)


def frozen_before_or_after(before: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters frozen before or right after shard, and unfrozen two steps later."""
    model = models.build("gpt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.blocks[1].requires_grad_(not before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onecopy.shard(model, optimizer, **settings)
    model.blocks[1].requires_grad_(False)
    for step in range(5):
        if step == 2:
            model.blocks[1].requires_grad_(True)
        models.loss(model, models.batch("gpt", step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


@pytest.mark.sampled("stage", [0, 1, 2, 3], 2, always=[3])
@pytest.mark.parametrize("master", ["fp32", "bf16+16"])
def test_unfrozen_parameters_get_masters(pool: Pool, stage: int, master: str) -> None:
    """bf16: to the last bit as if they had been trainable at shard."""
    settings = {"stage": stage, "precision": onecopy.Precision(compute="bf16", master=master)}
    expected = pool.run(2, frozen_before_or_after, False, settings)
    for values, others in zip(
        pool.run(2, frozen_before_or_after, True, settings), expected, strict=True
    ):
        for name, value in others.items():
            assert torch.equal(values[name], value), name


def unfrozen_for_nobody(add: bool) -> None:
    """Unfrozen, and in no optimizer unless `add`."""
    model = models.build("gpt")
    model.blocks[1].requires_grad_(False)
    optimizer = torch.optim.SGD(_trainable(model), lr=0.1)
    onecopy.shard(model, optimizer, stage=3)
    model.blocks[1].requires_grad_(True)
    for step in range(3):
        models.loss(model, models.batch("gpt", step, 0)).backward()
        if add and not step:
            optimizer.add_param_group({"params": model.blocks[1].parameters()})
        optimizer.step()
        optimizer.zero_grad()


def test_what_no_optimizer_has_is_said_once(pool: Pool) -> None:
    """As at shard."""
    pool.run(2, unfrozen_for_nobody, True)
    pool.run(2, unfrozen_for_nobody, False, record_warnings=True)
    for warned in pool.warnings:
        (text,) = [str(one) for one in warned]
        assert "blocks.1.norm1.weight for one" in text and "add_param_group" in text


def unfrozen_on_one_rank() -> None:
    """The ranks train different parameters."""
    model = models.build("gpt")
    model.blocks[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=2)
    if dist.get_rank() == 1:
        model.blocks[1].requires_grad_(True)
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    optimizer.step()


def test_ranks_must_unfreeze_alike(pool: Pool) -> None:
    """A named error in place of a hang."""
    errors = pool.run(2, unfrozen_on_one_rank, expect_failures=True)
    assert {error.type_name for error in errors} == {"DivergenceError"}
    assert any("unit blocks.1 is trained from now on" in error.message for error in errors)


def _lora(model: nn.Module, save: list[str] | None = None) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed: the test extra")
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=save,
        init_lora_weights=False,
    )
    with warnings.catch_warnings():
        # peft asks transformers for something that transformers wants to rename.
        warnings.simplefilter("ignore")
        wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


def train_lora(stage: int | None, save: list[str] | None) -> tuple[list[float], list[Tensor]]:
    """Losses in training, merged, unmerged and unloaded; and what was trained."""
    name = "hf_llama"
    model = _lora(models.build(name), save)
    optimizer = _sgd(_trainable(model))
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage)
    losses = []
    for step in range(3):
        loss = models.loss(model, models.batch(name, step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for change in (model.merge_adapter, model.unmerge_adapter):
        with onecopy.full_parameters(model) if stage is not None else nullcontext():
            change()
        with torch.no_grad():
            losses.append(models.loss(model, models.batch(name, 9, 0)).item())
    if stage is not None:
        onecopy.unshard(model)
    trained = [parameter.detach().clone() for parameter in _trainable(model)]
    plain = model.merge_and_unload()
    with torch.no_grad():
        losses.append(models.loss(plain, models.batch(name, 9, 0)).item())
    return losses, trained


@pytest.mark.slow  # to import peft takes long
@pytest.mark.sampled("world, stage", EVERY, 4, always=[(2, 3)])
@pytest.mark.parametrize("save", [None, ["lm_head"]])
def test_lora_by_peft(pool: Pool, world: int, stage: int, save: list[str] | None) -> None:
    """The base stays frozen; adapters and saved modules are trained, merged and taken out."""
    losses, trained = train_lora(None, save)
    for others, values in pool.run(world, train_lora, stage, save):
        torch.testing.assert_close(others, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(values, trained, rtol=1e-5, atol=1e-6)


def lora_after_shard(stage: int | None) -> list[Tensor]:
    """Train the whole model for a step, then adapters that came after shard."""
    model = models.build("hf_llama")
    base_optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if stage is not None:
        onecopy.shard(model, base_optimizer, stage=stage)
    models.loss(model, models.batch("hf_llama", 0, 0)).backward()
    base_optimizer.step()
    base_optimizer.zero_grad()
    wrapped = _lora(model)
    optimizer = _sgd(_trainable(wrapped))
    if stage is not None:
        with pytest.raises(onecopy.OneCopyError, match="given to shard and an optimizer"):
            models.loss(wrapped, models.batch("hf_llama", 0, 0))
        onecopy.shard(model, optimizer)
    for step in range(3):
        models.loss(wrapped, models.batch("hf_llama", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage is not None:
        onecopy.unshard(model)
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def add_after_shard(what: str) -> str:
    """A parameter, a module or a replaced module that came too late."""
    model = models.build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=2)
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    frozen = nn.Linear(3, 3).requires_grad_(False)
    if what == "parameter":
        model.blocks[0].bias = nn.Parameter(torch.zeros(16))
    elif what == "module":
        model.blocks[1].adapter = nn.Linear(3, 3)
    elif what == "replaced":
        model.blocks[2].down = nn.Linear(64, 16)
    elif what == "nothing in training":
        model.frozen, model.blocks[1].same = frozen, model.blocks[1].up
    try:
        models.loss(model, models.batch("gpt", 0, 0)).backward()
    except onecopy.OneCopyError as error:
        return str(error)
    optimizer.step()
    return ""


ADDED = {
    "parameter": "blocks.0.bias for one",
    "module": "blocks.1.adapter.weight for one",
    "replaced": "blocks.2.down.weight for one",
    "nothing in training": "",
}


@pytest.mark.parametrize("what", ADDED)
def test_parameters_added_after_shard_are_refused(pool: Pool, what: str) -> None:
    """At the first forward: they would be trained on each rank by itself."""
    (said,) = pool.run(1, add_after_shard, what)
    assert ADDED[what] in said and bool(said) == bool(ADDED[what])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_lora_after_shard(pool: Pool, world: int, stage: int) -> None:
    """The next forward says what to do: one more call of shard partitions anew."""
    expected = lora_after_shard(None)
    for values in pool.run(world, lora_after_shard, stage):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def grow(stage: int | None, how: str) -> tuple[list[Tensor], list[Tensor]]:
    """Add a block in mid-run, to a new optimizer or to a group of the old one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizers = [optimizer]
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage)
    x = torch.ones(2, 5)
    for step in range(4):
        if step == 2:
            model[1].append(nn.Linear(5, 5))
            if how == "group":
                optimizer.add_param_group({"params": model[1][-1].parameters()})
            else:
                optimizers.append(torch.optim.SGD(model[1][-1].parameters(), lr=0.2))
            if stage is not None:
                onecopy.shard(model, optimizers[-1])
                assert onecopy.handle.of(model).engine.config.stage == stage
        model(x).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    if stage is not None:
        onecopy.unshard(model)
    states = [optimizer.state[p]["momentum_buffer"] for p in model[0].parameters()]
    return [p.detach().clone() for p in model.parameters()], states


@pytest.mark.parametrize("how", ["group", "optimizer"])
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 3), (3, 2)])
def test_a_model_that_grows_is_partitioned_anew(
    pool: Pool, world: int, stage: int, how: str
) -> None:
    """With the first call's settings, and the optimizer states that there were."""
    expected = grow(None, how)
    for values in pool.run(world, grow, stage, how):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
