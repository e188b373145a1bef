"""What only shows in long, large or uneven runs; one command for each, or for all.

    python -m benchmarks.long_runs [memory] [units] [parameters] [slow-rank] [--steps 500]

memory: resident memory and Python's objects stay the same over 500 steps, at each stage.
units: a model of 10,000 units is sharded, and takes steps.
parameters: units of 2,000 parameters each.
slow-rank: four ranks, of which one takes longer to compute; all learn what they learn without it.

A run fails (exit code 1) where memory grows or losses differ. Times are shown beside those of the
model in plain PyTorch on one process; they decide nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.handle
from benchmarks.contenders import ONECOPY, Setting, build
from benchmarks.measure import resident, train_step

STAGES = tuple(f"onecopy-{stage}" for stage in range(4))
# The first looks at memory come when caches are full: those of torch and Python fill slowly.
WARM_STEPS, LOOKS = 200, 10
MOST_GROWTH_BYTES = 4 << 20
WIDTH, BATCH = 8, 2
SLOW_RANK, SLOW_SECONDS, SLOW_STEPS, SLOW_NPROC = 2, 0.05, 8, 4

Step = Callable[[], float]


# Flat memory ----------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> bool:
    """Resident bytes and blocks of Python's allocator, from the first look to the last."""
    setting = Setting(size="1m", nproc=2, dtype="fp32", micro_batch=1, context=64)
    is_flat = True
    print(f"{options.steps} steps, 2 ranks: MiB resident, blocks of Python, first and last")
    for name in (*STAGES, "onecopy-3-cpu"):
        ranks = onecopy.launch(_look_at_memory, setting.nproc, name, setting, options.steps)
        grown = max(last[0] - first[0] for first, last in ranks)
        blocks = max(last[1] - first[1] for first, last in ranks)
        (first, first_blocks), (last, last_blocks) = ranks[0]
        sizes = f"{first / 2**20:.1f} {last / 2**20:.1f}, {first_blocks} {last_blocks}"
        # Caches of Python's still fill by tens of blocks; what is not let go is one for each step.
        flat = grown <= MOST_GROWTH_BYTES and blocks < options.steps - WARM_STEPS - LOOKS
        print(f"  {name}: {sizes}{'' if flat else '  GROWS'}")
        is_flat &= flat
    return is_flat


def _look_at_memory(name: str, setting: Setting, steps: int) -> tuple[tuple[int, int], ...]:
    """The least of some looks after the warm steps, and the least at the end; in a rank process."""
    dist.init_process_group("gloo")
    contender = build(name, setting)
    looks = []
    for number in range(steps):
        train_step(contender, setting, number)
        if number in range(WARM_STEPS, WARM_STEPS + LOOKS) or number >= steps - LOOKS:
            gc.collect()
            looks.append((resident("VmRSS"), sys.getallocatedblocks()))
    contender.settle()
    onecopy.unshard(contender.model)
    dist.destroy_process_group()
    early, late = looks[:LOOKS], looks[-LOOKS:]
    return tuple(tuple(map(min, zip(*some, strict=True))) for some in (early, late))  # type: ignore[misc]


# Large models ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """Seconds on one rank: to shard, of the first step, of later ones; the same without onecopy."""

    num_units: int
    shard: float
    first: float
    step: float
    plain: float


class Many(nn.Module):
    """A block of many small parameters, each used once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)."""
        return x * torch.stack(list(self.scales)).mean(0)


def units(options: argparse.Namespace) -> bool:
    """10,000 units of one linear."""
    return _large("units of 2 parameters", options.units, 0)


def parameters(options: argparse.Namespace) -> bool:
    """Eight units of 2,000 parameters."""
    return _large("units of 2,000 parameters", 8, 2000)


