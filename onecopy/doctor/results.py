"""What the ranks of a self-test found, as plain records that travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["SIZES", "Card", "RankReport", "Training", "Transfer"]

SIZES = (4 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of a unit that is sent, as fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """How a rank presents itself to the others, before anything else is tried.

    versions: of what must be the same on all ranks. is_first_here: the first rank of its machine.
    """

    rank: int
    host: str
    address: str | None
    interface: str | None
    versions: Mapping[str, str | None]
    is_first_here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One verb at one size: bytes of the whole buffer, bytes that a rank sends, and seconds.

    seconds: the median of a few, on the slowest rank. is_exact: every value was right, here.
    """

    verb: str
    num_bytes: int
    sent_bytes: int
    seconds: float
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One step at stage 3, compared with one process that does the ranks' work one after another.

    different: elements of parameters whose bits differ. largest: the largest difference, as a
    share of the largest change that the step made.
    """

    num_parameters: int
    different: int
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank found.

    reached: what it was at last at. error: why it did not come further; empty if it did.
    others: what the other ranks were at, when this one did not come further.
    clocks: seconds by which a machine's clock is ahead of the first rank's, by its first rank.
    copy: bytes that this rank copies in a second, where the tensors lie.
    neighbours: the ranks whose memory this one reads, and that read its own.
    """

    rank: int
    world_size: int
    device: str = "cpu"
    backend: str = ""
    reached: str = ""
    error: str = ""
    seconds: float = 0.0
    cards: tuple[Card, ...] = ()
    others: Mapping[int, str] = field(default_factory=dict)
    clocks: Mapping[int, float] = field(default_factory=dict)
    copy: float | None = None
    neighbours: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    training: Training | None = None

    def to_json(self) -> dict[str, Any]:
        """For the store and for a bug report."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankReport:
        """The inverse of `to_json`, also after JSON has made words of the numbers of ranks."""
        training = values["training"]
        return cls(
            **{
                **values,
                "cards": tuple(Card(**one) for one in values["cards"]),
                "others": {int(rank): what for rank, what in values["others"].items()},
                "clocks": {int(rank): ahead for rank, ahead in values["clocks"].items()},
                "neighbours": tuple(values["neighbours"]),
                "transfers": tuple(Transfer(**one) for one in values["transfers"]),
                "training": None if training is None else Training(**training),
            }
        )
