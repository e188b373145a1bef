"""Bytes for tables and axes: one unit for all that is compared."""

from __future__ import annotations

__all__ = ["amount", "unit_for"]

UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def amount(num_bytes: float, unit: str) -> str:
    """Bytes in a unit of `UNITS`: one digit after the point, more where that would show none."""
    value = num_bytes / UNITS[unit]
    if value == 0 or value >= 0.95:
        return f"{value:,.1f}"
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def unit_for(num_bytes: float) -> str:
    """The unit in which this amount is read best."""
    return next((unit for unit, factor in UNITS.items() if num_bytes >= factor / 2), "kB")
