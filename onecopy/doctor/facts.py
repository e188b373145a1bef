"""What was seen, as plain records: what advice, tables and JSON are made of.

None is always "unknown": the system does not say it, or not to this user. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "UNLIMITED",
    "Accelerator",
    "DiskSpeed",
    "Facts",
    "Folder",
    "HostName",
    "InfinibandPort",
    "Interface",
    "Launched",
    "Limit",
    "Limits",
    "Memory",
    "Network",
    "Package",
    "Processors",
    "Software",
    "SwapSpeed",
    "TorchBuild",
]

UNLIMITED = -1  # as in the system's own RLIM_INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that onecopy needs or can use.

    wants: the versions that onecopy's own metadata asks for, such as ">=2.13"; empty for any.
    fits: whether `version` is among them; True where nothing is asked for or installed.
    """

    name: str
    version: str | None
    purpose: str
    is_required: bool = False
    wants: str = ""
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """How torch was built, and what it finds here."""

    cuda: str | None = None
    hip: str | None = None
    nccl: str | None = None
    cpu_capability: str | None = None
    threads: int | None = None
    backends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions. driver: the NVIDIA or AMD kernel driver's, whether torch can use it or not."""

    onecopy: str
    python: str
    system: str
    container: str = ""
    driver: str | None = None
    packages: tuple[Package, ...] = ()
    torch: TorchBuild | None = None

    def version_of(self, name: str) -> str | None:
        """The version of a package that was looked at."""
        found = (package.version for package in self.packages if package.name == name)
        return next(found, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """logical: all that the machine has. affinity: those that this process may run on.
    quota: how many cores' worth of time its control group gets. load: threads of all processes
    that wanted to run in the last minute, on average."""

    model: str | None = None
    logical: int | None = None
    affinity: int | None = None
    quota: float | None = None
    numa_nodes: int | None = None
    load: float | None = None

    @property
    def usable(self) -> int | None:
        """Cores that this process can keep busy."""
        known = [one for one in (self.logical, self.affinity) if one is not None]
        if self.quota is not None:
            known.append(max(1, int(self.quota)))
        return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Host memory. group_limit: of the control group (a container's limit), where there is one."""

    total: int | None = None
    available: int | None = None
    swap_total: int | None = None
    swap_free: int | None = None
    group_limit: int | None = None
    group_used: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    huge_pages: int | None = None
    transparent_huge_pages: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device as torch sees it."""

    index: int
    kind: str
    name: str | None = None
    total: int | None = None
    free: int | None = None
    bf16: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface. speed: Mbit/s as the driver says. has_link: a cable, or what is like it.
    is_physical: it has a device, which virtual ones (bridges, pairs of containers) lack."""

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool | None = None
    has_link: bool | None = None
    is_loopback: bool = False
    is_physical: bool | None = None
    speed: int | None = None
    mtu: int | None = None

    @property
    def is_usable(self) -> bool:
        """Another machine may be reached through it."""
        routable = [one for one in self.addresses if not one.startswith("fe80:")]
        return bool(routable) and not self.is_loopback and bool(self.is_up) and bool(self.has_link)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostName:
    """What the name of this machine means. problem: why it means nothing."""

    name: str
    addresses: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfinibandPort:
    """A port below /sys/class/infiniband. layer: InfiniBand or Ethernet (RoCE)."""

    device: str
    port: str
    state: str | None = None
    rate: str | None = None
    layer: str | None = None

    @property
    def is_active(self) -> bool:
        """Data can go through it."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """gloo_address, gloo_interface: where Gloo would listen, and gloo_reason why there."""

    host: HostName
    interfaces: tuple[Interface, ...] = ()
    gloo_address: str | None = None
    gloo_interface: str | None = None
    gloo_reason: str = ""
    nccl_interfaces: tuple[str, ...] = ()
    infiniband: tuple[InfinibandPort, ...] = ()

    def find(self, name: str | None) -> Interface | None:
        """The interface of that name."""
        return next((one for one in self.interfaces if one.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpeed:
    """Bytes per second, one after another. is_direct: past the system's cache (O_DIRECT)."""

    num_bytes: int
    write: float
    read: float
    is_direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder and what it lies on. kind: NVMe, SSD, hard disk, virtual disk, memory, network or
    container layer. not_measured: why there is no speed."""

    path: str
    purpose: str
    mount: str | None = None
    file_system: str | None = None
    device: str | None = None
    kind: str | None = None
    total: int | None = None
    free: int | None = None
    speed: DiskSpeed | None = None
    not_measured: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSpeed:
    """What a folder gives to states on disk, measured as training reads and writes them.

    write, read, both: bytes per second; both of them together where each chunk that is read is
    written back, as in the optimizer's step. num_bytes: of the file that was used. is_direct: past
    the system's cache. not_measured: why there are no figures.
    """

    path: str
    num_bytes: int = 0
    write: float = 0.0
    read: float = 0.0
    both: float = 0.0
    is_direct: bool = False
    not_measured: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit: what holds, and how far the user may raise it. UNLIMITED for none."""

    soft: int
    hard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of this process."""

    open_files: Limit | None = None
    processes: Limit | None = None
    locked_memory: Limit | None = None
    core_size: Limit | None = None
    core_pattern: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The world that a launcher has made, as this process sees it."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int

    @property
    def spans_nodes(self) -> bool:
        """There are ranks on other machines."""
        return self.world_size > self.local_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was seen on one machine.

    accelerator_problem: why accelerators could not be looked at.
    swap: of the folder that was asked for, if any.
    environment: variables that change how training runs, and are set.
    launched: None where no launcher has started this process.
    """

    software: Software
    processors: Processors
    memory: Memory
    network: Network
    limits: Limits
    accelerators: tuple[Accelerator, ...] = ()
    accelerator_problem: str = ""
    folders: tuple[Folder, ...] = ()
    swap: SwapSpeed | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launched: Launched | None = None

    @property
    def ranks_here(self) -> int | None:
        """How many ranks share this machine, where it is known."""
        return None if self.launched is None else self.launched.local_size
