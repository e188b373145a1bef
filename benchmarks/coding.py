"""What quantizing transfers costs one core: milliseconds for a MiB of values.

    python -m benchmarks.coding [--numel N] [--block B]

Beside them a copy and a cast of the same values. Coding pays where the network is slower than this:
1000 Mbit/s take 8.4 ms for a MiB, 100 Gbit/s 0.084 ms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from onecopy.comm.codec import decode, encode
from onecopy.comm.coding import Coding
from onecopy.memory import buffers
from onecopy.policies import CODES

ROUNDS = 9
MIB = 1 << 20


def milliseconds(function: Callable[[], object]) -> float:
    """The fastest of a few calls, after one that warms up."""
    function()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def measure(numel: int, dtype: torch.dtype, block: int) -> dict[str, float]:
    """Milliseconds for a MiB of values of this dtype, by what is done with them."""
    values = torch.randn(numel).to(dtype)
    mib, same = values.nbytes / MIB, torch.empty_like(values)
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    cast, total = torch.empty_like(values, dtype=other), torch.zeros(numel)
    found = {
        "copied": milliseconds(partial(same.copy_, values)),
        "cast": milliseconds(partial(cast.copy_, values)),
    }
    for code in CODES:
        coding = Coding(code, block)
        payload = torch.empty(coding.num_bytes(numel), dtype=torch.uint8)
        found[f"{code}, coded"] = milliseconds(partial(encode, values, coding, payload))
        found[f"{code}, decoded"] = milliseconds(partial(decode, payload, coding, same))
        found[f"{code}, decoded and added in fp32"] = milliseconds(
            partial(decode, payload, coding, total, add=True)
        )
    return {name: taken / mib for name, taken in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What quantizing transfers costs one core.")
    parser.add_argument("--numel", type=int, default=8 * MIB)
    parser.add_argument("--block", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # As shard does.
    buffers.reuse_freed_blocks()
    half, full = (
        measure(options.numel, dtype, options.block) for dtype in (torch.bfloat16, torch.float32)
    )
    print("| ms for a MiB of | bf16 | fp32 |\n|---|---|---|")
    for name, taken in half.items():
        print(f"| {name} | {taken:.2f} | {full[name]:.2f} |")


if __name__ == "__main__":
    main()
