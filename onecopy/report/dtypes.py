"""One line about the dtypes that a sharded model uses, where they are not simply its own fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["describe"]

NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def describe(engine: Engine) -> str | None:
    """The dtypes of a model, or None where all is fp32 (or wider)."""
    low = [unit for unit in engine.units if _is_low(unit)]
    if not low:
        return None
    trained = [unit for unit in engine.units if unit.gradients is not None]
    lowest = [unit for unit in trained if _is_low(unit)]
    parts = [f"{_count(engine.units)} parameters"]
    if lowest:
        parts += [
            f"compute {_names(unit.dtypes.compute for unit in lowest)}",
            f"reduce {_names(unit.dtypes.reduce for unit in lowest)}",
            f"masters {_masters(lowest)}",
            f"gradients {_names(unit.dtypes.gradient for unit in lowest)}",
        ]
    if engine.loss_scale is not None:
        kind = "fixed" if engine.loss_scale.is_fixed else "dynamic"
        parts.append(f"loss scale {engine.loss_scale.value:g} ({kind})")
    sentences = [", ".join(parts)]
    frozen = [unit for unit in low if unit.gradients is None]
    if frozen:
        dtypes = _names(unit.dtypes.compute for unit in frozen)
        sentences.append(f"frozen: {_count(frozen)} in {dtypes}")
    kept = _modules_in_fp32(engine)
    if kept:
        sentences.append("in fp32: " + ", ".join(f"{number} {name}" for name, number in kept))
    return "; ".join(sentences)


def _is_low(unit: Unit) -> bool:
    dtypes = (unit.dtypes.compute, unit.dtypes.reduce)
    return any(one.is_floating_point and one.itemsize < 4 for one in dtypes)


def _masters(units: list[Unit]) -> str:
    if any(unit.slice.is_split for unit in units):
        return "fp32 as bf16 and 16 more bits"
    return _names(unit.dtypes.master for unit in units)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(NAMES.get(one, str(one)) for one in dict.fromkeys(dtypes))


def _modules_in_fp32(engine: Engine) -> list[tuple[str, int]]:
    """Classes of the modules whose own parameters compute in fp32, and how many there are."""
    counts: Counter[str] = Counter()
    for module in engine.model.modules():
        found = [engine.find(one) for one in module._parameters.values() if one is not None]
        if any(one is not None and one[0].dtypes.compute is torch.float32 for one in found):
            counts[type(module).__name__] += 1
    return counts.most_common()


def _count(units: list[Unit]) -> str:
    number = sum(parameter.numel() for unit in units for parameter in unit.parameters)
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
