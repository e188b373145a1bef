"""What one rank does, or each, and whether it worked everywhere: an error reaches all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from onecopy.comm.compare import gather_objects
from onecopy.comm.groups import Group
from onecopy.errors import CheckpointError, OneCopyError

__all__ = ["errors_of_ranks", "together"]

T = TypeVar("T")


def together(group: Group, action: Callable[[], T]) -> list[T]:
    """Do something on every rank; the results of all, in order.

    Raises:
        CheckpointError: it failed on a rank, which is named; on all ranks.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    # Every other rank waits for the news.
    except Exception as error:
        failure = error
    told = (result, None) if failure is None else (None, _told(failure))
    everyone = gather_objects(group, told)
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise CheckpointError(_on_rank(group, rank, message)) from failure
    return [value for value, _ in everyone]


@contextmanager
def errors_of_ranks(group: Group) -> Iterator[None]:
    """Failures that torch.distributed.checkpoint has collected become one that names the rank.

    Raises:
        CheckpointError: instead of CheckpointException.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise CheckpointError(_on_rank(group, rank, _told(failure))) from failure


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, OneCopyError) else f"{type(error).__name__}: {error}"


def _on_rank(group: Group, rank: int, message: str) -> str:
    return f"on rank {group.ranks[rank]}: {message}" if group.size > 1 else message
