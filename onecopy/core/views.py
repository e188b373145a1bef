"""Parts of flat tensors, shaped like parameters."""

from __future__ import annotations

import torch

__all__ = ["is_dense", "is_fake", "view_of"]


def view_of(flat: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """The part of `flat` from `start` on as a tensor like `parameter`.

    Keeps a dense memory format (channels_last); everything else becomes contiguous.
    """
    part = flat[start : start + parameter.numel()]
    if is_dense(parameter):
        # From the part on: `flat` itself may be a view, as a slice is.
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.size())


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it only says what a tensor would be: torch's FakeTensor, which the simulator uses."""
    return type(tensor).__name__ == "FakeTensor"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides cover numel() elements without gap or overlap, in any dim order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
