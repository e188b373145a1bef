"""States of the global random generators: torch's on the host and on the accelerator, Python's,
and numpy's where the program uses it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["random_states", "restore_random_states"]


def random_states() -> dict[str, Any]:
    """The states of this process, as plain data."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    accelerator = _accelerator()
    if accelerator is not None:
        states["accelerator"] = accelerator.get_rng_state()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def restore_random_states(states: dict[str, Any], number: int = 0) -> None:
    """Put the generators into these states.

    Args:
        number: 0 for the states as they are; for others, generators are seeded from the states
            and this number, so that ranks that there were not before draw something else.
    """
    if number:
        seed = int(states["torch"].to(torch.int64).sum()) + number
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        return
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    accelerator = _accelerator()
    if accelerator is not None and "accelerator" in states:
        accelerator.set_rng_state(states["accelerator"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _accelerator() -> Any:
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else torch.get_device_module(found)
