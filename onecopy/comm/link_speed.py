"""`quantize="auto"`: does it pay to send codes? Measured by the transfers of training themselves.

Each hop that could be quantized is made with values as they are and with codes, in turn, by all
ranks at once, as in training: so what other ranks of the node send over the same link is in the
time, and so is coding. Of a few times the best counts, as nothing but noise makes a transfer slower
than it must be. How long it took on the slowest rank is what every rank knows, and so all ranks
decide alike.

Coding takes this rank's own time, which a transfer may not: it can go on beside computation. So
coding is timed alone, too, and must be little beside the transfer that it shortens, see COST_SHARE.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from onecopy.comm.codec import CODED_DTYPES
from onecopy.comm.groups import Group, Groups
from onecopy.comm.neighbours import Neighbours
from onecopy.comm.quantized import Quantized, Transports, transports_of
from onecopy.comm.transport import Finish, Hop, Mean, Nothing, Transport
from onecopy.comm.waits import Wait
from onecopy.policies import Quantize

__all__ = ["Decision", "HopTimes", "decide"]

# The kinds of hops.
VALUES, SUMS_INSIDE, SUMS_ACROSS = "values", "sums inside nodes", "sums across nodes"
# Of the time that values take as they are, coding may take this part. Where transfers are hidden
# behind computation, that takes longer than they do, and coding is all that is seen: then a step is
# longer by this part at most.
COST_SHARE = 0.05
# Elements that a hop moves in all. Links may let some hundred KiB through before their speed shows,
# so it is fewer only where fewer have taken LONG_ENOUGH seconds, twice.
NUMELS = (1 << 16, 1 << 18, 1 << 20)
LONG_ENOUGH = 0.05
REPEATS = 3
# One time is enough where it takes so many seconds.
TOO_LONG = 0.3
# Below those of every model, above those of the user's own messages; nothing is under way yet.
TAG = (1 << 16) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTimes:
    """One kind of hop: seconds as it is and coded, and what a rank sends for it in each way.

    coding_seconds: of coding alone, with nothing sent.
    """

    plain_seconds: float
    coded_seconds: float
    coding_seconds: float
    plain_bytes: int
    coded_bytes: int

    @property
    def pays(self) -> bool:
        """Codes save time, and cost no more than COST_SHARE of what there was."""
        costs_little = self.coding_seconds <= COST_SHARE * self.plain_seconds
        return costs_little and self.coded_seconds < self.plain_seconds

    @property
    def megabytes_per_second(self) -> float:
        """At which a rank sends values as they are, while all others do."""
        return self.plain_bytes / self.plain_seconds / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to quantize, and why.

    quantize: None where nothing pays. times: of the kinds of hops that were measured.
    """

    quantize: Quantize | None
    times: dict[str, HopTimes]

    @property
    def reason(self) -> str:
        """The choice and what was measured, in one line."""
        chosen = "None" if self.quantize is None else self.quantize.written()
        if not self.times:
            return f'quantize="auto" is {chosen}: there are no links between nodes'
        shown = "; ".join(
            f"{name} {one.megabytes_per_second:.0f} MB/s a rank, coded "
            f"{one.coded_seconds / one.plain_seconds:.2f} of the time, coding alone "
            f"{one.coding_seconds / one.plain_seconds:.2f}"
            for name, one in self.times.items()
        )
        return f'quantize="auto" is {chosen}: {shown}'


def decide(
    groups: Groups,
    device: torch.device,
    *,
    values: torch.dtype,
    gradients: torch.dtype,
    native: bool,
    neighbours: Neighbours | None = None,
) -> Decision:
    """What to quantize between these ranks, the same on all; a collective.

    Takes some tenths of a second, and a few seconds on very slow links.

    Args:
        groups: with hops across nodes.
        values, gradients: their dtypes on the wire.
        native: on the backend's own collectives.
        neighbours: the ranks with which messages go by reading.
    """
    is_coded = values in CODED_DTYPES and gradients in CODED_DTYPES
    if groups.world.process_group is None or groups.num_nodes == 1 or not is_coded:
        return Decision(quantize=None, times={})
    wish = Quantize()
    transports = transports_of(groups, native=native, quantize=wish, neighbours=neighbours)
    measure = partial(_measure, groups.world, device, transports)
    with Wait("agree", groups.world.ranks):
        found = {kind.name: measure(kind) for kind in _kinds(groups, transports, values, gradients)}
    # Nobody has sent anything where no node has two ranks.
    times = {name: one for name, one in found.items() if one.plain_bytes}
    weights = wish.weights if _pays(times, VALUES) else None
    assert wish.gradients is not None, "by default gradients are quantized"
    inside, across = (
        code if _pays(times, name) else None
        for name, code in zip((SUMS_INSIDE, SUMS_ACROSS), wish.gradients, strict=True)
    )
    pair = (inside, across) if inside or across else None
    is_any = weights is not None or pair is not None
    quantize = Quantize(weights=weights, gradients=pair) if is_any else None
    return Decision(quantize=quantize, times=times)


