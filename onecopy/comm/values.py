"""Small values over all ranks, for printing and logging: losses, norms, byte counts."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["over_ranks"]


def over_ranks(values: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
    """Sum (or maximum) of a small tensor over all ranks of the default group, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
    return values
