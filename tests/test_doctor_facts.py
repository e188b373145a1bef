"""What `onecopy doctor` reads, beside what the system's own tools say, and from made-up systems."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from onecopy.doctor import storage, swap_speed
from onecopy.doctor.facts import UNLIMITED, DiskSpeed, HostName, Interface
from onecopy.doctor.files import within
from onecopy.doctor.host import look_at_limits, look_at_memory, look_at_processors
from onecopy.doctor.network import gloo_way, look_at_network, nccl_candidates, resolve
from onecopy.doctor.software import fits, look_at_software
from onecopy.memory.cgroup import GroupLimits, read_limits
from onecopy.memory.swap_files import SwapFolder
from onecopy.recording.environment import NAMES, chosen_variables

ALONE = GroupLimits()


def output_of(*command: str) -> str:
    """What a tool of the system says; skips where there is none."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# Beside other tools ---------------------------------------------------------------------------


def test_cores_are_those_of_nproc() -> None:
    found = look_at_processors(ALONE)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run(["nproc"], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        pytest.skip("there is no nproc here")
    assert found.affinity == int(done.stdout)
    assert found.logical == os.cpu_count()


def test_processors_are_those_of_lscpu() -> None:
    said = dict(re.findall(r"^(.+?):\s*(.*)$", output_of("lscpu"), re.MULTILINE))
    found = look_at_processors(ALONE)
    assert found.model == said["Model name"]
    assert found.numa_nodes == int(said["NUMA node(s)"])


def test_memory_is_that_of_free() -> None:
    lines = {line.split()[0]: line.split()[1:] for line in output_of("free", "-b").splitlines()[1:]}
    found = look_at_memory(ALONE)
    assert found.total == int(lines["Mem:"][0])
    assert found.available is not None
    assert abs(found.available - int(lines["Mem:"][5])) < 0.3 * found.total
    assert found.swap_total == int(lines["Swap:"][0])


def test_folders_are_those_of_df(tmp_path: Path) -> None:
    columns = "--output=target,fstype,size,avail"
    mount, kind, size, free = output_of("df", "-B1", columns, str(tmp_path)).splitlines()[1].split()
    (found,) = storage.look_at_folders({tmp_path: "test"}, 0)
    assert (found.mount, found.file_system, found.total) == (mount, kind, int(size))
    assert found.free is not None and abs(found.free - int(free)) < 0.1 * int(size)
    (shm,) = storage.look_at_folders({Path("/dev/shm"): "test"}, 1 << 20)
    assert shm.total == int(output_of("df", "-B1", columns, "/dev/shm").splitlines()[1].split()[2])
    assert (shm.kind, shm.not_measured) == ("memory", "it is host memory")
    assert look_at_memory(ALONE).shm_total == shm.total


def test_interfaces_are_those_of_ip() -> None:
    said = {one["ifname"]: one for one in json.loads(output_of("ip", "-j", "address"))}
    found = {one.name: one for one in look_at_network({}).interfaces}
    assert set(found) == set(said)
    for name, one in said.items():
        addresses = [address["local"] for address in one["addr_info"]]
        assert sorted(found[name].addresses) == sorted(addresses)
        assert found[name].mtu == one["mtu"]
        assert found[name].is_up == ("UP" in one["flags"])
        assert found[name].is_loopback == ("LOOPBACK" in one["flags"])
        assert bool(found[name].has_link) == ("LOWER_UP" in one["flags"])


def test_limits_are_those_of_the_shell() -> None:
    found = look_at_limits()
    for flag, limit, factor in (("n", found.open_files, 1), ("l", found.locked_memory, 1024)):
        for hardness, value in (("S", limit and limit.soft), ("H", limit and limit.hard)):
            # bash, because the limits of other shells are counted in other units.
            said = output_of("bash", "-c", f"ulimit -{hardness}{flag}").strip()
            assert value == (UNLIMITED if said == "unlimited" else int(said) * factor)
    assert found.core_size is not None
    assert found.core_size.soft == resource.getrlimit(resource.RLIMIT_CORE)[0]


def test_the_host_name_means_what_the_system_says() -> None:
    (line, *_) = output_of("getent", "ahosts", os.uname().nodename).splitlines()
    assert line.split()[0] in resolve(os.uname().nodename).addresses
    assert resolve("no-such-host.invalid").problem


def test_versions_are_those_of_the_packages() -> None:
    import numpy
    import torch

    found = look_at_software()
    assert found.version_of("torch") == torch.__version__
    assert found.version_of("numpy") == numpy.__version__
    assert found.torch is not None and "gloo" in found.torch.backends
    assert found.torch.cuda == torch.version.cuda


# Control groups -------------------------------------------------------------------------------

GIB = 1 << 30


def test_limits_of_version_2_hold_from_above(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "sys/fs/cgroup/jobs/memory.max": str(4 * GIB),
            "sys/fs/cgroup/jobs/memory.current": str(GIB),
            "sys/fs/cgroup/jobs/cpu.max": "150000 100000",
            "sys/fs/cgroup/jobs/one/memory.max": "max",
            "sys/fs/cgroup/jobs/one/cpu.max": "max 100000",
        },
    )
    assert read_limits(root) == GroupLimits(memory=4 * GIB, memory_used=GIB, cpus=1.5)