def _pays(times: dict[str, HopTimes], name: str) -> bool:
    return name in times and times[name].pays


class _Kind(NamedTuple):
    """One kind of hop: between whom, coded by what, and in which dtypes.

    groups: this rank's, one hop in each at the same time.
    coded_dtype: codes are made of what was not rounded before.
    """

    name: str
    groups: Sequence[Group]
    coded: Quantized
    dtype: torch.dtype
    coded_dtype: torch.dtype
    is_sum: bool


def _kinds(
    groups: Groups, transports: Transports, values: torch.dtype, gradients: torch.dtype
) -> Iterator[_Kind]:
    """Those that can be quantized, the same on all ranks; see hops.py."""
    nodes, fp32 = groups.nodes, torch.float32
    columns = [] if nodes is None else [one.group for one in nodes.columns]
    near, far = [groups.shard if nodes is None else nodes.inside], columns
    if groups.replica.size > 1:
        # The shard group is near as a whole, also where it is spread over machines.
        near, far = near + columns, [groups.replica]
    if isinstance(transports.weights, Quantized):
        spread = columns or [groups.shard]
        yield _Kind(VALUES, spread, transports.weights, values, values, is_sum=False)
    for name, between, coded, of in (
        (SUMS_INSIDE, near, transports.inside, gradients),
        (SUMS_ACROSS, far, transports.across, fp32),
    ):
        assert isinstance(coded, Quantized), "by default gradients are quantized"
        yield _Kind(name, between, coded, gradients, of, is_sum=True)


def _measure(world: Group, device: torch.device, transports: Transports, kind: _Kind) -> HopTimes:
    """The times of one kind of hop on the slowest rank, the bytes of the one that sends most."""
    slowest = partial(_highest, world, device)
    seconds = 0.0
    for numel in NUMELS:
        if seconds < LONG_ENOUGH:
            plain = _Trial(kind, transports.plain, kind.dtype, numel, device)
            coded = _Trial(kind, kind.coded, kind.coded_dtype, numel, device)
            alone = kind.coded.over(Nothing(native=False))
            coding = _Trial(kind, alone, kind.coded_dtype, numel, device)
            seconds = min(slowest(plain.run())[0] for _ in range(2))
    # Not timed: where coding is compiled, it is now.
    slowest(coded.run())
    best = [math.inf, math.inf, math.inf]
    for _ in range(REPEATS if seconds < TOO_LONG else 1):
        for place, trial in enumerate((plain, coded, coding)):
            (seconds,) = slowest(trial.run())
            best[place] = min(best[place], seconds)
    plain_bytes, coded_bytes = slowest(plain.num_bytes, coded.num_bytes)
    return HopTimes(
        plain_seconds=best[0],
        coded_seconds=best[1],
        coding_seconds=best[2],
        plain_bytes=int(plain_bytes),
        coded_bytes=int(coded_bytes),
    )


class _Trial:
    """A kind of hop in one way, with so many elements in each group."""

    def __init__(
        self,
        kind: _Kind,
        transport: Transport,
        dtype: torch.dtype,
        numel: int,
        device: torch.device,
    ) -> None:
        self._is_sum, self._transport, self._device = kind.is_sum, transport, device
        hops = [
            Hop(group, (numel // group.size,) * group.size, TAG)
            for group in kind.groups
            if group.size > 1
        ]
        self._hops = [
            (hop, torch.ones(sum(hop.numels), dtype=dtype, device=device)) for hop in hops
        ]
        self.num_bytes = sum(
            transport.num_bytes(hop, dtype)[0] * (hop.group.size - 1) for hop in hops
        )

    def run(self) -> float:
        """Seconds that it takes this rank."""
        _synchronize(self._device)
        begin = time.perf_counter()
        for finish in [self._start(hop, buffer) for hop, buffer in self._hops]:
            finish()
        _synchronize(self._device)
        return time.perf_counter() - begin

    def _start(self, hop: Hop, buffer: torch.Tensor) -> Finish:
        if self._is_sum:
            return self._transport.reduce(buffer, Mean(torch.float32, 1.0), hop)
        own = buffer.split_with_sizes(list(hop.numels))[hop.group.rank]
        return self._transport.gather(buffer, own, hop)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _highest(world: Group, device: torch.device, *numbers: float) -> list[float]:
    """Of each number the highest of all ranks, which it keeps in step."""
    highest = torch.tensor(numbers, dtype=torch.float32, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=world.process_group)
    result: list[float] = highest.tolist()
    return result
