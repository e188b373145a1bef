"""The trainer's options: records from which the command line, its help and TOML files are read.

One file for each group: names, defaults, help texts and the checks that need no data. Nothing
here may import torch, so that `onecopy train --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar

from onecopy.training.options.data import DataOptions
from onecopy.training.options.group import OptionGroup
from onecopy.training.options.model import ModelOptions
from onecopy.training.options.optimization import OptimizationOptions
from onecopy.training.options.results import ResultOptions
from onecopy.training.options.sharding import ShardOptions

__all__ = ["OF_A_RUN", "TrainOptions"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions, DataOptions, OptimizationOptions, ShardOptions, ResultOptions):
    """Everything `onecopy train` can be told. Raises ConfigError for values that cannot work.

    origins: by name, where the values came from that are not defaults: "command line", or a file
        and a line of it. What is made by a program has none.
    """

    groups: ClassVar[tuple[type[OptionGroup], ...]] = (
        ModelOptions,
        DataOptions,
        OptimizationOptions,
        ShardOptions,
        ResultOptions,
    )
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def settings(cls) -> Iterator[tuple[type[OptionGroup], Field[Any]]]:
        """Every setting with its group, in the order of the help."""
        return ((group, item) for group in cls.groups for item in group.own_fields())

    def origin_of(self, name: str) -> str:
        """Where the value of a setting came from."""
        default = next(item.default for _, item in self.settings() if item.name == name)
        made = "default" if getattr(self, name) == default else "program"
        return self.origins.get(name, made)


# What the losses of a run depend on, beside the text and the number of sequences in a step: a run
# that is resumed must have the same. All other options may change.
OF_A_RUN = tuple(item.name for _, item in TrainOptions.settings() if "of_run" in item.metadata)
