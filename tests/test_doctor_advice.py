"""The advice of `onecopy doctor`: from made-up facts and reports to findings, rule by rule."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from rich.console import Console

from onecopy.doctor.advice import advise
from onecopy.doctor.advice_ranks import advise_ranks
from onecopy.doctor.advice_ways import step_seconds
from onecopy.doctor.examine import Examination
from onecopy.doctor.facts import (
    UNLIMITED,
    Accelerator,
    DiskSpeed,
    Facts,
    Folder,
    HostName,
    InfinibandPort,
    Interface,
    Launched,
    Limit,
    Limits,
    Memory,
    Network,
    Package,
    Processors,
    Software,
    SwapSpeed,
    TorchBuild,
)
from onecopy.doctor.findings import FINE, LEVELS, NOTE, PROBLEM, WARNING, Finding, merged
from onecopy.doctor.meeting import first_line
from onecopy.doctor.results import SIZES, Card, RankReport, Training, Transfer
from onecopy.doctor.show import print_examination

GB = 10**9
LO = Interface(
    name="lo", addresses=("127.0.0.1",), is_up=True, has_link=True, is_loopback=True, mtu=65536
)
ETH = Interface(
    name="eth0",
    addresses=("10.0.0.1", "fe80::1"),
    is_up=True,
    has_link=True,
    is_physical=True,
    speed=100_000,
    mtu=9000,
)
DISK = Folder(
    path="/data",
    purpose="current folder",
    mount="/data",
    file_system="ext4",
    device="nvme0n1",
    kind="NVMe",
    total=1000 * GB,
    free=900 * GB,
    speed=DiskSpeed(num_bytes=1 << 28, write=3e9, read=4e9, is_direct=True),
)
GPU = Accelerator(index=0, kind="cuda", name="H200", total=140 * GB, free=139 * GB, bf16=True)
ACTIVE = InfinibandPort(device="mlx5_0", port="1", state="ACTIVE", rate="400", layer="InfiniBand")
FOUR = Launched(rank=0, world_size=4, local_rank=0, local_size=4)
TWO_NODES = Launched(rank=0, world_size=8, local_rank=0, local_size=4)

# A machine about which there is nothing to say.
GOOD = Facts(
    software=Software(
        onecopy="1",
        python="3.11",
        system="Linux",
        packages=(Package(name="torch", version="2.13.0", purpose="", is_required=True),),
        torch=TorchBuild(threads=16, backends=("gloo", "nccl")),
    ),
    processors=Processors(model="CPU", logical=32, affinity=32, load=0.1),
    memory=Memory(total=256 * GB, available=200 * GB, shm_total=128 * GB, shm_free=128 * GB),
    network=Network(
        host=HostName(name="node1", addresses=("10.0.0.1",)),
        interfaces=(LO, ETH),
        gloo_address="10.0.0.1",
        gloo_interface="eth0",
        nccl_interfaces=("eth0",),
    ),
    limits=Limits(
        open_files=Limit(soft=65536, hard=65536),
        processes=Limit(soft=UNLIMITED, hard=UNLIMITED),
        locked_memory=Limit(soft=UNLIMITED, hard=UNLIMITED),
    ),
    folders=(DISK,),
)


def with_(part: str, **changes: Any) -> Facts:
    """GOOD with some fields of one part changed."""
    return replace(GOOD, **{part: replace(getattr(GOOD, part), **changes)})


def with_torch(**changes: Any) -> Facts:
    torch = GOOD.software.torch
    assert torch is not None, "GOOD has one"
    return with_("software", torch=replace(torch, **changes))


def package(**changes: Any) -> Facts:
    return with_("software", packages=(replace(GOOD.software.packages[0], **changes),))


def environment(**variables: str) -> Facts:
    return replace(GOOD, environment=variables)


def swap(**changes: Any) -> Facts:
    return replace(GOOD, swap=replace(SWAP, **changes))


def folder(**changes: Any) -> Facts:
    return replace(GOOD, folders=(replace(DISK, **changes),))


LOOPBACK = with_(
    "network",
    host=HostName(name="node1", addresses=("127.0.1.1",)),
    gloo_address="127.0.1.1",
    gloo_interface="lo",
)
UNRESOLVED = with_(
    "network",
    host=HostName(name="node1", problem="Name or service not known"),
    gloo_address="127.0.0.1",
)
GROUP = with_("memory", group_limit=16 * GB, group_used=2 * GB)
SMALL_LOCK = Limit(soft=65536, hard=65536)
SWAP = SwapSpeed(path="/nvme", num_bytes=1 << 28, write=2e9, read=4e9, both=3e9, is_direct=True)
SLOW_ETH = replace(ETH, speed=1000)
CPUS = with_("processors", logical=8, affinity=8)
QUOTA = with_("processors", quota=4.0)


def test_a_good_machine_needs_nothing() -> None:
    assert {finding.level for finding in advise(GOOD)} == {FINE}


@pytest.mark.parametrize(
    ("facts", "level", "seen", "remedy"),
    [
        (package(version=None), PROBLEM, "torch is not installed", "pip install 'torch'"),
        (
            package(version="2.9.0", wants=">=2.13", fits=False),
            PROBLEM,
            "torch 2.9.0 is installed, >=2.13 is wanted",
            "pip install 'torch>=2.13'",
        ),
        (
            package(name="peft", is_required=False, version="0.1", wants=">=0.9", fits=False),
            WARNING,
            "peft 0.1 is installed",
            "pip install 'peft>=0.9'",
        ),
        (with_torch(backends=("nccl",)), PROBLEM, "built without Gloo", "wheel of torch"),
        (
            replace(with_torch(backends=("gloo",)), accelerators=(GPU,)),
            PROBLEM,
            "built without NCCL",
            "made for these devices",
        ),
        (
            replace(GOOD, accelerator_problem="driver too old"),
            PROBLEM,
            "driver too old",
            "nvidia-smi",
        ),
        (with_torch(cuda="13.0"), WARNING, "sees no device; no driver", "--gpus all"),
        (with_("software", driver="NVIDIA 580.1"), WARNING, "CPUs only", "/whl/cu130"),
        (
            replace(GOOD, accelerators=(GPU,), launched=FOUR),
            PROBLEM,
            "4 ranks here share 1 device",
            "--nproc-per-node=1",
        ),
        (
            replace(GOOD, accelerators=(replace(GPU, free=60 * GB),)),
            WARNING,
            "cuda:0 has 60.0 GB of 140.0 GB free",
            "--device-memory 60GB",
        ),
        (replace(GOOD, accelerators=(replace(GPU, bf16=False),)), NOTE, "no bf16", '"fp16"'),
        (
            replace(CPUS, launched=FOUR),
            WARNING,
            "OMP_NUM_THREADS is not set, with 4 ranks on 8 cores",
            "export OMP_NUM_THREADS=2",
        ),
        (
            replace(CPUS, launched=FOUR, environment={"OMP_NUM_THREADS": "8"}),
            WARNING,
            "OMP_NUM_THREADS=8, 32 together, on 8 usable cores",
            "export OMP_NUM_THREADS=2",
        ),
        (
            replace(GOOD, launched=FOUR, environment={"OMP_NUM_THREADS": "1"}),
            NOTE,
            "with 8 cores for each rank",
            "OMP_NUM_THREADS=8 torchrun",
        ),
        (QUOTA, WARNING, "4 cores' worth of time, and 32 cores", "export OMP_NUM_THREADS=4"),
        (with_("processors", load=40.0), NOTE, "40.0 threads of other programs", "top"),
        (GROUP, NOTE, "may use 16.0 GB of the 256.0 GB", "--memory"),
        (
            with_("memory", group_limit=16 * GB, group_used=15 * GB),
            WARNING,
            "only 1.0 GB of host memory",
            "ps aux",
        ),
        (with_("memory", available=GB), WARNING, "only 1.0 GB of host memory", "ps aux"),
        (with_("memory", shm_total=64 << 20), WARNING, "/dev/shm has 67.1 MB", "--shm-size=8g"),
        (
            replace(
                with_("network", infiniband=(ACTIVE,)), limits=Limits(locked_memory=SMALL_LOCK)
            ),
            PROBLEM,
            "may lock 65.5 kB of memory",
            "ulimit -l unlimited",
        ),
        (
            with_("limits", open_files=Limit(soft=1024, hard=UNLIMITED)),
            NOTE,
            "may open 1024 files",
            "ulimit -n 65536",
        ),
        (
            with_("limits", open_files=Limit(soft=1024, hard=4096)),
            NOTE,
            "may open 1024 files",
            "ulimit -n 4096; more by",
        ),
        (
            with_("limits", processes=Limit(soft=256, hard=256)),
            WARNING,
            "may run 256 processes",
            "--ulimit nproc=65536",
        ),
        (environment(NCCL_P2P_DISABLE="1"), WARNING, "NCCL_P2P_DISABLE=1", "unset NCCL_P2P"),
        (environment(TORCH_DISTRIBUTED_DEBUG="detail"), WARNING, "DEBUG=detail", "unset"),
        (
            environment(GLOO_SOCKET_IFNAME="eth7"),
            PROBLEM,
            "eth7 does not exist",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
        (
            replace(
                with_("network", interfaces=(LO, replace(ETH, is_up=False))),
                environment={"GLOO_SOCKET_IFNAME": "eth0"},
            ),
            PROBLEM,
            "eth0 is down",
            "ip link set eth0 up, or unset GLOO_SOCKET_IFNAME",
        ),
        (
            replace(with_("network", nccl_interfaces=()), environment={"NCCL_SOCKET_IFNAME": "x"}),
            WARNING,
            "NCCL_SOCKET_IFNAME=x leaves no interface",
            "export NCCL_SOCKET_IFNAME=eth0",
        ),
        (LOOPBACK, NOTE, "means 127.0.1.1, this machine's loopback", "GLOO_SOCKET_IFNAME=eth0"),
        (
            replace(LOOPBACK, launched=TWO_NODES, environment={"OMP_NUM_THREADS": "2"}),
            PROBLEM,
            "so Gloo listens on 127.0.1.1",
            "GLOO_SOCKET_IFNAME=eth0 on every node",
        ),
        (UNRESOLVED, NOTE, "has no address (Name or service not known)", "/etc/hosts"),
        (
            with_("network", interfaces=(LO, ETH, replace(ETH, name="eth1", has_link=False))),
            NOTE,
            "without a cable: eth1",
            "ip link set eth1 up",
        ),
        (
            with_("network", infiniband=(replace(ACTIVE, state="DOWN"),)),
            WARNING,
            "mlx5_0/1: DOWN",
            "ibstat",
        ),
        (with_("network", interfaces=(LO, SLOW_ETH)), NOTE, "has 1 Gb/s", "onecopy plan"),
        (
            replace(
                with_("network", interfaces=(LO, SLOW_ETH)),
                launched=TWO_NODES,
                environment={"OMP_NUM_THREADS": "2"},
            ),
            WARNING,
            "has 1 Gb/s",
            "onecopy plan",
        ),
        (folder(kind="memory"), WARNING, "is host memory", "--folder"),
        (folder(kind="container layer"), NOTE, "a layer of the container", "docker run -v"),
        (folder(kind="SSD"), NOTE, "none of the folders is seen to lie on NVMe (SSD)", "--folder"),
        (folder(free=5 * GB), WARNING, "has 5.0 GB free", "keep=2"),
        (
            folder(free=None, speed=None, not_measured="no answer in 5 s"),
            WARNING,
            "cannot be looked at: no answer",
            "df /data",
        ),
        (
            folder(speed=DiskSpeed(num_bytes=1, write=1e8, read=1e8, is_direct=True)),
            NOTE,
            "takes 100.0 MB/s",
            "async_save",
        ),
        (swap(), FINE, "moves 3.0 GB/s: an optimizer step of 1B parameters", ""),
        (swap(both=1.5e9), NOTE, "moves 1.5 GB/s", "RAID 0"),
        (swap(is_direct=False), WARNING, "not read and written past", "ext4 or XFS"),
        (swap(not_measured="Permission denied"), WARNING, "not measured: Permission", "df /nvme"),
    ],
)
def test_each_rule_says_what_was_seen_and_what_to_do(
    facts: Facts, level: str, seen: str, remedy: str
) -> None:
    findings = [finding for finding in advise(facts) if seen in finding.seen]
    assert len(findings) == 1, [finding.seen for finding in advise(facts)]
    assert findings[0].level == level
    assert remedy in findings[0].remedy
    assert findings[0].why or level == FINE


def test_states_on_disk_are_told_in_seconds() -> None:
    """Masters and both moments, read and written; a mean of 4 bytes read, 2 bytes of values
    written. In forward and backward two gathers of 2 bytes, and the mean is written."""
    (finding,) = [one for one in advise(swap(read=2e9, write=4e9, both=1e9)) if "1B" in one.why]
    assert "reads 16 and writes 14 bytes a parameter in 30.0 s" in finding.why
    assert "forward and backward read 4 and write 4 in 3.0 s" in finding.why


def test_a_slow_link_is_told_in_seconds() -> None:
    # 16 ranks: a rank gathers twice and reduces once, 2 bytes for 15/16 of a billion parameters.
    assert step_seconds(0.125e9) == pytest.approx(3 * 2 * 15 / 16 / 0.125)
    facts = with_("network", interfaces=(LO, SLOW_ETH))
    (finding,) = [one for one in advise(facts) if "Gb/s" in one.seen]
    assert "sends for 45.0 s or more" in finding.why


def test_infiniband_makes_a_slow_interface_no_matter() -> None:
    facts = with_("network", interfaces=(LO, SLOW_ETH), infiniband=(ACTIVE,))
    assert {finding.level for finding in advise(facts)} == {FINE}


def test_nothing_known_is_nothing_wrong() -> None:
    """On a system that says nothing (no /proc, no /sys), nothing is made up."""
    software = Software(onecopy="1", python="3.11", system="Darwin")
    host = HostName(name="mac", addresses=("10.0.0.7",))
    facts = Facts(
        software=software,
        processors=Processors(),
        memory=Memory(),
        network=Network(host=host, gloo_address="10.0.0.7"),
        limits=Limits(),
        folders=(Folder(path="/tmp", purpose="temporary files", free=900 * GB),),
    )
    assert {finding.level for finding in advise(facts)} == {FINE}
    assert "unknown" in shown(Examination(facts=facts, findings=tuple(advise(facts))))


# Ranks ----------------------------------------------------------------------------------------

VERSIONS = {"onecopy": "1", "python": "3.11", "torch": "2.13.0", "numpy": "2"}


def card(rank: int, **changes: Any) -> Card:
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank}",
        "address": f"10.0.0.{rank}",
        "interface": "eth0",
        "versions": VERSIONS,
        "is_first_here": True,
    }
    return Card(**{**values, **changes})


def report(rank: int = 0, **changes: Any) -> RankReport:
    values: dict[str, Any] = {
        "rank": rank,
        "world_size": 2,
        "backend": "gloo",
        "reached": "the end",
        "cards": (card(0), card(1)),
        "copy": 1e10,
        "transfers": tuple(transfer(verb, n) for n in SIZES for verb in ("gather", "reduce")),
        "training": Training(num_parameters=100, different=0, largest=0.0),
    }
    return RankReport(**{**values, **changes})


def transfer(verb: str = "gather", num_bytes: int = SIZES[-1], **changes: Any) -> Transfer:
    values = {"sent_bytes": num_bytes // 2, "seconds": num_bytes / 2 / 2e9, "is_exact": True}
    return Transfer(verb=verb, num_bytes=num_bytes, **{**values, **changes})


def test_ranks_that_came_through_are_fine() -> None:
    findings = advise_ranks([report(0), report(1)], 2, "10.0.0.0 29500")
    assert {finding.level for finding in findings} == {FINE}
    # 2 bytes three times (two gathers and a reduce) for half a billion parameters: 3 GB at 2 GB/s.
    assert any("send 2.0 GB/s each" in one.seen and "for 1.5 s" in one.seen for one in findings)
    assert any("to the last bit" in one.seen for one in findings)


STOPPED: dict[str, Any] = {
    "training": None,
    "transfers": (),
    "error": "timed out",
    "reached": "connecting",
}


@pytest.mark.parametrize(
    ("reports", "level", "seen", "remedy"),
    [
        (
            [report(0, **STOPPED, others={1: ""})],
            PROBLEM,
            "no further than 'connecting': rank 0: timed out; rank 1 was at: nothing yet",
            "open all TCP ports",
        ),
        (
            [report(0, **{**STOPPED, "cards": (), "reached": "reaching the store"})],
            PROBLEM,
            "no further than 'reaching the store'",
            "nc -vz 10.0.0.0 29500",
        ),
        (
            [report(rank, **{**STOPPED, "cards": (card(0, address=None),)}) for rank in range(2)],
            PROBLEM,
            "no further than 'connecting': rank 0, 1: timed out",
            "an interface that is up and has an address",
        ),
        (
            [report(0, **{**STOPPED, "cards": (card(0, address="127.0.1.1"), card(1))})],
            PROBLEM,
            "no further than 'connecting'",
            "export GLOO_SOCKET_IFNAME=",
        ),
        (
            [
                report(
                    0,
                    **{
                        **STOPPED,
                        "reached": "gather of 1,048,576 bytes",
                        "transfers": (transfer(num_bytes=4096),),
                    },
                )
            ],
            PROBLEM,
            "no further than 'gather of 1,048,576 bytes'",
            "MTU",
        ),
        ([report(0)], PROBLEM, "no report of rank 1", "what that rank printed"),
        (
            [report(0, transfers=(transfer(), transfer("reduce", is_exact=False))), report(1)],
            PROBLEM,
            "wrong values after: reduce of 67.1 MB on rank 0",
            "--json",
        ),
        (
            [report(0, transfers=(transfer(num_bytes=SIZES[1]),)), report(1)],
            WARNING,
            "larger messages than 1.0 MB",
            "interface",
        ),
        (
            [
                report(0, training=Training(num_parameters=100, different=3, largest=1e-6)),
                report(1),
            ],
            WARNING,
            "3 of 100 parameters differ",
            "--json",
        ),
        (
            [report(0, training=Training(num_parameters=100, different=3, largest=0.5)), report(1)],
            PROBLEM,
            "3 of 100 parameters differ",
            "--json",
        ),
        (
            [report(0, training=Training(num_parameters=9, different=3, largest=float("nan")))] * 2,
            PROBLEM,
            "3 of 9 parameters differ",
            "--json",
        ),
        (
            [report(0, clocks={1: 30.0}), report(1)],
            WARNING,
            "the clock of node1 (rank 1) is 30.0 s ahead",
            "ntp",
        ),
        (
            [
                report(0, cards=(card(0), card(1, versions={**VERSIONS, "torch": "2.14"}))),
                report(1),
            ],
            PROBLEM,
            "different versions of torch: 2.13.0 on rank 0; 2.14 on rank 1",
            "pip install 'torch==2.13.0'",
        ),
        (
            [report(0, cards=(card(0), card(1, versions={**VERSIONS, "numpy": "1"}))), report(1)],
            NOTE,
            "different versions of numpy",
            "pip install 'numpy==2'",
        ),
    ],
)
def test_what_ranks_find_is_explained(
    reports: list[RankReport], level: str, seen: str, remedy: str
) -> None:
    findings = advise_ranks(reports, 2, "10.0.0.0 29500")
    (found,) = [finding for finding in findings if seen in finding.seen]
    assert found.level == level
    assert remedy in found.remedy
    assert found.why


def test_errors_are_told_without_places_in_the_sources_of_others() -> None:
    text = "[enforce fail at /a/b/device.cc:84] x != y. No address\n[/c/pair.cc:9] more"
    assert first_line(RuntimeError(text)) == "x != y. No address"
    assert first_line(RuntimeError("failed with [/c/pair.cc:9] timed out")) == (
        "failed with timed out"
    )
    assert first_line(TimeoutError()) == "TimeoutError"


def test_accelerators_may_round_otherwise() -> None:
    training = Training(num_parameters=100, different=3, largest=1e-6)
    one = report(0, device="cuda", training=training)
    (found,) = [f for f in advise_ranks([one, report(1)], 2, "") if "differ from" in f.seen]
    assert found.level == NOTE


def test_accelerators_that_the_test_did_not_use_are_told() -> None:
    (found,) = [f for f in advise_ranks([report(0)] * 2, 2, "", 1) if f.level == NOTE]
    assert "1 accelerator for 2 ranks" in found.seen
    assert found.remedy == "onecopy doctor --nproc 1"
    on_device = replace(report(0), device="cuda")
    assert all(f.level == FINE for f in advise_ranks([on_device, report(1)], 2, "", 2))


def test_reports_travel_as_json() -> None:
    before = report(1, others={0: "x"}, clocks={1: 0.5})
    assert RankReport.from_json(json.loads(json.dumps(before.to_json()))) == before
    empty = RankReport(rank=0, world_size=1)
    assert RankReport.from_json(json.loads(json.dumps(empty.to_json()))) == empty


# What is shown --------------------------------------------------------------------------------


def shown(examination: Examination, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_examination(console, examination)
    file = console.file
    assert isinstance(file, io.StringIO), "it was given one"
    return file.getvalue()


def full() -> Examination:
    facts = replace(
        LOOPBACK,
        accelerators=(GPU, replace(GPU, index=1, bf16=False)),
        environment={"NCCL_DEBUG": "INFO"},
        folders=(DISK, replace(DISK, path="/" + 30 * "long/", speed=None, not_measured="x")),
        swap=SWAP,
    )
    findings = advise(facts)
    machine = {"facts": asdict(facts), "findings": [asdict(one) for one in findings]}
    return Examination(
        facts=facts,
        findings=tuple(findings),
        reports=(report(0), report(1)),
        machines={"node1 (rank 1)": machine},
    )


def test_all_of_it_is_shown_in_80_columns_and_nothing_is_cut() -> None:
    text = shown(full())
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text  # what rich writes where it has cut something
    for words in ("H200", "node1: 127.0.1.1", "mounted on /data", "unit of 64 MiB", "/nvme"):
        assert words in text
    assert text.replace("\n", "").replace(" ", "").count("long/") == 30
    assert text.rstrip().splitlines()[-1] == "1 warning, 2 notes"


def test_findings_come_worst_first_and_everything_is_json() -> None:
    examination = full()
    levels = [LEVELS.index(one.level) for one in examination.findings]
    assert levels == sorted(levels)
    again = json.loads(json.dumps(examination.to_json()))
    assert again["facts"]["network"]["host"]["name"] == "node1"
    assert again["ranks"][1]["transfers"][0]["verb"] == "gather"
    assert not examination.has_problem
    assert Examination(
        facts=None, findings=(Finding(level=PROBLEM, topic="", seen=""),)
    ).has_problem


def test_what_is_the_same_on_several_machines_is_said_once() -> None:
    one = Finding(level=NOTE, topic="memory", seen="little", host="a")
    other = replace(one, seen="much")
    assert merged([one, other, replace(one, host="b")]) == [replace(one, host="a, b"), other]
