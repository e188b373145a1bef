"""The record of how much the model states take, measured or computed. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StateBytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of model states on one rank: parameters with their masters, gradients, optimizer.

    host, nvme: how many of all these lie in host memory and on NVMe, where states are offloaded.
    """

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0
    nvme: int = 0

    @property
    def total(self) -> int:
        """The sum of the three, in bytes, wherever they lie."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def device(self) -> int:
        """What of it lies on the device."""
        return self.total - self.host - self.nvme
