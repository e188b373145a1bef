"""Ranks meet at a store, before they try to talk to each other: who is there, and where.

The store is torchrun's (or `onecopy.launch`'s) own. What each rank is at is written there, so that
one that gets no further can say what the others are at.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from onecopy.doctor.files import within
from onecopy.doctor.results import Card
from onecopy.errors import CommunicationError

__all__ = ["Meeting", "first_line"]

# A store on a machine that has gone away answers nothing, and does not always say so.
ANSWER_SECONDS = 5.0
# A rank or the store may be slow for a moment.
CLOCK_READINGS = 3


class Meeting:
    """This rank's place at the store. Raises CommunicationError for what does not come.

    Attributes:
        rank, world_size: as the launcher says.
        store: a part of it that nobody else uses.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        limit = timedelta(seconds=seconds)
        try:
            # Where, and which rank this is, is read from the environment that a launcher sets.
            found = next(dist.rendezvous("env://", timeout=limit))
        except (RuntimeError, ValueError) as error:
            raise CommunicationError(first_line(error)) from error
        store, self.rank, self.world_size = found
        store.set_timeout(limit)
        self.store = dist.PrefixStore("onecopy-doctor", store)
        # A connection of its own: the other may be busy with a wait that does not end.
        self._other: dist.Store = self.store.clone()  # type: ignore[attr-defined]  # not in the stubs

    def say(self, what: str) -> None:
        """Let others know what this rank is at."""
        self._other.set(f"at/{self.rank}", what)

    def others(self) -> dict[int, str]:
        """What the other ranks are at, as far as the store still answers."""
        found: dict[int, str] = {}

        def ask() -> None:
            for rank in range(self.world_size):
                if rank != self.rank:
                    is_here = self._other.check([f"at/{rank}"])
                    found[rank] = self._other.get(f"at/{rank}").decode() if is_here else ""

        with suppress(RuntimeError, OSError):
            within(ANSWER_SECONDS, ask)
        return dict(found)

    def exchange(self, card: Card) -> tuple[Card, ...]:
        """The cards of all ranks, in their order.

        Raises:
            CommunicationError: some ranks did not come; it names them.
        """
        self.store.set(f"card/{self.rank}", json.dumps(asdict(card)))
        deadline = time.monotonic() + self._seconds
        keys = [f"card/{rank}" for rank in range(self.world_size)]
        for key in keys:
            with suppress(RuntimeError):
                left = max(0.05, deadline - time.monotonic())
                self.store.wait([key], timedelta(seconds=left))
        missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        if missing:
            raise CommunicationError(f"ranks that did not come: {missing}")
        return tuple(Card(**json.loads(self.store.get(key))) for key in keys)

    def compare_clocks(self, cards: tuple[Card, ...]) -> dict[int, float]:
        """How far the clocks of other machines are ahead of the first rank's, on that rank.

        Half of the way there and back is what the answer is older: known best from the shortest.
        """
        ahead = {}
        others = [card.rank for card in cards if card.is_first_here and card.rank]
        if self.rank in others:
            for number in range(CLOCK_READINGS):
                self.store.get(f"clock/ask/{self.rank}/{number}")
                self.store.set(f"clock/answer/{self.rank}/{number}", repr(time.time()))
        if self.rank == 0:
            for rank in others:
                ahead[rank] = min(self._ask(rank, n) for n in range(CLOCK_READINGS))[1]
        return ahead

    def _ask(self, rank: int, number: int) -> tuple[float, float]:
        """Seconds that the answer took, and how far that rank's clock is ahead."""
        asked = time.time()
        self.store.set(f"clock/ask/{rank}/{number}", "")
        answer = float(self.store.get(f"clock/answer/{rank}/{number}"))
        took = time.time() - asked
        return took, answer - asked - took / 2

    def post(self, what: str, value: Any) -> None:
        """Leave something for the first rank, if the store is still there."""
        key = f"{what}/{self.rank}"
        with suppress(RuntimeError, OSError):
            within(ANSWER_SECONDS, lambda: self._other.set(key, json.dumps(value)))

    def collect(self, what: str, ranks: list[int], seconds: float) -> dict[int, Any]:
        """What these ranks have left, as far as it comes in time."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds

        def wait() -> None:
            for rank in ranks:
                key, left = f"{what}/{rank}", max(0.05, deadline - time.monotonic())
                with suppress(RuntimeError):
                    self._other.wait([key], timedelta(seconds=left))
                    found[rank] = json.loads(self._other.get(key))

        with suppress(OSError):
            within(seconds + ANSWER_SECONDS, wait)
        # A copy: a wait that has not ended may still add to it.
        return dict(found)


def first_line(error: BaseException) -> str:
    """What happened, without the C++ stack and the places in the sources that torch adds."""
    text = str(error).strip().partition("\n")[0]
    return (
        re.sub(r"\[(?:enforce fail at )?\S+\.(?:cc|cpp|h):\d+\]\s*", "", text)
        or type(error).__name__
    )
