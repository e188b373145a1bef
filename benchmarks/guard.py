"""What a step costs, in numbers that are the same on every machine: a guard against growing it.

    python -m benchmarks.guard            # compare with what is stored; exit code 1 where it grew
    python -m benchmarks.guard --accept   # store what there is now

Two ranks train models of tiny blocks at each stage. Counted are, for each unit of 12 parameters and
for the rest of a step: calls of our own Python functions, operations that torch dispatches, and
messages. No time is in them. Two models, of 4 and of 12 blocks, tell what a unit costs from what a
step costs in any case. Of several steps the least counts, since waiting can only add.

The numbers lie beside this file, in guard.json, function by function: so a change of them is seen
in a review, and a failure names what grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import onecopy
from benchmarks.python_cost import BATCH, WIDTH, Block

STORED = Path(__file__).with_suffix(".json")
PACKAGE = str(Path(onecopy.__file__).parent) + os.sep
# What shard is called with; None: it is not, for what the model itself does.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "stage 3, bf16": {"stage": 3, "precision": "bf16"},
    "stage 3, offload": {"stage": 3, "offload": "cpu"},
}
NPROC, FEW, MANY = 2, 4, 12
# The first steps record the schedule.
WARM_STEPS, STEPS = 3, 3
# Python 3.12 and later make no frames for them.
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")
MESSAGES = ("send", "recv", "recv_anysource", "allreduce", "allgather", "broadcast", "barrier")
# So much of a sum may be added before it counts as growth.
TOLERANCE = 0.01
MOST_NAMED = 15

# For each kind of thing, how often each is done: "core/unit.py gather" among the calls.
Counts = dict[str, dict[str, float]]
KINDS = {"calls": "calls of our functions", "operations": "operations", "messages": "messages"}


def measure() -> dict[str, dict[str, Counts]]:
    """By variant, for "unit" and for "step", what rank 0 did; in a rank process."""
    dist.init_process_group("gloo")
    found = {}
    for name, settings in VARIANTS.items():
        few, many = (_count_steps(blocks, settings) for blocks in (FEW, MANY))
        found[name] = _divided(few, many)
    dist.destroy_process_group()
    return found


def _count_steps(blocks: int, settings: dict[str, Any] | None) -> dict[str, Counter[str]]:
    """What a step of a model of so many blocks does."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if settings is not None:
        # How often neighbours look depends on when the other has come.
        onecopy.shard(model, optimizer, neighbours="send", **settings)
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_STEPS):
        step()
    # What is no longer reachable is finalised now, and not while something is counted.
    gc.collect()
    gc.disable()
    found = _least([_count_calls(step) for _ in range(STEPS)])
    found |= _least([_count_operations(step) for _ in range(STEPS)])
    gc.enable()
    if settings is not None:
        onecopy.unshard(model)
    return found


