"""A configuration as it is written: JSON from a file, with errors that say where it is not JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError

__all__ = ["read"]

COMMENT = re.compile(r"^\s*(//|/\*|#)|[,{}\[\]]\s*(//|/\*|#)", re.MULTILINE)
TRAILING_COMMA = re.compile(r",\s*[}\]]")


def read(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The values of a configuration, and how to call it in errors.

    Args:
        source: a path of a JSON file, or what such a file holds.

    Raises:
        ConfigError: the file cannot be read or is not JSON, or a key is in it twice.
    """
    if isinstance(source, Mapping):
        return dict(source), "the dict"
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"from_deepspeed takes the path of a JSON file or a dict, not a {type(source).__name__}"
        )
    name = str(source)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name} cannot be read: {reason}") from error
    return _parse(text, name), name


def _parse(text: str, name: str) -> dict[str, Any]:
    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(
                    f"{name} has the key {key!r} {keys.count(key)} times in one place, and only "
                    "the last would count: remove the others"
                )
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=without_doubles)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{name} is not JSON: {error.msg} at {where}.{_advice(text)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds a {type(found).__name__}: a configuration is an object")
    return found


def _advice(text: str) -> str:
    """What it most often is."""
    if not text.strip():
        return " The file is empty."
    # Strings may hold anything.
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    found = []
    if COMMENT.search(bare):
        found.append("Remove the comments: DeepSpeed reads Hjson, which has them, this is JSON.")
    if TRAILING_COMMA.search(bare):
        found.append("Remove the comma before a closing bracket.")
    if re.search(r"\b(True|False|None)\b", bare):
        found.append("Write true, false and null, as JSON does.")
    if "'" in bare:
        found.append("Put names and texts in double quotes.")
    return "".join(f" {one}" for one in found)
