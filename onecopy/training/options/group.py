"""A group of settings: a dataclass that is a table of the TOML file and a section of the help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

from onecopy.options import check_choices, check_least, describe

__all__ = ["OptionGroup", "describe_of_run"]


def describe_of_run(
    text: str, *, choices: tuple[Any, ...] = (), metavar: str | None = None
) -> dict[str, Any]:
    """As `describe`, of what the losses of a run depend on: who resumes it must give the same."""
    return {**describe(text, choices=choices, metavar=metavar), "of_run": True}


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Settings that belong together; `TrainOptions` inherits from all groups.

    table: their table in a TOML file.
    title: what the help calls them.
    least: the least value of numbers.
    """

    table: ClassVar[str] = ""
    title: ClassVar[str] = ""
    least: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        check_choices(self)
        for group in type(self).__mro__:
            # What is inherited is checked where it belongs.
            if issubclass(group, OptionGroup) and vars(group).get("table"):
                check_least(self, group.least)
                group.check(self)

    def check(self) -> None:
        """Raises ConfigError for settings of this group that do not go together."""

    @classmethod
    def own_fields(cls) -> Iterator[Field[Any]]:
        """The settings of this group, in the order in which they are written down."""
        return (item for item in fields(cls) if item.name in cls.__annotations__)
