"""What is measured while the trainer's loop runs: losses, memory, bytes sent, speed.

This file owns when something is measured and how it is averaged over ranks. The loop only says
where it stands. Whatever is communicated here is small, happens on all ranks alike, and is not
part of the bytes it counts.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onecopy.comm.values import over_ranks
from onecopy.events import add_sink
from onecopy.report import memory
from onecopy.report.counters import BytesCounter
from onecopy.report.progress import ProgressLine, Status
from onecopy.report.states import StateBytes
from onecopy.training import data
from onecopy.training.data import Shard
from onecopy.training.options import TrainOptions

# Showing a loss averages it over ranks; a message in every step would slow the training.
STEPS_PER_STATUS = 5
KINDS_SENT = ("gather", "reduce", "refresh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The measurements of a run, equal on all ranks."""

    held_out_bits: dict[int, float]  # bits per byte by the number of steps done
    memory: StateBytes  # of the rank that holds most, in the second step
    bytes_per_step: dict[str, float]  # sent by a rank, by kind of event
    tokens_per_second: float  # of all ranks together, without evaluations
    seconds: float


class Observer:
    """Measures a run. Every rank makes one and calls it at the same places."""

    def __init__(
        self,
        model: nn.Module,
        held_out: Tensor,
        shard: Shard,
        options: TrainOptions,
        progress: ProgressLine,
        device: torch.device,
    ) -> None:
        self.options = options
        self.device = device
        self._model = model
        self._shard = shard
        self._progress = progress
        self._held_out = data.held_out_batches(held_out, shard)
        self._counter = BytesCounter()
        self._remove_counter = add_sink(model, self._counter)
        # The first step also records the order of use, so counting begins after it.
        self._counted_from = 1
        self._started = time.monotonic()
        self._evaluation_seconds = 0.0
        self._held_out_bits: dict[int, float] = {}
        self._memory: StateBytes | None = None
        self._bytes_per_step: dict[str, float] = {}

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Between backward and step `step` (from 0): the moment that memory is stated for."""
        # The first step has yet to create the optimizer's states.
        if step == 1:
            held = memory.measure(self._model, optimizer)
            counts = [held.parameters, held.gradients, held.optimizer]
            most = self._over_ranks(counts, maximum=True)
            self._memory = StateBytes(
                parameters=int(most[0]), gradients=int(most[1]), optimizer=int(most[2])
            )

    def after_step(self, done: int, loss: Tensor) -> None:
        """`done` steps are done; `loss` (scalar, nats per byte) is this rank's of the last one."""
        if done == 1:
            self._counter.take()
        if done % STEPS_PER_STATUS == 0:
            self._show_status(done, self._mean([float(loss)])[0])
        if self._evaluates_after(done):
            if not self._bytes_per_step and done > self._counted_from:
                self._bytes_per_step = self._count(done - self._counted_from)
            self.evaluate(done)
            # What the evaluation has gathered does not belong to a training step.
            self._counter.take()
            self._counted_from = done

    @torch.no_grad()
    def evaluate(self, done: int) -> None:
        """Measure the held-out loss after `done` steps, with equally many forwards on all ranks."""
        began = time.monotonic()
        self._model.eval()
        summed, num_sequences = 0.0, 0
        for tokens, targets in self._held_out:
            loss = self._model(tokens.to(self.device), targets.to(self.device))
            summed += float(loss) * len(tokens)
            num_sequences += len(tokens)
        self._model.train()
        bits = self._mean([summed / num_sequences])[0] / math.log(2)
        self._held_out_bits[done] = bits
        self._evaluation_seconds += time.monotonic() - began
        self._progress.note(f"step {done}/{self.options.steps}  held-out {bits:.2f} bits/byte")

    def finish(self) -> Observed:
        """Stop counting and return what was measured. Needs at least two steps."""
        self._remove_counter()
        assert self._memory is not None, "TrainOptions asks for two steps; the second measures"
        return Observed(
            held_out_bits=dict(self._held_out_bits),
            memory=self._memory,
            bytes_per_step=self._bytes_per_step,
            tokens_per_second=self._tokens_per_second(self.options.steps),
            seconds=time.monotonic() - self._started,
        )

    def _evaluates_after(self, done: int) -> bool:
        steps, evals = self.options.steps, self.options.evals
        return done * evals // steps > (done - 1) * evals // steps

    def _count(self, num_steps: int) -> dict[str, float]:
        taken = self._counter.take()
        sums = self._mean([float(taken.get(kind, 0)) for kind in KINDS_SENT])
        return {kind: total / num_steps for kind, total in zip(KINDS_SENT, sums, strict=True)}

    def _show_status(self, done: int, loss: float) -> None:
        elapsed = time.monotonic() - self._started
        left = elapsed / done * (self.options.steps - done)
        self._progress.show(
            Status(
                step=done,
                num_steps=self.options.steps,
                loss=loss,
                tokens_per_second=self._tokens_per_second(done),
                seconds_left=left,
            )
        )

    def _tokens_per_second(self, done: int) -> float:
        options = self.options
        per_step = options.accumulate * options.batch * options.context * self._shard.world_size
        training = time.monotonic() - self._started - self._evaluation_seconds
        return done * per_step / training

    def _mean(self, values: list[float]) -> list[float]:
        sums = self._over_ranks(values)
        return [total / self._shard.world_size for total in sums]

    def _over_ranks(self, values: list[float] | list[int], *, maximum: bool = False) -> list[float]:
        # fp64 holds every byte count below 2**53 exactly.
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [float(number) for number in over_ranks(numbers, maximum=maximum)]
