"""What is measured while the trainer's loop runs: losses, memory, bytes sent, speed.

This file owns when something is measured and how it is averaged over ranks. The loop only says
where it stands. Whatever is communicated here is small, happens on all ranks alike, and is not
part of the bytes it counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.comm.values import over_ranks
from onecopy.errors import ConfigError
from onecopy.events import SENT, Event, add_sink
from onecopy.report import memory
from onecopy.report.counters import BytesCounter
from onecopy.report.progress import ProgressLine, Status, plural
from onecopy.report.states import StateBytes
from onecopy.training.data import IGNORED, Corpus, Shard, held_out_batches
from onecopy.training.models import sum_of_losses
from onecopy.training.options import TrainOptions

# Ranks tell each other how they do: their losses, and whether one was asked to end. A message in
# every step would slow the training, and a request cannot wait for many steps that take long.
STEPS_PER_STATUS = 5
SECONDS_PER_STATUS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The measurements of a run, equal on all ranks.

    Where a run was resumed on other ranks, or at another stage, with no step left to measure
    in, `memory` is None, `bytes_per_step` is empty and `tokens_per_second` is 0.
    """

    held_out_bits: dict[int, float]  # bits per byte by the number of steps done
    memory: StateBytes | None  # of the rank that holds most, in the second step
    bytes_per_step: dict[str, float]  # sent by a rank, by kind of event
    across_per_step: float  # those of them that leave its node
    tokens_per_second: float  # of all ranks together, without evaluations and checkpoints
    seconds: float  # with those of the runs that this one goes on from


