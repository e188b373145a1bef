"""Block quantization of 1-D tensors: values to payloads (see coding.py) and back.

Symmetric: a block's scale is its largest magnitude divided by the largest code, and a code is the
value in units of the scale, rounded to the nearest. So an int8 or int4 value comes back with an
error of at most half a scale (and what its own dtype rounds). Whatever the block:

- All zeros come back as zeros. Scales have a floor, the smallest normal fp32 number.
- A block with an infinity or a NaN comes back with no finite value: overflow in fp16 is still seen.
- Values that came back once come back as they are the next time: scales have 16 significant bits,
  so that the largest value of a block is its code times its scale exactly, and finds it again.

On the processor this is done in pieces that fit its cache, without a compiler. On an accelerator
the same operations are fused by torch.compile, where that finds a compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onecopy.comm.coding import SCALE_BYTES, Coding

__all__ = ["CODED_DTYPES", "decode", "encode"]

# What can be coded; values of other dtypes travel as they are.
CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Values that are coded at a time on the processor: so many that the calls themselves cost little,
# and so few that fp32 copies of them, 1 MiB each, stay in its cache.
PIECE_NUMEL = 1 << 18
# The largest code.
LEVELS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# fp8 codes are read as fp16 numbers, whose exponents count from another zero.
FP8_AS_FP16 = 2.0**8

logger = logging.getLogger(__name__)


def encode(values: torch.Tensor, coding: Coding, payload: torch.Tensor) -> None:
    """Write the scales and codes of `values` into `payload`; bytes between them stay.

    Args:
        values: (n,) of one of CODED_DTYPES.
        payload: (coding.num_bytes(n, ...),) uint8, starting at a multiple of 4 bytes.
    """
    scales, codes = _parts(payload, values.numel(), coding)
    for piece in _pieces(values, coding):
        quantize = _best(_quantize, values, piece, coding)
        scale, code = quantize(values[piece.values].view(piece.shape), coding.code)
        scales[piece.blocks].copy_(scale)
        codes[piece.codes].copy_(code.view(torch.uint8).view(-1))


def decode(
    payload: torch.Tensor, coding: Coding, values: torch.Tensor, *, add: bool = False
) -> None:
    """The inverse of `encode`: write the values of `payload` into `values`.

    Args:
        values: (n,) of one of CODED_DTYPES, into which the fp32 values are rounded.
        add: add them to what is there.
    """
    scales, codes = _parts(payload, values.numel(), coding)
    for piece in _pieces(values, coding):
        dequantize = _best(_dequantize, values, piece, coding)
        rows, width = piece.shape
        code = codes[piece.codes].view(rows, -1)
        decoded = dequantize(scales[piece.blocks], code, coding.code)
        target = values[piece.values].view(rows, width)
        # An odd number of int4 codes has one more in its last byte.
        decoded = decoded[:, :width]
        if add:
            target.add_(decoded)
        else:
            target.copy_(decoded)


class _Piece:
    """Some blocks of a range that are coded together: rows of equal width.

    values, blocks, codes: where they lie in the range, among its scales and its codes.
    """

    __slots__ = ("blocks", "codes", "shape", "values")

    def __init__(self, first: int, rows: int, width: int, coding: Coding) -> None:
        low, numel = first * coding.block, rows * width
        self.shape = (rows, width)
        self.values = slice(low, low + numel)
        self.blocks = slice(first, first + rows)
        low = coding.code_bytes(low)
        self.codes = slice(low, low + coding.code_bytes(numel))


def _pieces(values: torch.Tensor, coding: Coding) -> Iterator[_Piece]:
    """Whole blocks, as many at a time as fit the cache, then the short one, if there is one."""
    num_whole, rest = divmod(values.numel(), coding.block)
    at_once = max(1, PIECE_NUMEL // coding.block)
    if _is_on_accelerator(values):
        at_once = max(1, num_whole)
    for first in range(0, num_whole, at_once):
        yield _Piece(first, min(at_once, num_whole - first), coding.block, coding)
    if rest:
        yield _Piece(num_whole, 1, rest, coding)


def _parts(payload: torch.Tensor, numel: int, coding: Coding) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload's scales, as fp32, at its beginning, and its codes, at its end."""
    scales = payload[: SCALE_BYTES * coding.num_blocks(numel)].view(torch.float32)
    return scales, payload[payload.numel() - coding.code_bytes(numel) :]


def _is_on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


# One piece --------------------------------------------------------------------------------------


def _quantize(values: torch.Tensor, code: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows,) fp32 scales and the rows' codes."""
    values = values.float()
    # Twice through the cache is faster than torch's aminmax or a norm.
    largest = torch.maximum(values.amax(1), values.amin(1).neg_())
    scale = largest * (1.0 / LEVELS[code])
    # To 16 significant bits.
    scale.view(torch.int32).add_(0x80).bitwise_and_(~0xFF)
    # What is not finite stays so: carried into the sign, a NaN's bits would become a zero.
    scale = scale.clamp_min_(SMALLEST_SCALE).add_(largest.mul_(0.0))
    units = values * scale.reciprocal().unsqueeze(1)
    if code == "fp8":
        return scale, units.to(torch.float8_e4m3fn)
    units.round_()
    if code == "int8":
        return scale, units.to(torch.int8)
    # Codes of the first half of a block and of the second share bytes, so that no step goes
    # through memory by twos. At most 7 each, both can be had from 16 times the one plus the other.
    middle = (units.size(1) + 1) // 2
    first, second = units[:, :middle], units[:, middle:]
    if first.size(1) > second.size(1):
        second = torch.nn.functional.pad(second, (0, 1))
    return scale, torch.add(first, second, alpha=16.0).to(torch.int8)


def _dequantize(scales: torch.Tensor, codes: torch.Tensor, code: str) -> torch.Tensor:
    """(rows, width) fp32 values; int4 gives one more where the width is odd."""
    scales = scales.unsqueeze(1)
    signed = codes.view(torch.int8)
    if code == "fp8":
        # By the bits: torch's own conversion takes eight times as long on a processor.
        bits = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return bits.view(torch.float16).float().mul_(scales * FP8_AS_FP16)
    units = signed.float()
    if code == "int4":
        second = (units * (1.0 / 16.0)).round_()
        units = torch.cat((units.sub_(second, alpha=16.0), second), dim=1)
    return units.mul_(scales)


class _Fused:
    """A function that torch.compile has been asked to fuse, or itself where that does not work."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            return self._plain(*args)
        try:
            return self._compiled(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Whatever a missing or broken compiler raises: the values are the same without it.
            logger.info("quantization is not fused, torch.compile failed: %s", error)
            self._compiled = None
            return self._plain(*args)


_FUSED: dict[Callable[..., Any], _Fused] = {}


def _best(
    function: Callable[..., Any], values: torch.Tensor, piece: _Piece, coding: Coding
) -> Callable[..., Any]:
    """The function, or a fused one: made when an accelerator first wants it.

    A last short block is not worth one: it would be compiled anew for each kind of length.
    """
    if not _is_on_accelerator(values) or piece.shape[1] < coding.block:
        return function
    if function not in _FUSED:
        _FUSED[function] = _Fused(function)
    return _FUSED[function]
