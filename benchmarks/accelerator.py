"""On one accelerator: what onecopy adds to plain PyTorch, and what states in host memory cost.

    python -m benchmarks.accelerator [--size 125m] [--dtype fp32|autocast] [--output DIR]

One process on one device, a world of one rank: nothing is sent, so what is left is the engine
itself. *plain* is the same model and AdamW(fused=True) without onecopy. All take turns, and the
device is waited for after each phase. DIR gets accelerator.json and accelerator.md.

The link to host memory is timed by copies of pinned memory, each way alone. With states in host
memory the bytes of a step come from onecopy's own events; *of link* is the time that these would
take at the link's speed, over the step. Where there is no accelerator, `--device cpu` tries it out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import onecopy
from benchmarks import report
from benchmarks.contenders import Contender, Setting, build
from benchmarks.model import SIZES, batch
from benchmarks.report import MIB, Column
from onecopy.events import Event

NAMES = ("plain", "onecopy-0", "onecopy-1", "onecopy-2", "onecopy-3", "onecopy-3-cpu")
LINK_BYTES, LINK_REPEATS = 256 << 20, 8
# Of losses in nats; in autocast some kernels add in another order.
EXACT = {"fp32": 1e-4, "autocast": 2e-2}
COLUMNS = (
    Column("name", "contender"),
    Column("forward", "forward", ".2f"),
    Column("backward", "backward", ".2f"),
    Column("optimizer", "optimizer", ".2f"),
    Column("total", "step ms", ".2f"),
    Column("of_plain", "/ plain", ".3f"),
    Column("held", "MiB held", ".0f"),
    Column("peak", "MiB at the peak", ".0f"),
    Column("up", "MB up", ".1f"),
    Column("down", "MB down", ".1f"),
    Column("of_link", "of link", ".2f"),
    Column("apart", "loss apart", ".1e"),
)


@dataclass(slots=True, kw_only=True)
class Measured:
    """One contender: seconds of the phases of each timed step, losses, bytes of the device.

    held: between steps. peak: at most in a step. moved: bytes of one step, to and from the device.
    """

    contender: Contender
    held: int
    phases: list[tuple[float, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    moved: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})


class Device:
    """The accelerator, or the CPU in its place: then nothing is asynchronous, or counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_real = name != "cpu"

    def wait(self) -> None:
        """Until it has done everything."""
        if self._is_real:
            torch.accelerator.synchronize()

    def held(self) -> int:
        """Bytes of tensors on it."""
        return torch.accelerator.memory_allocated() if self._is_real else 0

    def peak(self) -> int:
        """The most of it since `reset_peak`."""
        return torch.accelerator.max_memory_allocated() if self._is_real else 0

    def reset_peak(self) -> None:
        """From now on."""
        if self._is_real:
            torch.accelerator.reset_peak_memory_stats()

    def link(self) -> dict[str, float]:
        """Bytes per second from pinned host memory to it, and back."""
        there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=self.name)
        here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=self._is_real)
        return {"up": self._speed(there, here), "down": self._speed(here, there)}

    def _speed(self, target: Tensor, source: Tensor) -> float:
        seconds = []
        for _ in range(LINK_REPEATS):
            self.wait()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self.wait()
            seconds.append(time.perf_counter() - begin)
        return LINK_BYTES / median(seconds)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured; in the one rank process."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    device = Device(options.device)
    setting = Setting(
        size=options.size,
        nproc=1,
        dtype="fp32",
        micro_batch=options.micro_batch,
        context=options.context,
        device=options.device,
    )
    every = {name: _make(name, setting, device) for name in options.contenders}
    for round_number in range(-1, options.rounds):
        for one in every.values():
            _turn(one, options, setting, device, round_number)
    link = device.link()
    rows = [_row(name, one, link) for name, one in every.items()]
    for row in rows:
        row["of_plain"] = row["total"] / rows[0]["total"]
        first = every[rows[0]["name"]].losses
        mine = every[row["name"]].losses
        row["apart"] = max(abs(a - b) for a, b in zip(mine, first, strict=True))
    return {
        "setting": {"size": options.size, "dtype": options.dtype, "device": _described(options)},
        "machine": report.machine(),
        "link": {way: round(speed / 1e9, 2) for way, speed in link.items()},
        "rows": rows,
    }


