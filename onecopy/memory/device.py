"""How much memory a device has for this process."""

from __future__ import annotations

import torch

__all__ = ["available_bytes"]


def available_bytes(device: torch.device) -> int | None:
    """What is free on an accelerator, and what torch has taken of it for this process already.

    None for the CPU, whose memory ranks, loaders of data and the page cache share.
    """
    if device.type in ("cpu", "meta"):
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free) + torch.accelerator.memory_reserved(device)
