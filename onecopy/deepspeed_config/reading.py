"""What a configuration says, key by key, and what has been answered to each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AUTO", "Answer", "Reading", "meant"]

AUTO = "auto"
MAPPED, LEFT, IGNORED, REFUSED = "mapped", "left to you", "ignored", "refused"
NOT_THERE = " (not there)"


def meant(word: str, known: Iterable[str], otherwise: str) -> str:
    """The question after the nearest known word, or what to do where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What becomes of one key.

    key: as it is written, with dots between sections; " (not there)" follows where DeepSpeed's
        default is what counts.
    value: what the configuration says.
    fate: "mapped", "left to you", "ignored" or "refused".
    text: to what it is mapped, what is left to do, or why.
    """

    key: str
    value: Any
    fate: str
    text: str


@dataclass(frozen=True, slots=True)
class Written:
    """One value of a configuration: the name that is used for it here, and the one it had there."""

    key: str
    as_written: str
    value: Any
    deprecated: bool


class Reading:
    """The values of a configuration, and the answers so far; each key is answered once."""

    def __init__(self, values: Mapping[str, Written]) -> None:
        self._values = values
        self._answers: dict[str, Answer] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str, default: Any = None) -> Any:
        """What is written; the default where nothing is, or null or "auto"."""
        found = self._values.get(key)
        return default if found is None or found.value in (None, AUTO) else found.value

    def inside(self, section: str) -> dict[str, Any]:
        """What is written in a section that has no sections in it, "auto" included."""
        return {
            key.rpartition(".")[2]: found.value
            for key, found in self._values.items()
            if key.rpartition(".")[0] == section
        }

    def is_auto(self, key: str) -> bool:
        """Somebody else is to fill it in."""
        return key in self._values and self._values[key].value == AUTO

    def is_null(self, key: str) -> bool:
        """It is there, and says nothing."""
        return key in self._values and self._values[key].value is None

    def mapped(self, key: str, text: str) -> None:
        """It becomes a setting of ours, or a line of the code."""
        self._answer(key, MAPPED, text)

    def left(self, key: str, text: str) -> None:
        """The caller has it in hand."""
        self._answer(key, LEFT, text)

    def ignored(self, key: str, text: str) -> None:
        """Nothing has to be said here."""
        self._answer(key, IGNORED, text)

    def refused(self, key: str, text: str) -> None:
        """It cannot be, and the text says what to do."""
        self._answer(key, REFUSED, text)

    def default(self, key: str, value: Any, text: str) -> None:
        """DeepSpeed's default of a key that is not there, where it matters."""
        if key not in self._values:
            self._answers[key] = Answer(key=key + NOT_THERE, value=value, fate=MAPPED, text=text)

    def unanswered(self) -> list[str]:
        """The keys that nobody has answered yet."""
        return [key for key in self._values if key not in self._answers]

    def answers(self) -> list[Answer]:
        """In the order of the configuration; what is not there comes last."""
        known = [self._answers[key] for key in self._values if key in self._answers]
        return known + [one for key, one in self._answers.items() if key not in self._values]

    def _answer(self, key: str, fate: str, text: str) -> None:
        found = self._values.get(key)
        if found is None or key in self._answers:
            return
        if found.deprecated:
            text += f" (deprecated spelling of {key.rpartition('.')[2]})"
        self._answers[key] = Answer(key=found.as_written, value=found.value, fate=fate, text=text)
