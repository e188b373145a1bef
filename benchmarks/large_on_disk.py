"""A GPT whose states are on disk, trained within a limit of memory, beside the disk's own speed.

    python -m benchmarks.large_on_disk DIR [--params 1b] [--limit 4GiB] [--dtype bf16] [--steps 3]

The model is built by `onecopy.init_sharded`, so that it never exists whole, with stage 3 and
`offload="nvme:DIR"`. All ranks together may take --limit of memory (RLIMIT_DATA in each, and the
peak of what was resident is printed). The disk's own speed is that of a plain loop of direct reads
and writes in DIR, one of each in turn, as a step moves about as much in as out.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import onecopy
from benchmarks.measure import resident
from benchmarks.model import GPT, Size, batch
from benchmarks.report import machine
from onecopy.events import Event, add_sink

SIZES = {
    "10m": Size(layers=8, width=320, heads=5, vocabulary=1024),
    "100m": Size(layers=8, width=1024, heads=16, vocabulary=2048),
    "1b": Size(layers=20, width=2048, heads=16, vocabulary=4096),
}
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
BLOCK_BYTES = 4 << 20
DISK_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained; rows of `context` tokens, `limit` in bytes for all ranks together."""

    params: str
    dtype: str
    offload: str
    nproc: int
    context: int
    steps: int
    limit: int


@dataclass(slots=True)
class Phase:
    """Seconds of one phase of one step, and what it moved."""

    seconds: float = 0.0
    read: int = 0
    written: int = 0


@dataclass(slots=True)
class Result:
    """Of one rank: its phases step by step, and the most that was resident.

    build: seconds until the states are where they belong.
    """

    params: int = 0
    build: float = 0.0
    peak: int = 0
    losses: list[float] = field(default_factory=list)
    steps: list[dict[str, Phase]] = field(default_factory=list)


class CheckpointedGPT(GPT):
    """Keeps the inputs of blocks alone; what is inside is computed again in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss in nats, as its parent."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# Training -------------------------------------------------------------------------------------


def train(setting: Setting) -> Result:
    """A few steps; in a rank process."""
    dist.init_process_group("gloo")
    share = setting.limit // setting.nproc
    # More than this of private memory that can be written, and the process gets no more.
    resource.setrlimit(resource.RLIMIT_DATA, (share, share))
    size, result, begin = SIZES[setting.params], Result(), time.perf_counter()
    torch.manual_seed(0)
    with onecopy.init_sharded():
        model = CheckpointedGPT(size, setting.context)
    result.params = sum(one.numel() for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    onecopy.shard(model, optimizer, stage=3, precision=setting.dtype, offload=setting.offload)
    result.build = time.perf_counter() - begin
    phases: dict[str, Phase] = {}
    add_sink(model, lambda event: _count(phases, event))
    for number in range(setting.steps):
        phases.clear()
        phases |= {name: Phase() for name in ("forward", "backward", "step")}
        tokens = batch(size, (1, setting.context), number % 2, dist.get_rank())
        result.losses.append(_step(model, optimizer, tokens, phases))
        result.steps.append(dict(phases))
    result.peak = resident("VmHWM")
    dist.destroy_process_group()
    return result


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, phases: dict[str, Phase]
) -> float:
    dist.barrier()
    stamps = [time.perf_counter()]
    loss = model(tokens)
    stamps.append(time.perf_counter())
    loss.backward()
    stamps.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    stamps.append(time.perf_counter())
    for number, name in enumerate(("forward", "backward", "step")):
        phases[name].seconds = stamps[number + 1] - stamps[number]
    return float(loss.item())


def _count(phases: dict[str, Phase], event: Event) -> None:
    if event.kind != "swap" or event.what not in ("read", "write"):
        return
    phase = phases["step" if event.phase == "api" else event.phase]
    if event.what == "read":
        phase.read += event.num_bytes
    else:
        phase.written += event.num_bytes


# The disk -------------------------------------------------------------------------------------


def disk_speed(folder: Path, num_bytes: int) -> float:
    """Bytes a second, reads and writes together, past the cache where the file system allows it."""
    paths = [folder / name for name in ("onecopy-disk-read", "onecopy-disk-write")]
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
    count = num_bytes // BLOCK_BYTES
    files = [os.open(path, flags, 0o600) for path in paths]
    try:
        with ThreadPoolExecutor(DISK_THREADS) as pool:
            list(pool.map(partial(_move, files, "fill"), range(count)))
            begin = time.perf_counter()
            list(pool.map(partial(_move, files, "move"), range(count)))
            seconds = time.perf_counter() - begin
    finally:
        for one in files:
            os.close(one)
        for path in paths:
            path.unlink()
    return 2 * count * BLOCK_BYTES / seconds


def _move(files: list[int], what: str, number: int) -> None:
    with mmap.mmap(-1, BLOCK_BYTES) as memory:
        if what == "move":
            os.preadv(files[0], [memory], number * BLOCK_BYTES)
            os.pwritev(files[1], [memory], number * BLOCK_BYTES)
            return
        memory.write(os.urandom(4096) * (BLOCK_BYTES // 4096))
        for one in files:
            os.pwritev(one, [memory], number * BLOCK_BYTES)


# Output ---------------------------------------------------------------------------------------


def rows(ranks: list[Result], speed: float) -> list[dict[str, Any]]:
    """By phase: medians over steps but the first, the slowest rank's; bytes of all ranks."""
    made = []
    steps = list(zip(*(one.steps for one in ranks), strict=True))
    for name in ("forward", "backward", "step", "whole"):
        of_steps = [_of_step(step, name) for step in (steps[1:] or steps)]
        seconds, read, written = (median(column) for column in zip(*of_steps, strict=True))
        disk = (read + written) / speed
        made.append(
            {"phase": name, "seconds": seconds, "read": read, "written": written, "disk": disk}
        )
    return made


