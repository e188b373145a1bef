"""The optimizer's step on the host, beside torch, DeepSpeed's CPU Adam and the memory's own speed.

    python -m benchmarks.host_step [--params 10m] [--width 512] [--dtype bf16] [--threads 1]

One process has the whole model, so that nothing is sent between ranks. Everybody takes the same
AdamW step: fp32 masters, gradients and moments in host memory are updated, and the new values are
copied to where forward reads them, in the dtype of --dtype. Contenders take turns; forward and
backward of each come before its step and are not timed. See README.md here for the columns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

import onecopy
from benchmarks import report
from benchmarks.report import Column

PARAMS = {"10m": 10_000_000, "50m": 50_000_000, "100m": 100_000_000}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
ROWS = 4
WARM_ROUNDS = 2
COMPARED_ROUNDS = 4
# Read p, g, m, v and write p, m, v, all in fp32.
UPDATE_BYTES = 28
# Losses that differ by more were not the same training.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-3}

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

COLUMNS = (
    Column("name", "contender"),
    Column("step", "step ms", ".2f"),
    Column("spread", "IQR", ".2f"),
    Column("per_memory", "/ memory", ".2f"),
    Column("per_torch", "/ torch", ".2f"),
    Column("per_deepspeed", "/ deepspeed", ".2f"),
    Column("of_bandwidth", "of bandwidth", ".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    width: of a block, which is a unit of 12 width^2 parameters in 12 tensors.
    """

    params: str
    width: int
    dtype: str
    threads: int

    @property
    def num_blocks(self) -> int:
        """As many as come to the number of parameters."""
        return max(1, round(PARAMS[self.params] / (12 * self.width**2)))


@dataclass(slots=True)
class Turns:
    """Seconds of one contender's timed steps, and its loss in every round."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Block(nn.Module):
    """The parameters of a transformer block, without attention between tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        x = x + self.project(self.qkv(self.norm1(x)))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def _model(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(setting.width) for _ in range(setting.num_blocks)))


# Contenders -----------------------------------------------------------------------------------


class Contender(ABC):
    """Somebody who takes the step."""

    @abstractmethod
    def prepare(self) -> float | None:
        """Have gradients; returns the loss that they are of."""

    @abstractmethod
    def step(self) -> None:
        """What is timed."""

    @abstractmethod
    def settle(self) -> None:
        """After a step; not timed."""


class OneCopy(Contender):
    """onecopy with states in host memory; the optimizer is the user's."""

    def __init__(self, setting: Setting, make: Make) -> None:
        self._model = _model(setting)
        self._optimizer = make(self._model.parameters())
        onecopy.shard(self._model, self._optimizer, stage=3, precision=setting.dtype, offload="cpu")
        self._x = _input(setting)

    def prepare(self) -> float:
        """Forward and backward."""
        return _backward(self._model, self._x)

    def step(self) -> None:
        """The user's call."""
        self._optimizer.step()

    def settle(self) -> None:
        """The user's other call."""
        self._optimizer.zero_grad()


class Flat(Contender):
    """An optimizer on one flat master of the whole model, without any framework around it.

    values: where forward reads: the parameters are views of it.
    """

    def __init__(self, setting: Setting, make: Make, *, copies_values: bool = True) -> None:
        self._model, dtype = _model(setting), DTYPES[setting.dtype]
        self._parameters = list(self._model.parameters())
        numel = sum(one.numel() for one in self._parameters)
        self._master = nn.Parameter(torch.empty(numel))
        self._gradient = torch.zeros(numel)
        self._values = torch.empty(numel, dtype=dtype)
        start = 0
        for one in self._parameters:
            end = start + one.numel()
            self._master.data[start:end] = one.data.flatten()
            one.data = self._values[start:end].view(one.shape)
            start = end
        self._values.copy_(self._master.data)
        self._optimizer = make([self._master])
        self._copies_values = copies_values
        self._x = _input(setting)

    def prepare(self) -> float:
        """Forward and backward; gradients come into one fp32 tensor."""
        loss = _backward(self._model, self._x)
        start = 0
        for one in self._parameters:
            assert one.grad is not None, "every parameter is used"
            end = start + one.numel()
            self._gradient[start:end] = one.grad.flatten()
            one.grad = None
            start = end
        self._master.grad = self._gradient
        return loss

    def step(self) -> None:
        """The update, then the new values, as DeepSpeed's ZeRO optimizers do it."""
        self._optimizer.step()
        if self._copies_values:
            self._values.copy_(self._master.data)

    def settle(self) -> None:
        """The values, where that was not timed."""
        if not self._copies_values:
            self._values.copy_(self._master.data)


class Memory(Contender):
    """The same bytes with next to no arithmetic: in place, as a step does it.

    bytes of an element: 12 + 8 + 8 for the update, then 4 + the size of a value.
    """

    def __init__(self, setting: Setting) -> None:
        numel = sum(one.numel() for one in _model(setting).parameters())
        self._p, self._g, self._m, self._v = (torch.ones(numel) for _ in range(4))
        self._values = torch.empty(numel, dtype=DTYPES[setting.dtype])

    def prepare(self) -> None:
        """There is nothing to do."""

    def step(self) -> None:
        """Each of p, g, m and v is read once, each of p, m and v written; then the values."""
        self._p.add_(self._g)
        self._m.mul_(0.5)
        self._v.mul_(0.5)
        self._values.copy_(self._p)

    def settle(self) -> None:
        """No denormal numbers, which would take time of their own."""
        for one in (self._p, self._m, self._v):
            one.fill_(1.0)


