"""The habits: what loops do with a model in plain PyTorch, each a function of a side.

A habit returns the tensors that must be those of one process. Where something can be said in words
only (a gradient that is not there) it raises `Different`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.habit_parts import (
    HABITS,
    Different,
    Habit,
    Net,
    adam,
    begin,
    data,
    habit,
    loss_of,
    number,
    plain_tensor,
    sgd,
    train,
)
from benchmarks.habit_sides import Plain

__all__ = ["HABITS", "Different", "Habit"]

# Gradients and steps ----------------------------------------------------------------------------


@habit("several backwards before a step, without a setting")
def accumulation(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    for step in range(2):
        for micro in range(3):
            side.backward(lambda rank, s=step + micro: loss_of(model, s, rank) / 3)
        side.step(optimizer)
    return side.values(net)


@habit("`with model.no_sync():`")
def no_sync(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    for step in range(2):
        if type(side) is Plain:
            side.backward(lambda rank, s=step: loss_of(model, s, rank))
        else:
            with model.no_sync():
                side.backward(lambda rank, s=step: loss_of(model, s, rank))
        side.backward(lambda rank, s=step + 1: loss_of(model, s, rank))
        side.step(optimizer)
    return side.values(net)


@habit("`nn.utils.clip_grad_norm_(model.parameters(), 0.1)` returns and clips by the global norm")
def clipping(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    norms = []
    for step in range(2):
        side.backward(lambda rank, s=step: loss_of(model, s, rank))
        norms.append(number(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        side.step(optimizer)
    return [*norms, *side.values(net)]


@habit("`p.grad` read after backward")
def gradient_read(side: Plain) -> list[Tensor]:
    net, model, _ = begin(side)
    side.backward(lambda rank: loss_of(model, 0, rank))
    if any(p.grad is None for p in net.parameters()):
        raise Different("`p.grad` is None")
    return [number(p.grad[0].square().sum()) for p in net.parameters()]


@habit("`p.grad.add_(p.detach(), alpha=0.1)` before the step")
def gradient_changed(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    side.backward(lambda rank: loss_of(model, 0, rank))
    for p in net.parameters():
        if p.grad is not None:
            p.grad.add_(p.detach(), alpha=0.1)
    side.step(optimizer)
    return side.values(net)


@habit("noise made by hand added to `p.grad`")
def gradient_noise(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    side.backward(lambda rank: loss_of(model, 0, rank))
    generator = torch.Generator().manual_seed(3)
    for p in net.parameters():
        if p.grad is not None:
            p.grad += 0.1 * torch.randn(p.shape, generator=generator)
    side.step(optimizer)
    return side.values(net)


@habit("`optimizer.step(closure)`")
def closure(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    for step in range(2):

        def evaluate(step: int = step) -> None:
            optimizer.zero_grad()
            side.backward(lambda rank: loss_of(model, step, rank))

        optimizer.step(evaluate)
    return side.values(net)


@habit("double backward (gradient penalty)")
def penalty(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)

    def loss(rank: int) -> Tensor:
        x = data(0, rank).requires_grad_()
        y = model(x).square().mean()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (slope.norm(dim=1) - 1).square().mean()

    for _ in range(2):
        side.backward(loss)
        side.step(optimizer)
    return side.values(net)


class _Failing(torch.autograd.Function):
    """Raises in backward, as running out of memory does."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("out of memory")


