"""The optimizer of a run, and how its learning rate changes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from onecopy.training.options import TrainOptions

__all__ = ["make_optimizer", "share_of_rate"]


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Of what is trained. Matrices (embeddings too) decay; biases and the gains of norms do not."""
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=0.9)
    if options.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=options.lr)
    return torch.optim.AdamW(groups, lr=options.lr)


def share_of_rate(options: TrainOptions) -> Callable[[int], float]:
    """The learning rate in each step (from 0), as a share of the highest.

    A linear rise over the warm-up, then what the schedule says, down to `min_lr` behind the last
    step.
    """
    # A share of the steps, or their number.
    is_share = options.warmup < 1
    rising = max(1, round(options.warmup * options.steps if is_share else options.warmup))
    least = options.min_lr / options.lr
    falls: dict[str, Callable[[float], float]] = {
        "constant": lambda _: 1.0,
        "linear": lambda done: 1 - done,
        "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    }
    fall = falls[options.schedule]

    def share(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = (step - rising) / max(1, options.steps - rising)
        return least + (1 - least) * fall(min(1.0, done))

    return share
