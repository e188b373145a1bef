"""The record of how much the model states take, measured or computed. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StateBytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of model states on one rank: parameters with their masters, gradients, optimizer."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum of the three, in bytes."""
        return self.parameters + self.gradients + self.optimizer
