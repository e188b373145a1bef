"""How options describe themselves to the command line, and the checks that they share.

Each command has a frozen dataclass. A field with a default is a flag, one without is a positional
argument; what help says about it is in its metadata. Free of torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from onecopy.errors import ConfigError

__all__ = [
    "bytes_of",
    "check_choices",
    "check_least",
    "describe",
    "speed_of",
    "unknown_setting",
]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
# What settings are called in DeepSpeed, FSDP, Accelerate and Lightning.
ELSEWHERE = {
    "auto_wrap_policy": "units",
    "bf16": "precision",
    "clip_grad_norm": "max_grad_norm",
    "cpu_offload": "offload",
    "dtype": "precision",
    "fp16": "precision",
    "gradient_clip_val": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "ignored_modules": "keep_gathered",
    "mixed_precision": "precision",
    "mp_policy": "precision",
    "offload_policy": "offload",
    "reshard_after_forward": "stage",
    "sharding_strategy": "stage",
    "zero_stage": "stage",
}
BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def describe(
    text: str, *, choices: tuple[Any, ...] = (), metavar: str | None = None
) -> dict[str, Any]:
    """What the command line shows about a field, and how it calls its value."""
    return {"help": text, "choices": choices, "metavar": metavar}


def bytes_of(text: str) -> int:
    """A size for people in bytes: 5GB, 500MB, 2GiB, 1000000.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    unit = (UNITS | BINARY_UNITS).get(found.group(2)) if found else None
    if found is None or unit is None or float(found.group(1)) * unit < 1:
        raise ConfigError(f"{text!r} is no size: say 5GB, 500MB or 2GiB, for example")
    return int(float(found.group(1)) * unit)


def speed_of(text: str) -> int:
    """A speed for people in bytes per second: 3.2GB/s, 3.2GB, or 25Gbit/s, 25Gb/s in bits.

    Raises:
        ConfigError: it is none, or bits and bytes cannot be told apart.
    """
    size = re.sub(r"/s\s*$", "", text)
    bits = re.fullmatch(r"(.*?)(bits?|bps|(?<![kmgti])b)\s*", size)
    try:
        if size.rstrip().endswith("b") and bits is None:
            raise ConfigError(f"{text!r} may mean bits or bytes")
        return max(1, bytes_of(bits[1]) // 8) if bits else bytes_of(size)
    except ConfigError as error:
        raise ConfigError(
            f"{text!r} is no speed: say 3.2GB/s in bytes, or 25Gbit/s in bits, for example"
        ) from error


def check_choices(record: Any) -> None:
    """Raises ConfigError for a field of an options record whose value is none of its choices."""
    for option in fields(record):
        choices, value = option.metadata.get("choices"), getattr(record, option.name)
        if choices and value not in choices and value != option.default:
            listed = ", ".join(str(choice) for choice in choices)
            raise ConfigError(f"{_flag(option.name)} is {value!r}: choose one of {listed}.")


def check_least(record: Any, least: Mapping[str, float]) -> None:
    """Raises ConfigError for a number below the least that makes sense; None is left alone."""
    for name, bound in least.items():
        value = getattr(record, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"{_flag(name)} is {value}: give {bound} or more.")


def unknown_setting(name: str, known: Iterable[str]) -> ConfigError:
    """The error for a setting that does not exist, with the nearest one that does."""
    listed = sorted(known)
    # What all of them begin with makes any two look alike.
    section = name.rpartition(".")[0]
    words = {one.removeprefix(f"{section}."): one for one in listed}
    words |= {other: one for other, one in ELSEWHERE.items() if one in listed}
    near = difflib.get_close_matches(name.rpartition(".")[2], words, n=1, cutoff=0.5)
    hint = f" Did you mean {words[near[0]]!r}?" if near else ""
    return ConfigError(f"unknown setting {name!r}.{hint} Known settings: {', '.join(listed)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
