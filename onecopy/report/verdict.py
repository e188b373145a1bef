"""A run in a sentence or two, and advice where its figures support some."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

from onecopy.core.stages import STAGES
from onecopy.report.progress import count, duration
from onecopy.report.run_folder import ModelRecord
from onecopy.report.summary import COUNTS, WAITS, Summary

__all__ = ["advice", "number", "percent", "shorten", "span", "verdict"]

WAITING_FOR = {
    "gather": "for gathers",
    "reduce": "for reduces",
    "refresh": "for refreshes",
    "agree": "for agreement with other ranks",
}
WORK = {"compute": "computing", "optimizer": "the optimizer", "io": "reading and saving"}
# Shares of a step from which something is worth a word.
MUCH_WAITING, MUCH_OPTIMIZER, MUCH_IO = 0.2, 0.25, 0.1
FAR_APART, SENT_TOO_MUCH = 0.1, 0.02
LONGEST = 240  # letters
OFTEN = 0.7  # of the steps, for a rank to be called the slowest


def verdict(run: Summary) -> str:
    """How it ended, how far it came, the loss, the speed, and where the time goes."""
    return " ".join(filter(None, (_status(run), _loss(run), _speed(run), _limit(run))))


def advice(run: Summary) -> list[str]:
    """What to look at first, in order of weight; often nothing."""
    return [sentence for rule in RULES for sentence in rule(run)]


def shorten(error: str) -> str:
    """The first line of an error, as far as a sentence can hold it."""
    line = error.strip().partition("\n")[0]
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def percent(share: float) -> str:
    """A share for reading: 23 %, 0.4 %."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 1 or not value else f"{value:.1g} %"


