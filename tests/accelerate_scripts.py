"""What the ranks of tests/test_accelerate.py run: scripts of Accelerate, with and without onecopy.

Without (`stage` is None) `accelerator.prepare` wraps the model in DistributedDataParallel where
there are several ranks. accelerate is imported in the functions: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onecopy
import onecopy.errors
from tests.loops import net
from tests.runs import OPTIMIZERS
from tests.trainers import launched


@contextmanager
def accelerator(
    split_batches: bool = False, even_batches: bool = True, **settings: Any
) -> Iterator[Any]:
    """An Accelerator in the process group of this rank, as under a launcher; the next is new."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    with launched():
        loaders = DataLoaderConfiguration(split_batches=split_batches, even_batches=even_batches)
        yield Accelerator(cpu=True, dataloader_config=loaders, **settings)


@dataclass(frozen=True, kw_only=True)
class Script:
    """One script; the stage None leaves onecopy out."""

    stage: int | None
    optimizer: str = "adamw"
    accumulation: int = 1
    batch_size: int = 4
    clip: str | None = None
    epochs: int = 2
    # Of a GradScaler, which Accelerate itself makes on GPUs only; the first steps overflow.
    loss_scale: float | None = None
    weight: float = 1.0  # of the loss
    accelerator: dict[str, Any] = field(default_factory=dict)
    split_batches: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def loader(batch_size: int, samples: int = 32) -> DataLoader[Any]:
    """Samples in order."""
    x = torch.sin(torch.arange(samples * 4.0).view(samples, 4))
    return DataLoader(TensorDataset(x, x.cumsum(1)[:, :3]), batch_size=batch_size)


def prepare(accelerator: Any, stage: int | None, *objects: Any, **settings: Any) -> Any:
    """With onecopy or without: the only line in which scripts differ."""
    if stage is None:
        return accelerator.prepare(*objects)
    from onecopy.integrations.accelerate import prepare

    return prepare(accelerator, *objects, stage=stage, **settings)


def train(script: Script) -> dict[str, Any]:
    """Run a script; what it has seen, and the parameters in the end."""
    with accelerator(
        split_batches=script.split_batches,
        gradient_accumulation_steps=script.accumulation,
        **script.accelerator,
    ) as its_accelerator:
        if script.loss_scale is not None:
            its_accelerator.scaler = torch.amp.GradScaler(
                "cpu", init_scale=script.loss_scale, backoff_factor=2.0**-10
            )
        model = net()
        optimizer = OPTIMIZERS[script.optimizer](model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
        loop = Loop(
            its_accelerator,
            *prepare(
                its_accelerator,
                script.stage,
                model,
                loader(script.batch_size),
                optimizer,
                scheduler,
                **script.settings,
            ),
        )
        loop.weight = script.weight
        for _ in range(script.epochs):
            loop.epoch(script.clip)
        loop.seen["values"] = values(its_accelerator, loop.model)
        return loop.seen


def values(accelerator: Any, model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    state = accelerator.get_state_dict(model)
    return [value.clone() for value in state.values()]


class Loop:
    """The loop of a script, as Accelerate's documentation has it."""

    def __init__(
        self, accelerator: Any, model: Any, batches: Any, optimizer: Any, scheduler: Any
    ) -> None:
        self.accelerator, self.model, self.batches = accelerator, model, batches
        self.optimizer, self.scheduler = optimizer, scheduler
        self.weight = 1.0
        self.seen: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "skipped": []}

    def epoch(self, clip: str | None = None) -> None:
        """Once over the data."""
        for batch in self.batches:
            self.step(batch, clip)

    def step(self, batch: Any, clip: str | None = None) -> None:
        """One micro-batch."""
        x, y = batch
        with self.accelerator.accumulate(self.model):
            loss = self.weight * nn.functional.mse_loss(self.model(x), y)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients and clip is not None:
                self._clip(clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        seen = self.seen
        seen["losses"].append(self.accelerator.gather_for_metrics(loss.detach()).mean().item())
        seen["rates"].append(self.scheduler.get_last_lr()[0])
        seen["skipped"].append(self.accelerator.optimizer_step_was_skipped)

    def _clip(self, clip: str) -> None:
        parameters = self.model.parameters()
        if clip == "norm":
            norm = self.accelerator.clip_grad_norm_(parameters, 0.3)
            self.seen["norms"].append(float(norm))
        else:
            self.accelerator.clip_grad_value_(parameters, 0.02)


# By what is wrong, a pattern of the message.
REFUSED = {
    "deepspeed": r"set to DEEPSPEED, .*without its DeepSpeed plugin \(no --use_deepspeed\)",
    "fsdp": r"set to FSDP, .*without its FSDP plugin",
    "fp8": r'mixed_precision="fp8"\) replaces layers .*use "bf16"',
    "parallelism": r"parallelism_config=\.\.\.\) shards by itself.*prepare\(\.\.\., mesh=mesh\)",
    "placement": r"device_placement has 1 entries for 2 objects",
    "uneven": r"for batch in onecopy\.join\(model, loader\)",
}


def refusals() -> list[str]:
    """What is said of each."""
    return [_refusal(case) for case in REFUSED]


def _refusal(case: str) -> str:
    from unittest import mock

    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    kinds = {"deepspeed": DistributedType.DEEPSPEED, "fsdp": DistributedType.FSDP}
    values = {
        **{name: {"distributed_type": kind} for name, kind in kinds.items()},
        "fp8": {"mixed_precision": "fp8"},
        "parallelism": {"parallelism_config": mock.Mock(total_size=2)},
    }
    with accelerator() as its_accelerator, ExitStack() as stack:
        for name, value in values.get(case, {}).items():
            # Such accelerators need packages or devices that are not here.
            stack.enter_context(
                mock.patch.object(Accelerator, name, mock.PropertyMock(return_value=value))
            )
        model = net()
        optimizer = torch.optim.SGD(model.parameters())
        placement = {"device_placement": [True]} if case == "placement" else {}
        try:
            prepare(its_accelerator, 3, model, optimizer, **placement)
            its_accelerator.join_uneven_inputs([model], even_batches=True)
            its_accelerator.join_uneven_inputs([model], even_batches=False)
        except onecopy.errors.ConfigError as error:
            return str(error)
    return "nothing"


def uneven(stage: int | None) -> list[Tensor]:
    """20 samples in batches of 4: one of two ranks has three batches, the other two."""
    with accelerator(even_batches=False) as its_accelerator:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        size = 4 if dist.get_world_size() > 1 else 8
        model, optimizer, batches = prepare(
            its_accelerator, stage, model, optimizer, loader(size, samples=20)
        )
        for x, y in batches if stage is None else onecopy.join(model, batches):
            its_accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return values(its_accelerator, model)


def prepare_after_shard() -> tuple[str, list[Tensor], list[Tensor]]:
    """What Accelerate's own prepare of a sharded model says; and training by onecopy's."""
    trained = []
    for is_sharded_before in (True, False):
        with accelerator() as its_accelerator:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if is_sharded_before:
                onecopy.shard(model, optimizer, stage=2)
                try:
                    its_accelerator.prepare_model(model)
                    message = "nothing"
                except onecopy.OneCopyError as error:
                    message = str(error)
                its_accelerator.free_memory()
            model, optimizer, batches = prepare(its_accelerator, 2, model, optimizer, loader(4))
            for x, y in batches:
                its_accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            trained.append(values(its_accelerator, model))
    return message, *trained
