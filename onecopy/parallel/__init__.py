"""Composition with other parallelism, and what it is built from.

The names are imported when first used, as those of `onecopy` itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onecopy.parallel.gathered import keep_gathered as keep_gathered

_WHERE = {
    "keep_gathered": "onecopy.parallel.gathered",
}

__all__ = ["keep_gathered"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'onecopy.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
