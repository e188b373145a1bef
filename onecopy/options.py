"""How options describe themselves to the command line.

Each command has a frozen dataclass. A field with a default is a flag, one without is a positional
argument; what help says about it is in its metadata. Free of torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["describe"]


def describe(
    text: str, *, choices: tuple[Any, ...] = (), metavar: str | None = None
) -> dict[str, Any]:
    """What the command line shows about a field, and how it calls its value."""
    return {"help": text, "choices": choices, "metavar": metavar}
