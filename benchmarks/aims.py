"""What onecopy is to reach beside its peers, as ratios of one run, and what it has reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import formula
from benchmarks.contenders import FLOORS
from benchmarks.report import Column

__all__ = ["COLUMNS", "broken", "reached"]

Row = dict[str, Any]
STAGES = tuple(f"onecopy-{stage}" for stage in range(4))
# Bytes may differ from the formula so much: padding, and messages that carry no values.
NEAR = 0.05
# Losses in nats: sums of other orders, and those of decoded values.
EXACT, QUANTIZED = {"fp32": 2e-3, "bf16": 5e-2}, 0.2

COLUMNS = (
    Column("name", "contender"),
    Column("what", "what"),
    Column("value", "reached", ".3f"),
    Column("aim", "at most", ".2f"),
    Column("is_reached", ""),
)


def reached(rows: Sequence[Row]) -> list[Row]:
    """Each aim whose contenders took part, with what came out."""
    by_name = {row["name"]: row for row in rows}
    return [
        {
            "name": name,
            "what": what,
            "value": value,
            "aim": aim,
            "is_reached": "yes" if value <= aim else "NO",
        }
        for name in STAGES
        if name in by_name
        for what, value, aim in _aims(name, by_name)
        if value is not None
    ]


def broken(rows: Sequence[Row], dtype: str, *, is_alone: bool) -> list[str]:
    """What makes a run worthless: other losses, other bytes than the formula's.

    Args:
        is_alone: nobody else has used the interface that was read.
    """
    found = []
    for row in rows:
        name, apart = row["name"], row.get("apart")
        bound = QUANTIZED if name in ("qwz", "qgz", "zero++") else EXACT[dtype]
        if apart is not None and not apart <= bound:
            found.append(f"{name}: losses are {apart:.1e} from those of the first, above {bound}")
        if name not in STAGES:
            continue
        ratios = {"live_of_formula": "tensor bytes at rest"}
        if is_alone:
            ratios["sent_of_least"] = "bytes on the wire"
        for key, what in ratios.items():
            ratio = row.get(key, 1.0)
            if not abs(ratio - 1) <= NEAR:
                found.append(f"{name}: {what} are {ratio:.3f} of the formula's")
    return found


def _aims(name: str, by_name: Mapping[str, Row]) -> Iterator[tuple[str, float | None, float]]:
    """What is compared, the ratio (None where a side is missing) and what it is to be at most."""
    row, stage = by_name[name], int(name[-1])
    if stage == 3:
        yield "added, of FSDP2's", row.get("added_per_fsdp2"), 0.35
        yield "added, of DeepSpeed's", row.get("added_per_deepspeed"), 0.25
        yield "step, of DDP's", row.get("total_per_ddp"), 1.0
    elif stage > 0:
        yield "added, of DDP's", row.get("added_per_ddp"), 0.40
        yield "added, of DeepSpeed's", row.get("added_per_deepspeed"), 0.30
    yield "step, of the floor", row.get("of_floor"), 1.10
    deepspeed = by_name.get(f"deepspeed-{stage}")
    if deepspeed is not None:
        yield "start, of DeepSpeed's", row["start"] / deepspeed["start"], 0.5
    for peer, other in by_name.items():
        is_peer = peer not in FLOORS and not peer.startswith(("onecopy", "q", "zero++"))
        if is_peer and formula.cut_of(peer) == stage:
            yield f"peak, of {peer}'s", row["peak"] / other["peak"], 1.0
            if "live_peak" in row and "live_peak" in other:
                yield f"tensors, of {peer}'s", row["live_peak"] / other["live_peak"], 1.0
