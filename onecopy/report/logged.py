"""Numbers that a loop logs. Those on an accelerator are read when it has made them, not at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onecopy.errors import ConfigError

__all__ = ["Logged"]


class Logged:
    """What was logged of one step."""

    def __init__(self) -> None:
        self._numbers: dict[str, float | tuple[torch.Tensor, torch.Event]] = {}

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Keep numbers, and tensors of one element, by name; a name used again takes the later one.

        Raises:
            ConfigError: a value is neither.
        """
        for name, value in numbers.items():
            self._numbers[name] = _kept(name, value)

    def read(self) -> dict[str, float]:
        """The numbers; waits only for the device to have come to where they were logged."""
        return {name: _read(value) for name, value in self._numbers.items()}


def _kept(name: str, value: Any) -> float | tuple[torch.Tensor, torch.Event]:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigError(
                f"log({name}=...) got a tensor of shape {tuple(value.shape)}: log one number, "
                "its mean() for example"
            )
        value = value.detach()
        if value.device.type != "cpu":
            # Copied on the device's own time: reading it now would wait for all that is queued.
            copy = value.to("cpu", non_blocking=True)
            copied = torch.Event(value.device)
            copied.record()
            return copy, copied
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"log({name}={value!r}) got a {type(value).__name__}: log numbers and tensors of one "
            "element"
        ) from None


def _read(value: float | tuple[torch.Tensor, torch.Event]) -> float:
    if isinstance(value, float):
        return value
    copy, copied = value
    copied.synchronize()
    return float(copy)
