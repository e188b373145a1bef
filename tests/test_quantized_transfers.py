"""Quantized gathers and reduces against a simulation of them, with the same codec."""

from __future__ import annotations

import itertools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from onecopy import Quantize
from onecopy.comm import quantized
from onecopy.comm.codec import decode, encode
from onecopy.comm.coding import Coding
from onecopy.comm.collectives import Collectives
from onecopy.comm.meshes import world_group
from onecopy.comm.nodes import find_nodes, make_groups
from onecopy.comm.quantized import transports_of
from onecopy.comm.transport import Division
from onecopy.events import Events
from tests.pool import Pool

BLOCK = 32
NUM_FLAGS = 3
# Of the gradients that are drawn: 4.5 standard deviations.
LARGEST = 4.5e-3


class Case(NamedTuple):
    """What is transferred, and how.

    cut: "whole" for the sums of stage 0.
    native: by the backend's own collectives, which Gloo has, too.
    """

    world: int
    node_size: int | None
    quantize: Quantize
    dtype: torch.dtype
    numels: tuple[int, ...]
    cut: str = "world"
    native: bool = False

    @property
    def division(self) -> Division:
        """Slices with flags at their ends."""
        numels = [numel + NUM_FLAGS for numel in self.numels]
        ends = list(itertools.accumulate(numels))
        return Division(numels, [(end - NUM_FLAGS, end) for end in ends])

    def gradients(self, rank: int) -> Tensor:
        """Small values, and flags that would spoil the scale of a block."""
        generator = torch.Generator().manual_seed(rank)
        division = self.division
        buffer = torch.randn(sum(division.numels), generator=generator) * 1e-3
        for first, end in division.exact:
            buffer[first:end] = torch.arange(first, end) % (2 + rank)
        return buffer.to(self.dtype)

    def values(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(self.numels[number], generator=generator).to(self.dtype)


class Found(NamedTuple):
    slice: int
    flat: Tensor
    gather_bytes: tuple[int, int]
    mean: Tensor
    reduce_bytes: tuple[int, int]
    exact: Tensor


def transfer(case: Case) -> Found:
    world = world_group()
    groups = make_groups(world, case.cut, find_nodes(world, None, case.node_size), in_hops=True)
    transports = transports_of(groups, native=case.native, quantize=case.quantize)
    ways = Collectives(groups, key="test", model_number=0, transports=transports, events=Events())
    number = groups.shard.rank
    buffer = case.gradients(world.rank)
    before = buffer.clone()
    reduce = ways.reduce(buffer, case.division, torch.float32, 0)
    mean = reduce.finish()
    assert torch.equal(buffer, before), "a reduce leaves what it sums as it was"
    flat = torch.zeros(sum(case.numels), dtype=case.dtype)
    if case.cut == "whole":
        return Found(number, flat, (0, 0), mean, (reduce.num_bytes, reduce.across_bytes), flat)
    own = case.values(number)
    gather = ways.gather_values(flat, own, case.numels, 1)
    gather.finish()
    low = sum(case.numels[:number])
    assert torch.equal(ways.as_sent(own), flat[low : low + own.numel()])
    exact = torch.zeros_like(flat)
    ways.gather(exact, own, case.numels, 2).finish()
    return Found(
        number,
        flat,
        (gather.num_bytes, gather.across_bytes),
        mean,
        (reduce.num_bytes, reduce.across_bytes),
        exact,
    )


def coded(values: Tensor, code: str | None, exact: list[tuple[int, int]] | None = None) -> Tensor:
    """What arrives, in fp32."""
    kept = values.float().clone()
    if code is None:
        return kept
    bare = values.clone()
    for first, end in exact or []:
        bare[first:end] = 0
    payload = torch.zeros(Coding(code, BLOCK).num_bytes(len(bare)), dtype=torch.uint8)
    encode(bare, Coding(code, BLOCK), payload)
    arrived = torch.empty(len(bare))
    decode(payload, Coding(code, BLOCK), arrived)
    for first, end in exact or []:
        arrived[first:end] = kept[first:end]
    return arrived


def summed(parts: list[Tensor], own: int, code: str | None, exact: list[tuple[int, int]]) -> Tensor:
    """In rank order, the owner's part as it is."""
    arrived = [
        part.float() if number == own else coded(part, code, exact)
        for number, part in enumerate(parts)
    ]
    total = arrived[0].clone()
    for one in arrived[1:]:
        total += one
    return total


def nodes_of(case: Case) -> list[list[int]]:
    size = case.node_size or case.world
    return [list(range(low, min(low + size, case.world))) for low in range(0, case.world, size)]


def simulated_mean(case: Case, number: int) -> Tensor:
    """Slice `number` of the mean, for nodes of equal size."""
    assert case.quantize.gradients is not None
    inside, across = case.quantize.gradients
    nodes, division = nodes_of(case), case.division
    # Part c of the buffer: the slices of the c-th rank of each node.
    column, node = divmod(number, len(nodes))
    low = sum(division.numels[: column * len(nodes)])
    high = sum(division.numels[: (column + 1) * len(nodes)])
    exact = division.exact_between(low, high)
    sums = [
        summed([case.gradients(rank)[low:high] for rank in ranks], column, inside, exact)
        for ranks in nodes
    ]
    if len(nodes) == 1:
        return sums[0] * (1 / case.world)
    low = sum(division.numels[column * len(nodes) : number])
    high = low + division.numels[number]
    if across is None:
        sums = [one.to(case.dtype) for one in sums]
    own = [one[low:high] for one in sums]
    exact = [(high - low - NUM_FLAGS, high - low)]
    return summed(own, node, across, exact) * (1 / case.world)


def payload_bytes(case: Case, code: str | None, numel: int, num_flags: int, itemsize: int) -> int:
    if code is None:
        return numel * itemsize
    return Coding(code, BLOCK).num_bytes(numel, num_flags * itemsize)


CODES = (None, "int8", "int4", "fp8")
CASES = [
    Case(world, node_size, Quantize(weights=weights, gradients=gradients, block=BLOCK), dtype, n)
    for world, node_size in ((2, None), (3, None), (4, 2), (4, 1), (4, None))
    for weights, gradients in itertools.product(CODES, itertools.product(CODES, CODES))
    if weights or any(gradients)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for n in ((100,) * world, (33,) * world, (70, 0, 101, 64)[:world])
]
DEFAULTS = [
    Case(world, size, Quantize(block=BLOCK), torch.bfloat16, (100,) * world, native=native)
    for world, size in ((2, None), (4, 2))
    for native in (False, True)
]


@pytest.mark.sampled("case", [*DEFAULTS, *CASES], 8, always=DEFAULTS)
def test_transfers_are_what_a_simulation_says(pool: Pool, case: Case) -> None:
    found = pool.run(case.world, transfer, case)
    values = [case.values(number) for number in range(case.world)]
    whole = torch.cat([coded(one, case.quantize.weights).to(case.dtype) for one in values])
    nodes = nodes_of(case)
    inside, across = case.quantize.gradients or (None, None)
    for one in found:
        assert torch.equal(one.flat, whole)
        assert torch.equal(one.exact, torch.cat(values))
        if case.quantize.gradients:
            assert torch.equal(one.mean, simulated_mean(case, one.slice))
        own = case.numels[one.slice]
        num_sent = (len(nodes) if len(nodes) > 1 else case.world) - 1
        sent = num_sent * payload_bytes(case, case.quantize.weights, own, 0, case.dtype.itemsize)
        column = one.slice // len(nodes)
        part = sum(case.numels[column * len(nodes) : (column + 1) * len(nodes)])
        if len(nodes) > 1:
            assert one.gather_bytes[1] == sent
            sent += part * case.dtype.itemsize * (len(nodes[0]) - 1)
        assert one.gather_bytes[0] == sent
        check_reduce_bytes(case, one, inside, across)


def check_reduce_bytes(case: Case, one: Found, inside: str | None, across: str | None) -> None:
    nodes, strides = nodes_of(case), case.division.numels
    column, node = divmod(one.slice, len(nodes))
    parts = [
        strides[number * len(nodes) : (number + 1) * len(nodes)] for number in range(len(nodes[0]))
    ]
    sent = sum(
        payload_bytes(case, inside, sum(part), NUM_FLAGS * len(nodes), case.dtype.itemsize)
        for number, part in enumerate(parts)
        if number != column
    )
    leaving = sum(
        payload_bytes(case, across, numel, NUM_FLAGS, 4 if across else case.dtype.itemsize)
        for number, numel in enumerate(parts[column])
        if number != node
    )
    assert one.reduce_bytes == (sent + leaving, leaving)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 2, Quantize(block=BLOCK), torch.bfloat16, (100, 40, 77)),
        Case(4, 3, Quantize(gradients=("int4", "int8"), block=BLOCK), torch.float32, (50,) * 4),
        Case(2, None, Quantize(block=BLOCK), torch.bfloat16, (101,), "whole"),
        Case(4, 2, Quantize(block=BLOCK), torch.float16, (101,), "whole"),
        Case(4, 2, Quantize(block=BLOCK), torch.float32, (101, 99), "node"),
        # One slice is far longer than the others: parts to sum are cut anywhere.
        Case(4, None, Quantize(block=BLOCK), torch.float32, (8, 8, 200, 8)),
    ],
)
def test_sums_stay_within_their_bound(pool: Pool, case: Case) -> None:
    """Whatever the hops: each value is wrong by half a step for each part that was coded."""
    found = pool.run(case.world, transfer, case)
    expected = sum(case.gradients(rank).double() for rank in range(case.world)) / case.world
    starts = [0, *itertools.accumulate(case.division.numels)]
    for one in found:
        low, high = starts[one.slice], starts[one.slice + 1]
        slice_of_it = expected[low:high]
        flags = slice_of_it[-NUM_FLAGS:]
        precision = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}.get(case.dtype, 2.0**-20)
        assert torch.allclose(one.mean[-NUM_FLAGS:].double(), flags, rtol=precision, atol=0)
        # Half a step of the largest part for each, inside, across, and as much for what follows.
        steps = {"int8": 1 / 127, "int4": 1 / 7}
        assert case.quantize.gradients is not None
        bound = LARGEST * sum(steps[code or ""] for code in case.quantize.gradients)
        error = (one.mean[:-NUM_FLAGS].double() - slice_of_it[:-NUM_FLAGS]).abs().max()
        assert float(error) <= bound, (float(error), bound)
    same = {one.slice: one.mean for one in found}
    assert all(torch.equal(one.mean, same[one.slice]) for one in found), "replicas differ"


