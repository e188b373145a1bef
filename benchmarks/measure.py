"""What the rank processes run: contenders taking turns, and one contender alone for its memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.contenders import Contender, Setting, build
from benchmarks.model import SIZES, batch
from onecopy.memory.buffers import reuse_freed_blocks
from onecopy.memory.live_tensors import LiveTensors

__all__ = [
    "Alone",
    "Memory",
    "Plan",
    "Steps",
    "measure_memory",
    "reset_peak",
    "resident",
    "take_turns",
    "take_turns_alone",
    "train_step",
]

TURN_TIMEOUT = timedelta(hours=2)
MEMORY_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How often: `rounds` in which each contender has a turn of `timed` steps.

    The first step of a turn is not timed: it finds cold caches, and it has no transfers left from
    a step before it. `warm_rounds` rounds come first and count for nothing.
    """

    rounds: int
    timed: int
    warm_rounds: int = 1


@dataclass(slots=True, kw_only=True)
class Steps:
    """One contender on one rank: seconds of each timed step, and the loss of every step.

    cpu: seconds that all threads of the process together computed; waiting is not in it.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add(self, seconds: tuple[float, float, float, float]) -> None:
        """One timed step, as `train_step` returns it."""
        self.forward.append(seconds[0])
        self.backward.append(seconds[1])
        self.optimizer.append(seconds[2])
        self.cpu.append(seconds[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One rank's bytes.

    base: resident before the model is built. life: the most that was ever resident. steady: the
    most in later steps. live: the most that live tensors held in later steps.
    """

    base: int
    life: int
    steady: int
    live: int = 0


# Time -----------------------------------------------------------------------------------------


def take_turns(names: tuple[str, ...], setting: Setting, plan: Plan) -> dict[str, Steps]:
    """All contenders in this process and in one process group, in turn."""
    dist.init_process_group("gloo")
    if any(name.startswith("onecopy") for name in names):
        # shard() asks glibc for this; asked for here, all contenders have it from the start.
        reuse_freed_blocks()
    contenders = [build(name, setting) for name in names]
    results = {name: Steps() for name in names}
    for number in range(plan.warm_rounds + plan.rounds):
        for contender in contenders:
            _turn(contender, setting, plan, number, results[contender.name])
    dist.destroy_process_group()
    return results


def take_turns_alone(names: tuple[str, ...], setting: Setting, plan: Plan) -> dict[str, Steps]:
    """One contender in this process, in a group with its own kind, while the others sleep.

    Launched in `nproc` processes for each of `names`. So the contenders share no allocator, whose
    settings and free blocks one would inherit from another.
    """
    alone = Alone(names, setting.nproc)
    contender = build(alone.name, setting)
    steps = Steps()
    for number in range(plan.warm_rounds + plan.rounds):
        with alone.turn(number):
            _turn(contender, setting, plan, number, steps)
    dist.destroy_process_group()
    return {contender.name: steps}


class Alone:
    """This process's contender, in a group with its own kind; `nproc` processes for each name.

    name: which contender this process is.
    """

    def __init__(self, names: tuple[str, ...], nproc: int) -> None:
        self._place, self._rank = divmod(int(os.environ["RANK"]), nproc)
        self._count = len(names)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(host, port, is_master=False, timeout=TURN_TIMEOUT)
        own = dist.PrefixStore(f"contender/{self._place}", self._store)
        dist.init_process_group("gloo", store=own, rank=self._rank, world_size=nproc)
        self.name = names[self._place]

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Round `number` of this contender: the others sleep until the body has ended."""
        turn = number * self._count + self._place
        if turn:
            self._store.wait([f"turn/{turn}"], TURN_TIMEOUT)
        yield
        dist.barrier()
        if self._rank == 0:
            self._store.set(f"turn/{turn + 1}", "")


def _turn(contender: Contender, setting: Setting, plan: Plan, number: int, into: Steps) -> None:
    first = number * (plan.timed + 1)
    for step in range(first, first + plan.timed + 1):
        seconds, loss = train_step(contender, setting, step)
        into.losses.append(loss)
        if number >= plan.warm_rounds and step > first:
            into.add(seconds)
    contender.settle()
    dist.barrier()


def train_step(
    contender: Contender, setting: Setting, number: int
) -> tuple[tuple[float, float, float, float], float]:
    """Seconds of forward, of backward, of the update with zero_grad, of CPU; and the loss."""
    shape = (setting.micro_batch, setting.context)
    tokens = batch(SIZES[setting.size], shape, number, dist.get_rank())
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    loss = contender.forward(tokens)
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    contender.step()
    contender.zero_grad()
    end = time.perf_counter()
    cpu = time.process_time() - cpu
    return (forward - start, backward - forward, end - backward, cpu), loss.item()


# Memory ---------------------------------------------------------------------------------------


def measure_memory(name: str, setting: Setting, track: bool, same_allocator: bool) -> Memory:
    """One contender alone in fresh processes: a few steps, then a few that count.

    Args:
        track: follow live tensors, which takes memory itself: what is resident means nothing then.
        same_allocator: return freed blocks to the system for every contender, as shard() does.
    """
    dist.init_process_group("gloo")
    dist.barrier()
    if same_allocator:
        reuse_freed_blocks()
    base = resident("VmRSS")
    if track:
        with LiveTensors() as live:
            contender = build(name, setting)
            _run(contender, setting, 0)
            live.reset_peak()
            _run(contender, setting, MEMORY_STEPS)
        return Memory(base=base, life=0, steady=0, live=live.peak_bytes)
    contender = build(name, setting)
    _run(contender, setting, 0)
    reset_peak()
    _run(contender, setting, MEMORY_STEPS)
    life = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(base=base, life=life, steady=resident("VmHWM"))


def _run(contender: Contender, setting: Setting, first: int) -> None:
    for number in range(first, first + MEMORY_STEPS):
        train_step(contender, setting, number)
    contender.settle()


def reset_peak() -> None:
    """From now on VmHWM is the most that was resident since this call."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field_name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {field_name} in /proc/self/status")
