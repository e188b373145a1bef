"""Which model is trained, and what of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from onecopy.errors import ConfigError
from onecopy.training.options.group import OptionGroup, describe_of_run

GPT = "gpt"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The settings of `[model]`."""

    table = "model"
    title = "model"
    least: ClassVar[Mapping[str, float]] = {
        "layers": 1,
        "width": 1,
        "heads": 1,
        "lora_rank": 0,
        "lora_alpha": 0,
    }

    model: str = field(
        default=GPT,
        metadata=describe_of_run(
            "gpt, the small model that comes along; or a Hugging Face causal language model: a "
            "config.json or a folder with one, and with safetensors files if training is to start "
            "from their values",
            metavar="PATH",
        ),
    )
    random_weights: bool = field(
        default=False,
        metadata=describe_of_run("do not read the safetensors files of the model's folder"),
    )
    layers: int = field(default=3, metadata=describe_of_run("transformer blocks of gpt"))
    width: int = field(
        default=128, metadata=describe_of_run("size of the vector that stands for a token in gpt")
    )
    heads: int = field(
        default=4, metadata=describe_of_run("attention heads of gpt; must divide the width")
    )
    lora_rank: int = field(
        default=0,
        metadata=describe_of_run(
            "freeze the model and train low-rank adapters of this rank beside it; 0 trains all"
        ),
    )
    lora_alpha: float = field(
        default=16.0, metadata=describe_of_run("what adapters add is multiplied by alpha / rank")
    )
    lora_dropout: float = field(
        default=0.0, metadata=describe_of_run("share of an adapter's inputs that is left out")
    )
    lora_targets: tuple[str, ...] = field(
        default=(),
        metadata=describe_of_run(
            "names of modules that get adapters, such as q_proj; without it, all linear modules "
            "but the head",
            metavar="NAME",
        ),
    )

    def check(self) -> None:
        """Raises ConfigError for sizes that do not go together."""
        if self.width % self.heads:
            raise ConfigError(_heads_advice(self.width, self.heads))
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(
                f"--lora-dropout is {self.lora_dropout}: it is a share, 0 or more and below 1."
            )


def _heads_advice(width: int, heads: int) -> str:
    divisors = [n for n in range(1, min(width, 64) + 1) if width % n == 0]
    nearest = min(divisors, key=lambda n: abs(n - heads))
    return (
        f"--width {width} cannot be split over --heads {heads}: each head takes an equal part "
        f"of the width. Try --heads {nearest}."
    )
