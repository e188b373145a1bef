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
from onecopy.planner.papers import Zeropp
from tests.network_rank import NUM_PARAMETERS, STEPS, train
from tests.pool import RANK_ENVIRONMENT

RANKS = (2, 2)
MEGABITS = 1000  # so that no packet is lost, and none is repeated
TOLERANCE = 1.03
# Padding and the flags that ride along with gradients.
ROUNDING = 0.002


@dataclass(frozen=True, kw_only=True)
class Way:
    """Settings of shard, and what crosses nodes in a step as the paper counts it.

    times: the parameters' bytes in the dtype of compute.
    """

    name: str
    times: Fraction | int
    settings: dict[str, Any]

    @property
    def expected(self) -> float:
        """Bytes that each of the two nodes sends: it has one half of everything."""
        itemsize = 2 if self.settings.get("precision") == "bf16" else 4
        return float(self.times * NUM_PARAMETERS * itemsize / 2)


WAYS = [
    Way(name="ZeRO-3", times=Zeropp().across_nodes(), settings={"stage": 3}),
    Way(
        name="ZeRO-3 in bf16",
        times=Zeropp().across_nodes(),
        settings={"stage": 3, "precision": "bf16"},
    ),
    Way(name="ZeRO-2", times=2, settings={"stage": 2}),
    # The sum goes to one rank of each node, and its mean comes back to every rank.
    Way(name="ZeRO-0", times=4, settings={"stage": 0}),
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
    """The paper's count, the events' and the kernel's, of each step and in both directions."""
    ranks = nodes.launch(train, [way.settings for way in WAYS])
    for number, way in enumerate(WAYS):
        for one in range(STEPS):
            steps = [steps[number][one] for _, steps in ranks]
            counted = steps[0].counted + steps[1].counted, steps[2].counted + steps[3].counted
            assert counted == pytest.approx((way.expected,) * 2, rel=ROUNDING), way.name
            for rank, (step, (reading, _)) in enumerate(zip(steps, ranks, strict=True)):
                here = nodes.node_of(rank)
                sent = step.seen.sent_payload - reading.sent_payload
                received = step.seen.received_payload - reading.received_payload
                assert counted[here] <= sent <= TOLERANCE * counted[here], (way.name, step)
                assert counted[1 - here] <= received <= TOLERANCE * counted[1 - here], (
                    way.name,
                    step,
                )
