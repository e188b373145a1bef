"""What one rank does, or each, and whether it worked everywhere: an error reaches all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from onecopy.comm.compare import first_decides, gather_objects
from onecopy.comm.groups import Group
from onecopy.comm.waits import Wait
from onecopy.errors import CheckpointError, CommunicationError, OneCopyError

__all__ = ["errors_of_ranks", "finish_together", "together"]

T = TypeVar("T")
R = TypeVar("R")


def together(group: Group, action: Callable[[], T]) -> list[T]:
    """Do something on every rank; the results of all, in order.

    Raises:
        CheckpointError: it failed on a rank, which is named; on all ranks.
        CommunicationError: a rank has ended.
    """
    result, failure = _attempt(action)
    with _transfers(group):
        everyone = gather_objects(group, (result, _told(failure)))
    message = _first_message(group, everyone)
    if message is not None:
        raise CheckpointError(message) from failure
    return [value for value, _ in everyone]


def finish_together(group: Group, action: Callable[[], T], finish: Callable[[list[T]], R]) -> R:
    """Do something on every rank, then `finish` on the first with the results of all, in order.

    Returns what `finish` returned, on all ranks; only the first one receives the others' results.

    Raises:
        CheckpointError: it failed on a rank, which is named; on all ranks.
        CommunicationError: a rank has ended.
    """
    result, failure = _attempt(action)

    def decide(everyone: list[tuple[T, str | None]]) -> tuple[R | None, str | None]:
        nonlocal failure
        message = _first_message(group, everyone)
        if message is not None:
            return None, message
        answer, failure = _attempt(lambda: finish([value for value, _ in everyone]))
        return answer, _first_message(group, [(answer, _told(failure))])

    told: tuple[Any, str | None] = (result, _told(failure))
    with _transfers(group):
        answer, message = first_decides(group, told, decide)
    if message is not None:
        raise CheckpointError(message) from failure
    return answer  # type: ignore[return-value]


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    # Every other rank waits for the news.
    except Exception as error:
        return None, error


def _first_message(group: Group, everyone: list[tuple[Any, str | None]]) -> str | None:
    """What the first rank that failed has to say."""
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            return _on_rank(group, rank, message)
    return None


@contextmanager
def errors_of_ranks(group: Group) -> Iterator[None]:
    """Failures that torch.distributed.checkpoint has collected become one that names the rank.

    Raises:
        CheckpointError: instead of CheckpointException.
        CommunicationError: a rank has ended.
    """
    try:
        with _transfers(group, "load"):
            yield
    except CheckpointException as error:
        own, _ = error.failures.get(group.rank, (None, None))
        if own is not None and not isinstance(own, Exception):
            # Ctrl-C is no fault of a checkpoint, and no reason to try another one.
            raise own from None
        rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
        raise CheckpointError(_on_rank(group, rank, _told(failure) or "")) from failure


@contextmanager
def _transfers(group: Group, verb: str = "checkpoint") -> Iterator[None]:
    """What the transport says of ranks that have ended becomes an error that says so."""
    try:
        with Wait(verb, group.ranks):
            yield
    except OneCopyError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {group.ranks[group.rank]}: a rank of {list(group.ranks)} has ended during a "
            f"checkpoint, or has not answered in time ({error}); its own output says why. The last "
            "good checkpoint is untouched"
        ) from error


def _told(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, OneCopyError) else f"{type(error).__name__}: {error}"


def _on_rank(group: Group, rank: int, message: str) -> str:
    return f"on rank {group.ranks[rank]}: {message}" if group.size > 1 else message
