"""Network interfaces, what the host name means, and which interface ranks would talk through.

Addresses are asked of the kernel (rtnetlink), everything else is below /sys/class/net.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from onecopy.doctor.facts import HostName, InfinibandPort, Interface, Network
from onecopy.doctor.files import within
from onecopy.memory.system_files import ROOT, read_int, read_text

__all__ = ["gloo_way", "look_at_network", "nccl_candidates", "resolve"]

RESOLVE_SECONDS = 5.0
IFF_UP, IFF_LOOPBACK = 0x1, 0x8
# From linux/netlink.h, rtnetlink.h and if_addr.h.
RTM_NEWADDR, RTM_GETADDR, NLMSG_DONE, NLMSG_ERROR = 20, 22, 3, 2
NLM_F_REQUEST_DUMP = 0x1 | 0x300
IFA_ADDRESS, IFA_LOCAL = 1, 2
HEADER, ADDRESS_HEADER = struct.Struct("=IHHII"), struct.Struct("=BBBBI")
ATTRIBUTE = struct.Struct("=HH")


def look_at_network(variables: Mapping[str, str], root: Path = ROOT) -> Network:
    """Interfaces, the host name, and where Gloo and NCCL would go under these variables."""
    interfaces = tuple(_interfaces(root))
    host = resolve(socket.gethostname())
    address, interface, reason = gloo_way(variables.get("GLOO_SOCKET_IFNAME"), host, interfaces)
    return Network(
        host=host,
        interfaces=interfaces,
        gloo_address=address,
        gloo_interface=interface,
        gloo_reason=reason,
        nccl_interfaces=nccl_candidates(variables.get("NCCL_SOCKET_IFNAME"), interfaces),
        infiniband=tuple(_infiniband(root)),
    )


def resolve(name: str) -> HostName:
    """The addresses of a name, in the system's order, or why there are none."""
    try:
        found = within(RESOLVE_SECONDS, lambda: socket.getaddrinfo(name, None))
    except (OSError, UnicodeError) as error:  # a TimeoutError is an OSError
        reason = error.strerror if isinstance(error, socket.gaierror) else None
        return HostName(name=name, problem=reason or str(error))
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    return HostName(name=name, addresses=tuple(dict.fromkeys(addresses)))


def gloo_way(
    wish: str | None, host: HostName, interfaces: Sequence[Interface]
) -> tuple[str | None, str | None, str]:
    """(address, interface, reason) where Gloo listens: the interface that is named, else the first
    address of the host name that is this machine's, else loopback."""
    if wish:
        # Several are allowed; ranks listen on the first, and other groups on the next.
        name = wish.split(",")[0]
        found = next((one for one in interfaces if one.name == name), None)
        address = found.addresses[0] if found and found.addresses else None
        return address, name, "GLOO_SOCKET_IFNAME"
    for address in host.addresses:
        if _is_mine(address):
            return address, _owner(address, interfaces), "the host name"
    return (
        "127.0.0.1",
        _owner("127.0.0.1", interfaces),
        "the host name has no address of this machine",
    )


def _is_mine(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _owner(address: str, interfaces: Sequence[Interface]) -> str | None:
    for one in interfaces:
        if address in one.addresses:
            return one.name
    is_loopback = ipaddress.ip_address(address).is_loopback
    return next((one.name for one in interfaces if one.is_loopback), None) if is_loopback else None


def nccl_candidates(wish: str | None, interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """The interfaces that NCCL's sockets may take: `wish` is NCCL_SOCKET_IFNAME.

    Prefixes, or whole names after "=", or all but those after "^". Without a wish NCCL takes
    InfiniBand's (ib...) first, others next, docker's and loopback only where nothing else is.
    """
    up = [one for one in interfaces if one.is_up and one.addresses]
    if wish:
        is_exclusion, words = wish.startswith("^"), wish.lstrip("^").lstrip("=").split(",")
        is_whole = wish.lstrip("^").startswith("=")
        chosen = [
            one.name
            for one in up
            if any(one.name == w if is_whole else one.name.startswith(w) for w in words)
            != is_exclusion
        ]
        return tuple(chosen)
    first = [one.name for one in up if one.name.startswith("ib")]
    docker = [one.name for one in up if one.name.startswith("docker")]
    loopback = [one.name for one in up if one.is_loopback]
    others = [one.name for one in up if one.name not in {*first, *docker, *loopback}]
    return tuple(first or others or docker or loopback)


# Interfaces ----------------------------------------------------------------------------------


def _interfaces(root: Path) -> Iterator[Interface]:
    try:
        named = socket.if_nameindex()
        addresses = _addresses()
    except (AttributeError, OSError):
        return
    for index, name in named:
        folder = root / "sys/class/net" / name
        flags = read_text(folder / "flags")
        bits = int(flags, 16) if flags else None
        speed = read_int(folder / "speed")
        is_loopback = name in ("lo", "lo0") if bits is None else bool(bits & IFF_LOOPBACK)
        carrier = read_int(folder / "carrier")
        is_up = None if bits is None else bool(bits & IFF_UP)
        yield Interface(
            name=name,
            addresses=tuple(addresses.get(index, ())),
            is_up=is_up,
            # The kernel tells the carrier of interfaces that are up only.
            has_link=bool(carrier) if carrier is not None else (False if is_up is False else None),
            is_loopback=is_loopback,
            is_physical=(folder / "device").exists() if folder.exists() else None,
            speed=speed if speed is not None and speed > 0 else None,
            mtu=read_int(folder / "mtu"),
        )


def _addresses() -> dict[int, list[str]]:
    """Addresses by the number of their interface, IPv4 first; none where the kernel is no Linux."""
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        return {}
    found: dict[int, list[str]] = {}
    with socket.socket(family, socket.SOCK_RAW) as kernel:
        kernel.settimeout(2.0)
        request = ADDRESS_HEADER.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        size = HEADER.size + len(request)
        kernel.send(HEADER.pack(size, RTM_GETADDR, NLM_F_REQUEST_DUMP, 1, 0) + request)
        for kind, message in _messages(kernel):
            if kind == RTM_NEWADDR:
                index = ADDRESS_HEADER.unpack_from(message)[4]
                found.setdefault(index, []).append(_address(message))
    return {index: sorted(each, key=lambda one: ":" in one) for index, each in found.items()}


def _messages(kernel: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Kind and content of each message, up to the one that says they are over."""
    while True:
        data = kernel.recv(1 << 16)
        while len(data) >= HEADER.size:
            size, kind, _, _, _ = HEADER.unpack_from(data)
            if kind in (NLMSG_DONE, NLMSG_ERROR) or size < HEADER.size:
                return
            yield kind, data[HEADER.size : size]
            data = data[_aligned(size) :]


def _address(message: bytes) -> str:
    family, rest = message[0], message[ADDRESS_HEADER.size :]
    values = {}
    while len(rest) >= ATTRIBUTE.size:
        size, kind = ATTRIBUTE.unpack_from(rest)
        values[kind] = rest[ATTRIBUTE.size : size]
        rest = rest[_aligned(max(size, ATTRIBUTE.size)) :]
    # On a point-to-point link the other one is the peer's.
    return socket.inet_ntop(family, values.get(IFA_LOCAL) or values[IFA_ADDRESS])


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def _infiniband(root: Path) -> Iterator[InfinibandPort]:
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state = read_text(port / "state")  # such as "4: ACTIVE"
        yield InfinibandPort(
            device=port.parent.parent.name,
            port=port.name,
            state=None if state is None else state.rpartition(":")[2].strip(),
            rate=read_text(port / "rate"),
            layer=read_text(port / "link_layer"),
        )
