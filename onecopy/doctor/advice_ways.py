"""From the facts about networks and disks to findings."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator

from onecopy.doctor.facts import Facts, Folder, Interface, SwapSpeed
from onecopy.doctor.findings import FINE, NOTE, PROBLEM, WARNING, Finding
from onecopy.planner.estimate import (
    BF16,
    bytes_sent,
    gather_traffic,
    gradient_traffic,
    optimizer_traffic,
    traffic,
)
from onecopy.planner.rows import ALL_NVME
from onecopy.report.progress import size

__all__ = ["DISKS", "NETWORK", "step_seconds"]

Rule = Callable[[Facts], Iterator[Finding]]

SLOW_LINK, FAST_LINK = 2_500, 25_000  # Mbit/s
MANY_RANKS = 16
BILLION = 10**9
# fp32 masters and two fp32 moments: what a checkpoint holds of a parameter with Adam.
SAVED_BYTES = 12
# Bytes per second, read and written together: what one drive of a server does.
FAST_SWAP = 2 * BILLION
LEAST_FREE = 20 * BILLION
DOWN = "is down"


def step_seconds(bytes_per_second: float, world_size: int = MANY_RANKS) -> float:
    """How long a rank sends for a step of a model of a billion parameters at stage 3 in bf16."""
    sent = bytes_sent(traffic(3).total, BILLION, world_size, bytes_per_element=2)
    return sent / bytes_per_second


def _named_interfaces(facts: Facts) -> Iterator[Finding]:
    if all(one.is_up is None for one in facts.network.interfaces):
        return  # this system does not tell, so nothing is known to be wrong
    wish = facts.environment.get("GLOO_SOCKET_IFNAME")
    for name in wish.split(",") if wish else ():
        found = facts.network.find(name)
        fault = _fault(found)
        if fault:
            yield Finding(
                level=PROBLEM,
                topic="network",
                seen=f"GLOO_SOCKET_IFNAME={wish}, and {name} {fault}",
                why="Gloo listens there only: no process group can be made",
                remedy=(f"ip link set {name} up, or " if fault == DOWN else "")
                + _choose(facts, "GLOO_SOCKET_IFNAME"),
            )
    wish = facts.environment.get("NCCL_SOCKET_IFNAME")
    if wish and not facts.network.nccl_interfaces:
        yield Finding(
            level=PROBLEM if facts.accelerators else WARNING,
            topic="network",
            seen=f"NCCL_SOCKET_IFNAME={wish} leaves no interface that is up and has an address",
            why='NCCL stops with "no socket interface found"',
            remedy=_choose(facts, "NCCL_SOCKET_IFNAME"),
        )


def _fault(interface: Interface | None) -> str:
    if interface is None:
        return "does not exist"
    if interface.is_up is False:
        return DOWN
    return "" if interface.addresses else "has no address"


def _choose(facts: Facts, variable: str) -> str:
    usable = [one.name for one in facts.network.interfaces if one.is_usable]
    if not usable:
        return f"unset {variable}"
    more = f" (also there: {', '.join(usable[1:])})" if usable[1:] else ""
    return f"export {variable}={usable[0]}{more}"


def _host_name(facts: Facts) -> Iterator[Finding]:
    """Where Gloo's ranks would listen, if nobody says where."""
    network, host = facts.network, facts.network.host
    if facts.environment.get("GLOO_SOCKET_IFNAME"):
        return
    address = network.gloo_address
    if address is None or not ipaddress.ip_address(address).is_loopback:
        seen = f"the host name {host.name} means {address} ({network.gloo_interface})"
        yield Finding(level=FINE, topic="network", seen=seen)
        return
    if host.problem:
        seen = f"the host name {host.name} has no address ({host.problem})"
    elif address in host.addresses:
        seen = f"the host name {host.name} means {address}, this machine's loopback"
    else:
        seen = f"the host name {host.name} means {', '.join(host.addresses)}, of another machine"
    spans = facts.launched is not None and facts.launched.spans_nodes
    yield Finding(
        level=PROBLEM if spans else NOTE,
        topic="network",
        seen=f"{seen}, so Gloo listens on {address}",
        why="ranks on other machines cannot reach it; on one machine it works"
        if not spans
        else "the ranks on other machines cannot reach it",
        remedy=f"{_choose(facts, 'GLOO_SOCKET_IFNAME')} on every node, or give the host name its "
        "address in /etc/hosts",
    )


