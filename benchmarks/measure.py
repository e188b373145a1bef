"""What the rank processes run: contenders taking turns, and one contender alone for its tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import Contender, Setting, build
from benchmarks.model import SIZES, batch
from benchmarks.network import LOOPBACK, settled
from onecopy.memory.buffers import reuse_freed_blocks
from onecopy.memory.live_tensors import LiveTensors

__all__ = [
    "Alone",
    "LiveBytes",
    "Plan",
    "Steps",
    "Turns",
    "measure_live_tensors",
    "reset_peak",
    "resident",
    "take_turns",
    "train_step",
]

TURN_TIMEOUT = timedelta(hours=2)
LIVE_WARM_STEPS, LIVE_STEPS = 3, 2
# Torch's reducer, in C++, makes their gradients: no operation shows them.
UNSEEN_GRADIENTS = ("ddp", "zero_redundancy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How often: `rounds` in which each contender has a turn of `timed` steps.

    The first step of a turn is not timed: it finds cold caches, and it has no transfers left from
    a step before it. `warm_rounds` rounds come first and count for nothing.

    same_allocator: all return freed blocks to the system as shard() makes glibc do it.
    """

    rounds: int
    timed: int
    warm_rounds: int = 1
    same_allocator: bool = False


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


@dataclass(slots=True, kw_only=True)
class Turns:
    """All turns of one contender on one rank.

    start: seconds from the model in plain PyTorch to the end of its first step on all ranks.
    base: bytes resident before the model is made. peak: the most in each turn, steady: after it.
    sent: bytes that all ranks of the contender sent in one step of each turn, without headers.
    """

    steps: Steps = field(default_factory=Steps)
    start: float = 0.0
    base: int = 0
    peak: list[int] = field(default_factory=list)
    steady: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """What live tensors of one rank held: at most, and between backward and the update."""

    peak: int
    steady: int


# Turns ----------------------------------------------------------------------------------------


def take_turns(names: tuple[str, ...], setting: Setting, plan: Plan) -> tuple[str, Turns]:
    """One contender in this process, in a group with its own kind, while the others sleep.

    Launched in `nproc` processes for each of `names`. So the contenders share no allocator, whose
    settings and free blocks one would inherit from another. Nobody else may use the loopback
    interface, whose counters are read.
    """
    alone = Alone(names, setting.nproc)
    if plan.same_allocator:
        reuse_freed_blocks()
    turns = Turns(base=resident("VmRSS"))
    contender: Contender | None = None
    for number in range(plan.warm_rounds + plan.rounds):
        with alone.turn(number):
            if contender is None:
                contender = build(alone.name, setting)
            _turn(contender, setting, plan, number, turns)
    alone.end()
    return alone.name, turns


class Alone:
    """This process's contender, in a group with its own kind; `nproc` processes for each name.

    The environment becomes that of a launch of `nproc` ranks.

    name: which contender this process is.
    """

    def __init__(self, names: tuple[str, ...], nproc: int) -> None:
        number = int(os.environ["RANK"])
        self._place, self._rank = divmod(number, nproc)
        self._count, self._nproc = len(names), nproc
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # In a network of its own (network.py) the launcher's store cannot be reached.
        is_reached = "TORCHELASTIC_USE_AGENT_STORE" in os.environ
        self._makes_store = number == 0 and not is_reached
        self._store = dist.TCPStore(
            host, port, None, self._makes_store, TURN_TIMEOUT, wait_for_workers=False
        )
        os.environ.update(
            {name: str(self._rank) for name in ("RANK", "LOCAL_RANK")}
            | {name: str(nproc) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        )
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

    def end(self) -> None:
        """Leave the group; the process that has the store waits for all others."""
        dist.destroy_process_group()
        if self._store.add("ended", 1) == self._count * self._nproc:
            self._store.set("all ended", "")
        if self._makes_store:
            self._store.wait(["all ended"], TURN_TIMEOUT)


def _turn(contender: Contender, setting: Setting, plan: Plan, number: int, into: Turns) -> None:
    """The first step is not timed, but what it sends is counted."""
    first, counts = number * (plan.timed + 1), number >= plan.warm_rounds
    reset_peak()
    before = settled(LOOPBACK)
    seconds, loss = train_step(contender, setting, first)
    if number == 0:
        into.start = contender.wrap_seconds + sum(seconds[:3])
    contender.settle()
    sent = settled(LOOPBACK).since(before).looped_payload
    into.steps.losses.append(loss)
    for step in range(first + 1, first + 1 + plan.timed):
        seconds, loss = train_step(contender, setting, step)
        into.steps.losses.append(loss)
        if counts:
            into.steps.add(seconds)
    contender.settle()
    if counts:
        into.sent.append(sent)
        into.peak.append(resident("VmHWM"))
        into.steady.append(resident("VmRSS"))


def train_step(
    contender: Contender, setting: Setting, number: int
) -> tuple[tuple[float, float, float, float], float]:
    """Seconds of forward, of backward, of the update with zero_grad, of CPU; and the loss."""
    tokens = _tokens(setting, number)
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    loss = contender.forward(tokens)
    forward = time.perf_counter()
    contender.backward(loss)
    backward = time.perf_counter()
    contender.step()
    contender.zero_grad()
    end = time.perf_counter()
    cpu = time.process_time() - cpu
    return (forward - start, backward - forward, end - backward, cpu), loss.item()


def _tokens(setting: Setting, number: int) -> Tensor:
    shape = (setting.micro_batch, setting.context)
    return batch(SIZES[setting.size], shape, number, dist.get_rank())


# Memory ---------------------------------------------------------------------------------------


def measure_live_tensors(name: str, setting: Setting) -> LiveBytes:
    """One contender alone in fresh processes: some steps first, then some that count."""
    dist.init_process_group("gloo")
    with LiveTensors() as live:
        contender = build(name, setting)
        for number in range(LIVE_WARM_STEPS):
            train_step(contender, setting, number)
            contender.settle()
        live.reset_peak()
        steady = [
            _live_step(contender, setting, LIVE_WARM_STEPS + number, live)
            for number in range(LIVE_STEPS)
        ]
    dist.destroy_process_group()
    return LiveBytes(peak=live.peak_bytes, steady=max(steady))


def _live_step(contender: Contender, setting: Setting, number: int, live: LiveTensors) -> int:
    """What is alive between backward and the update."""
    contender.backward(contender.forward(_tokens(setting, number)))
    if contender.name in UNSEEN_GRADIENTS:
        live.watch([one.grad for one in contender.model.parameters() if one.grad is not None])
    steady = live.num_bytes()
    contender.step()
    contender.zero_grad()
    contender.settle()
    return steady


def reset_peak() -> None:
    """From now on VmHWM is the most that was resident since this call."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field_name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {field_name} in /proc/self/status")
