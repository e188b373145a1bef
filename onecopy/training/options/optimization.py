"""How the model learns: steps, batches, the optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from onecopy.errors import ConfigError
from onecopy.options import describe
from onecopy.training.options.group import OptionGroup, describe_of_run

OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimizationOptions(OptionGroup):
    """The settings of `[train]`."""

    table = "train"
    title = "training"
    least: ClassVar[Mapping[str, float]] = {
        # The first step creates the optimizer's states: memory can be measured from the second on.
        "steps": 2,
        "epochs": 0,
        "batch": 1,
        "accumulate": 1,
        "warmup": 0,
        "min_lr": 0,
        "weight_decay": 0,
        "max_grad_norm": 0,
        "seed": 0,
    }

    steps: int = field(default=260, metadata=describe_of_run("optimizer steps"))
    epochs: float = field(
        default=0.0,
        metadata=describe_of_run(
            "train so often on all the data, instead of --steps; 0: see there"
        ),
    )
    batch: int = field(default=12, metadata=describe("sequences per process and backward"))
    accumulate: int = field(default=1, metadata=describe("backwards per optimizer step"))
    optimizer: str = field(
        default="adamw",
        metadata=describe_of_run(
            "which of torch.optim; muon trains the matrices of blocks, and adamw the rest",
            choices=OPTIMIZERS,
        ),
    )
    lr: float = field(
        default=3e-3, metadata=describe_of_run("highest learning rate, reached after the warm-up")
    )
    schedule: str = field(
        default="cosine",
        metadata=describe_of_run(
            "how the learning rate falls from there to --min-lr at the last step", choices=SCHEDULES
        ),
    )
    warmup: float = field(
        default=0.1,
        metadata=describe_of_run(
            "in which the learning rate rises: a share of the steps below 1, else a number of steps"
        ),
    )
    min_lr: float = field(
        default=0.0, metadata=describe_of_run("learning rate at the end of the schedule")
    )
    weight_decay: float = field(
        default=0.1, metadata=describe_of_run("of matrices; norms and biases have none")
    )
    max_grad_norm: float = field(
        default=1.0,
        metadata=describe_of_run("clip the global gradient norm to this; 0 does not clip"),
    )
    seed: int = field(default=0, metadata=describe_of_run("seeds weights, batches and the sample"))

    def check(self) -> None:
        """Raises ConfigError for rates that cannot be."""
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"--lr is {self.lr}: give a number above 0, such as 0.003.")
        if self.min_lr > self.lr:
            raise ConfigError(f"--min-lr is {self.min_lr}, which is above --lr {self.lr}.")
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise ConfigError(
                f"--warmup is {self.warmup}: give a share of the steps between 0 and 1, or a whole "
                "number of steps."
            )
