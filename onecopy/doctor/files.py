"""Questions to the system that may never be answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


def within(seconds: float, question: Callable[[], T]) -> T:
    """The answer to a question to the system that may never be answered.

    Names are resolved over the network, and a folder may lie on a server that has gone.

    Raises:
        TimeoutError: no answer in time. The thread that waits for it ends with the process.
        Exception: whatever `question` raises.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="onecopy-doctor")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return answers[0]