class Calls:
    """Between `start` and `stop`: which of our functions are called in this thread, how often.

    calls: by file and name. messages: by what a process group is asked for.

    Args:
        without: how the paths of files begin that do not count, nor what they call.
    """

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self.calls: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._without = tuple(f"{PACKAGE}{path}" for path in without)
        self._depth = 0

    def start(self) -> None:
        """Count from now on."""
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Count no more."""
        sys.setprofile(None)

    def _note(self, frame: FrameType, what: str, argument: Any) -> None:
        code = frame.f_code
        if self._without and code.co_filename.startswith(self._without):
            self._depth += {"call": 1, "return": -1}.get(what, 0)
        if self._depth > 0 or not code.co_filename.startswith(PACKAGE):
            return
        if what == "call" and code.co_name not in INLINED:
            file = code.co_filename.removeprefix(PACKAGE).replace(os.sep, "/")
            self.calls[f"{file} {code.co_qualname}"] += 1
        elif what == "c_call" and argument.__name__ in MESSAGES:
            self.messages[argument.__name__] += 1


def _count_calls(step: Callable[[], None]) -> dict[str, Counter[str]]:
    counted = Calls()
    dist.barrier()
    counted.start()
    try:
        step()
    finally:
        counted.stop()
    return {"calls": counted.calls, "messages": counted.messages}


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _count_operations(step: Callable[[], None]) -> dict[str, Counter[str]]:
    with _Operations() as operations:
        step()
    return {"operations": operations.counts}


def _least(steps: list[dict[str, Counter[str]]]) -> dict[str, Counter[str]]:
    """Of each kind, the step in which least was done."""
    return {kind: min((one[kind] for one in steps), key=Counter.total) for kind in steps[0]}


def _divided(
    few: Mapping[str, Counter[str]], many: Mapping[str, Counter[str]]
) -> dict[str, Counts]:
    """What each further unit does, and what is left for the step."""
    unit: Counts = {}
    step: Counts = {}
    for kind in KINDS:
        names = sorted(few[kind] | many[kind])
        slopes = {name: (many[kind][name] - few[kind][name]) / (MANY - FEW) for name in names}
        rest = {name: few[kind][name] - FEW * slope for name, slope in slopes.items()}
        unit[kind], step[kind] = (
            {name: round(value, 3) for name, value in of.items() if round(value, 3)}
            for of in (slopes, rest)
        )
    return {"unit": unit, "step": step}


# Comparison -----------------------------------------------------------------------------------


def grown(stored: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Sentences about each sum that is larger than what is stored, and what has made it so."""
    lines = []
    for variant, per, kind in _sums(found):
        now = found[variant][per][kind]
        before = stored.get(variant, {}).get(per, {}).get(kind, {})
        total, least = sum(now.values()), sum(before.values())
        if total <= least + max(0.5, TOLERANCE * abs(least)):
            continue
        lines.append(f"{variant}: {total:g} {KINDS[kind]} per {per}, stored are {least:g}")
        more = {name: count - before.get(name, 0) for name, count in now.items()}
        names = sorted((name for name in more if more[name] > 0), key=more.__getitem__)
        lines += [f"    +{more[name]:g} {name}" for name in names[: -MOST_NAMED - 1 : -1]]
    return lines


def fallen(stored: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether some sum is lower by so much that it is worth storing."""
    for variant, per, kind in _sums(found):
        total = sum(found[variant][per][kind].values())
        least = sum(stored.get(variant, {}).get(per, {}).get(kind, {}).values())
        if total < least - max(0.5, TOLERANCE * abs(least)):
            return True
    return False


def _sums(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for variant, of in found.items():
        for per in of:
            for kind in KINDS:
                yield variant, per, kind


def main(arguments: list[str] | None = None) -> int:
    """Count, compare, and return 1 where something grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--accept", action="store_true", help="store what there is now")
    parser.add_argument("--stored", type=Path, default=STORED, help="a file of other numbers")
    options = parser.parse_args(arguments)
    found = onecopy.launch(measure, NPROC)[0]
    _show(found)
    if options.accept:
        options.stored.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"\nstored in {options.stored}: look at what has changed with git diff")
        return 0
    stored = json.loads(options.stored.read_text())
    lines = grown(stored, found)
    if lines:
        accept = "if that is meant, store it: python -m benchmarks.guard --accept"
        print("\na step does more than before:", *lines, accept, sep="\n")
        return 1
    if fallen(stored, found):
        print("\nless than what is stored: python -m benchmarks.guard --accept holds it there")
    return 0


def _show(found: Mapping[str, Any]) -> None:
    sums = [(per, kind) for per in ("unit", "step") for kind in KINDS]
    print(f"{'':20}" + "".join(f"{f'{kind} / {per}':>20}" for per, kind in sums))
    for variant, of in found.items():
        totals = "".join(f"{sum(of[per][kind].values()):20g}" for per, kind in sums)
        print(f"{variant:20}{totals}")


if __name__ == "__main__":
    sys.exit(main())
