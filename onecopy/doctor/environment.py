"""The world that a launcher has told this process of."""

from __future__ import annotations

import os

from onecopy.doctor.facts import Launched
from onecopy.launcher import in_launched_process, local_place

__all__ = ["launched"]


def launched() -> Launched | None:
    """The world that torchrun (or `onecopy.launch`) has made, if it has."""
    if not in_launched_process():
        return None
    local_rank, local_size = local_place()
    return Launched(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=local_rank,
        local_size=local_size,
    )
