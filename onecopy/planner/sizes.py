"""Numbers as people write and read them: "7.5B" parameters, GB of memory."""

from __future__ import annotations

import re

from onecopy.errors import ConfigError

__all__ = ["amount", "is_parameters", "parse_parameters", "shown", "unit_for"]

PARAMETERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
UNITS = {"MB": 1e6, "GB": 1e9}
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


def amount(num_bytes: float, unit: str) -> str:
    """Bytes in a unit of `UNITS`: one digit after the point, more where that would show none."""
    value = num_bytes / UNITS[unit]
    if value == 0 or value >= 0.95:
        return f"{value:,.1f}"
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def unit_for(num_bytes: float) -> str:
    """The unit in which this amount is read best."""
    return "GB" if num_bytes >= UNITS["GB"] / 2 else "MB"
