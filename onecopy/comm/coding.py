"""How block quantization writes values down, and how many bytes that takes: closed formulas.

Free of torch, so that the planner counts with the formula that the wire follows. The codec itself
is in codec.py, what sends payloads in quantized.py.

A payload is    [ scales | exact values | padding | codes ]    of one range of values:
    scales  fp32, one for each block
    exact   values that must not be rounded (flags), as they are
    codes   1 byte for each value, or for two of them ("int4")
and is a multiple of ALIGNMENT_BYTES long, so that payloads may follow each other in one buffer.

Scales are fp32: with 2048 values in a block they are 0.2 % of the int8 codes, 0.1 % more than in 16
bits. A scale of fp16 would overflow or vanish where bf16 and fp32 values do not, and one of bf16
would have to be rounded up for the largest value to have a code, by up to 1 %, and the bound on
errors with it.

Sources: qwZ and qgZ of ZeRO++ (Wang et al. 2023, sections 3.1 and 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALIGNMENT_BYTES", "BITS", "SCALE_BYTES", "Coding"]

# Bits of one value, in each of the codes of `Quantize`. fp8 is e4m3: 4 bits of exponent, 3 of
# mantissa.
BITS = {"int8": 8, "int4": 4, "fp8": 8}
SCALE_BYTES = 4
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Coding:
    """One way to quantize.

    code: one of BITS.
    block: values with a scale of their own, an even number; the last block of a range may be short.
    """

    code: str
    block: int

    def num_blocks(self, numel: int) -> int:
        """Blocks, and scales, of a range of so many values."""
        return -(-numel // self.block)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of so many values."""
        return -(-numel * BITS[self.code] // 8)

    def num_bytes(self, numel: int, exact_bytes: int = 0) -> int:
        """Bytes of the payload of a range of so many values.

        Args:
            exact_bytes: of the values among them that travel as they are; they have codes, too.
        """
        num_bytes = SCALE_BYTES * self.num_blocks(numel) + exact_bytes + self.code_bytes(numel)
        return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