class Observer:
    """Measures a run. Every rank makes one and calls it at the same places.

    Its state goes into checkpoints. What depends on how the model is cut is taken over only by a
    run that cuts it alike; others measure anew.
    """

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        shard: Shard,
        options: TrainOptions,
        progress: ProgressLine,
        device: torch.device,
    ) -> None:
        self.options = options
        self.progress = progress
        self.device = device
        self._model = model
        self._shard = shard
        self._held_out = held_out_batches(corpus, shard)
        # Nats per token become bits per byte of text, which do not depend on the tokenizer.
        self._bits_per_nat = 1 / corpus.held_out.bytes_per_token / math.log(2)
        self._status_every = STEPS_PER_STATUS
        self._counter = BytesCounter()
        self._across = 0
        self._remove_counters = [add_sink(model, sink) for sink in (self._counter, self._cross)]
        self._done = self._first = 0  # steps of the run, and of it before this process
        self._counted_from = 0
        self._seconds_before = 0.0
        # Steps of earlier processes that the speed counts too, and their seconds.
        self._alike_before = (0, 0.0)
        self._started = time.monotonic()
        self._paused_seconds = 0.0
        self._held_out_bits: dict[int, float] = {}
        self._memory: StateBytes | None = None
        self._bytes_per_step: dict[str, float] = {}
        self._across_per_step = 0.0

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Between backward and step `step` (from 0): the moment that memory is stated for."""
        # The run's first step has yet to create the optimizer's states.
        if step > 0 and self._memory is None:
            held = memory.measure(self._model, optimizer)
            counts = [held.parameters, held.gradients, held.optimizer]
            most = self._over_ranks(counts, maximum=True)
            self._memory = StateBytes(
                parameters=int(most[0]), gradients=int(most[1]), optimizer=int(most[2])
            )

    def after_step(self, done: int, loss: Tensor, signal: str | None = None) -> bool:
        """`done` steps are done; `loss` (scalar, nats per token) is this rank's of the last one.

        Returns:
            whether to end now, as some rank has got a `signal`. Ranks hear of it together, a few
            steps later.
        """
        self._done = done
        if done == self._first + 1:
            # A process's first step also records the order of use: counting begins after it.
            self._take()
            self._counted_from = done
        stops = False
        if done % self._status_every == 0 or done == self.options.steps:
            stops = self._share_status(done, float(loss), signal)
        if self._evaluates_after(done):
            if not self._bytes_per_step and done > self._counted_from:
                self._count(done - self._counted_from)
            self.evaluate(done)
            # What the evaluation has gathered does not belong to a training step.
            self._take()
            self._counted_from = done
        return stops

    def held_out_after(self, done: int) -> dict[str, float]:
        """The held-out loss in bits per byte, if it was measured after `done` steps, by name."""
        bits = self._held_out_bits.get(done)
        return {} if bits is None else {"held_out_bits": bits}

    @torch.no_grad()
    def evaluate(self, done: int) -> None:
        """Measure the held-out loss after `done` steps, with equally many forwards on all ranks.

        Raises:
            ConfigError: nothing that is held out counts.
        """
        with self.paused():
            self._model.eval()
            summed, num_targets = 0.0, 0
            for tokens, targets in self._held_out:
                device = self.device
                summed += float(sum_of_losses(self._model, tokens.to(device), targets.to(device)))
                num_targets += int((targets != IGNORED).sum())
            self._model.train()
            of_all, num_targets_of_all = self._over_ranks([summed, float(num_targets)])
            if not num_targets_of_all:
                raise ConfigError(
                    "no token of the held-out part counts: its prompts fill --context, or more. "
                    "Give a larger one, or other data."
                )
            bits = of_all / num_targets_of_all * self._bits_per_nat
            self._held_out_bits[done] = bits
        self.progress.note(f"step {done}/{self.options.steps}  held-out {bits:.2f} bits/byte")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is not training: its time does not count as such."""
        began = time.monotonic()
        yield
        self._paused_seconds += time.monotonic() - began

    def finish(self) -> Observed:
        """Stop counting and return what was measured."""
        for remove in self._remove_counters:
            remove()
        return Observed(
            held_out_bits=dict(self._held_out_bits),
            memory=self._memory,
            bytes_per_step=self._bytes_per_step,
            across_per_step=self._across_per_step,
            tokens_per_second=self._tokens_per_second(),
            seconds=self._seconds_before + time.monotonic() - self._started,
        )

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far, equal on all ranks, which ask together."""
        steps, training = self._trained()
        elapsed = self._seconds_before + time.monotonic() - self._started
        seconds, training = self._over_ranks([elapsed, training], maximum=True)
        return {
            "done": self._done,
            "held_out_bits": dict(self._held_out_bits),
            "seconds": seconds,
            "setup": self._setup(),
            "trained": (steps, training),
            "memory": None if self._memory is None else asdict(self._memory),
            "bytes_per_step": dict(self._bytes_per_step),
            "across_per_step": self._across_per_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._done = self._first = state["done"]
        self._held_out_bits = dict(state["held_out_bits"])
        self._seconds_before = state["seconds"]
        self._started, self._paused_seconds = time.monotonic(), 0.0
        if state["setup"] == self._setup():
            self._alike_before = state["trained"]
            self._memory = StateBytes(**state["memory"]) if state["memory"] else None
            self._bytes_per_step = dict(state["bytes_per_step"])
            self._across_per_step = state["across_per_step"]
        else:
            self.progress.note(self._dealt())

    def _setup(self) -> dict[str, Any]:
        options = self.options
        return {
            "ranks": self._shard.world_size,
            "stage": options.stage,
            "node_size": options.node_size,
            "quantize": options.quantize,
            "precision": options.precision,
            "device": self.device.type,
            "batch": options.batch,
            "accumulate": options.accumulate,
        }

    def _dealt(self) -> str:
        ranks, batch, accumulate = (
            self._shard.world_size,
            self.options.batch,
            self.options.accumulate,
        )
        factors = [plural(ranks, "rank"), plural(accumulate, "backward"), str(batch)]
        return f"{ranks * batch * accumulate} sequences per step, as before: {' x '.join(factors)}"

    def _evaluates_after(self, done: int) -> bool:
        steps, evals, every = self.options.steps, self.options.evals, self.options.eval_every
        if every:
            return done % every == 0 or done == steps
        return done * evals // steps > (done - 1) * evals // steps

    def _cross(self, event: Event) -> None:
        self._across += event.across_bytes

    def _take(self) -> tuple[dict[str, int], int]:
        """Bytes by kind since the last look, and those of them that left this rank's node."""
        across, self._across = self._across, 0
        return self._counter.take(), across

    def _count(self, num_steps: int) -> None:
        taken, across = self._take()
        sums = self._mean([float(taken.get(kind, 0)) for kind in SENT] + [float(across)])
        *sent, self._across_per_step = (total / num_steps for total in sums)
        self._bytes_per_step = dict(zip(SENT, sent, strict=True))

    def _share_status(self, done: int, loss: float, signal: str | None) -> bool:
        """Tell each other; returns whether any rank has got a signal."""
        steps, seconds = self._trained()
        asked = float(signal is not None)
        loss, signals, per_step = self._mean([loss, asked, seconds / steps])
        # The same on all ranks, as it comes from what they have shared.
        in_time = int(SECONDS_PER_STATUS / max(per_step, 1e-3))
        self._status_every = max(1, min(STEPS_PER_STATUS, in_time))
        self.progress.show(
            Status(
                step=done,
                num_steps=self.options.steps,
                loss=loss,
                bits_per_byte=loss * self._bits_per_nat,
                tokens_per_second=self._tokens_per_second(),
                seconds_left=per_step * (self.options.steps - done),
            )
        )
        return signals > 0

    def _trained(self) -> tuple[int, float]:
        """Steps made in this setup, and the seconds they took."""
        steps, seconds = self._alike_before
        if self._done > self._first:
            steps += self._done - self._first
            seconds += time.monotonic() - self._started - self._paused_seconds
        return steps, seconds

    def _tokens_per_second(self) -> float:
        options = self.options
        per_step = options.accumulate * options.batch * options.context * self._shard.world_size
        steps, seconds = self._trained()
        return steps * per_step / seconds if steps else 0.0

    def _mean(self, values: list[float]) -> list[float]:
        sums = self._over_ranks(values)
        return [total / self._shard.world_size for total in sums]

    def _over_ranks(self, values: list[float] | list[int], *, maximum: bool = False) -> list[float]:
        # fp64 holds every byte count below 2**53 exactly.
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [float(number) for number in over_ranks(numbers, maximum=maximum)]
