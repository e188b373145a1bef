"""Several nodes on one machine: network namespaces, joined by links of a chosen speed.

    with network(ranks=(2, 2), megabits=100) as nodes:
        results = nodes.launch(train, ...)

Each node is a network namespace with one interface, `wire`: what its ranks say to each other goes
by the namespace's own loopback, all else by the wire, whose counters the kernel keeps. Two nodes
are the two ends of a veth pair; more are joined by a bridge in a namespace of its own. A token
bucket (`tc ... tbf`) at each sending end is the speed of the link, the same in both directions.
One node alone has its loopback, `lo`, which nobody else uses: its counters are those of the ranks.

It needs Linux, the programs `ip` and `tc` (Debian: iproute2) and the right to make namespaces.
Nothing outside of the namespaces is changed, and they go at the end: also after an error or Ctrl-C.
What a process that was killed has left behind, the next one removes: names carry their owner's pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import onecopy

__all__ = [
    "HEADER_BYTES",
    "LOOPBACK",
    "LOOPBACK_HEADER_BYTES",
    "WIRE",
    "CannotMakeNodesError",
    "Counters",
    "Network",
    "network",
    "settled",
]

WIRE, BRIDGE, LOOPBACK = "wire", "bridge", "lo"
# Ethernet 14, IPv4 20, TCP with time stamps 32; loopback counts packets without the first.
HEADER_BYTES, LOOPBACK_HEADER_BYTES = 66, 52
# A bucket holds what the link sends in BURST_SECONDS, so that a late timer costs no speed.
LEAST_BURST, BURST_SECONDS = 256 << 10, 0.004
# In front of the bucket: more than the connections of some ranks keep under way, so none is lost.
QUEUE_BYTES = 16 << 20
QUIET_SECONDS, MOST_LOOKS = 0.02, 25
# Nobody else is in a new namespace, so that no port can be taken.
PORT = 29500
CLONE_NEWNET = 0x40000000
NAME = re.compile(r"onecopy-(\d+)-\d+")
_numbers = itertools.count()


class CannotMakeNodesError(Exception):
    """No `ip` or `tc`, or no right to use them; the message says which."""


class Counters(NamedTuple):
    """What has gone over one node's wire: bytes with their headers, and packets.

    A packet is what the interface was given. A veth pair takes segments of up to 64 KiB, which
    only real hardware would cut into frames, with one set of headers for each.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def since(self, before: Counters) -> Counters:
        """What has been added."""
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def sent_payload(self) -> int:
        """Bytes sent without the headers of TCP, IP and Ethernet."""
        return self.sent_bytes - HEADER_BYTES * self.sent_packets

    @property
    def looped_payload(self) -> int:
        """The same where these are counters of `lo`: what all ranks of the node have sent."""
        return self.sent_bytes - LOOPBACK_HEADER_BYTES * self.sent_packets

    @property
    def received_payload(self) -> int:
        """Bytes received, likewise."""
        return self.received_bytes - HEADER_BYTES * self.received_packets


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes that are there; can be sent to their ranks.

    ranks: how many each node has. nodes: their namespaces. ends: the namespace and the device of
        every end that sends.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    ends: tuple[tuple[str, str], ...]

    def limit(self, megabits: float | None) -> None:
        """From now on every link carries so many Mbit/s in each direction; None: what it can."""
        for namespace, device in self.ends:
            where = ("-n", namespace, "qdisc")
            if megabits is None:
                # There may be none.
                with contextlib.suppress(CannotMakeNodesError):
                    _run("tc", *where, "del", "dev", device, "root")
                continue
            burst = max(LEAST_BURST, int(megabits * 1e6 / 8 * BURST_SECONDS))
            bucket = ("rate", f"{megabits}mbit", "burst", f"{burst}b", "limit", f"{QUEUE_BYTES}b")
            _run("tc", *where, "replace", "dev", device, "root", "tbf", *bucket)

    def launch(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`onecopy.launch` over all nodes: torchrun's environment of as many machines.

        Returns what each rank returned, in rank order; the ranks of a node are neighbours.
        """
        return onecopy.launch(_run_in_node, sum(self.ranks), self, fn, arguments)

    def node_of(self, rank: int) -> int:
        """The number of the node that has this rank."""
        return next(n for n, end in enumerate(itertools.accumulate(self.ranks)) if rank < end)

    def enter(self, rank: int) -> None:
        """Make this process a rank: it moves to its node, and finds its environment there."""
        node = self.node_of(rank)
        _enter(self.nodes[node])
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(sum(self.ranks)),
            LOCAL_RANK=str(rank - sum(self.ranks[:node])),
            LOCAL_WORLD_SIZE=str(self.ranks[node]),
            GROUP_RANK=str(node),
            GROUP_WORLD_SIZE=str(len(self.ranks)),
            MASTER_ADDR=_address(0) if self.ends else "127.0.0.1",
            MASTER_PORT=str(PORT),
            GLOO_SOCKET_IFNAME=WIRE if self.ends else LOOPBACK,
        )
        # The first rank makes the store: the launcher's own cannot be reached from here.
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


@contextlib.contextmanager
def network(ranks: Sequence[int] = (2, 2), megabits: float | None = None) -> Iterator[Network]:
    """Nodes with so many ranks each, until the end of the block.

    Args:
        ranks: of each node.
        megabits: see `Network.limit`.

    Raises:
        CannotMakeNodesError: this machine does not allow it.
    """
    if sys.platform != "linux":
        raise CannotMakeNodesError("network namespaces are Linux's")
    _remove_stale()
    with contextlib.ExitStack() as stack:
        nodes = tuple(_make_namespace(stack) for _ in ranks)
        ends = _join(nodes, stack) if len(nodes) > 1 else ()
        for number, name in enumerate(nodes if ends else ()):
            _run("ip", "-n", name, "addr", "add", f"{_address(number)}/24", "dev", WIRE)
        for name, device in (*((name, LOOPBACK) for name in nodes), *ends):
            _run("ip", "-n", name, "link", "set", device, "up")
        _try_to_enter(nodes[0])
        made = Network(ranks=tuple(ranks), nodes=nodes, ends=ends)
        if megabits is not None:
            made.limit(megabits)
        yield made


def settled(interface: str = WIRE) -> Counters:
    """The counters of this rank's interface when all that was sent has arrived; a collective.

    Every rank calls it, with nothing under way that waits for another. It sends some hundred bytes
    itself: what they are is seen by calling it twice.
    """
    dist.barrier()
    now = _read_counters(interface)
    for _ in range(MOST_LOOKS):
        time.sleep(QUIET_SECONDS)
        before, now = now, _read_counters(interface)
        if now == before:
            break
    dist.barrier()
    return now


def _read_counters(interface: str) -> Counters:
    # Not /sys/class/net, which shows the namespace in which /sys was mounted.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            values = [int(number) for number in numbers.split()]
            return Counters(values[8], values[9], values[0], values[1])
    raise LookupError(f"the network of this process has no interface {interface}")


def _run_in_node(nodes: Network, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    nodes.enter(int(os.environ["RANK"]))
    return fn(*arguments)


# Namespaces -----------------------------------------------------------------------------------


def _make_namespace(stack: contextlib.ExitStack) -> str:
    name = f"onecopy-{os.getpid()}-{next(_numbers)}"
    _run("ip", "netns", "add", name)
    # With it go its interfaces, and the other ends of its pairs.
    stack.callback(_run, "ip", "netns", "del", name)
    return name


def _join(nodes: Sequence[str], stack: contextlib.ExitStack) -> tuple[tuple[str, str], ...]:
    return _join_two(nodes) if len(nodes) == 2 else _join_by_bridge(nodes, stack)


def _join_two(nodes: Sequence[str]) -> tuple[tuple[str, str], ...]:
    one, other = nodes
    _make_pair((one, WIRE), (other, WIRE))
    return (one, WIRE), (other, WIRE)


def _join_by_bridge(
    nodes: Sequence[str], stack: contextlib.ExitStack
) -> tuple[tuple[str, str], ...]:
    switch = _make_namespace(stack)
    _run("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "-n", switch, "link", "set", BRIDGE, "up")
    ends: list[tuple[str, str]] = []
    for number, node in enumerate(nodes):
        pair = (node, WIRE), (switch, f"port{number}")
        _make_pair(*pair)
        _run("ip", "-n", switch, "link", "set", f"port{number}", "master", BRIDGE)
        ends += pair
    return tuple(ends)


def _make_pair(one: tuple[str, str], other: tuple[str, str]) -> None:
    _run(
        *("ip", "link", "add", one[1], "netns", one[0], "type", "veth"),
        *("peer", "name", other[1], "netns", other[0]),
    )


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _enter(namespace: str) -> None:
    """Move the calling thread, and what it starts later, to a namespace (os.setns is 3.12's)."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), file.name)


def _try_to_enter(namespace: str) -> None:
    failures: list[OSError] = []

    def enter() -> None:
        try:
            _enter(namespace)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failures:
        raise CannotMakeNodesError(f"a process cannot enter a namespace: {failures[0]}")


def _remove_stale() -> None:
    """Namespaces whose owner was killed."""
    for namespace in json.loads(_run("ip", "-j", "netns", "list") or "[]"):
        match = NAME.fullmatch(namespace["name"])
        if match and not Path("/proc", match[1]).exists():
            # Another process may be just as tidy.
            with contextlib.suppress(CannotMakeNodesError):
                _run("ip", "netns", "del", namespace["name"])


def _run(program: str, *arguments: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise CannotMakeNodesError(f"the program {program} is not installed (iproute2)")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        command = " ".join((program, *arguments))
        raise CannotMakeNodesError(f"{command}: {done.stderr.strip()}")
    return done.stdout
