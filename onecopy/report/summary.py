"""What the records of a run come to: the figures that the page, the verdict and the tables share.

The first step of a rank records the order of its units and makes the optimizer's states. It is
left out of every mean and median as soon as there are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

from onecopy.report.run_folder import SPLIT, RankRun, Run, StepRecord

__all__ = [
    "COUNTS",
    "MEMORY",
    "WAITS",
    "RankSummary",
    "Series",
    "Summary",
    "names_of",
    "summarise",
]

Record = TypeVar("Record")
Read = Callable[[StepRecord], float | None]
# Of a step's seconds: those in which the rank waited for others.
WAITS = ("gather", "reduce", "refresh", "agree")
# Metrics of which the sum over ranks per second is of interest.
COUNTS = ("tokens", "samples")
STATES = ("parameters", "gradients", "optimizer")
# Kinds of memory that are both estimated and measured.
MEMORY = (*STATES, "gathered")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank.

    split: mean seconds of a step by the kinds of `SPLIT`. memory: the most bytes of each kind that
    a step ended with. sent, expected: mean bytes of a step by kind, measured and by formula.
    """

    rank: int
    host: str
    device: str
    num_steps: int
    split: Mapping[str, float]
    memory: Mapping[str, int]
    sent: Mapping[str, float]
    expected: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Of a step, on average."""
        return sum(self.split.values())

    @property
    def states(self) -> int:
        """Bytes of model states."""
        return sum(self.memory.get(kind, 0) for kind in STATES)

    @property
    def waiting(self) -> float:
        """Seconds of a step in which it waited for others."""
        return sum(self.split[kind] for kind in WAITS)

    @property
    def own(self) -> float:
        """Seconds of a step in which it worked itself."""
        return self.seconds - self.waiting


@dataclass(frozen=True, slots=True)
class Series:
    """A number over the steps: of every rank that has logged it, in order of the steps.

    values: of each of `steps` a value for each rank; they may be nan and infinite.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]

    def means(self) -> list[float]:
        """Of each step over its ranks; not a number where one of them is none."""
        return [mean(ranks) for ranks in self.values]

    def not_numbers(self) -> list[int]:
        """Steps in which a rank has a value that is nan or infinite."""
        pairs = zip(self.steps, self.values, strict=True)
        return [step for step, ranks in pairs if not all(map(math.isfinite, ranks))]


def mean(values: Sequence[float]) -> float:
    """Of any floats: statistics.fmean raises where infinities meet or sums become too large."""
    return sum(values) / len(values)


