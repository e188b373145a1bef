"""What `onecopy config from-deepspeed` can be told. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from onecopy.options import check_least, describe

__all__ = ["FromDeepSpeedOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDeepSpeedOptions:
    """Raises ConfigError for values that cannot work."""

    file: Path = field(metadata=describe("the configuration, for example ds_config.json"))
    world: int | None = field(
        default=None,
        metadata=describe("data-parallel ranks, to check the batch sizes", metavar="RANKS"),
    )
    json: bool = field(default=False, metadata=describe("print JSON instead of a table"))

    def __post_init__(self) -> None:
        check_least(self, {"world": 1})
