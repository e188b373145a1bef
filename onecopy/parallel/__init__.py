"""Composition with other parallelism, and what it is built from.

The names are imported when first used, as those of `onecopy` itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onecopy.parallel.gathered import keep_gathered as keep_gathered
    from onecopy.parallel.huggingface import sequence_parallel as sequence_parallel
    from onecopy.parallel.parts import Parts as Parts
    from onecopy.parallel.pipeline import micro_batches as micro_batches
    from onecopy.parallel.sequence import attention as attention
    from onecopy.parallel.sequence import position_ids as position_ids
    from onecopy.parallel.sequence import split_sequence as split_sequence
    from onecopy.parallel.tied import tie as tie
    from onecopy.parallel.tiled import tile_modules as tile_modules
    from onecopy.parallel.tiled import tiled_cross_entropy as tiled_cross_entropy
    from onecopy.parallel.tiled_loss import tile_loss as tile_loss

_WHERE = {
    "Parts": "onecopy.parallel.parts",
    "attention": "onecopy.parallel.sequence",
    "keep_gathered": "onecopy.parallel.gathered",
    "micro_batches": "onecopy.parallel.pipeline",
    "position_ids": "onecopy.parallel.sequence",
    "sequence_parallel": "onecopy.parallel.huggingface",
    "split_sequence": "onecopy.parallel.sequence",
    "tie": "onecopy.parallel.tied",
    "tile_loss": "onecopy.parallel.tiled_loss",
    "tile_modules": "onecopy.parallel.tiled",
    "tiled_cross_entropy": "onecopy.parallel.tiled",
}

__all__ = [
    "Parts",
    "attention",
    "keep_gathered",
    "micro_batches",
    "position_ids",
    "sequence_parallel",
    "split_sequence",
    "tie",
    "tile_loss",
    "tile_modules",
    "tiled_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'onecopy.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
