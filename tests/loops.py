"""Training loops as people write them, each for a plain and for a sharded model.

A loop is a function of a `Side`, which shards or does not, and returns tensors that must be equal
on both sides. All ranks see the same data, so that the mean over ranks is each rank's own gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.checkpoint import checkpoint

import onecopy

Optimizer = torch.optim.Optimizer
LOOPS: dict[str, Callable[[Side], list[Tensor]]] = {}


@dataclass
class Side:
    """One side of the comparison: plain where `stage` is None."""

    stage: int | None
    settings: dict[str, Any] = field(default_factory=dict)

    def shard(self, model: Any, optimizer: Any = None, **settings: Any) -> None:
        """The one added line."""
        if self.stage is not None:
            onecopy.shard(model, optimizer, **{"stage": self.stage, **self.settings, **settings})

    def attach(self, model: Any, optimizer: Any) -> None:
        """An optimizer made late."""
        if self.stage is not None:
            onecopy.shard(model, optimizer)

    def whole(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around code that reads or writes values."""
        return nullcontext() if self.stage is None else onecopy.full_parameters(model)

    def values(self, *models: nn.Module) -> list[Tensor]:
        """Copies of all parameters and buffers."""
        found = []
        for model in models:
            with self.whole(model):
                found += [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
        return found


def loop(function: Callable[[Side], list[Tensor]]) -> Callable[[Side], list[Tensor]]:
    """Put a loop into the table."""
    LOOPS[function.__name__] = function
    return function


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def net(seed: int = 0, outputs: int = 3) -> nn.Sequential:
    """A stem, two blocks and a head."""
    torch.manual_seed(seed)
    blocks = nn.Sequential(Block(), Block())
    return nn.Sequential(nn.Linear(4, 6), blocks, nn.Linear(6, outputs))


def data(step: int, rows: int = 3, width: int = 4) -> Tensor:
    """Different in every step."""
    return torch.sin(torch.arange(rows * width).view(rows, width) * (0.7 + 0.1 * step) + step)


def sgd(model: nn.Module, lr: Any = 0.1) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.05)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """The plainest loop."""
    for step in steps:
        model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# Optimizers and schedulers ----------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
}


