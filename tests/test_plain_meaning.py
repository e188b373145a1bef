"""Sequences of ordinary calls that must mean what they mean in plain PyTorch, at every stage.

Each script takes a model and an optimizer and does the same with and without sharding; all ranks
see the same data, so that the mean over ranks is each rank's own gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.handle
from tests import models
from tests.pool import Pool


class Block(nn.Module):
    """A parameter beside a linear: read before it, and through detach where asked."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.linear = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.detached, self.uses_extra = detached, False

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.detach() if self.detached else self.scale
        x = self.linear(x * scale)
        return self.extra(x) if self.uses_extra else x


def build(detached: bool = False) -> nn.Module:
    """Two blocks behind a linear."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(detached), Block(detached))
    return nn.Sequential(nn.Linear(4, 4), blocks, nn.Linear(4, 1))


X = torch.linspace(-1, 1, 12).view(3, 4)
Model, Optimizer = nn.Module, torch.optim.Optimizer


def _local(model: Model) -> Any:
    return onecopy.no_sync(model) if onecopy.handle.find(model) else nullcontext()


def _whole(model: Model) -> Any:
    return onecopy.full_parameters(model) if onecopy.handle.find(model) else nullcontext()


def _step(model: Model, optimizer: Optimizer, times: int = 1) -> None:
    for _ in range(times):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen_in_mid_run(model: Model, optimizer: Optimizer) -> None:
    """A parameter that an operation before it still needs gets no gradient any more."""
    _step(model, optimizer)
    for block in model[1]:
        block.scale.requires_grad_(False)
    _step(model, optimizer, 3)
    for block in model[1]:
        block.scale.requires_grad_(True)
    _step(model, optimizer, 2)


def used_from_some_step_on(model: Model, optimizer: Optimizer) -> None:
    """A layer of a block that was idle at first."""
    _step(model, optimizer, 3)
    for block in model[1]:
        block.uses_extra = True
    _step(model, optimizer, 3)


def zero_grad_after_no_sync(model: Model, optimizer: Optimizer) -> None:
    """What no_sync has kept is cleared like any gradient."""
    with _local(model):
        model(X).sum().backward()
    optimizer.zero_grad()
    _step(model, optimizer)


def cleared_by_hand(model: Model, optimizer: Optimizer) -> None:
    """A gradient set to None, or cleared by a module around or inside, is gone."""
    clear: list[Callable[[], Any]] = [
        lambda: [setattr(parameter, "grad", None) for parameter in model.parameters()],
        nn.ModuleList([model]).zero_grad,
        lambda: nn.ModuleList([model]).zero_grad(set_to_none=False),
        model[1].zero_grad,
        lambda: setattr(model[0].weight, "grad", None),
    ]
    for clear_some in clear:
        model(X).sum().backward()
        clear_some()
        model(2 * X).sum().backward()
        optimizer.step()
        clear_some()
        optimizer.step()
        optimizer.zero_grad()


def step_inside_no_sync(model: Model, optimizer: Optimizer) -> None:
    """The step uses the gradients that are there."""
    with _local(model):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    _step(model, optimizer)


def _boom(_: Tensor) -> None:
    raise ValueError("on purpose")


def failed_backward_between(model: Model, optimizer: Optimizer) -> None:
    """A backward that fails at its very start leaves earlier sums alone."""
    for local in (True, False):
        with _local(model) if local else nullcontext():
            model(X).sum().backward()
            output = model(X)
            output.register_hook(_boom)
            with suppress(ValueError):
                output.sum().backward()
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def new_memory(model: Model, optimizer: Optimizer) -> None:
    """Values that come by re-pointing, as vector_to_parameters does it."""
    _step(model, optimizer)
    with _whole(model):
        ones = torch.linspace(0, 1, sum(p.numel() for p in model.parameters()))
        nn.utils.vector_to_parameters(ones, model.parameters())
    _step(model, optimizer, 2)
    with _whole(model):
        model[0].weight.data = torch.full((4, 4), 0.25)
    _step(model, optimizer)


def measured_gradients(model: Model, optimizer: Optimizer) -> None:
    """torch.autograd.grad returns gradients and leaves the accumulating ones alone."""
    for _ in range(2):
        model(X).sum().backward()
        torch.autograd.grad(model(X).sum(), [model[0].bias])
        optimizer.step()
        optimizer.zero_grad()


def evaluation_while_a_graph_lives(model: Model, optimizer: Optimizer) -> None:
    """No warning about memory that autograd itself holds."""
    for _ in range(2):
        loss = model(X).sum()
        with torch.no_grad():
            model(X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gradients_kept_over_zero_grad(model: Model, optimizer: Optimizer) -> None:
    """Tensors taken from `.grad` are the gradients of then, whichever way they were cleared."""
    clear: list[Callable[[], Any]] = [
        optimizer.zero_grad,
        model.zero_grad,
        lambda: [setattr(parameter, "grad", None) for parameter in model.parameters()],
    ]
    for clear_all in clear:
        model(X).sum().backward()
        kept = [parameter.grad for parameter in model.parameters()]
        clear_all()
        model(2 * X).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            if gradient is not None and parameter.grad is not None:
                gradient.mul_(0.5)
                parameter.grad += gradient
        optimizer.step()
        optimizer.zero_grad()
        # Put back as they were, without another backward.
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def gradients_moved_about(model: Model, optimizer: Optimizer) -> None:
    """A parameter is given the gradient of another one."""
    for _ in range(2):
        model(X).sum().backward()
        first, second, third = (block.linear.weight for block in (*model[1], model[1][0]))
        first.grad, second.grad = second.grad, first.grad
        optimizer.step()
        taken, third.grad = third.grad, None
        assert taken is not None
        second.grad = taken.clone()
        optimizer.step()
        optimizer.zero_grad()


def gradients_written_past_torch(model: Model, optimizer: Optimizer) -> None:
    """In ways that torch does not count, and with one factor for each."""
    for _ in range(2):
        model(X).sum().backward()
        present = [one for one in model.parameters() if one.grad is not None]
        for parameter in present:
            parameter.grad.data = parameter.grad.data * 0.5  # type: ignore[union-attr]
            parameter.grad.numpy()[...] += 0.25  # type: ignore[union-attr]
            view = parameter.grad.view(-1)  # type: ignore[union-attr]
            view.data[0] = 1.0
        gradients = [parameter.grad for parameter in present]
        torch._foreach_mul_(gradients, [0.5 + number for number in range(len(present))])
        optimizer.step()
        optimizer.zero_grad()


def forward_while_gradients_are_looked_at(model: Model, optimizer: Optimizer) -> None:
    """They are still there after it."""
    for _ in range(2):
        model(X).sum().backward()
        sharded = onecopy.handle.find(model) is not None
        with onecopy.full_parameters(model, grads=True) if sharded else nullcontext():
            model(X)
            model[0].weight.grad.mul_(2)
            model(X)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def _mask(module: nn.Module, _: Any) -> None:
    module.weight.data *= torch.tril(torch.ones(4, 4))


def masked_before_forward(model: Model, optimizer: Optimizer) -> None:
    """Values change in forward, in a way that torch does not count."""
    for block in model[1]:
        block.linear.register_forward_pre_hook(_mask)
    _step(model, optimizer, 3)


def losses_of_different_parts(model: Model, optimizer: Optimizer) -> None:
    """Backwards before a step that have no parameter in common."""
    for _ in range(2):
        model[0](X).sum().backward()
        model[2](X).sum().backward()
        model[1][0](X).sum().backward()
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def gradient_put_before_a_backward(model: Model, optimizer: Optimizer) -> None:
    """The backward adds to what the user has put there."""
    for _ in range(2):
        model[0](X).sum().backward()
        model[2].bias.grad = torch.ones(1)
        model[0].bias.grad = torch.ones(4)
        model[2](X).sum().backward()
        model[0](X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS: dict[str, Callable[[Model, Optimizer], None]] = {
    script.__name__: script
    for script in (
        frozen_in_mid_run,
        used_from_some_step_on,
        zero_grad_after_no_sync,
        cleared_by_hand,
        step_inside_no_sync,
        failed_backward_between,
        new_memory,
        measured_gradients,
        evaluation_while_a_graph_lives,
        gradients_kept_over_zero_grad,
        gradients_moved_about,
        gradients_written_past_torch,
        forward_while_gradients_are_looked_at,
        masked_before_forward,
        losses_of_different_parts,
        gradient_put_before_a_backward,
    )
}


def run(name: str, stage: int | None, detached: bool = False) -> list[Tensor]:
    """Whole parameters after a script; plain PyTorch where stage is None."""
    model = build(detached)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.1)
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage)
    SCRIPTS[name](model, optimizer)
    with _whole(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.sampled(
    "name, stage",
    list(itertools.product(SCRIPTS, (0, 1, 2, 3))),
    2 * len(SCRIPTS),
    always=[(name, 3) for name in SCRIPTS],
)
def test_as_in_plain_pytorch(pool: Pool, name: str, stage: int) -> None:
    """The same parameters on every rank."""
    for detached in (False, True):
        expected = run(name, None, detached)
        for values in pool.run(2, run, name, stage, detached):
            for one, other in zip(values, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Clipped(nn.Linear):
    """Clips its weight in forward, from some step on."""

    limit: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.limit is not None:
            self.weight.data.clamp_(-self.limit, self.limit)
        return super().forward(x)


def clipped(stage: int | None) -> list[Tensor]:
    """What starts when forwards are foreseen."""
    torch.manual_seed(0)
    model = nn.Sequential(Clipped(4, 4), nn.Sequential(Clipped(4, 4), Clipped(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage)
    _step(model, optimizer, 2)
    for one in model.modules():
        one.limit = 0.1
    _step(model, optimizer, 2)
    with _whole(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", [2, 3])
def test_clipping_of_weights_in_forward(pool: Pool, stage: int) -> None:
    """Through `.data`, as in plain PyTorch."""
    expected = clipped(None)
    for values in pool.run(2, clipped, stage):
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def clipped_after_step(stage: int) -> list[float]:
    """bf16: the loop of Wasserstein GANs."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    onecopy.shard(model, optimizer, stage=stage, precision="bf16")
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:
            model.weight.data.fill_(5.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return [float(value) for value in model.state_dict()["weight"].flatten()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_data_written_after_bf16_steps(pool: Pool, stage: int) -> None:
    """5 - lr * 1."""
    assert pool.run(2, clipped_after_step, stage) == [[4.0, 4.0]] * 2


def set_by_hand(stage: int) -> list[list[float]]:
    """bf16: values written between steps reach the masters, at stages that keep parameters too."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    onecopy.shard(model, optimizer, stage=stage, precision="bf16")
    seen = []
    for _ in range(2):
        with torch.no_grad(), _whole(model) if stage == 3 else nullcontext():
            model.weight.fill_(5.0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model.state_dict()["weight"].flatten().tolist())
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_set_between_bf16_steps(pool: Pool, stage: int) -> None:
    """5 - lr * 1."""
    assert pool.run(2, set_by_hand, stage) == [[[4.0, 4.0]] * 2] * 2


def users_messages(stage: int) -> float:
    """The user's own message with the default tag is under way while gradients are."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    onecopy.shard(model, optimizer, stage=stage)
    message = torch.full((3,), 7.0 * (1 - dist.get_rank()))
    work = dist.isend(message, 1) if dist.get_rank() == 0 else dist.irecv(message, 0)
    _ = [_step_of(model, optimizer) for _ in range(2)]
    assert work is not None
    work.wait()
    return float(message.sum())


def _step_of(model: Model, optimizer: Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_messages_of_the_user(pool: Pool, stage: int) -> None:
    """Ours have tags of their own."""
    assert pool.run(2, users_messages, stage) == [21.0, 21.0]


def saliency_on_one_rank(stage: int) -> list[Tensor]:
    """torch.autograd.grad on one rank reduces nothing, so it may be one rank's affair."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage)
    for step in range(3):
        if dist.get_rank() == step % 2:
            inputs = X.clone().requires_grad_()
            torch.autograd.grad(model(inputs).sum(), [inputs])
        _step(model, optimizer)
    with _whole(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_measured_on_one_rank(pool: Pool, stage: int) -> None:
    """At the stages that keep parameters."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, 3)
    for values in pool.run(2, saliency_on_one_rank, stage):
        for one, other in zip(values, model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def refusals() -> list[str]:
    """What cannot be right is refused by name, before anything has changed."""
    embedding = nn.Embedding(4, 2)
    first, second = nn.Sequential(embedding), nn.Sequential(embedding, nn.Linear(2, 1))
    untied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    untied[1].weight = nn.Parameter(untied[0].weight.data)
    graded = nn.Linear(2, 2)
    graded(torch.ones(1, 2)).sum().backward()
    converted = nn.Sequential(nn.Linear(2, 2))
    other = torch.optim.SGD(converted.parameters(), lr=1.0)
    onecopy.shard(converted, other, stage=2)
    converted[0].double()
    attempts: list[Callable[[], Any]] = [
        lambda: onecopy.shard([first, second], stage=2),
        lambda: onecopy.shard(untied),
        lambda: onecopy.shard(graded),
        other.step,
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
        except onecopy.OneCopyError as error:
            said.append(str(error))
    assert onecopy.handle.find(first) is None
    return said


def test_refused_by_name(pool: Pool) -> None:
    """Shared over models, untied by accident, gradients before shard, another dtype after shard."""
    (said,) = pool.run(1, refusals)
    words = ["another sharded model", "share memory", "zero_grad() before", "was moved"]
    assert len(said) == len(words), said
    for text, word in zip(said, words, strict=True):
        assert word in text


def unsharded() -> bool:
    """unshard drops gradients, and what stood for them."""
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    onecopy.shard(model, optimizer, stage=2)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    optimizer.zero_grad()
    assert model.weight.grad is None
    model(torch.ones(1, 2)).sum().backward()
    onecopy.unshard(model)
    assert model.weight.grad is None
    assert "zero_grad" not in vars(optimizer)
    _step_of(model, optimizer)
    return bool(torch.isfinite(model.weight).all())


def test_unshard_after_a_backward(pool: Pool) -> None:
    """The plain model trains on."""
    assert pool.run(2, unsharded) == [True, True]


def whole_model_checkpointed(reentrant: bool) -> bool:
    """bf16 under a checkpoint around the model: the recomputation casts its inputs too."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3, precision="bf16")
    for _ in range(2):
        inputs = X.clone().requires_grad_()
        checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_bf16_inputs_are_cast_in_recomputation(pool: Pool, reentrant: bool) -> None:
    """Else the recomputed forward would mix dtypes."""
    assert pool.run(2, whole_model_checkpointed, reentrant) == [True, True]


def backward_through_an_old_graph(stage: int) -> str:
    """A graph from before the step, used after it: the values that it needs are gone."""
    model = models.build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage)
    loss = models.loss(model, models.batch("mlp", 0, dist.get_rank()))
    loss.backward(retain_graph=True)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        said = str(error)
    else:
        said = "no error"
    optimizer.zero_grad()
    models.loss(model, models.batch("mlp", 1, dist.get_rank())).backward()
    optimizer.step()
    return said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_from_before_the_step_is_refused(pool: Pool, stage: int) -> None:
    """By autograd, as in plain PyTorch, and not run with the new values."""
    for said in pool.run(2, backward_through_an_old_graph, stage):
        assert "modified by an inplace operation" in said
