"""What `shard` says of its own accord, by the logger "onecopy"."""

from __future__ import annotations

import logging
import sys

__all__ = ["announce"]

LOGGER = logging.getLogger("onecopy")


def announce(text: str | None, *, is_first: bool) -> None:
    """Say it on the first rank, if there is anything to say.

    Where nobody has configured logging it goes to stderr. Raise the logger's level to silence it:
    `logging.getLogger("onecopy").setLevel("WARNING")`.
    """
    if text is None or not is_first or LOGGER.level > logging.INFO:
        return
    if LOGGER.hasHandlers():
        LOGGER.info(text)
    else:
        print(f"onecopy: {text}", file=sys.stderr)
