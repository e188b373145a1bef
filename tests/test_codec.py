"""Block quantization: bounds, hard values, sizes, and payloads that survive being coded again."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onecopy.comm import codec
from onecopy.comm.codec import CODED_DTYPES, decode, encode
from onecopy.comm.coding import ALIGNMENT_BYTES, BITS, SCALE_BYTES, Coding
from onecopy.policies import CODES

LEVELS = {"int8": 127, "int4": 7, "fp8": 448}
SIZES = (0, 1, 2, 7, 63, 64, 65, 128, 1000, 1027)


def payload_of(values: torch.Tensor, coding: Coding) -> torch.Tensor:
    payload = torch.zeros(coding.num_bytes(values.numel()), dtype=torch.uint8)
    encode(values, coding, payload)
    return payload


def there_and_back(
    values: torch.Tensor, coding: Coding, dtype: torch.dtype | None = None
) -> torch.Tensor:
    decoded = torch.empty_like(values, dtype=dtype or values.dtype)
    decode(payload_of(values, coding), coding, decoded)
    return decoded


def half_steps(values: torch.Tensor, coding: Coding) -> torch.Tensor:
    """The bound for each value, in float64: half of its block's scale; in fp8 of its step."""
    bounds = []
    for block in values.double().split(coding.block):
        scale = max(float(block.abs().max()) / LEVELS[coding.code], 2.0**-126)
        units = torch.ones_like(block)
        if coding.code == "fp8":
            exponents = (block.abs() / scale).clamp(min=2.0**-6).log2().floor()
            units = (exponents - 3).exp2()
        bounds.append(scale / 2 * units)
    # fp32 computes the quotients: a value in the middle of two codes may be rounded to either.
    return torch.cat(bounds) * (1 + 2.0**-12)


def half_rounding(values: torch.Tensor) -> torch.Tensor:
    """What rounding to the dtype of `values` may add, in float64."""
    info = torch.finfo(values.dtype)
    magnitudes = values.double().abs()
    return (magnitudes * info.eps).clamp(min=info.smallest_normal * info.eps)