def _input(setting: Setting) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, setting.width, generator=generator).to(DTYPES[setting.dtype])


def _backward(model: nn.Module, x: Tensor) -> float:
    loss = (model(x).float() - 1).square().mean()
    loss.backward()
    return loss.item()


def _deepspeed_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, **SETTINGS)


def _adam(**way: Any) -> Make:
    """One of torch's ways to compute AdamW."""
    return partial(torch.optim.AdamW, **SETTINGS, **way)


CONTENDERS: dict[str, Any] = {
    "memory": Memory,
    "torch": lambda setting: Flat(setting, _adam(fused=True)),
    "deepspeed": lambda setting: Flat(setting, _deepspeed_adam),
    "deepspeed-update": lambda setting: Flat(setting, _deepspeed_adam, copies_values=False),
    "onecopy-fused": lambda setting: OneCopy(setting, _adam(fused=True)),
    "onecopy-deepspeed": lambda setting: OneCopy(setting, _deepspeed_adam),
    "onecopy-foreach": lambda setting: OneCopy(setting, _adam(foreach=True)),
    "onecopy-plain": lambda setting: OneCopy(setting, _adam(foreach=False)),
}


# Measurement ----------------------------------------------------------------------------------


def measure(names: tuple[str, ...], setting: Setting, rounds: int) -> dict[str, Turns]:
    """All contenders in turn; in a process of its own, whose number of threads is set."""
    torch.set_num_threads(setting.threads)
    dist.init_process_group("gloo")
    contenders: dict[str, Contender] = {name: CONTENDERS[name](setting) for name in names}
    turns = {name: Turns() for name in names}
    # One thread's own time does not run while others have its core; several wait for each other.
    clock = time.thread_time if setting.threads == 1 else time.perf_counter
    for number in range(WARM_ROUNDS + rounds):
        for name, contender in contenders.items():
            loss = contender.prepare()
            start = clock()
            contender.step()
            seconds = clock() - start
            contender.settle()
            if loss is not None:
                turns[name].losses.append(loss)
            if number >= WARM_ROUNDS:
                turns[name].seconds.append(seconds)
    dist.destroy_process_group()
    return turns


def rows(turns: dict[str, Turns], dtype: str) -> list[dict[str, Any]]:
    """One row for each contender; ratios are medians of the ratios within a round."""
    made = []
    size = DTYPES[dtype].itemsize
    # What must move, over what the memory's loop moves, which reads the new masters once more.
    share = (UPDATE_BYTES + size) / (UPDATE_BYTES + 4 + size)
    for name, one in turns.items():
        low, _, high = quantiles(one.seconds, n=4)
        row: dict[str, Any] = {
            "name": name,
            "step": 1e3 * median(one.seconds),
            "spread": 1e3 * (high - low),
        }
        for peer in ("memory", "torch", "deepspeed"):
            if peer in turns:
                row[f"per_{peer}"] = _ratio(one.seconds, turns[peer].seconds)
        if "memory" in turns and name not in ("memory", "deepspeed-update"):
            row["of_bandwidth"] = share / row["per_memory"]
        made.append(row)
    return made


def _ratio(seconds: list[float], of: list[float]) -> float:
    return median(one / other for one, other in zip(seconds, of, strict=True))


def _apart(turns: dict[str, Turns]) -> float:
    """How far losses are from each other, before roundings have made them different trainings."""
    losses = [one.losses[:COMPARED_ROUNDS] for one in turns.values() if one.losses]
    return max(max(of_round) - min(of_round) for of_round in zip(*losses, strict=True))


# Output ---------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 1 where the contenders did not compute the same."""
    options = _parser().parse_args(arguments)
    # DeepSpeed's threads are not torch's: they only follow the variable, in a new process.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    setting = Setting(
        params=options.params, width=options.width, dtype=options.dtype, threads=options.threads
    )
    names = tuple(name for name in CONTENDERS if name in options.contenders)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if importlib.util.find_spec("deepspeed") is None:
        names = tuple(name for name in names if "deepspeed" not in name)
        console.print("DeepSpeed is not installed: left out")
    before = report.machine()
    turns = onecopy.launch(measure, 1, names, setting, options.rounds)[0]
    made = rows(turns, setting.dtype)
    title = (
        f"{setting.params} parameters, values in {setting.dtype}, {setting.num_blocks} units of "
        f"{12 * setting.width**2 / 1e6:.2f}M, {setting.threads} threads, {options.rounds} rounds\n"
        f"{before}"
    )
    report.show(console, title, COLUMNS, made, options.markdown)
    apart = _apart(turns)
    console.print(f"losses differ by at most {apart:.1e}")
    if options.json:
        record = {
            "setting": asdict(setting),
            "machine": before,
            "rows": made,
            "turns": {name: asdict(one) for name, one in turns.items()},
            "apart": apart,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if apart > TOLERANCES[setting.dtype]:
        console.print("NOT THE SAME TRAINING", style="bold red")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--params", choices=PARAMS, default="10m", help="parameters of the model (default 10m)")
    add("--width", type=int, default=512, help="a unit has 12 width^2 parameters (default 512)")
    add("--dtype", choices=DTYPES, default="bf16", help="of the values that go up (default bf16)")
    add("--threads", type=int, default=1, help="threads of the step (default 1)")
    add("--rounds", type=int, default=15, help="timed turns of each contender (default 15)")
    add("--contenders", nargs="+", choices=CONTENDERS, default=tuple(CONTENDERS), metavar="NAME")
    add("--markdown", action="store_true", help="print the table in Markdown too")
    add("--json", type=Path, help="write everything, each step's time too, to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
