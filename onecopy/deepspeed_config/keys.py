"""From nested sections to known keys: other spellings, unknown names, values of a wrong kind."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from onecopy.deepspeed_config.catalogue import (
    ALIASES,
    ARGUMENTS,
    KINDS,
    OLD_SECTIONS,
    SWITCHED,
    WHOLE,
    ZERO,
    known_keys,
)
from onecopy.deepspeed_config.reading import AUTO, Written

__all__ = ["DTYPES", "find_keys", "is_comment"]

DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
}
# Keys whose values are answered with them, whatever they are.
OPAQUE = {*WHOLE, *SWITCHED, *(key for key, kind in KINDS.items() if kind == "section")}
SECTIONS = {
    key.rsplit(".", depth)[0]
    for key in (*known_keys(), *(f"{section}.*" for section in ARGUMENTS))
    for depth in range(1, key.count(".") + 1)
}


def find_keys(values: Mapping[str, Any]) -> tuple[dict[str, Written], list[str]]:
    """The keys of a configuration under the names used here, and what is wrong with others."""
    known = {**dict.fromkeys(known_keys()), **dict.fromkeys(ALIASES)}
    found: dict[str, Written] = {}
    problems: list[str] = []
    for as_written, value in _leaves(values, ""):
        head, _, rest = as_written.partition(".")
        path = f"{OLD_SECTIONS[head]}.{rest}" if head in OLD_SECTIONS else as_written
        key, deprecated = ALIASES.get(path, (path, head in OLD_SECTIONS))
        if is_comment(as_written):
            found[as_written] = Written(as_written, as_written, value, False)
        elif path not in known and path.rpartition(".")[0] not in ARGUMENTS:
            problems.append(_unknown(as_written, value))
        elif key in found:
            problems.append(f"{as_written} and {found[key].as_written} say the same: remove one")
        else:
            found[key] = Written(key, as_written, value, deprecated)
            problems += _wrong_kind(found[key])
    return found, problems


def _leaves(values: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of what is not a section, or is answered as a whole."""
    for name, value in values.items():
        path = f"{section}{name}"
        inner = OLD_SECTIONS.get(path, path)
        if isinstance(value, Mapping) and inner in SECTIONS and inner not in OPAQUE:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def is_comment(path: str) -> bool:
    """JSON has no comments, so some write them as keys."""
    return path.rpartition(".")[2].startswith(("_", "//", "#"))


def _unknown(path: str, value: Any) -> str:
    section, _, name = path.rpartition(".")
    if path in SECTIONS or path in OLD_SECTIONS:
        return f"{path} is a section, and its value is {value!r}: give an object"
    names = {key.rpartition(".")[2]: key for key in [*ALIASES, *known_keys()]}
    siblings = [key for key in names.values() if key.rpartition(".")[0] == section]
    near = difflib.get_close_matches(name, [key.rpartition(".")[2] for key in siblings], n=1)
    if near:
        return f"there is no key {path}. Did you mean {section + '.' if section else ''}{near[0]}?"
    elsewhere = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    if elsewhere:
        return f"there is no key {path}. Did you mean {names[elsewhere[0]]}?"
    return f"there is no key {path}: remove it, if DeepSpeed has ignored it so far"


def _wrong_kind(found: Written) -> list[str]:
    kind, value = KINDS.get(found.key), found.value
    if kind is None or value is None or value == AUTO or _is_a(kind, value):
        return []
    if found.key == ZERO:
        return [f"{ZERO} is {value!r}: give an object, or true or false as in old files"]
    return [f"{found.as_written} is {value!r}: {_HINTS[kind]}"]


def _is_a(kind: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "number":
        return is_number and math.isfinite(value)
    if kind == "whole number":
        # 5e8 is how many write such numbers.
        return is_number and math.isfinite(value) and value == int(value)
    if kind == "dtype":
        return isinstance(value, str) and value.lower() in DTYPES
    types = {"switch": bool, "text": str, "section": Mapping}
    return isinstance(value, types[kind])


_HINTS = {
    "number": "give a number, without quotes",
    "whole number": "give a whole number, without quotes",
    "switch": "give true or false, without quotes",
    "text": "give a text in quotes",
    "dtype": 'give "fp32", "fp16" or "bf16"',
    "section": "give an object",
}
