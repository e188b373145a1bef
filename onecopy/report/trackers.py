"""Hands a step's numbers to trackers (TensorBoard, wandb, trackio, anything with `log`).

None of them stops the training: one that raises is told of once, and is told nothing more.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onecopy.errors import ConfigError

__all__ = ["Trackers", "log_of", "numbers_of"]

LOGGER = logging.getLogger("onecopy")
Log = Callable[[int, dict[str, float]], Any]
# Logged of each step under these names, their rate is told too.
COUNTS = ("tokens", "samples")


class Trackers:
    """Those of a run.

    Raises:
        ConfigError: one has no `log` that takes a step and a dict.
    """

    def __init__(self, trackers: Iterable[Any]) -> None:
        self._logs: list[tuple[Any, Log]] = [(one, log_of(one)) for one in trackers]

    def __bool__(self) -> bool:
        return bool(self._logs)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Tell each of them; each gets a dict of its own."""
        self._each(lambda log, _: log(step, dict(numbers)))

    def flush(self) -> None:
        """Nothing more comes for now: what has a `flush` is asked to write what it holds."""

        def flush(_: Log, tracker: Any) -> None:
            if callable(method := getattr(tracker, "flush", None)):
                method()

        self._each(flush)

    def _each(self, action: Callable[[Log, Any], Any]) -> None:
        for one in list(self._logs):
            tracker, log = one
            try:
                action(log, tracker)
            # Whatever a tracker does, training goes on.
            except Exception as error:
                self._logs.remove(one)
                LOGGER.warning(
                    "the tracker %r has failed (%s: %s) and is told nothing more: training goes on",
                    tracker,
                    type(error).__name__,
                    error,
                )


def log_of(tracker: Any) -> Log:
    """How to call a tracker's `log` with a step and a dict, by the names of its parameters.

    One whose first parameter is `step` takes `log(step, numbers)`. One that has a `step` further
    back, or takes any keyword, takes `log(numbers, step=step)`, as wandb and trackio do. Any other
    is to take `log(step, numbers)`.

    Raises:
        ConfigError: it has no `log`, or one that neither call fits.
    """
    log = getattr(tracker, "log", None)
    if not callable(log):
        raise ConfigError(
            f"the tracker {tracker!r} has no log: pass objects with log(step, numbers) or "
            "log(numbers, step=...)"
        )
    try:
        signature = inspect.signature(log)
    except (TypeError, ValueError):
        # Native code may keep its parameters to itself.
        return lambda step, numbers: log(step, numbers)
    parameters = list(signature.parameters.values())
    by_keyword = parameters[:1] and parameters[0].name != "step" and _takes_step(parameters[1:])
    try:
        if by_keyword:
            signature.bind({}, step=0)
        else:
            signature.bind(0, {})
    except TypeError as error:
        raise ConfigError(
            f"the tracker {tracker!r} has log{signature}, which takes neither log(step, numbers) "
            f"nor log(numbers, step=...) ({error}): pass an object with a log that does"
        ) from error
    if by_keyword:
        return lambda step, numbers: log(numbers, step=step)
    return lambda step, numbers: log(step, numbers)


def _takes_step(parameters: Iterable[inspect.Parameter]) -> bool:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        (one.name == "step" and one.kind in by_name) or one.kind is inspect.Parameter.VAR_KEYWORD
        for one in parameters
    )


def numbers_of(line: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, float]:
    """What trackers are told of a step.

    time/step and time/NAME: its seconds, and where they went. sent/NAME: bytes that this rank has
    sent. memory/NAME: its bytes, as far as they were measured in this step. rate/tokens and
    rate/samples: per second, where the loop logs them. And what was logged, under its own names.

    Args:
        line: as a run's folder has it, see `StepRecord`.
    """
    seconds = line["seconds"]
    numbers = {"time/step": seconds}
    for group, name in (("time", "split"), ("sent", "sent"), ("memory", "memory")):
        numbers |= {f"{group}/{kind}": float(value) for kind, value in line[name].items()}
    if seconds > 0:
        numbers |= {f"rate/{name}": metrics[name] / seconds for name in COUNTS if name in metrics}
    return {**numbers, **metrics}