# Not slotted: what is expensive is kept once it is known.
@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run. name: how a page that may show several calls it. ranks: those that made a step."""

    run: Run
    name: str
    ranks: tuple[RankSummary, ...]

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps that were made."""
        return self.seconds.steps

    @cached_property
    def seconds(self) -> Series:
        """Of each step on each rank."""
        return _series("seconds", self.run.ranks, lambda step: step.seconds)

    @cached_property
    def step_seconds(self) -> float | None:
        """The median step, as long as it took on the rank where it took longest."""
        longest = [max(ranks) for ranks in _steady(self.seconds.values)]
        return median(longest) if longest else None

    def per_second(self, counted: str = "") -> Series | None:
        """Steps, or what was logged under a name of `COUNTS`, of all ranks together.

        A step takes as long as on the rank where it takes longest. None where it was not logged.
        """
        if not self.step_seconds or (counted and counted not in self.metrics):
            return None
        longest = {
            step: max(ranks)
            for step, ranks in zip(self.seconds.steps, self.seconds.values, strict=True)
        }
        logged = self.metrics[counted] if counted else self.seconds
        values = tuple(
            ((sum(ranks) if counted else 1.0) / longest[step] if longest[step] else math.nan,)
            for step, ranks in zip(logged.steps, logged.values, strict=True)
        )
        return Series(f"{counted or 'steps'} per second", logged.steps, values)

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """What was logged, by name; the loss first."""
        names = {
            name: None for rank in self.run.ranks for step in rank.steps for name in step.metrics
        }
        ordered = sorted(names, key=lambda name: (name != "loss", "loss" not in name))
        return {name: _metric(name, self.run.ranks) for name in ordered}

    @property
    def loss(self) -> Series | None:
        """The metric that is called a loss, if one is."""
        first = next(iter(self.metrics.values()), None)
        return first if first is not None and "loss" in first.name else None

    @property
    def estimated(self) -> dict[str, int]:
        """Bytes of a rank by kind, by the planner's formulas, of all models together."""
        return _added(one.estimate.memory for one in self.run.models if one.estimate is not None)

    @property
    def skipped(self) -> list[int]:
        """Steps that were not made, because gradients had overflowed."""
        return [one.step for rank in self.run.ranks[:1] for one in rank.steps if one.skipped]

    @property
    def shares(self) -> dict[str, float]:
        """Of a step's time by kind, on the average rank; empty where nothing was timed."""
        whole = fmean(one.seconds for one in self.ranks) if self.ranks else 0.0
        if not whole:
            return {}
        return {kind: fmean(one.split[kind] for one in self.ranks) / whole for kind in SPLIT}

    @property
    def waiting(self) -> float:
        """Share of a step's time in which the average rank waited for others."""
        return sum(self.shares.get(kind, 0.0) for kind in WAITS)

    @property
    def slowest(self) -> RankSummary | None:
        """The rank that works most itself; the others wait for it."""
        return max(self.ranks, key=lambda one: one.own, default=None)

    @property
    def difference(self) -> float:
        """By how much the slowest rank's own work is more than that of the middle of the others."""
        own = sorted(one.own for one in self.ranks)
        middle = median(own[:-1]) if len(own) > 1 else 0.0
        return own[-1] / middle - 1 if middle else 0.0

    @property
    def others(self) -> str:
        """What the slowest rank is compared with, in words."""
        return "the other rank" if len(self.ranks) == 2 else "the middle rank"

    def sent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes of a step on the average rank by kind: measured, and by formula."""
        return _mean(one.sent for one in self.ranks), _mean(one.expected for one in self.ranks)

    def peak(self) -> int | None:
        """The most bytes that any process had, where that was measured."""
        return max((one.memory["peak"] for one in self.ranks if "peak" in one.memory), default=None)


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """The figures of each run."""
    return [
        Summary(run=run, name=name, ranks=tuple(_rank(one) for one in run.ranks if one.steps))
        for run, name in zip(runs, names_of([run.path for run in runs]), strict=True)
    ]


def names_of(paths: Sequence[Path]) -> list[str]:
    """As short a name for each folder as tells it from the others."""
    whole = [path.resolve() for path in paths]
    for length in range(1, max((len(path.parts) for path in whole), default=0) + 1):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(set(whole)):
            return names
    return [str(path) for path in whole]


def _rank(found: RankRun) -> RankSummary:
    steps = _steady(found.steps)
    memory: dict[str, int] = {}
    for one in found.steps:
        for kind, num_bytes in one.memory.items():
            memory[kind] = max(num_bytes, memory.get(kind, 0))
    split = _mean(one.split for one in steps)
    return RankSummary(
        rank=found.rank,
        host=found.host,
        device=found.device,
        num_steps=len(found.steps),
        split={kind: split.get(kind, 0.0) for kind in SPLIT},
        memory=memory,
        sent=_mean(one.sent for one in steps),
        expected=_mean(one.expected for one in steps),
    )


def _steady(steps: Sequence[Record]) -> Sequence[Record]:
    return steps[1:] if len(steps) > 1 else steps


def _series(name: str, ranks: Iterable[RankRun], value: Read) -> Series:
    found: dict[int, list[float]] = {}
    for rank in ranks:
        for step in rank.steps:
            number = value(step)
            if number is not None:
                found.setdefault(step.step, []).append(number)
    steps = sorted(found)
    return Series(name, tuple(steps), tuple(tuple(found[step]) for step in steps))


def _metric(name: str, ranks: Iterable[RankRun]) -> Series:
    return _series(name, ranks, lambda step: step.metrics.get(name))


def _mean(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each kind, over the mappings that are not empty."""
    found = [one for one in mappings if one]
    sums: dict[str, float] = {}
    for one in found:
        for kind, value in one.items():
            sums[kind] = sums.get(kind, 0.0) + value
    return {kind: value / len(found) for kind, value in sums.items()}


def _added(mappings: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for one in mappings:
        for kind, value in one.items():
            sums[kind] = sums.get(kind, 0) + value
    return sums