def overflow(case: Case) -> bool:
    world = world_group()
    groups = make_groups(world, "world", find_nodes(world, None, case.node_size), in_hops=True)
    transports = transports_of(groups, native=False, quantize=case.quantize)
    ways = Collectives(groups, key="test", model_number=0, transports=transports, events=Events())
    buffer = case.gradients(world.rank)
    if world.rank == 1:
        buffer[5] = float("inf")
    mean = ways.reduce(buffer, case.division, torch.float32, 0).finish()
    assert bool(torch.isfinite(mean[-NUM_FLAGS:]).all())
    return bool(torch.isfinite(mean).all())


@pytest.mark.parametrize(("world", "node_size"), [(2, None), (4, 2)])
def test_an_overflow_reaches_the_owner(pool: Pool, world: int, node_size: int | None) -> None:
    case = Case(world, node_size, Quantize(block=BLOCK), torch.float16, (100,) * world)
    assert pool.run(world, overflow, case).count(False) == 1


def sum_often(case: Case, times: int) -> Tensor:
    """The mean over many reduces of the same gradients; one overflow is between them."""
    world = world_group()
    groups = make_groups(world, "world", find_nodes(world, None, case.node_size), in_hops=True)
    transports = transports_of(groups, native=False, quantize=case.quantize)
    ways = Collectives(groups, key="test", model_number=0, transports=transports, events=Events())
    total = torch.zeros(case.division.numels[groups.shard.rank])
    for number in range(times):
        buffer = case.gradients(world.rank)
        if number == 3:
            buffer[7] = float("inf")
        # Each window has an error of its own.
        with mock.patch.object(quantized, "WINDOW_NUMEL", 2 * BLOCK):
            mean = ways.reduce(buffer, case.division, torch.float32, 0).finish()
        if number != 3:
            total += mean / (times - 1)
    return total


@pytest.mark.parametrize(("world", "node_size"), [(2, None), (4, 2)])
def test_error_feedback_makes_up_for_what_was_lost(
    pool: Pool, world: int, node_size: int | None
) -> None:
    """The same gradients come out right in the mean: their error does not add up."""
    times, worst = 60, {}
    for error_feedback in (False, True):
        quantize = Quantize(
            weights=None, gradients=("int4", "int4"), block=BLOCK, error_feedback=error_feedback
        )
        case = Case(world, node_size, quantize, torch.float32, (100,) * world)
        expected = sum(case.gradients(rank) for rank in range(world)) / world
        assert isinstance(expected, Tensor)
        slices = expected.split_with_sizes(list(case.division.numels))
        order = {0: 0, 1: 2, 2: 1, 3: 3} if node_size else {0: 0, 1: 1}
        worst[error_feedback] = max(
            float((mean - slices[order[rank]])[:-NUM_FLAGS].abs().max())
            for rank, mean in enumerate(pool.run(world, sum_often, case, times))
        )
    assert worst[True] < worst[False] / 4