def _links(facts: Facts) -> Iterator[Finding]:
    down = [
        one.name
        for one in facts.network.interfaces
        if one.is_physical and not one.is_loopback and (not one.is_up or one.has_link is False)
    ]
    if down:
        yield Finding(
            level=NOTE,
            topic="network",
            seen=f"down or without a cable: {', '.join(down)}",
            why="if one of them is meant for training, ranks take a slower way",
            remedy=f"ip link set {down[0]} up",
        )
    ports = [f"{p.device}/{p.port}: {p.state}" for p in facts.network.infiniband if not p.is_active]
    if ports:
        yield Finding(
            level=WARNING,
            topic="network",
            seen=f"InfiniBand ports that are not active: {', '.join(ports)}",
            why="NCCL leaves them out, and what goes through the others takes longer",
            remedy="ibstat; look at the cable and the subnet manager",
        )


def _link_speed(facts: Facts) -> Iterator[Finding]:
    if any(port.is_active for port in facts.network.infiniband):
        return
    speeds = [one.speed for one in facts.network.interfaces if one.is_usable and one.speed]
    if not speeds:
        return
    fastest = max(speeds)
    seconds = step_seconds(fastest * 1e6 / 8)
    why = (
        f"between nodes, a step of a model of 1B parameters at stage 3 in bf16 sends for "
        f"{seconds:.1f} s or more"
    )
    if fastest >= FAST_LINK:
        yield Finding(level=FINE, topic="network", seen=f"a link of {fastest / 1000:g} Gb/s")
        return
    spans = facts.launched is not None and facts.launched.spans_nodes
    yield Finding(
        level=WARNING if spans and fastest < SLOW_LINK else NOTE,
        topic="network",
        seen=f"the fastest link has {fastest / 1000:g} Gb/s",
        why=why,
        remedy="a faster network, a larger batch per step, or less that goes across "
        "(docs/slow-networks.md): onecopy plan MODEL --devices N --devices-per-node X --network "
        f"{fastest / 1000:g}Gbit/s",
    )


def _kinds(facts: Facts) -> Iterator[Finding]:
    for folder in facts.folders:
        words = KINDS.get(folder.kind or "")
        if words and (folder.kind != "memory" or folder.purpose != "temporary files"):
            yield Finding(
                level=words[0],
                topic="storage",
                seen=f"{folder.path} ({folder.purpose}) is {words[1]} ({folder.file_system})",
                why=words[2],
                remedy=words[3],
            )
    known = {folder.kind for folder in facts.folders if folder.kind}
    if known and "NVMe" not in known:
        yield Finding(
            level=NOTE,
            topic="storage",
            seen=f"none of the folders is seen to lie on NVMe ({', '.join(sorted(known))})",
            why="checkpoints, and model states that do not fit into memory, go to disk",
            remedy="if there is one, have it measured: onecopy doctor --folder DIR",
        )


KINDS = {
    "memory": (
        WARNING,
        "host memory",
        "checkpoints there are gone after a restart, and count as used memory",
        "keep checkpoints in a folder on a disk: onecopy doctor --folder DIR",
    ),
    "container layer": (
        NOTE,
        "a layer of the container",
        "it is slower than a volume, and is removed with the container",
        "docker run -v /a/disk:/checkpoints, and onecopy doctor --folder /checkpoints",
    ),
    "hard disk": (
        NOTE,
        "a hard disk",
        "it takes one stream at a time; ranks that save together slow each other down",
        "keep checkpoints on an SSD and copy them from there",
    ),
}