def _make(name: str, setting: Setting, device: Device) -> Measured:
    before = device.held()
    # In a world of one rank the model and its optimizer, as they are.
    contender = build("compute" if name == "plain" else name, setting)
    if name == "plain":
        contender.step, contender.zero_grad = (
            contender.optimizer.step,
            contender.optimizer.zero_grad,
        )
    one = Measured(contender=contender, held=device.held() - before)
    if name != "plain":
        onecopy.events.add_sink(contender.model, _counter(one.moved))
    return one


def _counter(moved: dict[str, int]) -> Callable[[Event], None]:
    def count(event: Event) -> None:
        if event.kind == "swap" and event.what in moved:
            moved[event.what] += event.num_bytes

    return count


def _turn(
    one: Measured, options: argparse.Namespace, setting: Setting, device: Device, number: int
) -> None:
    """Some steps; those of the first round, and the first of each, count for nothing."""
    shape = setting.micro_batch, setting.context
    autocast: AbstractContextManager[object] = nullcontext()
    if options.dtype == "autocast":
        autocast = torch.autocast(torch.device(setting.device).type, torch.bfloat16)
    for step in range(options.steps + 1):
        tokens = batch(SIZES[setting.size], shape, len(one.losses), 0).to(setting.device)
        others = device.held() - one.held
        device.reset_peak()
        one.moved.update(up=0, down=0)
        device.wait()
        times = [time.perf_counter()]
        with autocast:
            loss = one.contender.forward(tokens)
        for act in (lambda: None, loss.backward, one.contender.step):
            act()
            device.wait()
            times.append(time.perf_counter())
        peak = device.peak() - others
        one.contender.zero_grad()
        one.losses.append(loss.item())
        del loss
        one.held = device.held() - others
        if number >= 0 and step:
            one.phases.append(tuple(end - begin for begin, end in pairwise(times)))
            one.peak = max(one.peak, peak)


def _row(name: str, one: Measured, link: dict[str, float]) -> dict[str, Any]:
    forward, backward, optimizer = (1e3 * median(phase) for phase in zip(*one.phases, strict=True))
    row: dict[str, Any] = {
        "name": name,
        "forward": forward,
        "backward": backward,
        "optimizer": optimizer,
        "total": 1e3 * median(map(sum, one.phases)),
    }
    if one.peak:
        row |= {"held": one.held / MIB, "peak": one.peak / MIB}
    if any(one.moved.values()):
        row |= {way: num_bytes / 1e6 for way, num_bytes in one.moved.items()}
        # Both directions at once, as the link has a way for each.
        least = max(num_bytes / link[way] for way, num_bytes in one.moved.items())
        row["of_link"] = 1e3 * least / row["total"]
    return row


def _described(options: argparse.Namespace) -> str:
    kind = torch.device(options.device).type
    return torch.cuda.get_device_name() if kind == "cuda" else kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where somebody has computed something else."""
    found = torch.accelerator.current_accelerator()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", default="cpu" if found is None else found.type, help="default: what there is")
    add("--size", choices=SIZES, default="125m", help="parameters (default 125m)")
    add("--dtype", choices=EXACT, default="fp32", help="autocast computes in bf16 (default fp32)")
    add("--micro-batch", type=int, default=8, help="rows (default 8)")
    add("--context", type=int, default=512, help="tokens per row (default 512)")
    add("--rounds", type=int, default=10, help="turns of each (default 10)")
    add("--steps", type=int, default=3, help="timed steps per turn (default 3)")
    add("--contenders", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    add("--output", type=Path, metavar="DIR", help="write accelerator.json and accelerator.md")
    options = parser.parse_args(arguments)
    run = measure(options)
    title = f"{run['setting']}, link {run['link']} GB/s"
    report.show(
        Console(width=None if sys.stdout.isatty() else 160),
        title,
        COLUMNS,
        run["rows"],
        in_markdown=False,
    )
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "accelerator.json").write_text(json.dumps(run, indent=1) + "\n")
        table = report.markdown(COLUMNS, run["rows"])
        (options.output / "accelerator.md").write_text(f"{title}\n\n{table}\n")
    others = [row["name"] for row in run["rows"] if row["apart"] > EXACT[options.dtype]]
    if others:
        print(f"NOT A COMPARISON: other losses than {run['rows'][0]['name']}: {', '.join(others)}")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
