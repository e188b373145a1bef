"""What crosses from node to node in a step is what the events say, and what the paper says.

Four ranks on two nodes of benchmarks/network.py: the wire between the nodes carries nothing else,
and the kernel counts it in both directions. Its bytes have headers, 66 for each packet (Ethernet
14, IPv4 20, TCP with time stamps 32), which are taken off by the number of packets, also those that
only acknowledge; a veth pair passes on segments of up to 64 KiB as one packet. What remains is the
transfers, Gloo's own 40 to 80 bytes for each message, and barriers, of which two belong to the
reading: those are measured by a reading of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from benchmarks.network import CannotMakeNodesError, Network, network
from onecopy.config import Quantize
from onecopy.planner.papers import Quantized, Zeropp
from tests.network_rank import NUM_PARAMETERS, train
from tests.pool import RANK_ENVIRONMENT

RANKS = (2, 2)
MEGABITS = 1000  # slower than the kernel, which drops packets where the receiver gets no turn
TOLERANCE = 1.03
# Padding and the flags that ride along with gradients.
ROUNDING = 0.002


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train, and what crosses nodes in a step as the paper counts it.

    times: the parameters' bytes in the dtype of compute.
    """

    name: str
    times: Fraction | int
    settings: dict[str, Any]
    backwards: int = 1

    @property
    def expected(self) -> float:
        """Bytes that each of the two nodes sends: it has one half of everything."""
        itemsize = 2 if self.settings.get("precision") == "bf16" else 4
        return float(self.times * NUM_PARAMETERS * itemsize / 2)


HPZ = Zeropp(secondary=True)
INT8, INT4 = Quantized(bits=8, block=2048), Quantized(bits=4, block=2048)
WAYS = [
    Way(name="ZeRO-3", times=Zeropp().across_nodes(), settings={"stage": 3}),
    Way(
        name="ZeRO-3 in bf16, twice",
        times=Zeropp().across_nodes(2),
        settings={"stage": 3, "precision": "bf16"},
        backwards=2,
    ),
    Way(name="ZeRO-2", times=2, settings={"stage": 2}),
    # One sum to a rank of each node, and its mean back to all, neither of them in hops.
    Way(name="ZeRO-0", times=4, settings={"stage": 0}),
    Way(name="hpZ, twice", times=HPZ.across_nodes(2), settings={"stage": "hpz"}, backwards=2),
    # Once a step, however many backwards there are: the sum and its mean, or the sum and values.
    Way(name="MiCS, twice", times=2, settings={"stage": "mics"}, backwards=2),
    Way(name="HFSDP, twice", times=2, settings={"stage": "hfsdp"}, backwards=2),
    Way(
        name="qwZ",
        times=Zeropp(weights=INT8).across_nodes(),
        settings={"stage": 3, "precision": "bf16", "quantize": Quantize(gradients=None)},
    ),
    Way(
        name="qgZ",
        times=Zeropp(gradients=INT4).across_nodes(),
        settings={"stage": 3, "precision": "bf16", "quantize": Quantize(weights=None)},
    ),
    Way(
        name="ZeRO++",
        times=Zeropp(weights=INT8, gradients=INT4, secondary=True).across_nodes(),
        settings={"stage": "hpz", "precision": "bf16", "quantize": Quantize()},
    ),
]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Two nodes of two ranks."""
    for name, value in RANK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    try:
        with network(RANKS, MEGABITS) as made:
            yield made
    except CannotMakeNodesError as reason:
        pytest.skip(f"there can be no network of namespaces: {reason}")


def test_bytes_between_nodes(nodes: Network) -> None:
    """The paper's count, the events' and the kernel's: of each step, in both directions."""
    ranks = nodes.launch(train, [(way.settings, way.backwards) for way in WAYS])
    for number, way in enumerate(WAYS):
        steps = list(zip(*(ways[number] for _, ways in ranks), strict=True))
        for of_ranks in steps:
            counted = [sum(one.counted for one in of_ranks[node : node + 2]) for node in (0, 2)]
            assert counted == pytest.approx([way.expected] * 2, rel=ROUNDING), way.name
        for rank, (reading, _) in enumerate(ranks):
            here = nodes.node_of(rank)
            seen = [of_ranks[rank].seen for of_ranks in steps]
            sent = [one.sent_payload - reading.sent_payload for one in seen]
            received = [one.received_payload - reading.received_payload for one in seen]
            check(way, sent, counted[here])
            check(way, received, counted[1 - here])


def check(way: Way, seen: list[int], counted: int) -> None:
    """In each step as much as was counted; TCP may repeat what a busy receiver has not confirmed.

    That can only add, so the least of some equal steps is what they send.
    """
    assert all(one >= counted for one in seen), (way.name, seen, counted)
    assert min(seen) <= TOLERANCE * counted, (way.name, seen, counted)
