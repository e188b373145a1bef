"""Checks that settings share: a value of the wrong kind is answered with the right spelling.

Free of torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from onecopy.errors import ConfigError
from onecopy.options import unknown_setting

__all__ = ["check_choice", "check_number", "check_switch", "named_settings", "names_of"]

T = TypeVar("T")

# How dtypes are called elsewhere.
SPELLINGS = {
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
}


def named_settings(record: type[T]) -> type[T]:
    """Let a dataclass of settings answer an unknown name with the nearest known one."""
    init: Callable[..., None] = record.__init__
    prefix = "" if record.__name__ == "Config" else f"{record.__name__.lower()}."

    @wraps(init)
    def checked_init(self: T, *values: Any, **settings: Any) -> None:
        known = [item.name for item in fields(record) if item.init]  # type: ignore[arg-type]
        if values:
            first = known[0]
            raise ConfigError(
                f"{record.__name__}({values[0]!r}): give settings by name, for example "
                f"{record.__name__}({first}={values[0]!r})"
            )
        for name in settings:
            if name not in known:
                raise unknown_setting(prefix + name, [prefix + one for one in known])
        init(self, **settings)

    setattr(record, "__init__", checked_init)  # noqa: B010  # mypy: a method is no variable
    return record


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ConfigError where a value is none of these, with the one that was meant."""
    if any(value is choice or _same(value, choice) for choice in choices):
        return
    listed = ", ".join(repr(choice) for choice in choices)
    raise ConfigError(f"{name}={value!r} is not one of {listed}.{_hint(value, choices)}")


def check_number(name: str, value: object, advice: str, *, whole: bool = False) -> None:
    """Raises ConfigError where a value is no finite number; a bool is none."""
    kinds = (int,) if whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or math.isnan(value):  # type: ignore[arg-type]
        raise ConfigError(f"{name}={value!r}: {advice}")


def check_switch(name: str, value: object) -> None:
    """Raises ConfigError where a value is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: give True or False")


def names_of(setting: str, value: object) -> tuple[str, ...]:
    """Names of modules, as a tuple."""
    if isinstance(value, str):
        raise ConfigError(f"{setting}={value!r}: give a tuple of names, ({value!r},)")
    if not isinstance(value, tuple | list | set | frozenset):
        raise ConfigError(f"{setting}={value!r}: give a tuple of names of modules")
    for one in value:
        if not isinstance(one, str):
            name = getattr(one, "__name__", type(one).__name__)
            raise ConfigError(
                f"{setting} has {one!r}: give names, not modules or classes, as "
                f'model.named_modules() has them; "layers.*" for several. Names of classes go '
                f'where a setting says so, as "{name}"'
            )
    return tuple(value)


def _same(value: object, choice: object) -> bool:
    # True is 1 in Python, and 3.0 is 3.
    if isinstance(value, bool) != isinstance(choice, bool) or isinstance(value, float):
        return False
    return bool(value == choice)


def _hint(value: object, choices: tuple[object, ...]) -> str:
    texts = {str(choice): choice for choice in choices}
    text = SPELLINGS.get(str(value), str(value).removesuffix(".0"))
    # '3', 3.0 and torch.bfloat16 are meant well; True means nothing here.
    near = [text] if text in texts else difflib.get_close_matches(text, texts, n=1)
    return f" Did you mean {texts[near[0]]!r}?" if near else ""