def _scheduled(side: Side, model: nn.Module, name: str, before: bool) -> list[Tensor]:
    optimizer = sgd(model, 0.05)
    scheduler = SCHEDULERS[name](optimizer) if before else None
    side.attach(model, optimizer)
    scheduler = scheduler or SCHEDULERS[name](optimizer)
    for step in range(4):
        (model(data(step)) - data(step + 3, 3, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        metric = [1.0] if name == "ReduceLROnPlateau" else []
        scheduler.step(*metric)
    rates = [group[key] for group in optimizer.param_groups for key in ("lr", "momentum")]
    return [*side.values(model), torch.tensor(rates)]


@loop
def schedulers(side: Side) -> list[Tensor]:
    """Every scheduler that torch has, made before its optimizer is attached, and after."""
    missing = set(lr_scheduler.__all__) - SCHEDULERS.keys() - {"LRScheduler"}
    assert not missing, f"not tested: {missing}"
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    side.shard(model)
    found = []
    for name in SCHEDULERS:
        for before in (True, False):
            found += _scheduled(side, model, name, before)
    return found


@loop
def settings_changed_in_mid_run(side: Side) -> list[Tensor]:
    """lr, weight_decay and betas by hand; a tensor as lr, changed in place."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), weight_decay=0.1)
    side.shard(model, optimizer)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"].fill_(0.003)
    optimizer.param_groups[0].update(weight_decay=0.3, betas=(0.8, 0.9))
    train(model, optimizer, range(2, 4))
    optimizer.param_groups[0]["lr"] = 0.02
    train(model, optimizer, range(4, 6))
    return side.values(model)


@loop
def groups_added_and_named(side: Side) -> list[Tensor]:
    """Named parameters, decayed and not; a group more after some steps."""
    model = net()
    named = list(model[:2].named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [one for one in named if one[1].dim() > 1], "weight_decay": 0.2},
            {"params": [one for one in named if one[1].dim() < 2]},
        ],
        lr=0.1,
        momentum=0.5,
    )
    with suppress_unowned():
        side.shard(model, optimizer)
    train(model, optimizer, range(2))
    head = [(f"2.{name}", parameter) for name, parameter in model[2].named_parameters()]
    optimizer.add_param_group({"params": head, "lr": 0.05})
    train(model, optimizer, range(2, 4))
    assert len(optimizer.param_groups) == 3
    return side.values(model)


def suppress_unowned() -> AbstractContextManager[Any]:
    """That parameters are in no optimizer is on purpose."""
    import warnings

    context = warnings.catch_warnings()
    context.__enter__()
    warnings.filterwarnings("ignore", message=".*are in no optimizer")
    return _Leaving(context)


@dataclass
class _Leaving(AbstractContextManager[Any]):
    context: Any

    def __exit__(self, *exception: Any) -> None:
        self.context.__exit__(None, None, None)


@loop
def optimizers_at_their_own_pace(side: Side) -> list[Tensor]:
    """Two optimizers on one model; one steps, and clears, every other time only."""
    model = net()
    fast = sgd(model[0])
    slow = torch.optim.Adam([*model[1].parameters(), *model[2].parameters()], lr=0.01)
    side.shard(model, [fast, slow])
    for step in range(6):
        model(data(step)).square().mean().backward()
        fast.step()
        fast.zero_grad(set_to_none=bool(step % 3))
        if step % 2:
            slow.step()
            slow.zero_grad(set_to_none=bool(step % 3))
    return side.values(model)


@loop
def one_optimizer_for_two_models(side: Side) -> list[Tensor]:
    """An encoder and a decoder, clipped together."""
    encoder, decoder = net(0, 4), net(1)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    side.shard([encoder, decoder], optimizer)
    for step in range(4):
        decoder(encoder(data(step))).square().mean().backward()
        both = [*encoder.parameters(), *decoder.parameters()]
        nn.utils.clip_grad_norm_(both, 0.05)
        optimizer.step()
        encoder.zero_grad(), decoder.zero_grad()
    return side.values(encoder, decoder)


@loop
def zeros_are_not_none(side: Side) -> list[Tensor]:
    """With set_to_none=False momentum and decay go on for what got no gradient."""
    model = net()
    optimizer = sgd(model)
    side.shard(model, optimizer)
    for step, (owner, to_none) in enumerate(
        [(optimizer, False), (model, False), (optimizer, True), (model, True)] * 2
    ):
        # The parts are called one by one: each is an outermost forward, or none that has hooks.
        hidden = model[0](data(step))
        hidden = hidden if step % 2 else model[1](hidden)
        model[2](hidden).square().mean().backward()
        optimizer.step()
        owner.zero_grad(set_to_none=to_none)
    return side.values(model)


@loop
def closures(side: Side) -> list[Tensor]:
    """A closure that clears, accumulates and clips; its loss comes back."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    side.shard(model, optimizer)
    losses = []
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            for micro in range(2):
                loss = model(data(step + micro)).square().mean()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        losses.append(optimizer.step(closure).detach())
    return [*side.values(model), *losses]


@loop
def norms_of_every_kind(side: Side) -> list[Tensor]:
    """clip_grad_norm_, get_total_norm and clip_grads_with_norm_, of all and of some."""
    model = net()
    optimizer = sgd(model)
    side.shard(model, optimizer)
    norms = []
    for step, (order, foreach) in enumerate(
        [(2.0, None), (1.0, True), (3.0, False), (float("inf"), None), (2, True), ("inf", False)]
    ):
        model(data(step)).square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        kind = float(order)
        norms.append(nn.utils.get_total_norm(grads, kind, foreach=foreach))
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norms[-1], foreach=foreach)
        norms.append(
            nn.utils.clip_grad_norm_(
                model.parameters(), 0.2, kind, error_if_nonfinite=True, foreach=foreach
            )
        )
        norms.append(nn.utils.clip_grad_norm_(model[0].parameters(), 0.01, kind))
        nn.utils.clip_grad_value_(model[2].parameters(), 0.05, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
    (model(data(0)) * float("inf")).mean().backward()
    with suppress(RuntimeError):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        raise AssertionError("an infinite norm is an error here")
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    return [*side.values(model), *(norm.detach() for norm in norms)]


@loop
def forwards_before_clipping(side: Side) -> list[Tensor]:
    """Gradients stay what they are while the model is used for something else."""
    model = net()
    optimizer = sgd(model)
    side.shard(model, optimizer)
    norms = []
    for step in range(3):
        model(data(step)).square().mean().backward()
        later = model(data(step + 1)).square().mean()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        later.backward()
        model(data(step + 2))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    return [*side.values(model), *norms]


@loop
def accumulation(side: Side) -> list[Tensor]:
    """With and without model.no_sync(), as trainers call it."""
    model = net()
    optimizer = sgd(model)
    side.shard(model, optimizer)
    for step in range(6):
        for micro in range(3):
            local = step % 2 and micro < 2 and side.stage is not None
            with model.no_sync() if local else nullcontext():
                (model(data(step + micro)).square().mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model)


# Several models ---------------------------------------------------------------------------------


@loop
def adversaries(side: Side) -> list[Tensor]:
    """A critic that sees the generator's output, once with and once without its graph."""
    generator, critic = net(0, 4), net(1, 1)
    of_generator, of_critic = sgd(generator), torch.optim.Adam(critic.parameters(), lr=0.01)
    side.shard(generator, of_generator)
    side.shard(critic, of_critic)
    for step in range(3):
        of_critic.zero_grad()
        F.softplus(-critic(data(step))).mean().backward()
        F.softplus(critic(generator(data(step + 1)).detach())).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(generator(data(step + 2)))).mean().backward()
        of_generator.step()
    return side.values(generator, critic)


@loop
def distillation(side: Side) -> list[Tensor]:
    """A teacher that is sharded without an optimizer, in evaluation mode."""
    teacher, student = net(0).eval().requires_grad_(False), net(1)
    optimizer = sgd(student)
    side.shard(teacher)
    side.shard(student, optimizer)
    for step in range(4):
        with torch.no_grad():
            target = teacher(data(step))
        (student(data(step)) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(teacher, student)


@loop
def preference(side: Side) -> list[Tensor]:
    """DPO: the reference is a frozen copy of the policy, made in mid-run."""
    policy = net()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    side.shard(policy, optimizer)
    train(policy, optimizer, range(2))
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    side.shard(reference)
    for step in range(3):
        chosen, rejected = data(step), data(step + 5)
        with torch.no_grad():
            before = reference(chosen).mean() - reference(rejected).mean()
        margin = policy(chosen).mean() - policy(rejected).mean() - before
        (-F.logsigmoid(margin)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(policy, reference)


# Modules and hooks ------------------------------------------------------------------------------


def _users_hooks(model: nn.Sequential, seen: list[Tensor]) -> Iterator[Any]:
    yield model[0].weight.register_hook(lambda gradient: gradient * 2)
    yield model[1][0].register_forward_pre_hook(lambda _, inputs: (inputs[0] + 0.1,))
    yield model[1][0].register_forward_hook(lambda _m, _i, output: output * 1.5)
    yield model[1][1].register_full_backward_hook(
        lambda _m, inputs, outputs: seen.append(outputs[0].clone())
    )
    yield model[2].register_full_backward_pre_hook(lambda _m, outputs: (outputs[0] * 0.5,))
    yield model.register_forward_hook(lambda _m, _i, output: output + 1)


@loop
def hooks_of_the_user(side: Side) -> list[Tensor]:
    """On parameters and modules, before shard and after, and taken away again."""
    found = []
    for before in (True, False):
        model, seen = net(), []
        optimizer = sgd(model)
        hooks = list(_users_hooks(model, seen)) if before else []
        side.shard(model, optimizer)
        hooks = hooks or list(_users_hooks(model, seen))
        train(model, optimizer, range(3))
        for hook in hooks:
            hook.remove()
        train(model, optimizer, range(3, 5))
        found += [*side.values(model), *seen]
    return found


@loop
def functional_calls(side: Side) -> list[Tensor]:
    """Other weights for one forward, with and without gradients of them."""
    model = net()
    optimizer = sgd(model)
    average = {name: one.detach().clone() for name, one in model.named_parameters()}
    side.shard(model, optimizer)
    found = []
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        with torch.no_grad():
            found.append(torch.func.functional_call(model, average, (data(step),)))
        fast = {name: one.clone().requires_grad_() for name, one in average.items()}
        loss = torch.func.functional_call(model, fast, (data(step),)).square().mean()
        found += torch.autograd.grad(loss, list(fast.values()))
    return [*side.values(model), *(one.detach() for one in found)]


@loop
def parametrized(side: Side) -> list[Tensor]:
    """Parametrizations and both kinds of weight_norm."""
    found = []
    for kind in ("new", "old", "spectral", "orthogonal"):
        model = net()
        for block in model[1]:
            if kind == "new":
                nn.utils.parametrizations.weight_norm(block.up)
            elif kind == "old":
                with ignore_old():
                    nn.utils.weight_norm(block.up)
            elif kind == "spectral":
                nn.utils.parametrizations.spectral_norm(block.up)
            else:
                nn.utils.parametrizations.orthogonal(block.down)
        optimizer = sgd(model, 0.02)
        side.shard(model, optimizer)
        train(model, optimizer, range(3))
        model.eval()
        with torch.no_grad():
            found.append(model(data(7)))
        found += side.values(model)
    return found


def ignore_old() -> AbstractContextManager[Any]:
    """torch warns that the old weight_norm is old."""
    import warnings

    context = warnings.catch_warnings()
    context.__enter__()
    warnings.simplefilter("ignore")
    return _Leaving(context)


class Recurrent(nn.Module):
    """All three kinds, two layers, both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 4, batch_first=True)
        self.rnn = nn.RNN(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.lstm, self.gru, self.rnn):
            part.flatten_parameters()
            x, _ = part(x)
        return x


@loop
def recurrent(side: Side) -> list[Tensor]:
    """Flat weights keep referring to the parameters."""
    torch.manual_seed(0)
    model = Recurrent()
    optimizer = sgd(model)
    side.shard(model, optimizer)
    for step in range(4):
        model(data(step, 3, 8).view(3, 2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model)


class Checkpointed(nn.Module):
    """Blocks inside a checkpoint, a part of a block in one, a shared and a frozen norm."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net = net()
        self.net[1][1].norm = self.net[1][0].norm
        self.net[1][0].norm.bias.requires_grad_(False)
        self.inner = Block()
        self.run = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        for block in self.net[1]:
            x = self.run(block, x)
        x = self.run(lambda y: self.inner.up(self.inner.norm(y)), x)
        return self.net[2](self.inner.down(torch.tanh(x)))


@loop
def checkpoints(side: Side) -> list[Tensor]:
    """Reentrant and not, around units and inside, with what is shared and frozen."""
    found = []
    for reentrant in (False, True):
        model = Checkpointed(reentrant)
        optimizer = sgd(model)
        side.shard(model, optimizer, units=("net.1.*", "inner"))
        train(model, optimizer, range(2))
        for micro in range(2):
            model(data(micro)).square().mean().backward()
        optimizer.step()
        found += side.values(model)
    return found


class Failing:
    """Raises once where it is called, as a device that is full does."""

    def __init__(self) -> None:
        self.is_armed = False

    def __call__(self, *_: Any) -> None:
        if self.is_armed:
            self.is_armed = False
            raise torch.OutOfMemoryError("on purpose")


@loop
def out_of_memory(side: Side) -> list[Tensor]:
    """In forward, in backward and in the step, after and before values have changed."""
    model, boom = net(), Failing()
    optimizer = sgd(model)
    late = optimizer.register_step_post_hook(boom)
    side.shard(model, optimizer)
    model[1][1].register_forward_hook(boom)
    model[1][0].register_full_backward_hook(boom)
    train(model, optimizer, range(2))
    for step in range(2, 4):
        for attempt in (_forward, _backward):
            with suppress(torch.OutOfMemoryError):
                attempt(model, step, boom)
        optimizer.zero_grad()
        _failing_step(model, optimizer, step, boom)
        train(model, optimizer, range(step, step + 1))
    late.remove()
    early = optimizer.register_step_pre_hook(boom)
    for step in range(4, 6):
        _failing_step(model, optimizer, step, boom)
        optimizer.step()
        optimizer.zero_grad()
    early.remove()
    train(model, optimizer, range(6, 8))
    return side.values(model)


def _forward(model: nn.Module, step: int, boom: Failing) -> None:
    boom.is_armed = True
    model(data(step))


def _backward(model: nn.Module, step: int, boom: Failing) -> None:
    loss = model(data(step)).square().mean()
    boom.is_armed = True
    loss.backward()


def _failing_step(model: nn.Module, optimizer: Optimizer, step: int, boom: Failing) -> None:
    model(data(step)).square().mean().backward()
    boom.is_armed = True
    with suppress(torch.OutOfMemoryError):
        optimizer.step()


@loop
def evaluation_in_any_order(side: Side) -> list[Tensor]:
    """no_grad and inference_mode before, between and within steps; train() and eval()."""
    model = net()
    optimizer = sgd(model)
    side.shard(model, optimizer)
    found = []

    def evaluate(mode: Callable[[], Any], step: int) -> None:
        model.eval()
        with mode():
            found.append(model(data(step)).clone())
        model.train()

    evaluate(torch.inference_mode, 0)
    for step in range(3):
        evaluate(torch.no_grad, step)
        loss = model(data(step)).square().mean()
        evaluate(torch.inference_mode, step + 1)
        loss.backward()
        evaluate(torch.no_grad, step + 2)
        optimizer.step()
        evaluate(torch.inference_mode, step)
        optimizer.zero_grad()
    return [*side.values(model), *(one.detach() for one in found)]


@loop
def gradients_of_gradients(side: Side) -> list[Tensor]:
    """A penalty on the input's gradient, and a graph that is used twice."""
    model = net()
    optimizer = sgd(model, 0.02)
    side.shard(model, optimizer)
    for step in range(3):
        _penalize(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model)


def _penalize(model: nn.Module, step: int) -> None:
    """When this returns no graph is left to hold values."""
    inputs = data(step).requires_grad_()
    loss = model(inputs).square().mean()
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + slope.square().sum()).backward(retain_graph=True)
    loss.backward()