def random_values(numel: int, dtype: torch.dtype, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    info = torch.finfo(dtype)
    match kind:
        case "wide":
            values = values * torch.randn(numel, generator=generator).mul(4).exp2()
            values = values.clamp(-info.max, info.max)
        case "subnormal":
            values = values.double() * info.smallest_normal / 8
        case "huge":
            values = values.double().clamp(-3, 3) / 3 * info.max
        case "smallest":
            values = values.sign().double() * info.smallest_normal * info.eps
        case "equal":
            values = torch.full((numel,), 0.3)
    return values.to(dtype)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", CODED_DTYPES)
def test_errors_are_at_most_half_a_step(code: str, dtype: torch.dtype) -> None:
    kinds = ("normal", "wide", "subnormal", "huge", "smallest", "equal")
    for number, (numel, kind, block) in enumerate(itertools.product(SIZES, kinds, (64, 2048))):
        coding = Coding(code, block)
        values = random_values(numel, dtype, kind, number)
        if not numel:
            assert there_and_back(values, coding).numel() == 0
            continue
        error = (there_and_back(values, coding, torch.float32).double() - values.double()).abs()
        bound = half_steps(values, coding)
        assert bool((error <= bound).all()), (numel, kind, block, (error / bound).max())
        error = (there_and_back(values, coding).double() - values.double()).abs()
        assert bool((error <= bound + half_rounding(values)).all()), (numel, kind, block)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", CODED_DTYPES)
def test_what_was_decoded_is_coded_without_loss(code: str, dtype: torch.dtype) -> None:
    for number, kind in enumerate(("normal", "wide", "subnormal", "huge", "smallest", "equal")):
        values = random_values(1027, dtype, kind, number)
        coding = Coding(code, 64)
        once = there_and_back(values, coding)
        # The dtype's own steps may be longer than those of fp8.
        if (code, dtype, kind) != ("fp8", torch.float16, "subnormal"):
            assert torch.equal(payload_of(once, coding), payload_of(values, coding)), kind
        assert torch.equal(there_and_back(once, coding), once), kind


@pytest.mark.parametrize("code", CODES)
def test_zeros_and_lossless_values_stay(code: str) -> None:
    coding = Coding(code, 64)
    assert torch.equal(there_and_back(torch.zeros(200), coding), torch.zeros(200))
    # Multiples of a power of two up to the largest code of int4, which all codes have.
    values = torch.arange(-7, 8).repeat(20)[:299] * 2.0**-9
    if code == "int4":
        for dtype in CODED_DTYPES:
            assert torch.equal(there_and_back(values.to(dtype), coding), values.to(dtype))
    values = torch.tensor([LEVELS[code], -1.0, 0.0, 2.0, -4.0] * 25)
    assert torch.equal(there_and_back(values, coding), values)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", CODED_DTYPES)
def test_what_is_not_finite_stays_so(code: str, dtype: torch.dtype) -> None:
    coding = Coding(code, 16)
    for bad, place in itertools.product((math.inf, -math.inf, math.nan), (0, 15, 16, 37, 40)):
        values = torch.randn(41, generator=torch.Generator().manual_seed(place)).to(dtype)
        values[place] = bad
        decoded = there_and_back(values, coding)
        for number, block in enumerate(decoded.split(16)):
            finite = torch.isfinite(block)
            assert bool(finite.any()) != (number == place // 16), (bad, place)
            assert bool(finite.all()) != (number == place // 16), (bad, place)
    # Each NaN there is: those with all bits set come from accelerators.
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    for nan in bits.view(torch.float32):
        values = torch.ones(16)
        values[3] = nan
        assert not bool(torch.isfinite(there_and_back(values, coding)).any())


@pytest.mark.parametrize("code", CODES)
def test_pieces_of_the_cache_do_not_show(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coding, values = Coding(code, 64), torch.randn(1027)
    whole = payload_of(values, coding)
    monkeypatch.setattr(codec, "PIECE_NUMEL", 128)
    assert torch.equal(payload_of(values, coding), whole)
    total = torch.ones(1027)
    decode(whole, coding, total, add=True)
    assert torch.equal(total, there_and_back(values, coding) + 1)


def test_room_between_scales_and_codes_stays() -> None:
    coding, values = Coding("int4", 64), torch.randn(1027)
    payload = torch.full((coding.num_bytes(1027, 24),), 77, dtype=torch.uint8)
    encode(values, coding, payload)
    first = SCALE_BYTES * coding.num_blocks(1027)
    assert payload[first : first + 24].tolist() == [77] * 24
    decoded = torch.empty(1027)
    decode(payload, coding, decoded)
    assert torch.equal(decoded, there_and_back(values, coding))


def test_bytes_are_the_formula() -> None:
    assert tuple(BITS) == CODES
    for (code, bits), block in itertools.product(BITS.items(), (16, 64, 2048)):
        for numel in SIZES:
            coding = Coding(code, block)
            exact = math.ceil(numel / block) * SCALE_BYTES + math.ceil(numel * bits / 8)
            num_bytes = coding.num_bytes(numel, 6)
            assert num_bytes % ALIGNMENT_BYTES == 0
            assert exact + 6 <= num_bytes < exact + 6 + ALIGNMENT_BYTES
    # The factors of ZeRO++ for bf16 values.
    for code, block, factor in (("int8", 2048, 0.50098), ("int4", 128, 0.2656)):
        assert Coding(code, block).num_bytes(1 << 20) / (2 << 20) == pytest.approx(factor, 1e-3)


def test_without_a_compiler_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def compiles_nothing(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise RuntimeError("no C compiler")

        return fail

    values = torch.randn(4, 64)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "onecopy"):
        patch.setattr(torch, "compile", compiles_nothing)
        fused = codec._Fused(codec._quantize)
        for _ in range(2):
            for one, other in zip(
                fused(values, "int8"), codec._quantize(values, "int8"), strict=True
            ):
                assert torch.equal(one, other)
    assert [record.getMessage() for record in caplog.records].count(
        "quantization is not fused, torch.compile failed: no C compiler"
    ) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("code", CODES)
def test_fused_is_the_same(code: str) -> None:
    """As an accelerator would have it; here torch.compile needs a C++ compiler."""
    values = torch.randn(5, 66)
    try:
        fused = torch.compile(codec._quantize, dynamic=True)(values, code)
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {error}")
    scales, codes = codec._quantize(values, code)
    assert torch.equal(fused[0], scales)
    assert torch.equal(fused[1].view(torch.uint8), codes.view(torch.uint8))
    decoded = torch.compile(codec._dequantize, dynamic=True)(scales, codes, code)
    assert torch.equal(decoded, codec._dequantize(scales, codes, code))
