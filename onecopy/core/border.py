"""What crosses the border of a sharded model: dtypes of inputs and outputs, and the loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.loss_scale import scale_gradient
from onecopy.core.precision import DTYPES, map_tensors

if TYPE_CHECKING:
    from onecopy.core.backward import Backward
    from onecopy.core.engine import Engine

__all__ = ["Border"]


class Border:
    """The border of one model.

    Attributes:
        changes_inputs, changes_outputs: whether there is anything to do for them.
    """

    def __init__(self, engine: Engine, backward: Backward) -> None:
        self._backward = backward
        self._scales = engine.loss_scale is not None
        precision = engine.config.precision_policy
        self._model = engine.model
        self._compute = precision.compute if precision.compute != "fp32" else None
        self._input_dtype: torch.dtype | None = None
        if precision.compute is not None and precision.cast_inputs:
            self._input_dtype = DTYPES[precision.compute]
        self._output_dtype: torch.dtype | None = None
        if precision.cast_outputs is not None:
            self._output_dtype = DTYPES[precision.cast_outputs]
        # A gradient that arrives in fp16 would be scaled too late.
        self._raises_fp16 = precision.cast_outputs is None and any(
            gradients.unit.dtypes.compute is torch.float16 for gradients in engine.gradients
        )
        self.changes_inputs = self._input_dtype is not None or self._scales
        self.changes_outputs = self._output_dtype is not None or self._raises_fp16 or self._scales

    def enter(self, inputs: Any) -> Any:
        """The inputs as the model computes with them."""
        return map_tensors(inputs, self._enter)

    def leave(self, output: Any) -> Any:
        """The outputs as the user gets them."""
        return map_tensors(output, self._leave)

    def explain(self, error: BaseException | None) -> None:
        """Add to an error about dtypes in forward where other dtypes may come from."""
        if self._compute is None or not isinstance(error, RuntimeError):
            return
        if not any(word in str(error) for word in ("dtype", "scalar type")):
            return
        buffers = [
            f"{name} ({str(buffer.dtype).removeprefix('torch.')})"
            for name, buffer in self._model.named_buffers()
            if buffer.is_floating_point()
            and buffer.dtype is not DTYPES[self._compute]
            # Those of norms meet no activations.
            and ".running_" not in f".{name}"
        ]
        found = f": here {', '.join(buffers[:3])}" if buffers else ""
        error.add_note(
            f"onecopy: parameters and inputs of this model are {self._compute}. Buffers keep their "
            f"own dtype{found}; so do tensors that forward makes itself. Cast them where they "
            "meet, for example self.table.to(x.dtype), or keep the module in fp32, "
            "onecopy.Precision(keep_fp32=...)"
        )

    def _enter(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        dtype = self._input_dtype or tensor.dtype
        if self._scales and tensor.requires_grad and torch.is_grad_enabled():
            return scale_gradient(tensor, dtype, self._backward.input_factor)
        return tensor.to(dtype)

    def _leave(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        dtype = self._output_dtype or tensor.dtype
        if self._raises_fp16 and dtype is torch.float16:
            dtype = torch.float32
        if self._scales and tensor.requires_grad and torch.is_grad_enabled():
            return scale_gradient(tensor, dtype, self._backward.output_factor)
        return tensor.to(dtype)
