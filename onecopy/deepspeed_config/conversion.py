"""From a configuration of DeepSpeed to settings, a table of answers, and code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecopy.deepspeed_config.catalogue import ARGUMENTS, IGNORED, LEFT, SWITCHED, WHOLE, ZERO
from onecopy.deepspeed_config.code import Script
from onecopy.deepspeed_config.keys import find_keys, is_comment
from onecopy.deepspeed_config.optimizers import map_optimizer
from onecopy.deepspeed_config.precision import BYTES, autocast_dtype, map_precision
from onecopy.deepspeed_config.reading import AUTO, REFUSED, Answer, Reading
from onecopy.deepspeed_config.schedules import map_schedule
from onecopy.deepspeed_config.source import read
from onecopy.deepspeed_config.training import (
    Batch,
    map_activations,
    map_batch,
    map_loop,
    wrong_world,
)
from onecopy.deepspeed_config.zero import map_zero
from onecopy.errors import ConfigError

__all__ = ["Conversion", "convert"]

AUTO_TEXTS = {
    "bf16.enabled": 'say precision="bf16" if you train in it',
    "fp16.enabled": 'say precision="fp16" if you train in it',
    "gradient_clipping": "say max_grad_norm=..., or call clip_grad_norm_ in the loop",
    "train_batch_size": "rows of all ranks for one update: follows from your loader",
    "train_micro_batch_size_per_gpu": "batch_size of your DataLoader",
    "gradient_accumulation_steps": "divide the loss by the number of backwards for each update",
    f"{ZERO}.stage3_prefetch_bucket_size": "one unit ahead, unless you say prefetch_bytes",
    f"{ZERO}.stage": "say stage=...; stage=3 unless you do",
}


@dataclass(slots=True, kw_only=True, eq=False)
class Conversion:
    """What becomes of a configuration of DeepSpeed.

    source: the file, or "the dict".
    answers: what becomes of each key.
    settings: arguments of `shard`.
    batch: what the configuration says of batch sizes.
    code: lines to paste; "" where something is refused.
    is_told: the answers have been shown.
    """

    source: str
    answers: tuple[Answer, ...]
    settings: Mapping[str, Any]
    batch: Batch
    code: str
    is_told: bool = False

    @property
    def refused(self) -> list[Answer]:
        """What has to be changed first."""
        return [one for one in self.answers if one.fate == REFUSED]

    def raise_if_refused(self) -> None:
        """Raises ConfigError that lists everything that is refused."""
        if self.refused:
            listed = "".join(f"\n  {one.key}: {one.text}" for one in self.refused)
            raise ConfigError(f"{self.source} asks for what is not here:{listed}")

    def check_world(self, world_size: int) -> None:
        """Raises ConfigError where batch sizes are right for other ranks than there are."""
        if self.batch.num_ranks not in (None, world_size):
            raise ConfigError(f"{self.source}: {wrong_world(self.batch, world_size)}")


def convert(source: str | Path | Mapping[str, Any], *, world_size: int | None = None) -> Conversion:
    """Answer every key of a configuration.

    Args:
        source: a JSON file of DeepSpeed, or what it holds.
        world_size: the number of data-parallel ranks, to check batch sizes; None where unknown.

    Raises:
        ConfigError: it cannot be read, or has keys that DeepSpeed does not know, or values of a
            wrong kind. What is refused is among the answers, see `Conversion.raise_if_refused`.
    """
    values, name = read(source)
    found, problems = find_keys(values)
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{name} is no configuration of DeepSpeed:{listed}")
    reading = Reading(found)
    _answer_open(reading)
    _answer_by_sentence(reading)
    try:
        precision = map_precision(reading)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    compute = None if precision is None else precision.compute
    settings = map_zero(reading, BYTES[compute or "fp32"])
    if precision is not None:
        settings["precision"] = precision
    settings |= map_loop(reading)
    batch = map_batch(reading, world_size)
    script = Script(
        settings=settings,
        optimizer=map_optimizer(reading),
        schedule=map_schedule(reading),
        steps=batch.steps,
        activations=map_activations(reading),
        autocast=autocast_dtype(reading),
    )
    silent = reading.unanswered()
    assert not silent, f"no answer to {silent}"
    answers = tuple(reading.answers())
    is_refused = any(one.fate == REFUSED for one in answers)
    code = "" if is_refused else script.code()
    return Conversion(source=name, answers=answers, settings=settings, batch=batch, code=code)


def _answer_open(reading: Reading) -> None:
    for key in reading.unanswered():
        if is_comment(key):
            reading.ignored(key, "a comment")
        elif reading.is_null(key):
            reading.ignored(key, "null says nothing")
        elif reading.is_auto(key) and key not in IGNORED:
            inside = key.rpartition(".")[0] in ARGUMENTS
            other = (
                "write yours, see the code" if inside else "off, or as usual here, unless you say"
            )
            text = AUTO_TEXTS.get(key, other)
            reading.left(key, f'"{AUTO}": {text}')


def _answer_by_sentence(reading: Reading) -> None:
    for key, text in IGNORED.items():
        reading.ignored(key, text)
    for key, text in LEFT.items():
        reading.left(key, text)
    for key, text in WHOLE.items():
        reading.ignored(key, text)
    for key, feature in SWITCHED.items():
        value = reading.value(key)
        if isinstance(value, Mapping) and feature.switch is not None:
            value = value.get(feature.switch)
        if value is not True and value in (None, False, AUTO, 0, 1, {}):
            reading.ignored(key, "off")
        reading.refused(key, feature.remedy)
