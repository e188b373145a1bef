"""Tensors without values: the only file that leans on torch's private FakeTensor.

Inside `fake_tensors()` every new tensor knows its shape, dtype, device and how large its storage
is, and has no memory. What would need values gets an answer that lets training go on: numbers are
1, tensors are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onecopy.errors import OneCopyError

__all__ = ["NEEDS_VALUES", "fake_tensors"]

_MISSING = (
    "the simulation leans on private parts of torch that have changed in torch {version} ({what}): "
    "use the closed formulas, onecopy plan without --simulate, and please report it"
)

# What torch raises where a model looks at values.
NEEDS_VALUES: tuple[type[Exception], ...] = tuple(
    getattr(torch._subclasses.fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException")
    if hasattr(torch._subclasses, "fake_tensor") and hasattr(torch._subclasses.fake_tensor, name)
)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors are made without memory, and operations on them compute shapes only.

    Raises:
        OneCopyError: torch's private parts are not what they were.
    """
    kind, mode = _private()
    before = vars(kind).get("data_ptr")
    # Where a tensor would lie: told apart by its storage, as real ones are.
    kind.data_ptr = _address
    try:
        with mode, _Answers():  # type: ignore[no-untyped-call]
            yield
    finally:
        if before is None:
            del kind.data_ptr
        else:
            kind.data_ptr = before


def _private() -> tuple[Any, Any]:
    try:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        return FakeTensor, FakeTensorMode(allow_non_fake_inputs=True)
    except (ImportError, TypeError) as error:
        raise OneCopyError(_MISSING.format(version=torch.__version__, what=error)) from error


def _address(tensor: torch.Tensor) -> int:
    if not tensor.untyped_storage().nbytes():
        return 0
    offset = int(tensor.storage_offset()) * tensor.itemsize
    # Far enough from each other for any storage.
    return (int(tensor.untyped_storage()._cdata) << 64) + offset


class _Answers(TorchDispatchMode):
    """Answers what cannot be computed without values."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.equal.default:
            return True
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))