def number(value: float) -> str:
    """A number that was logged, in four digits; nan and infinities by name."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 and abs(value) < 1e9 else f"{value:.4g}"


def span(seconds: float) -> str:
    """How long a step took: 840 ms, 12.3 s."""
    if seconds >= 60:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return (
        f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 or not seconds else f"{1e6 * seconds:.3g} us"
    )


def _status(run: Summary) -> str:
    steps, took = _steps(len(run.steps)), duration(run.run.seconds)
    if run.run.status == "failed":
        error = shorten(run.run.error or "no error is recorded")
        return f"Failed after {steps} in {took}: {error.rstrip('.')}."
    if run.run.status == "finished":
        return f"Finished: {steps} in {took}."
    return f"Running, or killed: {steps} in {took}, and nothing says that it has ended."


def _steps(made: int) -> str:
    return "1 step" if made == 1 else f"{made:,} steps"


def _loss(run: Summary) -> str:
    if run.loss is None:
        return ""
    means = run.loss.means()
    if len(means) == 1:
        return f"{run.loss.name} {number(means[0])}.".capitalize()
    return f"{run.loss.name} from {number(means[0])} to {number(means[-1])}.".capitalize()


def _speed(run: Summary) -> str:
    if run.step_seconds is None:
        return ""
    words = [f"{span(run.step_seconds)} a step"]
    for name in COUNTS:
        series = run.per_second(name)
        values = [] if series is None else [value for (value,) in series.values if value == value]
        if values:
            words.append(f"{count(median(values))} {name} per second")
    return f"{', '.join(words)}."


def _limit(run: Summary) -> str:
    shares = run.shares
    if not shares:
        return ""
    wait = max(WAITS, key=lambda kind: shares[kind])
    work = max(WORK, key=lambda kind: shares[kind])
    most = sorted([(shares[work], WORK[work]), (shares[wait], f"waiting {WAITING_FOR[wait]}")])
    sentence = ", ".join(
        f"{percent(share)}{' of a step' if not number else ''} is {name}"
        for number, (share, name) in enumerate(reversed(most))
        if share
    )
    if len(run.ranks) > 1:
        sentence += f"; ranks differ by {percent(run.difference)}"
    return sentence + "."


def _not_numbers(run: Summary) -> Iterator[str]:
    steps = run.loss.not_numbers() if run.loss is not None else []
    if steps and run.loss is not None:
        yield (
            f"{run.loss.name} is not a number in {len(steps)} of "
            f"{_steps(len(run.loss.steps))}, first in step {steps[0]}: lower the learning "
            "rate, clip (max_grad_norm), or look at the data of that step."
        )


def _skipped(run: Summary) -> Iterator[str]:
    made = len(run.steps)
    # The scale is being found in the first steps: overflows are normal there.
    late = [step for step in run.skipped if step >= run.steps[made // 2]]
    if len(late) > 0.02 * made and made >= 20:
        yield (
            f"{len(late)} of the last {made - made // 2} steps were skipped because fp16 gradients "
            "had overflowed: bf16 does not overflow; max_grad_norm helps where gradients explode."
        )


def _apart(run: Summary) -> Iterator[str]:
    slowest = run.slowest
    if slowest is None or run.difference < FAR_APART:
        return
    words = f"Rank {slowest.rank}" + (f" on {slowest.host}" if slowest.host else "")
    waits = "which waits" if len(run.ranks) == 2 else "and the others wait"
    words += f" works {percent(run.difference)} longer than {run.others}, {waits} for it"
    often = _share_as_slowest(run, slowest.rank)
    if often >= OFTEN:
        yield (
            f"{words}. It is the slowest in {percent(often)} of the steps: look at that machine, "
            "and at whether its data are larger."
        )
    else:
        yield (
            f"{words}; which rank is slowest changes from step to step, as with data of different "
            "lengths: batches of equal numbers of tokens help."
        )


def _share_as_slowest(run: Summary, rank: int) -> float:
    own: dict[int, list[tuple[float, int]]] = {}
    for one in run.run.ranks:
        for step in one.steps[1:]:
            waiting = sum(step.split.get(kind, 0.0) for kind in WAITS)
            own.setdefault(step.step, []).append((step.seconds - waiting, one.rank))
    return sum(max(ranks)[1] == rank for ranks in own.values()) / len(own) if own else 0.0


def _waits(run: Summary) -> Iterator[str]:
    """The slowest rank waits for the network alone, the others for it as well."""
    slowest = run.slowest
    if slowest is None or not slowest.seconds or len(run.ranks) < 2:
        return
    if slowest.waiting / slowest.seconds < MUCH_WAITING:
        return
    kind = max(WAITS, key=lambda kind: slowest.split[kind])
    share = percent(slowest.split[kind] / slowest.seconds)
    remedies = {
        "gather": "gather further ahead (prefetch_bytes), and compute more tokens in a step",
        "reduce": "compute more tokens in a step; where a step has several backwards, "
        "model.no_sync() sends once for all of them",
        "refresh": "compute more tokens in a step, so that refreshes hide behind them",
        "agree": "see which unit is agreed on in the timeline below: order that changes from "
        "step to step must be agreed each time",
    }
    words = f"Even the slowest rank waits {percent(slowest.waiting / slowest.seconds)} of a step, "
    words += f"most of it {WAITING_FOR[kind]} ({share}): {remedies[kind]}."
    if kind == "gather" and any(_releases(one) for one in run.run.models):
        words += " Stage 2 sends a third less; onecopy plan says whether it fits."
    yield words


def _releases(model: ModelRecord) -> bool:
    setting = model.settings.get("stage")
    return setting is not None and setting.value in STAGES and STAGES[setting.value].releases


def _optimizer(run: Summary) -> Iterator[str]:
    share = run.shares.get("optimizer", 0.0)
    if share >= MUCH_OPTIMIZER:
        yield (
            f"The optimizer takes {percent(share)} of a step: fused=True, where it has that, makes "
            "one pass over the states; more tokens in a step make it rarer."
        )


def _files(run: Summary) -> Iterator[str]:
    share = run.shares.get("io", 0.0)
    if share < MUCH_IO:
        return
    events = (event for rank in run.run.ranks for event in rank.events)
    if any(event.kind == "keep" and event.what == "nvme" for event in events):
        remedy = 'activations are kept on disk, where host memory (place="host") is faster'
    else:
        remedy = "onecopy.async_save writes while training goes on"
    yield f"Reading and saving take {percent(share)} of the time: {remedy}."


def _traffic(run: Summary) -> Iterator[str]:
    measured, expected = run.sent()
    sent, formula = sum(measured.values()), sum(expected.values())
    if formula and sent > formula * (1 + SENT_TOO_MUCH):
        yield (
            f"{percent(sent / formula - 1)} more is sent than by formula: parameters that are "
            "touched outside of their unit's forward and backward are gathered once more each time."
        )


Rule = Callable[[Summary], Iterator[str]]
RULES: tuple[Rule, ...] = (
    _not_numbers,
    _skipped,
    _apart,
    _waits,
    _optimizer,
    _files,
    _traffic,
)
