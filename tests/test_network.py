"""What crosses from node to node in a step is what planner and events say, and what papers say.

Four ranks on two nodes of benchmarks/network.py: the wire between the nodes carries nothing else,
and the kernel counts it in both directions. Its bytes have headers, 66 for each packet (Ethernet
14, IPv4 20, TCP with time stamps 32), which are taken off by the number of packets, also those that
only acknowledge; a veth pair passes on segments of up to 64 KiB as one packet. What remains is the
transfers, Gloo's own 40 to 80 bytes for each message, and barriers, of which two belong to the
reading: those are measured by a reading of nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from benchmarks.network import CannotMakeNodesError, Network, network
from onecopy.planner.cluster import Cluster
from onecopy.planner.estimate import DTYPE_BYTES, widths_of
from onecopy.planner.modules import units_of
from onecopy.planner.options import PlanOptions
from onecopy.planner.papers import Quantized, Zeropp
from onecopy.planner.shapes import ModelShape
from onecopy.planner.traffic import sent_by
from onecopy.policies import Quantize
from tests.conftest import Sampler
from tests.network_rank import make_model, train

pytestmark = pytest.mark.usefixtures("rank_environment")

MEGABITS = 1000  # slower than the kernel, which drops packets where the receiver gets no turn
TOLERANCE = 1.03
# Padding, and the flags that ride along with gradients: the planner has them, papers have not.
ROUNDING = 0.002


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train, and what crosses nodes in a step as the paper counts it.

    times: the parameters' bytes in the dtype of compute.
    """

    name: str
    times: Fraction | int
    stage: int | str
    precision: str = "fp32"
    quantize: Quantize | None = None
    backwards: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """Of shard."""
        return {"stage": self.stage, "precision": self.precision, "quantize": self.quantize}

    def in_paper(self, num_nodes: int) -> float:
        """Bytes that each node sends to all others together."""
        numel = sum(parameter.numel() for parameter in make_model().parameters())
        whole = self.times * numel * DTYPE_BYTES[self.precision]
        return float(whole * (num_nodes - 1) / num_nodes)

    def planned(self, ranks: tuple[int, ...], node: int) -> int:
        """The same by the planner, which also counts padding and what rides along."""
        size = ranks[0]
        options = PlanOptions(precision=self.precision)
        shape = ModelShape(name="", units=units_of(make_model(), options))
        cluster = Cluster(devices=sum(ranks), devices_per_node=size)
        widths = widths_of(options.policy, 2)
        arguments = (shape, self.stage, cluster, widths, self.backwards)
        sent = (
            sent_by(*arguments, rank=rank, quantize=self.quantize)
            for rank in range(node * size, (node + 1) * size)
        )
        return sum(one.across for one in sent)


HPZ = Zeropp(secondary=True)
INT8, INT4 = Quantized(bits=8, block=2048), Quantized(bits=4, block=2048)
ZEROPP = Zeropp(weights=INT8, gradients=INT4, secondary=True)
WAYS = [
    Way(name="ZeRO-2", times=2, stage=2),
    # One sum to a rank of each node, and its mean back to all, neither of them in hops.
    Way(name="ZeRO-0", times=4, stage=0),
    Way(name="ZeRO-3", times=Zeropp().across_nodes(2), stage=3, backwards=2),
    Way(name="hpZ", times=HPZ.across_nodes(2), stage="hpz", backwards=2),
    # Once a step, however many backwards there are: the sum and its mean, or the sum and values.
    Way(name="MiCS", times=2, stage="mics", backwards=2),
    Way(name="HFSDP", times=2, stage="hfsdp", backwards=2),
    Way(
        name="qwZ",
        times=Zeropp(weights=INT8).across_nodes(),
        stage=3,
        precision="bf16",
        quantize=Quantize(gradients=None),
    ),
    Way(
        name="qgZ",
        times=Zeropp(gradients=INT4).across_nodes(),
        stage=3,
        precision="bf16",
        quantize=Quantize(weights=None),
    ),
    Way(
        name="ZeRO++",
        times=ZEROPP.across_nodes(),
        stage="hpz",
        precision="bf16",
        quantize=Quantize(),
    ),
]


