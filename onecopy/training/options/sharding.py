"""What `onecopy.shard` is told, and where the ranks are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from onecopy.config import AUTO, HYBRIDS, ZEROPP, Config
from onecopy.errors import ConfigError
from onecopy.options import describe
from onecopy.policies import CODES, Quantize
from onecopy.training.options.group import OptionGroup

PLACES = ("device", "host", "nvme:/folder")


@dataclass(frozen=True, kw_only=True)
class ShardOptions(OptionGroup):
    """The settings of `[shard]`: the same names and values as `onecopy.shard` has."""

    table = "shard"
    title = "sharding"
    least: ClassVar[Mapping[str, float]] = {"nproc": 1, "node_size": 1}

    stage: int | str = field(
        default=3,
        metadata=describe(
            "what to cut over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, "
            "3 parameters too; "
            f"{', '.join(HYBRIDS)} cut some inside nodes, as do three cuts like whole/node/world; "
            "auto the stage that sends least of those that fit",
            metavar="STAGE",
        ),
    )
    precision: str = field(
        default="fp32",
        metadata=describe(
            "dtype of forward and backward; the optimizer always updates fp32 masters",
            choices=("fp32", "bf16", "fp16"),
        ),
    )
    offload: str | None = field(
        default=None,
        metadata=describe(
            "keep states elsewhere: cpu, or nvme:/folder on a local drive", metavar="PLACE"
        ),
    )
    quantize: str | None = field(
        default=None,
        metadata=describe(
            "send parameters and gradients in fewer bits: zero++ as the paper does, auto where "
            "the network is slow enough; without it, as they are",
            choices=(ZEROPP, AUTO),
        ),
    )
    frozen: str | None = field(
        default=None,
        metadata=describe(
            "keep what is not trained, such as the model beside adapters, in this code; its values "
            "are rounded for good",
            choices=CODES,
        ),
    )
    node_size: int | None = field(
        default=None,
        metadata=describe(
            "how many processes are in one node; without it, what torchrun says", metavar="N"
        ),
    )
    memory: str | None = field(
        default=None,
        metadata=describe(
            "with --stage auto: what one process can hold, such as 80GiB; without it, what its "
            "accelerator has",
            metavar="SIZE",
        ),
    )
    step_in_backward: bool = field(
        default=False,
        metadata=describe("update each unit within the backward, so that no gradient is kept"),
    )
    whole_parameters: bool = field(
        default=False,
        metadata=describe("cut no parameter: each belongs to one rank, as a whole"),
    )
    activations: str | None = field(
        default=None,
        metadata=describe(
            "keep only the inputs of blocks, and compute the rest again in backward; where to keep "
            f"them: {', '.join(PLACES)}",
            metavar="PLACE",
        ),
    )
    nproc: int = field(
        default=2,
        metadata=describe(
            "processes to start on this machine; ignored under torchrun, which starts its own"
        ),
    )
    device: str = field(
        default="auto",
        metadata=describe(
            "auto takes one accelerator per process where there are enough, else the CPU",
            choices=("auto", "cpu"),
        ),
    )

    def check(self) -> None:
        """Raises ConfigError for what `shard` would not take."""
        if self.frozen is not None and self.quantize == AUTO:
            raise ConfigError(f"--frozen {self.frozen} and --quantize auto: say zero++, or none.")
        place = self.activations
        if place is not None and place not in PLACES[:2] and not place.startswith("nvme:"):
            raise ConfigError(f"--activations is {place!r}: choose one of {', '.join(PLACES)}.")
        self.config()

    def config(self) -> Config:
        """These settings, for `onecopy.shard`."""
        return Config(
            stage=self.stage,
            memory=self.memory,
            node_size=self.node_size,
            precision=self.precision,
            offload=self.offload,
            quantize=self._quantize(),
            step_in_backward=self.step_in_backward,
            whole_parameters=self.whole_parameters,
        )

    def _quantize(self) -> Quantize | str | None:
        if self.frozen is None:
            return self.quantize
        if self.quantize is None:
            return Quantize(weights=None, gradients=None, frozen=self.frozen)
        return Quantize(frozen=self.frozen)
