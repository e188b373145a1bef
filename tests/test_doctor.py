"""`onecopy doctor` from end to end: alone, as torchrun's ranks, and where a way is blocked."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.network import WIRE, CannotMakeNodesError, network
from onecopy import cli, launcher
from onecopy.comm.collectives import Collectives
from onecopy.comm.meshes import world_group
from onecopy.comm.neighbours import meet_neighbours
from onecopy.doctor import step, transfers
from onecopy.doctor.network import look_at_network
from onecopy.doctor.results import SIZES, RankReport
from onecopy.doctor.selftest import MEET
from onecopy.doctor.selftest import test_rank as run_self_test
from onecopy.errors import LaunchError
from tests.pool import REPOSITORY, Pool

CPU = torch.device("cpu")
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
CUT_AFTER = 30 << 20  # bytes on the wire: transfers are under way then


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this one; it must not stay set for other tests."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


def test_alone_it_looks_starts_ranks_and_finds_them_right(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = f"doctor --json - --device cpu --disk-bytes 1MiB --limit 60 --folder {tmp_path}"
    assert cli.main(arguments.split()) == 0
    found = json.loads(capsys.readouterr().out)
    reports = [RankReport.from_json(rank) for rank in found["ranks"]]
    assert [report.rank for report in reports] == [0, 1]
    for report in reports:
        assert (report.reached, report.error, report.backend) == ("the end", "", "gloo")
        assert [one.num_bytes for one in report.transfers if one.verb == "reduce"] == list(SIZES)
        assert all(one.is_exact and one.seconds > 0 for one in report.transfers)
        assert report.training is not None and report.training.different == 0
    # What one rank does not own, the other sends.
    largest = [one for one in reports[0].transfers if one.num_bytes == SIZES[-1]]
    assert [one.sent_bytes for one in largest] == [SIZES[-1] // 2] * 3
    assert found["facts"]["software"]["packages"][0]["version"] == torch.__version__
    assert found["facts"]["folders"][0]["path"] == str(tmp_path.resolve())
    assert "PATH" not in found["facts"]["environment"]


def test_only_looking_writes_json_beside_the_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "doctor.json"
    assert cli.main(["doctor", "--no-test", "--disk-bytes", "0", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for heading in ("versions", "processors", "memory", "network", "storage", "findings"):
        assert f"\n{heading}\n" in "\n" + text
    found = json.loads(file.read_text())
    assert found["ranks"] == []
    assert found["facts"]["folders"][0]["not_measured"] == "switched off"


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("--folder no/such", "there is no such folder"),
        ("--nvme no/such", "--nvme no/such: there is no such folder"),
        ("--json no/such/file", "make the folder first"),
        ("--nproc 0", "--nproc is 0"),
        ("--limit 0", "--limit is 0"),
        ("--disk-bytes much", "is no size"),
    ],
)
def test_bad_options_give_advice(
    arguments: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments.split()]) == 2
    assert advice in capsys.readouterr().err


def test_a_rank_that_dies_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(*_: Any) -> None:
        raise LaunchError("rank 1 of 2 failed: the process was ended by SIGBUS")

    monkeypatch.setattr(launcher, "launch", die)
    assert cli.main(["doctor", "--disk-bytes", "0", "--json", "-"]) == 1
    (problem,) = [
        one for one in json.loads(capsys.readouterr().out)["findings"] if one["level"] == "problem"
    ]
    assert "SIGBUS" in problem["seen"]


# What is measured ------------------------------------------------------------------------------


def measured(fault: str) -> list[bool]:
    """Whether gather, reduce and refresh were exact; with a fault on the first rank."""
    transfers.SIZES = (1 << 16,)
    transfers.VERB_SECONDS = 0.0
    original = getattr(Collectives, fault, None)
    world = world_group()

    def wrong(self: Collectives, *arguments: Any) -> Any:
        assert original is not None, "a method was named"
        pending = original(self, *arguments)
        finish = pending.finish

        class Wrong:
            def finish(self) -> torch.Tensor:
                result: torch.Tensor = finish()
                result[-1] += 1.0
                return result

        return Wrong()

    if fault and world.rank == 0:
        setattr(Collectives, fault, wrong)
    try:
        return [
            one.is_exact
            for one in transfers.measure(world, CPU, lambda what: None, meet_neighbours(world, CPU))
        ]
    finally:
        if original is not None:
            setattr(Collectives, fault, original)


@pytest.mark.parametrize(
    ("fault", "exact"),
    [
        ("", [True, True, True]),
        ("gather", [False, True, False]),
        ("reduce", [True, False, True]),
    ],
)
def test_a_wrong_value_is_noticed(pool: Pool, fault: str, exact: list[bool]) -> None:
    first, *others = pool.run(3, measured, fault)
    assert first == exact
    assert others == [[True, True, True]] * 2


def compared(fault: bool) -> tuple[int, int, float]:
    group = world_group()
    if fault:
        # As if the first rank's data had been lost on the way.
        original, step._step_alone = step._step_alone, lambda model, b: original(model, b[1:])
    try:
        found = step.compare_step(group.rank, group.size, CPU)
    finally:
        if fault:
            step._step_alone = original
    return found.num_parameters, found.different, found.largest


def test_a_step_equals_one_process_and_a_wrong_one_does_not(pool: Pool) -> None:
    for count, different, largest in pool.run(3, compared, False):
        assert count > 30_000
        assert (different, largest) == (0, 0.0)
    for count, different, largest in pool.run(2, compared, True):
        assert different > count / 2
        assert largest > 1e-3


def where_gloo_listens(interface: str | None) -> tuple[str | None, set[str]]:
    """Where the doctor says that Gloo would, and where a new group of it does."""
    before = listening()
    wish = os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        said = look_at_network(os.environ).gloo_address
        group = torch.distributed.new_group(backend="gloo")
        found = listening() - before
        torch.distributed.barrier()
        torch.distributed.destroy_process_group(group)
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if wish is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = wish
    return said, {address for address, _ in found}


def listening() -> set[tuple[str, str]]:
    """Addresses at which a socket of this process listens, and their sockets' numbers."""
    numbers = set()
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            numbers.add(os.readlink(f"/proc/self/fd/{file}"))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in numbers:
                # Words of 32 bits, each in the order of this machine.
                packed = bytes.fromhex(words[1].partition(":")[0])
                if sys.byteorder == "little":
                    packed = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
                found.add((socket.inet_ntop(family, packed), words[9]))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_gloo_listens_where_it_is_said_to(pool: Pool) -> None:
    usable = [one.name for one in look_at_network({}).interfaces if one.is_usable]
    for interface in (None, *usable[:1]):
        for said, found in pool.run(2, where_gloo_listens, interface):
            assert found == {said}, interface


