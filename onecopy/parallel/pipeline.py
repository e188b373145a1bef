"""Pipelines of `torch.distributed.pipelining` whose stages are sharded: one step's micro-batches.

A schedule calls each stage's module forward and backward once for each micro-batch. Left alone,
each of them gathers and reduces: 3 times the parameters per micro-batch where all is cut. What
stays from one to the next is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from torch import nn

from onecopy import handle
from onecopy.errors import ConfigError, ShardingError
from onecopy.parallel.gathered import keep_gathered

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import _PipelineStageBase

    from onecopy.core.backward import Backward

__all__ = ["micro_batches"]

ONCE_OR_EACH = ("once", "each")


@contextmanager
def micro_batches(
    stages: nn.Module | _PipelineStageBase | Sequence[nn.Module | _PipelineStageBase],
    num: int,
    *,
    gather: Literal["once", "each"] = "once",
    reduce: Literal["once", "each"] = "once",
) -> Iterator[None]:
    """Around `schedule.step(...)`: what its micro-batches share.

    Elements sent per parameter and rank, times (N-1)/N on N data-parallel ranks, for k
    micro-batches at stage 3:

        gather  reduce  sent    memory of a whole stage module that is held meanwhile
        once    once    2       its parameters, and its gradients
        once    each    k + 1   its parameters
        each    once    2k + 1  its gradients
        each    each    3k      neither

    At stages 1 and 2 parameters are there anyway: 2, or k + 1. The last micro-batch's backward
    reduces while it runs.

    Args:
        stages: what `shard` was given, or the `PipelineStage`s around it: one, or several.
        num: micro-batches of the schedule.
        gather: "once" keeps gathered what is gathered first, until the block ends.
        reduce: "once" keeps gradients on their rank up to the last micro-batch.

    Raises:
        ConfigError: gather or reduce is something else, or num is not positive.
        ShardingError: a module is not sharded, or it is over ranks of other pipeline stages; at the
            end of the block, a module has run another number of backwards.

    Source: GPipe (Huang et al. 2019), section 2; ZeRO (Rajbhandari et al. 2020), sections 2 and 7.
    """
    _check(num, gather=gather, reduce=reduce)
    several = list(stages) if isinstance(stages, Sequence) else [stages]
    modules = [_module_of(one) for one in several]
    backwards: list[Backward] = [handle.of(one).backward for one in modules]
    before = [one.num_backwards for one in backwards]
    with keep_gathered(modules) if gather == "once" else nullcontext():
        for one in backwards:
            one.takes_by_hand, one.was_split = True, False
            one.local_until = one.num_backwards + num - 1 if reduce == "once" else 0
        try:
            yield
            for one in backwards:
                if one.was_split:
                    one.take_by_hand()
        finally:
            for one in backwards:
                one.takes_by_hand, one.local_until = False, 0
    for module, one, start in zip(modules, backwards, before, strict=True):
        _check_count(module, one.num_backwards - start, num, by_hand=one.was_split)


def _check(num: int, **choices: str) -> None:
    if num < 1:
        raise ConfigError(f"num={num} micro-batches: say how many the schedule was made with")
    for name, choice in choices.items():
        if choice not in ONCE_OR_EACH:
            raise ConfigError(f'{name}={choice!r} is neither "once" nor "each"')


def _module_of(stage: nn.Module | _PipelineStageBase) -> nn.Module:
    """The sharded module of a pipeline stage.

    Raises:
        ShardingError: it is neither a stage nor a module; other pipeline stages are among the ranks
            over which it is sharded.
    """
    if isinstance(stage, nn.Module):
        return stage
    if not hasattr(stage, "submod"):
        raise ShardingError(
            f"micro_batches({type(stage).__name__}, ...): pass the PipelineStage that the schedule "
            "was made with (a list of them where it has several), or the module in it"
        )
    data = set(handle.of(stage.submod).engine.collectives.groups.world.ranks)
    others = sorted(data & set(dist.get_process_group_ranks(stage.group)) - {dist.get_rank()})
    if others:
        raise ShardingError(
            f"the module of pipeline stage {stage.stage_index} is sharded over ranks "
            f"{sorted(data)}, and ranks {others} of these hold other pipeline stages: shard it "
            'with the mesh of the job, mesh = init_device_mesh(..., mesh_dim_names=("pp", "dp")), '
            "shard(stage_module, optimizer, mesh=mesh)"
        )
    return stage.submod


def _check_count(module: nn.Module, count: int, num: int, *, by_hand: bool) -> None:
    """Were all gradients together when the schedule divided them by the number of micro-batches?"""
    if by_hand and count:
        raise ShardingError(
            f"the schedule has made {count} backwards of this {type(module).__name__} at once and "
            "others in two parts (DualPipe), and divides the gradients of the latter only by the "
            "number of micro-batches. Use ScheduleZBVZeroBubble or ScheduleInterleaved1F1B"
        )
    if count not in (0, num):
        raise ShardingError(
            f"micro_batches(num={num}), but {type(module).__name__} has run {count} backwards in "
            "the block: its gradients were not reduced with the last of them. Say the number of "
            "micro-batches that the schedule was made with (n_microbatches), and put one call of "
            "schedule.step into each block"
        )
