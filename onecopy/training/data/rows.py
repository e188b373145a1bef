"""What a row of JSON lines or of a table says: a text, a prompt with its completion, or a chat.

A row becomes one document, in pieces whose tokens the loss counts or leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError
from onecopy.extras import require

__all__ = ["Chat", "Piece", "Rows"]

MESSAGES = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of a document.

    held_out: not for training. counted: the loss counts its tokens. begins, ends: it is the first
    or the last piece of its document. is_rendered: by a chat template, which writes special tokens
    itself.
    """

    text: str
    held_out: bool = False
    counted: bool = True
    begins: bool = True
    ends: bool = True
    is_rendered: bool = False


class Chat:
    """Renders chats with the template of a tokenizer's folder; transformers has the language."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def render(self, messages: list[Any], where: str, *, asks: bool = False) -> str:
        """The text of a chat; with `asks`, up to where the answer begins.

        Raises:
            ConfigError: there is no template, or it refuses the messages.
        """
        tokenizer = self._tokenizer or self._load(where)
        try:
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # a template raises what it likes
            raise ConfigError(f"{where}: the chat template refuses it: {error}") from error
        return text

    def _load(self, where: str) -> Any:
        if self._folder is not None:
            transformers = require("transformers", "training on chats")
            self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                str(self._folder), local_files_only=True
            )
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise ConfigError(
                f"{where} is a chat, but the tokenizer has no chat template. Give a folder that "
                "has one (chat_template.jinja) with --tokenizer, or write the chats as texts."
            )
        return self._tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How rows are read.

    text_field: what holds a row's text or chat; without it in a row, that is "prompt" and
    "completion", or "messages". only_completions: the loss leaves out prompts, and in chats what
    is not the assistant's.
    """

    text_field: str
    only_completions: bool
    chat: Chat

    def pieces(self, row: Any, where: str) -> Iterator[Piece]:
        """The document of a row; `where` names it in errors.

        Raises:
            ConfigError: it has no text, or is not what the fields should be.
        """
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where} is no JSON object but {_shown(row)}.")
        if row.get(self.text_field) is not None:
            yield from self._of_field(row, self.text_field, where)
        elif row.get("prompt") is not None and row.get("completion") is not None:
            yield from self._of_prompt(row, where)
        elif row.get(MESSAGES) is not None:
            yield from self._of_chat(row[MESSAGES], f"{where}, {MESSAGES!r}")
        else:
            found = ", ".join(repr(name) for name in row) or "nothing"
            raise ConfigError(
                f"{where} has neither {self.text_field!r}, nor 'prompt' and 'completion', nor "
                f"{MESSAGES!r}, but {found}. Name the field with the text: --text-field NAME."
            )

    def _of_field(self, row: Mapping[str, Any], field: str, where: str) -> Iterator[Piece]:
        value = row[field]
        if isinstance(value, list):
            yield from self._of_chat(value, f"{where}, {field!r}")
            return
        text = _text(row, field, where)
        if self.only_completions:
            raise ConfigError(
                f"{where} has a text without a prompt, so --loss-on completions does not say what "
                "of it counts. Give 'prompt' and 'completion' instead, or --loss-on all."
            )
        yield Piece(text=text)

    def _of_prompt(self, row: Mapping[str, Any], where: str) -> Iterator[Piece]:
        prompt, completion = (_text(row, name, where) for name in ("prompt", "completion"))
        # Each by itself, as a prompt is when the model is asked.
        yield Piece(text=prompt, counted=not self.only_completions, ends=False)
        yield Piece(text=completion, begins=False)

    def _of_chat(self, messages: Any, where: str) -> Iterator[Piece]:
        if not messages or not isinstance(messages, list):
            raise ConfigError(f"{where} is no list of messages but {_shown(messages)}.")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ConfigError(f"{where}: a message has no 'role': {_shown(message)}.")
        if not self.only_completions:
            yield Piece(text=self.chat.render(messages, where), is_rendered=True)
            return
        parts = self._answers(messages, where)
        for number, (text, counted) in enumerate(parts):
            yield Piece(
                text=text,
                counted=counted,
                begins=number == 0,
                ends=number == len(parts) - 1,
                is_rendered=True,
            )

    def _answers(self, messages: list[Any], where: str) -> list[tuple[str, bool]]:
        """A chat in parts, and whether each is the assistant's."""
        whole = self.chat.render(messages, where)
        parts: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self.chat.render(messages[:number], where, asks=True)
            answered = self.chat.render(messages[: number + 1], where)
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise ConfigError(
                    f"{where}: the chat template writes message {number} otherwise than as what "
                    "follows the messages before it, so --loss-on completions cannot tell what is "
                    "the assistant's. Give 'prompt' and 'completion' instead."
                )
            parts += [(asked[len(done) :], False), (answered[len(asked) :], True)]
            done = answered
        if not parts or not whole.startswith(done):
            raise ConfigError(
                f"{where} has no answer of the assistant that --loss-on completions could count."
            )
        return [*parts, (whole[len(done) :], False)] if whole != done else parts


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {field!r} is no text but {_shown(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {field!r} has half a surrogate pair: {error}.") from error
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