def _of_step(ranks: tuple[dict[str, Phase], ...], name: str) -> tuple[float, int, int]:
    names = ("forward", "backward", "step") if name == "whole" else (name,)
    return (
        max(sum(rank[one].seconds for one in names) for rank in ranks),
        sum(rank[one].read for rank in ranks for one in names),
        sum(rank[one].written for rank in ranks for one in names),
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 where more memory was resident than the limit."""
    options = _parser().parse_args(arguments)
    setting = Setting(
        params=options.params,
        dtype=options.dtype,
        offload=options.offload or f"nvme:{options.directory}",
        nproc=options.nproc,
        context=options.context,
        steps=options.steps,
        limit=options.limit,
    )
    options.directory.mkdir(parents=True, exist_ok=True)
    before = disk_speed(options.directory, options.disk_bytes)
    ranks: list[Result] = onecopy.launch(train, setting.nproc, setting)
    speeds = before, disk_speed(options.directory, options.disk_bytes)
    made = rows(ranks, sum(speeds) / 2)
    _show(setting, ranks, made, speeds)
    if options.json:
        record = {
            "setting": asdict(setting),
            "machine": machine(),
            "disk": speeds,
            "rows": made,
            "ranks": [asdict(one) for one in ranks],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if sum(one.peak for one in ranks) <= setting.limit else 1


def _show(
    setting: Setting, ranks: list[Result], made: list[dict[str, Any]], speeds: tuple[float, float]
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    peaks = " + ".join(f"{one.peak / 2**30:.2f}" for one in ranks)
    console.print(
        f"{ranks[0].params / 1e9:.3f}B parameters, {setting.dtype}, {setting.nproc} ranks, "
        f"{setting.steps} steps of {setting.context} tokens a rank; {setting.offload}\n"
        f"{machine()}\nresident at most {peaks} GiB, limit {setting.limit / 2**30:.2f} GiB; "
        f"built in {max(one.build for one in ranks):.1f} s\n"
        f"disk {speeds[0] / 1e9:.2f} GB/s before, {speeds[1] / 1e9:.2f} after; losses "
        + " ".join(f"{loss:.4f}" for loss in ranks[0].losses)
    )
    console.print("| phase | seconds | GB read | GB written | disk alone, s | of the disk |")
    console.print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in made:
        console.print(
            f"| {row['phase']} | {row['seconds']:.2f} | {row['read'] / 1e9:.2f} | "
            f"{row['written'] / 1e9:.2f} | {row['disk']:.2f} | "
            f"{row['disk'] / row['seconds']:.2f} |"
        )


def _bytes(text: str) -> int:
    for name, factor in UNITS.items():
        if text.endswith(name):
            return round(float(text.removesuffix(name)) * factor)
    raise argparse.ArgumentTypeError(f"{text!r}: say how much, as 4GiB or 512MiB")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_on_disk", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="on the drive that is to be used")
    add("--params", choices=SIZES, default="1b", type=str.lower, help="(default 1b)")
    add("--limit", type=_bytes, default=4 << 30, help="of memory, all ranks together (4GiB)")
    add("--dtype", choices=("fp32", "bf16"), default="bf16")
    add("--nproc", type=int, default=1, help="ranks (default 1)")
    add("--steps", type=int, default=3, help="the first one is not in the figures (default 3)")
    add("--context", type=int, default=64, help="tokens of a step and rank (default 64)")
    add("--offload", help="instead of nvme:DIR, for comparison")
    add("--disk-bytes", type=_bytes, default=2 << 30, help="moved to time the disk (2GiB)")
    add("--json", type=Path, help="write everything to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