@contextmanager
def nodes_of(ranks: tuple[int, ...]) -> Iterator[Network]:
    """Nodes with so many ranks each, or no test."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(network(ranks, MEGABITS))
        except CannotMakeNodesError as reason:
            pytest.skip(f"there can be no network of namespaces: {reason}")
        yield made


def test_bytes_between_nodes(sampled: Sampler[Way]) -> None:
    """The planner's count, the events' and the kernel's: of each step, in both directions."""
    ways = sampled(WAYS, 5, always=[one for one in WAYS if one.name in ("ZeRO-3", "ZeRO++")])
    with nodes_of((2, 2)) as nodes:
        check(nodes, ways)


@pytest.mark.slow
def test_bytes_between_three_nodes() -> None:
    """Joined by a bridge. Each node sends as much to the one as to the other."""
    with nodes_of((1, 1, 1)) as nodes:
        check(nodes, [way for way in WAYS if way.stage in (2, 3)])


def test_namespaces_go_with_an_error() -> None:
    class Unexpected(Exception):
        pass

    with nodes_of((1, 1)) as nodes, pytest.raises(Unexpected), network((1, 1, 1)) as more:
        assert {*nodes.nodes, *more.nodes} <= namespaces()
        raise Unexpected
    assert not {*nodes.nodes, *more.nodes} & namespaces()


def test_what_a_killed_process_has_left_is_removed() -> None:
    with nodes_of((1, 1)):
        ended = subprocess.Popen(["true"])
        ended.wait()
        left = f"onecopy-{ended.pid}-0"
        subprocess.run(["ip", "netns", "add", left], check=True)
        with network((1, 1)) as others:
            assert set(others.nodes) <= namespaces()
            assert left not in namespaces()


def namespaces() -> set[str]:
    """Those that have names."""
    shown = subprocess.run(["ip", "-j", "netns"], check=True, capture_output=True, text=True)
    return {one["name"] for one in json.loads(shown.stdout or "[]")}


def check(nodes: Network, ways: Sequence[Way]) -> None:
    """Train in each way, and compare."""
    found = nodes.launch(train, [(way.settings, way.backwards) for way in ways])
    for number, way in enumerate(ways):
        steps = list(zip(*(steps[number] for _, steps in found), strict=True))
        planned = [way.planned(nodes.ranks, node) for node in range(len(nodes.ranks))]
        # What reaches a node is one share of what each of the others sends.
        arriving = [sum(planned) - own for own in planned]
        arriving = [num_bytes // (len(planned) - 1) for num_bytes in arriving]
        assert planned == pytest.approx([way.in_paper(len(planned))] * len(planned), rel=ROUNDING)
        for of_ranks in steps:
            counted = [0] * len(planned)
            for rank, step in enumerate(of_ranks):
                counted[nodes.node_of(rank)] += step.counted
            assert counted == planned, way.name
        for rank, (reading, _) in enumerate(found):
            here = nodes.node_of(rank)
            seen = [of_ranks[rank].seen for of_ranks in steps]
            sent = [one.sent_payload - reading.sent_payload for one in seen]
            received = [one.received_payload - reading.received_payload for one in seen]
            assert_near(way, sent, planned[here])
            assert_near(way, received, arriving[here])


def assert_near(way: Way, seen: list[int], counted: int) -> None:
    """In each step as much as was counted; TCP may repeat what a busy receiver has not confirmed.

    That can only add, so the least of some equal steps is what they send.
    """
    assert all(one >= counted for one in seen), (way.name, seen, counted)
    assert min(seen) <= TOLERANCE * counted, (way.name, seen, counted)
