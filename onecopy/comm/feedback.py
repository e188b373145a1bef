"""Error feedback: what a gradient loses to its codes is added to the next one (LoCo).

A sender keeps, for each part of a buffer that it sends, a moving average of the errors that codes
made, itself coded in 8 bits: 1 byte for each value that it sends. What is lost then, is not lost in
the same direction for ever: sums over many steps come out as if nothing had been rounded.

    sent = codes of (part + error)
    error <- BETA error + (1 - BETA) (part + error - sent)

Errors begin anew after every RESET_AFTER sums, as stale ones do not help, and where something was
not finite. They are no part of checkpoints: a run that is resumed begins with none.

Source: LoCo (Xie et al. 2024), section 3: BETA 0.8, errors in 8 bits, reset after 1024 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from onecopy.comm.codec import decode, encode
from onecopy.comm.coding import Coding

__all__ = ["Feedback"]

BETA = 0.8
RESET_AFTER = 1024


class Feedback:
    """The errors of one kind of hop, by what identifies a part."""

    def __init__(self, block: int) -> None:
        self._coding = Coding("int8", block)
        # With the number of sums that each has been kept for.
        self._errors: dict[Hashable, tuple[torch.Tensor, int]] = {}

    def send(
        self,
        key: Hashable,
        part: torch.Tensor,
        code: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Code a part together with the error of before, and keep the error that this makes.

        Args:
            part: (n,) values that are to be sent.
            code: codes values and returns what will arrive of them, in fp32.
        """
        payload, count = self._errors.pop(key, (None, 0))
        error = torch.zeros_like(part, dtype=torch.float32)
        is_kept = payload is not None and payload.numel() == self._coding.num_bytes(part.numel())
        if payload is None or not is_kept or count == RESET_AFTER:
            payload, count = self._fresh(part), 0
        else:
            decode(payload, self._coding, error)
        wanted = error + part
        lost = wanted.sub_(code(wanted))
        error.mul_(BETA).add_(lost, alpha=1.0 - BETA)
        # An overflow is seen by who receives it. Here it must not stay.
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        encode(error, self._coding, payload)
        self._errors[key] = payload, count + 1

    def _fresh(self, part: torch.Tensor) -> torch.Tensor:
        num_bytes = self._coding.num_bytes(part.numel())
        return torch.empty(num_bytes, dtype=torch.uint8, device=part.device)
