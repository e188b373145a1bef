"""Compute, reduce and master dtypes of one parameter, from the user's `Precision`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from onecopy.errors import ConfigError
from onecopy.policies import Precision

__all__ = ["DTYPES", "Dtypes", "cast_floating", "check_master", "dtypes_of", "map_tensors"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes of one unit.

    compute: what forward and backward see. reduce: gradients on the wire. master: the slice that
    the optimizer updates. gradient: the mean that its owner keeps for the optimizer.
    splits_master: where parameters stay, the master is kept as what it rounds to and a remainder.
    """

    compute: torch.dtype
    reduce: torch.dtype
    master: torch.dtype
    gradient: torch.dtype
    splits_master: bool = False

    @property
    def sums(self) -> torch.dtype:
        """What gradients are summed in, over ranks and under no_sync: fp32 at least."""
        return torch.promote_types(self.master, torch.float32)


def dtypes_of(
    parameter: torch.Tensor, precision: Precision | None, *, kept: bool = False
) -> Dtypes:
    """The dtypes of a parameter; `kept` says that it stays in fp32.

    A frozen parameter has no optimizer state to protect: its master is its compute dtype.
    """
    precision = precision or Precision()
    compute = parameter.dtype
    if precision.compute is not None and compute.is_floating_point:
        compute = torch.float32 if kept else DTYPES[precision.compute]
    low = compute.is_floating_point and compute.itemsize < torch.float32.itemsize
    is_pure = precision.master == "bf16" and compute == torch.bfloat16
    master = torch.float32 if low and parameter.requires_grad and not is_pure else compute
    reduce, gradient = compute, master
    if compute.is_floating_point:
        reduce = DTYPES[precision.reduce] if precision.reduce else compute
        gradient = DTYPES[precision.gradient] if precision.gradient else master
    splits = precision.master == "bf16+16" and low and compute == torch.bfloat16
    return Dtypes(compute, reduce, master, gradient, splits and master != compute)


def check_master(precision: Precision, compute: Iterable[torch.dtype]) -> None:
    """Refuse a choice of masters that would change nothing.

    Args:
        compute: the compute dtypes of all units.

    Raises:
        ConfigError: masters are to be bf16, and nothing computes in bf16.
    """
    if precision.master in (None, "fp32") or torch.bfloat16 in compute:
        return
    raise ConfigError(
        f"precision.master={precision.master!r}, but no parameter of this model computes in bf16: "
        'say compute="bf16" too, or leave master out'
    )


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`; see `map_tensors`."""
    return map_tensors(value, lambda one: one.to(dtype) if one.is_floating_point() else one)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `function` applied to every tensor in it.

    Walks dicts, lists, tuples, named tuples and dataclasses; everything else is passed on as is.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is dict:
        # By itself: compilers do not see through the copy below.
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, dict):
        # Copied, not built anew: dict subclasses take other arguments.
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(item, function)
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            item.name: map_tensors(getattr(value, item.name), function)
            for item in fields(value)
            if item.init
        }
        return replace(value, **changes)
    return value