def _space(facts: Facts) -> Iterator[Finding]:
    seen: set[str | None] = set()
    for folder in facts.folders:
        if folder.not_measured and folder.free is None:
            yield Finding(
                level=WARNING,
                topic="storage",
                seen=f"{folder.path} ({folder.purpose}) cannot be looked at: {folder.not_measured}",
                why="what a program reads or writes there fails or hangs",
                remedy=f"df {folder.path}; ls {folder.path}",
            )
        if folder.free is None or folder.free >= LEAST_FREE or folder.mount in seen:
            continue
        seen.add(folder.mount)
        yield Finding(
            level=WARNING,
            topic="storage",
            seen=f"{folder.path} ({folder.purpose}) has {size(folder.free)} free",
            why=f"a checkpoint of 1B parameters with Adam takes {size(SAVED_BYTES * BILLION)}, and "
            "the last good one is kept until the next is complete",
            remedy="another folder, or keep fewer: onecopy.save(..., keep=2)",
        )


def _speed(facts: Facts) -> Iterator[Finding]:
    for folder in facts.folders:
        if folder.speed is not None:
            yield _speed_of(folder, folder.speed.write)


def _speed_of(folder: Folder, write: float) -> Finding:
    seconds = SAVED_BYTES * BILLION / write
    words = f"a checkpoint of 1B parameters with Adam is written there in {seconds:.0f} s"
    if write >= 0.5e9:
        seen = f"{folder.path} takes {size(write)}/s: {words}"
        return Finding(level=FINE, topic="storage", seen=seen)
    return Finding(
        level=NOTE,
        topic="storage",
        seen=f"{folder.path} ({folder.purpose}) takes {size(write)}/s",
        why=words,
        remedy="onecopy.async_save writes while training goes on",
    )


def _swap(facts: Facts) -> Iterator[Finding]:
    swap = facts.swap
    if swap is None:
        return
    if swap.not_measured:
        yield Finding(
            level=WARNING,
            topic="storage",
            seen=f"{swap.path} (--nvme) was not measured: {swap.not_measured}",
            why="states could not be kept there, either",
            remedy=f"df {swap.path}; ls -ld {swap.path}",
        )
        return
    yield _swap_speed(swap)
    if not swap.is_direct:
        yield Finding(
            level=WARNING,
            topic="storage",
            seen=f"{swap.path} (--nvme) is not read and written past the system's cache",
            why="each byte is copied once more and takes memory, and the speed above may be "
            "that of the cache",
            remedy="a folder on a local disk, with ext4 or XFS",
        )


def _swap_speed(swap: SwapSpeed) -> Finding:
    """How long a billion parameters take, by the planner's bytes per parameter."""
    step = optimizer_traffic(3, BF16, ALL_NVME)
    gathers, means = gather_traffic(3, BF16, ALL_NVME) * 2, gradient_traffic(BF16, ALL_NVME)
    step_seconds = step.total * BILLION / swap.both
    read, written = gathers.read + means.read, gathers.written + means.written
    more_seconds = BILLION * (read / swap.read + written / swap.write)
    words = (
        f"an optimizer step of 1B parameters (bf16, Adam, everything on NVMe) reads {step.read} "
        f"and writes {step.written} bytes a parameter in {step_seconds:.1f} s; forward and "
        f"backward read {read} and write {written} in {more_seconds:.1f} s"
    )
    seen = f"{swap.path} (--nvme) moves {size(swap.both)}/s"
    if swap.both >= FAST_SWAP:
        return Finding(level=FINE, topic="storage", seen=f"{seen}: {words}")
    return Finding(
        level=NOTE,
        topic="storage",
        seen=seen,
        why=words,
        remedy="several drives as one (RAID 0), more nodes, or a larger batch per step",
    )


NETWORK: tuple[Rule, ...] = (_named_interfaces, _host_name, _links, _link_speed)
DISKS: tuple[Rule, ...] = (_kinds, _space, _speed, _swap)