def _large(what: str, blocks: int, per_unit: int) -> bool:
    print(
        f"{blocks} {what}, 2 ranks: seconds to shard, of the first step, of a step; of a plain step"
    )
    for name in ("onecopy-1", "onecopy-3"):
        one: Large = onecopy.launch(_train_large, 2, name, blocks, per_unit)[0]
        figures = f"{one.shard:.2f} {one.first:.2f} {one.step:.3f}; {one.plain:.3f}"
        print(f"  {name}: {one.num_units} units: {figures}")
    return True


def _train_large(name: str, blocks: int, per_unit: int) -> Large:
    dist.init_process_group("gloo")
    plain_step = _stepper(_large_model(blocks, per_unit))[0]
    plain_step()
    plain = _timed(plain_step)
    step, model, optimizer = _stepper(_large_model(blocks, per_unit))
    dist.barrier()
    begin = time.perf_counter()
    onecopy.shard(model, optimizer, **ONECOPY[name])
    shard = time.perf_counter() - begin
    first = _timed(step)
    later = median(_timed(step) for _ in range(3))
    num_units = len(onecopy.handle.of(model).engine.units)
    onecopy.unshard(model)
    dist.destroy_process_group()
    return Large(num_units=num_units, shard=shard, first=first, step=later, plain=plain)


def _large_model(blocks: int, per_unit: int) -> nn.Module:
    torch.manual_seed(0)
    if per_unit:
        return nn.Sequential(*(Many(per_unit) for _ in range(blocks)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(blocks)))


def _stepper(model: nn.Module) -> tuple[Step, nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(BATCH, WIDTH)

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, model, optimizer


def _timed(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


# A slow rank ----------------------------------------------------------------------------------


def slow_rank(options: argparse.Namespace) -> bool:
    """A rank that sleeps in every forward holds up all; nothing else becomes of it."""
    setting = Setting(size="1m", nproc=SLOW_NPROC, dtype="fp32", micro_batch=1, context=64)
    print(
        f"{SLOW_NPROC} ranks, ms of a step as usual, and with one {1e3 * SLOW_SECONDS:.0f} ms late"
    )
    is_same = True
    for name in STAGES:
        usual, slow = (
            onecopy.launch(_train_with_delay, SLOW_NPROC, name, setting, seconds)
            for seconds in (0.0, SLOW_SECONDS)
        )
        same = [losses for losses, _ in usual] == [losses for losses, _ in slow]
        times = (1e3 * max(seconds for _, seconds in ranks) for ranks in (usual, slow))
        print(f"  {name}: {' '.join(f'{one:.0f}' for one in times)}{'' if same else '  DIFFERS'}")
        is_same &= same
    return is_same


def _train_with_delay(name: str, setting: Setting, seconds: float) -> tuple[list[float], float]:
    """Losses, and the seconds of a step, in a rank process."""
    dist.init_process_group("gloo")
    contender = build(name, setting)
    forward = contender.forward

    def late(tokens: Tensor) -> Tensor:
        if dist.get_rank() == SLOW_RANK:
            time.sleep(seconds)
        return forward(tokens)

    contender.forward = late
    losses, totals = [], []
    for number in range(SLOW_STEPS):
        times, loss = train_step(contender, setting, number)
        losses.append(loss)
        totals.append(sum(times[:3]))
    contender.settle()
    onecopy.unshard(contender.model)
    dist.destroy_process_group()
    return losses, median(totals)


RUNS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "memory": memory,
    "units": units,
    "parameters": parameters,
    "slow-rank": slow_rank,
}


def main(arguments: list[str] | None = None) -> int:
    """Run what is named, or all; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_runs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=500, help="of memory (default 500)")
    parser.add_argument("--units", type=int, default=10_000, help="of units (default 10000)")
    options = parser.parse_args(arguments)
    unknown = set(options.runs) - set(RUNS)
    if unknown or options.steps < WARM_STEPS + 2 * LOOKS:
        parser.error(f"choose of {', '.join(RUNS)}, and at least {WARM_STEPS + 2 * LOOKS} steps")
    results = [RUNS[name](options) for name in options.runs or RUNS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
