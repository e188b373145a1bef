"""What the environment tells this process, and what it is told for the self-test."""

from __future__ import annotations

import os

from onecopy.doctor.facts import Launched
from onecopy.recording.environment import chosen_variables

__all__ = ["is_first_rank", "launched", "silence_torch", "variables_of_user"]

QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}


def launched() -> Launched | None:
    """The world that torchrun (or `onecopy.launch`) has made, if it has."""
    try:
        # Not before silence_torch: it imports torch.
        from onecopy.launcher import in_launched_process, local_place
    except ImportError:
        return None  # without torch no rank does anything
    if not in_launched_process():
        return None
    local_rank, local_size = local_place()
    return Launched(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=local_rank,
        local_size=local_size,
    )


def is_first_rank() -> bool:
    """Whether this process is the first one of a launcher's, or alone; without importing torch."""
    return os.environ.get("RANK", "0") == "0"


def silence_torch() -> None:
    """Leave out the messages of torch's C++ code, with their stacks: findings say what they mean.

    Before torch is imported; ranks inherit it.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def variables_of_user() -> dict[str, str]:
    """The variables that are told, without what `silence_torch` has set."""
    return {name: value for name, value in chosen_variables().items() if QUIET.get(name) != value}