# Several machines ------------------------------------------------------------------------------


def start(rank: int, port: int, *prefix: str, **variables: str) -> subprocess.Popen[str]:
    """One rank of two, as a launcher would start it on a machine of its own."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    limit = variables.get("LIMIT", "60")
    arguments = f"doctor --device cpu --disk-bytes 0 --limit {limit} --json -"
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "onecopy", *arguments.split()],
        env=environment,
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def outcomes(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; none is left behind."""
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def problems(text: str) -> list[dict[str, str]]:
    return [one for one in json.loads(text)["findings"] if one["level"] == "problem"]


def test_the_first_rank_of_a_launcher_speaks_for_all_machines() -> None:
    port = free_port()
    where = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    first, second = outcomes([start(rank, port, **where) for rank in range(2)])
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    found = json.loads(first[1])
    assert second[1] == ""
    assert [rank["reached"] for rank in found["ranks"]] == ["the end", "the end"]
    assert [card["is_first_here"] for card in found["ranks"][0]["cards"]] == [True, True]
    assert abs(found["ranks"][0]["clocks"]["1"]) < 0.5
    (name,) = found["machines"]
    assert name.endswith("(rank 1)")
    assert found["machines"][name]["facts"]["launched"]["rank"] == 1


def test_a_rank_that_does_not_come_is_said_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    registered: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *what: registered.append(what))
    report = run_self_test("cpu", 1.0)
    assert report.reached == MEET
    assert "1/2 clients joined" in report.error
    assert registered, "the process would wait for threads that wait for others"


@pytest.mark.slow
def test_a_way_that_only_the_store_can_go_is_found() -> None:
    """Each rank tells the others to come to its own loopback."""
    with ExitStack() as stack:
        namespaces = enter_nodes(stack)
        where = {"MASTER_ADDR": FIRST, "GLOO_SOCKET_IFNAME": "lo", "LIMIT": "5"}
        ranks = [
            start(rank, 29500, "ip", "netns", "exec", name, **where)
            for rank, name in enumerate(namespaces)
        ]
        first, second = outcomes(ranks)
    assert first[0] == 1
    (problem,) = problems(first[1])
    assert "no further than 'connecting'" in problem["seen"]
    assert "rank 1 listens on 127.0.0.1 (lo" in problem["why"]
    assert "export GLOO_SOCKET_IFNAME" in problem["remedy"]
    assert second[0] in (0, 1)  # 1 where the first one's store has gone before it could tell it


@pytest.mark.slow
def test_a_link_that_breaks_is_found() -> None:
    with ExitStack() as stack:
        namespaces = enter_nodes(stack)
        ranks = [
            start(
                rank,
                29500,
                *("ip", "netns", "exec", name),
                MASTER_ADDR=FIRST,
                GLOO_SOCKET_IFNAME=WIRE,
                LIMIT="5",
            )
            for rank, name in enumerate(namespaces)
        ]
        wait_for_traffic(namespaces[1])
        cut = ["ip", "-n", namespaces[1], "link", "set", WIRE, "down"]
        subprocess.run(cut, check=True)
        first, second = outcomes(ranks)
    assert first[0] == 1
    (problem,) = problems(first[1])
    assert "bytes'" in problem["seen"], "it names what was under way"
    assert "messages of" in problem["why"] and f"rank 1 listens on {SECOND}" in problem["why"]
    assert "ip -s link" in problem["remedy"]
    assert "no further than" in " ".join(second[2].split())


def enter_nodes(stack: ExitStack) -> tuple[str, ...]:
    """The namespaces of two nodes with a rank each."""
    try:
        return stack.enter_context(network((1, 1))).nodes
    except CannotMakeNodesError as reason:
        pytest.skip(f"there can be no network namespaces: {reason}")


def free_port() -> int:
    """One that nobody listens on, below those that the system gives to whoever asks for any.

    It is taken some seconds later: by then another test's connection could have got such a one.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(given.read_text().split()[0]) if given.is_file() else 32768
    top = lowest if lowest > 16384 else 32768
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(top - 8192, top)))
            port: int = probe.getsockname()[1]
            return port


def wait_for_traffic(namespace: str) -> None:
    counter = f"/sys/class/net/{WIRE}/statistics/tx_bytes"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, "cat", counter], capture_output=True, check=True
        )
        if int(done.stdout) > CUT_AFTER:
            return
        time.sleep(0.02)
    pytest.fail("the ranks have sent nothing")