def test_a_container_sees_its_own_group_of_version_2_as_the_whole(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw",
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/fs/cgroup/memory.current": "5",
        },
    )
    assert read_limits(root) == GroupLimits(memory=GIB, memory_used=5)


def test_limits_of_version_1_are_read_where_each_controller_is(tmp_path: Path) -> None:
    mounts = (
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/",
            "proc/self/mountinfo": mounts,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "7",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        },
    )
    assert read_limits(root) == GroupLimits(memory=2 * GIB, memory_used=7, cpus=2.0)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/",
            "proc/self/mountinfo": "35 31 0:32 / /cg rw - cgroup cgroup rw,memory",
            "cg/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert read_limits(root) == GroupLimits()


def test_a_system_without_proc_and_sys_is_unknown(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == GroupLimits()
    memory = look_at_memory(ALONE, tmp_path)
    assert (memory.available, memory.shm_total, memory.swap_total) == (None, None, None)
    assert look_at_processors(ALONE, tmp_path).numa_nodes is None
    assert look_at_limits(tmp_path).core_pattern is None
    network = look_at_network({}, tmp_path)
    assert all(one.is_up is None and one.mtu is None for one in network.interfaces)
    (folder,) = storage.look_at_folders({tmp_path: "test"}, 0, tmp_path / "nothing")
    assert (folder.mount, folder.kind) == (None, None)
    assert folder.free


# Folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mount", "files", "kind", "device"),
    [
        ("259:1 / / rw - ext4 /dev/nvme0n1p1 rw", {"nvme0n1": "0"}, "NVMe", "nvme0n1"),
        ("8:1 / / rw - xfs /dev/sda1 rw", {"sda": "1"}, "hard disk", "sda"),
        ("8:1 / / rw - xfs /dev/sda1 rw", {"sda": "0"}, "SSD", "sda"),
        ("254:0 / / rw - ext4 /dev/vda rw", {"vda": "1"}, "virtual disk", "vda"),
        ("0:50 / / rw - overlay overlay rw", {}, "container layer", "overlay"),
        ("0:51 / / rw - nfs4 server:/home rw", {}, "network", "server:/home"),
        ("0:52 / / rw - tmpfs tmpfs rw", {}, "memory", "tmpfs"),
        ("0:53 / / rw - zfs pool/home rw", {}, None, "pool/home"),
    ],
)
def test_kinds_of_disks(
    tmp_path: Path, mount: str, files: dict[str, str], kind: str | None, device: str
) -> None:
    root = write(tmp_path, {"proc/self/mountinfo": f"27 1 {mount}"})
    number = mount.split()[0]
    for disk, rotational in files.items():
        part = root / "sys/devices" / disk / f"{disk}p1"
        write(part, {"partition": "1"})
        write(root, {f"sys/block/{disk}/queue/rotational": rotational})
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "sys/dev/block" / number).symlink_to(part if number != "254:0" else part.parent)
    (found,) = storage.look_at_folders({tmp_path: "test"}, 0, root)
    assert (found.kind, found.device, found.mount) == (kind, device, "/")


def test_a_later_and_deeper_mount_hides_the_others(tmp_path: Path) -> None:
    deep = tmp_path / "with blank"
    deep.mkdir()
    escaped = str(deep).replace(" ", "\\040")
    mounts = f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {escaped} rw - nfs b:/c rw\n"
    root = write(tmp_path / "root", {"proc/self/mountinfo": mounts})
    found = storage.look_at_folders({deep: "deep", tmp_path: "above"}, 0, root)
    assert [one.kind for one in found] == ["network", None]
    assert found[0].mount == str(deep)


