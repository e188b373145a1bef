"""Folders of runs that never ran, for tests of what is made of them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecopy.report.run_folder import FORMAT, RUN_FILE, SPLIT, events_file, steps_file

UNITS = ["root", *(f"transformer.blocks.{number}" for number in range(6)), "head"]
UNIT_BYTES = 4_000_000
Metrics = Callable[[int, int], dict[str, Any]]


def losses(rank: int, step: int) -> dict[str, Any]:
    """A loss that falls, differs by rank, and is the same each time."""
    noise = random.Random(f"{rank} {step}").uniform(-0.05, 0.05)
    return {"loss": 1.2 + 2.3 * math.exp(-step / 40) + noise}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What to write. slow: a rank that computes longer. status: "killed" leaves no end.

    change: is given each step's line, and returns the one to write.
    """

    world_size: int = 2
    num_steps: int = 60
    metrics: Metrics = losses
    status: str = "finished"
    error: str | None = None
    slow: int | None = None
    detailed: tuple[int, ...] = (3, 4)
    settings: dict[str, Any] = field(default_factory=dict)
    compute: float = 0.3
    sent_more: float = 1.0
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line
    units: list[str] = field(default_factory=lambda: list(UNITS))

    def write(self, folder: Path) -> Path:
        """Make the folder; returns it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).write_text(json.dumps(self._run()))
        for rank in range(self.world_size):
            lines = [json.dumps(line) for line in self._lines(rank)]
            text = "".join(line + "\n" for line in lines)
            # A process that is killed may leave half a line.
            (folder / steps_file(rank)).write_text(
                text[: -len(lines[-1]) // 2] if self.status == "killed" else text
            )
            if self.detailed:
                (folder / events_file(rank)).write_text(
                    "".join(json.dumps(line) + "\n" for line in self._events(rank))
                )
        return folder

    def step(self, rank: int, number: int) -> dict[str, Any]:
        """The line of a step."""
        noise = random.Random(f"{rank} {number} time").uniform(0.98, 1.02)
        own = self.compute * noise * (1.3 if rank == self.slow else 1.0)
        slowest = self.compute * (1.02 if self.slow is None else 1.34)
        split = dict.fromkeys(SPLIT, 0.0) | {
            "compute": own,
            "gather": 0.05 + 0.7 * (slowest - own),
            "reduce": 0.02 + 0.3 * (slowest - own),
            "agree": 0.004,
            "optimizer": 0.03,
            "io": 0.001,
        }
        split["compute"] += 1.0 if number == 1 else 0.0
        share = (self.world_size - 1) / self.world_size * len(self.units) * UNIT_BYTES
        expected = {"gather": round(2 * share), "reduce": round(share), "refresh": 0}
        line = {
            "step": number,
            "time": 1.0 + sum(split.values()) * number,
            "seconds": sum(split.values()),
            "split": split,
            "sent": {kind: round(self.sent_more * value) for kind, value in expected.items()},
            "expected": expected,
            "memory": self._memory(rank, number),
            "metrics": self.metrics(rank, number),
        }
        return self.change(line)

    def _memory(self, rank: int, number: int) -> dict[str, int]:
        whole = len(self.units) * UNIT_BYTES // self.world_size
        return {
            "parameters": whole,
            "gradients": whole,
            "optimizer": 2 * whole,
            "gathered": 3 * UNIT_BYTES,
            "process": 310_000_000 + 1_000_000 * rank,
            "peak": 340_000_000 + min(number, 5) * 1_000_000 * (rank + 1),
        }

    def _lines(self, rank: int) -> Iterator[dict[str, Any]]:
        begin = {"rank": rank, "host": f"node{rank // 8}", "device": "cpu", "pid": 10 + rank}
        yield {"begin": {**begin, "time": 0.5, "step": 1}}
        for number in range(1, self.num_steps + 1):
            yield self.step(rank, number)
        if self.status in ("finished", "failed"):
            yield {"end": {"status": self.status, "error": self.error, "time": 99.0}}

    def _events(self, rank: int) -> Iterator[dict[str, Any]]:
        for number in self.detailed:
            record = self.step(rank, number)
            begin = record["time"] - record["seconds"]
            moments = list(self._moments())
            for place, event in enumerate(moments):
                time = begin + record["seconds"] * (place + 1) / (len(moments) + 2)
                yield {"step": number, "time": time, **event}

    def _moments(self) -> Iterator[dict[str, Any]]:
        """Forward with one unit gathered ahead, then backward."""
        held = self._memory(0, 1)
        states = {kind: held[kind] for kind in ("parameters", "optimizer")}
        gathered: list[str] = []
        gradients = 0
        for phase, units in (("forward", self.units), ("backward", self.units[::-1])):
            for place, unit in enumerate(units):
                for one in units[place : place + 2]:
                    if one not in gathered:
                        gathered.append(one)
                        yield self._event("gather", one, phase, states, gathered, gradients)
                yield self._event("wait", unit, phase, states, gathered, gradients)
                yield self._event("enter", unit, phase, states, gathered, gradients)
                yield self._event("leave", unit, phase, states, gathered, gradients)
                if phase == "backward":
                    yield self._event(
                        "reduce", unit, phase, states, gathered, gradients + UNIT_BYTES
                    )
                    gradients += UNIT_BYTES // self.world_size
                gathered.remove(unit)
                yield self._event("release", unit, phase, states, gathered, gradients)
        yield self._event("step", "", "step", states, gathered, gradients)

    def _event(
        self,
        kind: str,
        unit: str,
        phase: str,
        states: dict[str, int],
        gathered: list[str],
        gradients: int,
    ) -> dict[str, Any]:
        sends = kind in ("gather", "reduce")
        return {
            "kind": kind,
            "unit": unit,
            "phase": phase,
            "num_bytes": UNIT_BYTES // 2 if sends else 0,
            "group": "shard" if sends else "",
            "seconds": 0.002 if kind == "wait" else 0.0,
            "what": "gather" if kind == "wait" else "",
            "memory": {
                **states,
                "gradients": gradients,
                "gathered": len(gathered) * UNIT_BYTES,
            },
        }

    def _run(self) -> dict[str, Any]:
        whole = len(self.units) * UNIT_BYTES // self.world_size
        origins = {
            "stage": {"value": 3, "origin": "argument of shard", "is_default": True},
            "memory": {"value": None, "origin": "argument of shard", "is_default": True},
            "precision": {"value": None, "origin": "default", "is_default": True},
            "max_grad_norm": {"value": 1.0, "origin": "onecopy.toml"},
        }
        chosen = {name: {"value": v, "origin": "command line"} for name, v in self.settings.items()}
        unit = {"num_parameters": UNIT_BYTES // 4, "num_bytes": UNIT_BYTES, "trainable": True}
        model = {
            "name": "",
            "kind": "GPT",
            "num_parameters": len(self.units) * UNIT_BYTES // 4,
            "units": [{"name": name, **unit} for name in self.units],
            "settings": origins,
            "estimate": {
                "memory": {
                    "parameters": whole,
                    "gradients": whole,
                    "optimizer": 2 * whole,
                    "gathered": 3 * UNIT_BYTES,
                    "buffers": 2 * UNIT_BYTES,
                },
                "sent": {"gather": 1, "reduce": 1, "refresh": 0},
            },
        }
        return {
            "format": FORMAT,
            "status": "running" if self.status == "killed" else self.status,
            "error": self.error,
            "started": 1_800_000_000.0,
            "seconds": None if self.status == "killed" else 99.0,
            "command": ["train.py", "--lr", "3e-4"],
            "world_size": self.world_size,
            "hosts": [f"node{rank // 8}" for rank in range(self.world_size)],
            "versions": {"onecopy": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
            "environment": {"OMP_NUM_THREADS": "1"},
            "settings": chosen,
            "models": [model],
        }