@habit("an exception in backward, caught, then training on")
def exception(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    train(side, model, [optimizer], range(1))
    hook = net.blocks[0].register_forward_hook(lambda _m, _i, output: _Failing.apply(output))
    try:
        side.backward(lambda rank: loss_of(model, 1, rank))
    except MemoryError:
        optimizer.zero_grad()
    hook.remove()
    train(side, model, [optimizer], range(2, 4))
    return side.values(net)


# Optimizers -------------------------------------------------------------------------------------


@habit("an optimizer made before stays the one that is used")
def optimizer_first(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, adam, first=True)
    for step in range(2):
        side.backward(lambda rank, s=step: loss_of(model, s, rank))
        optimizer.step()
        optimizer.zero_grad()
    return side.values(net)


@habit("`optimizer.add_param_group(...)` in mid-run")
def group_added(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, lambda net: sgd(net.blocks))
    train(side, model, [optimizer], range(2))
    optimizer.zero_grad()
    for p in net.parameters():
        p.grad = None
    optimizer.add_param_group({"params": list(net.head.parameters()), "lr": 0.1})
    train(side, model, [optimizer], range(2, 4))
    return side.values(net)


@habit("two optimizers on one model")
def two_optimizers(side: Plain) -> list[Tensor]:
    net = Net()
    model, optimizers = side.start(
        net,
        lambda net: sgd(net.blocks),
        lambda net: torch.optim.Adam([*net.stem.parameters(), *net.head.parameters()], eps=1e-3),
    )
    train(side, model, optimizers, range(3))
    return side.values(net)


@habit("two models under one optimizer")
def two_models(side: Plain) -> list[Tensor]:
    nets = [Net(), Net(seed=1)]
    (first, second), optimizer = side.start_pair(
        nets, lambda nets: torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.2)
    )
    for step in range(2):
        side.backward(lambda rank, s=step: loss_of(lambda x: second(first(x)), s, rank))
        side.step(optimizer)
    return side.values(*nets)


@habit("`torch.optim.Muon` equals one process", tolerance=1e-3)
def muon(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, lambda net: torch.optim.Muon(net.parameters(), lr=0.05))
    train(side, model, [optimizer], range(3))
    return side.values(net)


@habit("`torch.optim.Adafactor` equals one process", tolerance=1e-4)
def adafactor(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, lambda net: torch.optim.Adafactor(net.parameters(), lr=0.1))
    train(side, model, [optimizer], range(3))
    return side.values(net)


@habit("`torch.amp.GradScaler` by hand, an overflow on one rank")
def grad_scaler(side: Plain) -> list[Tensor]:
    net = Net()
    net.stem.requires_grad_(False), net.blocks.requires_grad_(False)
    model, (optimizer,) = side.start(net, lambda net: sgd(net.head))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):

        def loss(rank: int, step: int = step) -> Tensor:
            y = model(data(step, rank))
            own = (y - 1).square().mean()
            if step == rank == 1:  # in the first row of the head's weight alone
                own = own + (y[:, 0] * float("inf")).sum()
            return scaler.scale(own)

        side.backward(loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*side.values(net), torch.tensor(scaler.get_scale())]


@habit("fp16 loss scaling without a change to the loop", tolerance=5e-3)
def loss_scaling(side: Plain) -> list[Tensor]:
    net = Net()
    model, (optimizer,) = side.start_fp16(
        net, lambda net: torch.optim.SGD(net.parameters(), lr=2e6)
    )
    dtype = next(net.parameters()).dtype

    def loss(step: int, rank: int) -> Tensor:
        return (model(data(step, rank).to(dtype)).float() - 1).square().mean() * 1e-7

    for step in range(3):
        side.backward(lambda rank, s=step: loss(s, rank))
        side.step(optimizer)
    return side.values(net)


# Parameters in use, frozen and not --------------------------------------------------------------


@habit("freezing and unfreezing in mid-run")
def unfreezing(side: Plain) -> list[Tensor]:
    net = Net()
    net.blocks.requires_grad_(False)
    model, optimizers = side.start(net, sgd, unused=True)
    train(side, model, optimizers, range(2))
    net.blocks.requires_grad_(True)
    train(side, model, optimizers, range(2, 4))
    net.stem.requires_grad_(False)
    train(side, model, optimizers, range(4, 6))
    return side.values(net)


@habit("a parameter that one rank does not use")
def unused(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, how="unused", unused=True)
    for step in range(2):
        side.backward(lambda rank, s=step: loss_of(lambda x: model(x, rank), s, rank))
        side.step(optimizer)
    return side.values(net)


@habit("ranks run different modules")
def different_modules(side: Plain) -> list[Tensor]:
    apart = ("blocks.*",)
    net, model, optimizer = begin(side, how="different modules", unused=True, apart=apart)
    for step in range(2):
        side.backward(lambda rank, s=step: loss_of(lambda x: model(x, rank), s, rank))
        side.step(optimizer)
    return side.values(net)