def test_disks_are_measured_once_for_each_mount_and_nothing_stays(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    first, second = storage.look_at_folders({one: "", other: ""}, 3 << 20)
    if first.kind == "memory":
        pytest.skip("temporary files lie in memory here")
    assert first.speed is not None
    assert first.speed.num_bytes == 3 << 20
    assert first.speed.write > 0 and first.speed.read > 0
    assert second.speed is None and second.not_measured == f"as {one.resolve()}"
    assert not [*one.iterdir(), *other.iterdir()]


def test_another_folder_is_measured_where_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = DiskSpeed(num_bytes=1, write=1.0, read=1.0, is_direct=True)

    def measure(folder: Path, num_bytes: int) -> DiskSpeed:
        if folder == one:
            raise PermissionError(errno.EACCES, "Permission denied")
        return speed

    one, other = (tmp_path / "one").resolve(), tmp_path / "other"
    one.mkdir()
    other.mkdir()
    write(tmp_path, {"proc/self/mountinfo": "27 1 8:1 / / rw - ext4 /dev/sda1 rw"})
    monkeypatch.setattr(storage, "measure_disk", measure)
    first, second = storage.look_at_folders({one: "", other: ""}, 1, tmp_path)
    assert (first.speed, first.not_measured) == (None, "Permission denied")
    assert second.speed == speed


def test_without_direct_access_what_is_written_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    found = storage.measure_disk(tmp_path, 100)
    assert not found.is_direct
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = storage.look_at_folders({Path("/proc"): "test"}, 1 << 20)
    assert found.speed is None
    assert found.not_measured
    (missing,) = storage.look_at_folders({Path("/no/such/folder"): "test"}, 0)
    assert "No such file" in missing.not_measured


def test_a_folder_is_measured_for_states_on_disk_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_speed, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(swap_speed, "LEAST_SECONDS", 0.0)
    found = swap_speed.look_at_swap(tmp_path, (5 << 20) + 1)
    assert (found.path, found.num_bytes, found.not_measured) == (str(tmp_path), 5 << 20, "")
    assert min(found.write, found.read, found.both) > 0
    assert not [*tmp_path.iterdir()]
    # A disk that is too slow for the whole file: one chunk each.
    monkeypatch.setattr(swap_speed, "MOST_SECONDS", 0.0)
    folder = SwapFolder(tmp_path, 0)
    course = swap_speed.Course(folder, 5 << 20)
    assert course.update(time.perf_counter() + 3600) == 10 << 20
    assert course.read(time.perf_counter() + 3600) == 5 << 20
    assert course.read(0.0) == 0
    folder.close()


def test_a_folder_that_cannot_keep_states_says_why(tmp_path: Path) -> None:
    assert swap_speed.look_at_swap(tmp_path, 0).not_measured == "switched off"
    missing = swap_speed.look_at_swap(tmp_path / "missing", 1 << 20)
    assert "No such file" in missing.not_measured
    full = swap_speed.look_at_swap(tmp_path, 1 << 50)
    assert "No space left" in full.not_measured or "File too large" in full.not_measured


def test_what_does_not_answer_is_given_up() -> None:
    import threading

    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer in"):
        within(0.05, never.wait)
    never.set()


# Network --------------------------------------------------------------------------------------

LO = Interface(name="lo", addresses=("127.0.0.1",), is_up=True, has_link=True, is_loopback=True)
ETH = Interface(name="eth0", addresses=("10.0.0.1",), is_up=True, has_link=True)
IB = Interface(name="ib0", addresses=("10.1.0.1",), is_up=True, has_link=True)
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",), is_up=True, has_link=True)
DOWN = Interface(name="eth1", addresses=("10.0.0.2",), is_up=False)


def test_where_gloo_listens() -> None:
    mine = HostName(name="here", addresses=("127.0.0.1",))
    assert gloo_way(None, mine, [LO, ETH])[:2] == ("127.0.0.1", "lo")
    assert gloo_way("eth0", mine, [LO, ETH])[:2] == ("10.0.0.1", "eth0")
    assert gloo_way("eth7", mine, [LO, ETH])[:2] == (None, "eth7")
    # An address of another machine (kept for documentation, so nobody's): loopback is left.
    other = HostName(name="here", addresses=("192.0.2.77",))
    assert gloo_way(None, other, [LO, ETH])[:2] == ("127.0.0.1", "lo")
    # On all of Debian's machines, and on loopback though no interface has it.
    debian = HostName(name="here", addresses=("127.0.1.1",))
    assert gloo_way(None, debian, [LO, ETH])[:2] == ("127.0.1.1", "lo")


@pytest.mark.parametrize(
    ("wish", "chosen"),
    [
        (None, ("ib0",)),
        ("eth", ("eth0",)),
        ("=eth", ()),
        ("=eth0", ("eth0",)),
        ("^ib,docker", ("lo", "eth0")),
        ("wlan", ()),
    ],
)
def test_where_nccl_may_listen(wish: str | None, chosen: tuple[str, ...]) -> None:
    assert nccl_candidates(wish, [LO, ETH, IB, DOCKER, DOWN]) == chosen


def test_infiniband_ports_are_read(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1/"
    files = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    root = write(tmp_path, {port + name: text for name, text in files.items()})
    (found,) = look_at_network({}, root).infiniband
    assert found.is_active
    assert (found.device, found.port, found.rate) == ("mlx5_0", "1", "400 Gb/sec (4X NDR)")


# Software and environment ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "wants", "is_among"),
    [
        ("2.13.0+cpu", ">=2.13", True),
        ("2.12.1", ">=2.13", False),
        ("2.9", ">=2.13", False),
        ("2.14.0.dev20260101", ">=2.13", True),
        ("3.0", ">=2.13,<3", False),
        ("2.99", ">=2.13,<3", True),
        ("1.4.2", "~=1.4", True),
        ("2.0", "~=1.4", False),
        ("1.5.0", "~=1.4.2", False),
        ("1.4.2", "!=1.4.2", False),
        ("anything", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, wants: str, is_among: bool) -> None:
    assert fits(version, wants) is is_among


def test_only_chosen_variables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("NCCL_SECRET_TOKEN", "secret")
    found = chosen_variables()
    assert found["NCCL_DEBUG"] == "INFO"
    assert set(found) <= set(NAMES)
    assert "secret" not in found.values()
    assert not [name for name in NAMES if re.search("KEY|TOKEN|SECRET|PASS", name)]
