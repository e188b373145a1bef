"""Dtypes of parameters, and casting of nested inputs."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from onecopy.config import Precision
from onecopy.core.precision import Dtypes, cast_floating, dtypes_of

FP32, BF16, FP64, INT = torch.float32, torch.bfloat16, torch.float64, torch.int64


@pytest.mark.parametrize(
    ("own", "trainable", "precision", "expected"),
    [
        (FP32, True, None, Dtypes(FP32, FP32, FP32)),
        (FP64, True, None, Dtypes(FP64, FP64, FP64)),
        (BF16, True, None, Dtypes(BF16, BF16, FP32)),
        (BF16, False, None, Dtypes(BF16, BF16, BF16)),
        (FP32, True, Precision(compute="bf16"), Dtypes(BF16, BF16, FP32)),
        (FP32, True, Precision(compute="bf16", reduce="fp32"), Dtypes(BF16, FP32, FP32)),
        (INT, False, Precision(compute="bf16"), Dtypes(INT, INT, INT)),
    ],
)
def test_dtypes(
    own: torch.dtype, trainable: bool, precision: Precision | None, expected: Dtypes
) -> None:
    """Masters are fp32 wherever a trainable parameter computes lower."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=own), requires_grad=trainable)
    assert dtypes_of(parameter, "Linear", precision) == expected


def test_named_modules_stay_in_fp32() -> None:
    """By class name, whatever the compute dtype."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    precision = Precision(compute="bf16")
    assert dtypes_of(parameter, "BatchNorm2d", precision).compute == FP32


@dataclass
class Pair:
    """An input of the user's."""

    one: torch.Tensor
    other: str


Point = namedtuple("Point", "x y")


class Named(dict):  # type: ignore[type-arg]
    """A dict that is built from other arguments, as Hugging Face's outputs are."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def test_nested_inputs_are_cast() -> None:
    """Containers keep their types; integers, strings and None pass."""
    x, n = torch.ones(2), torch.ones(2, dtype=INT)
    named = Named("me")
    named["x"] = x
    value = [
        {"a": x, "n": n},
        (x, None),
        Point(x, 1),
        Pair(x, "s"),
        defaultdict(list, k=[x]),
        named,
    ]
    cast = cast_floating(value, BF16)
    assert cast[0]["a"].dtype == BF16
    assert cast[0]["n"] is n
    assert (cast[1][0].dtype, cast[1][1]) == (BF16, None)
    assert (type(cast[2]), cast[2].x.dtype, cast[2].y) == (Point, BF16, 1)
    assert (cast[3].one.dtype, cast[3].other) == (BF16, "s")
    assert (type(cast[4]), cast[4]["k"][0].dtype) == (defaultdict, BF16)
    assert (type(cast[5]), cast[5].name, cast[5]["x"].dtype) == (Named, "me", BF16)
    assert x.dtype == value[0]["a"].dtype == FP32, "the caller's own values are left alone"
