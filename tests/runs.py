"""What the ranks of the pool run: training through the engine, with everything that is observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.comm.compare
import onecopy.core.views
import onecopy.events
import onecopy.handle
from onecopy.events import Event
from tests import models

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01
    ),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "adamw_fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
}


@dataclass
class Run:
    """One rank's view of a run."""

    losses: list[list[float]]  # [step][backward]
    parameters: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Options of a run; `settings` go to shard."""

    name: str
    stage: int | str
    optimizer: str = "adamw"
    steps: int = 3
    backwards: int = 1
    no_sync: bool = False
    max_grad_norm: float | None = None
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    keep_events: bool = False
    unmade: bool = False  # built inside init_sharded


def train(plan: Plan) -> Run:
    """Train a model of `tests.models` through the engine, as a user's loop would."""
    torch.manual_seed(0)
    with onecopy.init_sharded() if plan.unmade else nullcontext():
        # Only the first rank's values count.
        model = models.build(plan.name, plan.seed + plan.unmade * dist.get_rank())
    optimizer = OPTIMIZERS[plan.optimizer](model)
    run = Run([], {})
    onecopy.shard(model, optimizer, stage=plan.stage, **plan.settings)
    if plan.keep_events:
        onecopy.events.add_sink(model, run.events.append)
    batches = models.batches(plan.name, plan.steps, dist.get_world_size(), plan.backwards)
    for step in batches:
        run.losses.append(_backwards(model, step[dist.get_rank()], plan.no_sync))
        if plan.max_grad_norm is not None:
            run.norms.append(onecopy.clip_grad_norm_(model, plan.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = full_values(model)
    return run


def _backwards(model: nn.Module, micro: Sequence[models.Batch], no_sync: bool) -> list[float]:
    losses = []
    for number, batch in enumerate(micro):
        with ExitStack() as stack:
            if no_sync and number < len(micro) - 1:
                stack.enter_context(onecopy.no_sync(model))
            loss = models.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
    return losses


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole: the masters where there are separate ones."""
    engine = onecopy.handle.of(model).engine
    with onecopy.full_parameters(model):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        for unit in engine.units:
            if unit.dtypes.master == unit.dtypes.compute:
                continue
            # Only masters tell whether low-precision training is right to the last bit.
            whole = torch.cat(
                onecopy.comm.compare.gather_objects(
                    engine.collectives.groups.shard, unit.slice.master.clone()
                )
            )
            for name, start, parameter in zip(
                unit.names, unit.layout.starts, unit.parameters, strict=True
            ):
                values[name] = onecopy.core.views.view_of(whole, start, parameter).clone()
    return values