@habit("ranks with different numbers of batches (in `join`)")
def unequal(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    counts = (2, 4)
    for step in side.batches(model, counts):
        side.backward(
            lambda rank, s=step: loss_of(model, s, rank) if s < counts[rank] else None,
        )
        side.step(optimizer)
    return side.values(net)


@habit("the embedding used as the head: `F.linear(h, self.emb.weight)`")
def weight_of_root(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, how="root weight", unused=True)
    train(side, model, [optimizer], range(2))
    return side.values(net)


@habit("a block's weight used outside of the block")
def weight_of_block(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, how="block weight")
    train(side, model, [optimizer], range(2))
    return side.values(net)


@habit("a method other than `forward` trains: `model.encode(x)`")
def other_method(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, methods=("encode",), unused=True)
    for step in range(2):
        side.backward(lambda rank, s=step: loss_of(model.encode, s, rank))
        side.step(optimizer)
    return side.values(net)


@habit("a loss on weights: `loss + p.square().sum()`")
def loss_on_weights(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    for step in range(2):
        side.backward(
            lambda rank, s=step: (
                loss_of(model, s, rank) + 0.05 * sum(p.square().sum() for p in net.parameters())
            )
        )
        side.step(optimizer)
    return side.values(net)


# Values -----------------------------------------------------------------------------------------


@habit("`p.norm()` read")
def norm_read(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    train(side, model, [optimizer], range(1))
    return [number(p.norm()) for p in net.parameters()]


@habit("`p.norm()` read on rank 0 alone: its value, or an error in seconds", may_refuse=True)
def read_on_one_rank(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    train(side, model, [optimizer], range(1))
    norm = torch.zeros(())
    if side.rank == 0:
        norm = number(net.blocks[0].up.weight.norm())
    train(side, model, [optimizer], range(1, 2))
    return [side.of_first(norm), *side.values(net)]


@habit("`nn.init.normal_(p)` afterwards")
def initialised(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    torch.manual_seed(5)
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    train(side, model, [optimizer], range(1))
    return side.values(net)


@habit("a moving average of the weights: `e.lerp_(p, 0.1)`")
def moving_average(side: Plain) -> list[Tensor]:
    average = Net(seed=1).requires_grad_(False)
    net, model, optimizer = begin(side)
    for step in range(2):
        train(side, model, [optimizer], range(step, step + 1))
        with torch.no_grad():
            for e, p in zip(average.parameters(), net.parameters(), strict=True):
                e.lerp_(p, 0.1)
    return [plain_tensor(e) for e in average.parameters()]


@habit("`copy.deepcopy(model)`")
def deepcopy(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    train(side, model, [optimizer], range(1))
    twin = copy.deepcopy(net)
    train(side, model, [optimizer], range(1, 2))
    with torch.no_grad():
        return [twin(data(0, 0)), *side.values(net)]


@habit("`model.state_dict()` has plain, whole tensors")
def state_dict(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    train(side, model, [optimizer], range(1))
    return [plain_tensor(value) for value in net.state_dict().values()]


@habit("`model.load_state_dict(...)` of a plain model's")
def load_state_dict(side: Plain) -> list[Tensor]:
    other = Net(seed=7).state_dict()
    net, model, optimizer = begin(side)
    net.load_state_dict(other)
    train(side, model, [optimizer], range(1))
    return side.values(net)


# Forward ----------------------------------------------------------------------------------------


@habit("evaluation or `generate` of different lengths on ranks (parameters gathered first)")
def evaluation(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    train(side, model, [optimizer], range(1))
    model.eval()
    with torch.no_grad(), side.gathered(model):
        for rank in range(2) if type(side) is Plain else [side.rank]:
            for step in range(1 + 2 * rank):
                model(data(step, rank))
    model.train()
    train(side, model, [optimizer], range(1, 2))
    return side.values(net)


@habit("activation checkpointing")
def checkpointing(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, how="checkpoint")
    train(side, model, [optimizer], range(2))
    return side.values(net)


@habit("activation checkpointing, `use_reentrant=True`")
def checkpointing_reentrant(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side, how="checkpoint reentrant")
    train(side, model, [optimizer], range(2))
    return side.values(net)


@habit("`torch.compile` of the whole model")
def compiled(side: Plain) -> list[Tensor]:
    net, model, optimizer = begin(side)
    model = side.compile(model)
    train(side, model, [optimizer], range(3))
    return side.values(net)
