"""Numbers of parameters as people write and read them: "7.5B"."""

from __future__ import annotations

import re

from onecopy.errors import ConfigError

__all__ = ["is_parameters", "parse_parameters", "shown"]

PARAMETERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NUMBER = re.compile(r"\s*(\d+(?:[_,]\d{3})*(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def is_parameters(text: str) -> bool:
    """Whether `text` starts as a number does, so that a size is what was meant."""
    return text.lstrip()[:1].isdigit() or text.lstrip()[:2].startswith(".")


def parse_parameters(text: str) -> int:
    """ "7.5B" as a number of parameters.

    Raises:
        ConfigError: it cannot be read.
    """
    found = NUMBER.fullmatch(text)
    unit = found[2].upper() if found else ""
    value = 0
    if found is not None and unit in PARAMETERS:
        value = round(float(found[1].replace("_", "").replace(",", "")) * PARAMETERS[unit])
    if value < 1:
        raise ConfigError(
            f"{text!r} is no model size: write it as 7.5B, 350M, 1.5T or 124439808, for example."
        )
    return value


def shown(number: float) -> str:
    """A number of parameters in few digits: 7.5B."""
    for unit, factor in reversed(PARAMETERS.items()):
        if number >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:g}"
