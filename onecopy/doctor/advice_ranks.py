"""From what the ranks of a self-test found to findings: what did not come through, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onecopy.doctor.advice_ways import step_seconds
from onecopy.doctor.findings import FINE, NOTE, PROBLEM, WARNING, Finding, by_level
from onecopy.doctor.results import SIZES, Card, RankReport
from onecopy.report.progress import plural, size

__all__ = ["advise_ranks"]

ALLOWED_CLOCK = 1.0  # seconds
# A sum in another order differs by rounding; a wrong value by the size of the change itself.
ROUNDING = 1e-3
LEVEL_OF_DIFFERENCE = {"onecopy": PROBLEM, "torch": PROBLEM, "python": WARNING}


def advise_ranks(
    reports: Sequence[RankReport], world_size: int, where: str, idle_devices: int = 0
) -> list[Finding]:
    """What the test says; the first report is of the first rank, and some may be missing.

    Args:
        where: the address of the store, for what to look at.
        idle_devices: accelerators of the machine, where the test was not told to use CPUs.
    """
    return by_level(
        [
            *_device(reports, idle_devices),
            *_missing(reports, world_size),
            *_stopped(reports, where),
            *_versions(reports),
            *_clocks(reports),
            *_transfers(reports),
            *_neighbours(reports),
            *_training(reports),
        ]
    )


def _device(reports: Sequence[RankReport], idle_devices: int) -> Iterator[Finding]:
    if idle_devices and reports and reports[0].device == "cpu":
        yield Finding(
            level=NOTE,
            topic="self-test",
            seen=f"the test used CPUs: {plural(idle_devices, 'accelerator')} for "
            f"{plural(reports[0].world_size, 'rank')}",
            why="each rank needs one of its own",
            remedy=f"onecopy doctor --nproc {idle_devices}",
        )


def _missing(reports: Sequence[RankReport], world_size: int) -> Iterator[Finding]:
    here = {report.rank for report in reports}
    missing = [rank for rank in range(world_size) if rank not in here]
    if missing and not any(report.error for report in reports):
        yield Finding(
            level=PROBLEM,
            topic="self-test",
            seen=f"no report of rank {_listed(missing)}",
            why="a process has ended, or cannot reach the store any more",
            remedy="look at what that rank printed",
        )


def _stopped(reports: Sequence[RankReport], where: str) -> Iterator[Finding]:
    """One finding for all ranks that stopped at the same thing, with what each saw."""
    stopped = [report for report in reports if report.error]
    if not stopped:
        return
    # Ranks stop where the first does, or one behind it.
    first = min(stopped, key=lambda report: report.seconds)
    ranks_of: dict[str, list[int]] = {}
    for report in stopped:
        ranks_of.setdefault(report.error, []).append(report.rank)
    errors = [f"rank {_listed(ranks)}: {error}" for error, ranks in ranks_of.items()]
    others = [
        f"rank {rank} was at: {what or 'nothing yet'}"
        for rank, what in first.others.items()
        if what != first.reached
    ]
    yield Finding(
        level=PROBLEM,
        topic="self-test",
        seen=f"no further than {first.reached!r}: {'; '.join([*errors, *others])}",
        why=_reason(first),
        remedy=_remedy(first, where),
    )


def _reason(report: RankReport) -> str:
    if not report.cards:
        return (
            "ranks meet at a store that the first rank's machine serves: it was not reached, or "
            "other ranks have not reached it"
        )
    if not report.transfers and "bytes" not in report.reached:
        return (
            f"the store was reached, but not the ranks themselves. {_places(report.cards)}. They "
            "use ports that the system picks"
        )
    passed = max((one.num_bytes for one in report.transfers), default=0)
    words = f"messages of {size(passed)} came through" if passed else "connections were made"
    return f"{words}, then no more. {_places(report.cards)}"


def _places(cards: Sequence[Card]) -> str:
    shown = [
        f"rank {card.rank} listens on {card.address} ({card.interface}, {card.host})"
        if card.address
        else f"rank {card.rank} cannot listen on {card.interface} ({card.host})"
        for card in cards[:8]
    ]
    more = f", and {len(cards) - 8} more" if len(cards) > 8 else ""
    return ", ".join(shown) + more


def _remedy(report: RankReport, where: str) -> str:
    if not report.cards:
        return (
            f"see that every rank was started, and from the other machines: nc -vz {where} "
            "(a firewall, or another MASTER_ADDR)"
        )
    if any(card.address is None for card in report.cards):
        return "export GLOO_SOCKET_IFNAME=<an interface that is up and has an address>, or unset it"
    machines = sum(card.is_first_here for card in report.cards)
    loopback = [card.rank for card in report.cards if (card.address or "").startswith("127.")]
    if loopback and machines > 1:
        return (
            f"on loopback (rank {_listed(loopback)}) no other machine is heard: export "
            "GLOO_SOCKET_IFNAME=<the "
            "interface of the network between the machines> on every node"
        )
    if "bytes" in report.reached:
        return (
            "ping the other address with large packets (ping -M do -s 1472), compare the MTU of "
            "the interfaces, and look at the link (ip -s link)"
        )
    return (
        "ping the other addresses; open all TCP ports between the machines; if an address is of "
        "the wrong network, export GLOO_SOCKET_IFNAME=<interface> on every node"
    )


def _versions(reports: Sequence[RankReport]) -> Iterator[Finding]:
    cards = next((report.cards for report in reports if report.cards), ())
    if not cards:
        return
    for name in cards[0].versions:
        ranks_of: dict[str | None, list[int]] = {}
        for card in cards:
            ranks_of.setdefault(card.versions.get(name), []).append(card.rank)
        if len(ranks_of) > 1:
            shown = [f"{version} on rank {_listed(ranks)}" for version, ranks in ranks_of.items()]
            yield Finding(
                level=LEVEL_OF_DIFFERENCE.get(name, NOTE),
                topic="versions",
                seen=f"ranks have different versions of {name}: {'; '.join(shown)}",
                why="they may send and expect different messages, and compute different values",
                remedy=f"pip install '{name}=={cards[0].versions.get(name)}' on every node"
                if name != "python"
                else "use the same environment on every node",
            )


def _clocks(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for report in reports:
        for rank, ahead in report.clocks.items():
            if abs(ahead) > ALLOWED_CLOCK:
                host = next((card.host for card in report.cards if card.rank == rank), "?")
                yield Finding(
                    level=WARNING,
                    topic="clocks",
                    seen=f"the clock of {host} (rank {rank}) is {abs(ahead):.1f} s "
                    f"{'ahead of' if ahead > 0 else 'behind'} the first rank's",
                    why="logs and traces of the ranks cannot be laid side by side, and files on a "
                    "shared disk look too new or too old",
                    remedy="timedatectl set-ntp true (or chrony) on every node",
                )


def _transfers(reports: Sequence[RankReport]) -> Iterator[Finding]:
    wrong = [
        f"{one.verb} of {size(one.num_bytes)} on rank {report.rank}"
        for report in reports
        for one in report.transfers
        if not one.is_exact
    ]
    if wrong:
        yield Finding(
            level=PROBLEM,
            topic="self-test",
            seen=f"wrong values after: {', '.join(wrong)}",
            why="what training sends would be wrong too",
            remedy="report it with onecopy doctor --json FILE; on accelerators NCCL_P2P_DISABLE=1 "
            "shows whether the direct way between devices is at fault",
        )
    elif reports and reports[0].transfers and not any(report.error for report in reports):
        yield from _bandwidth(reports[0])


def _neighbours(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Ranks on CPUs of one machine that send what they could read."""
    for report in reports:
        if report.error or report.device != "cpu" or report.rank >= len(report.cards):
            continue
        host = report.cards[report.rank].host
        here = {one.rank for one in report.cards if one.host == host} - {report.rank}
        apart = sorted(here - set(report.neighbours))
        if apart:
            yield Finding(
                level=NOTE,
                topic="self-test",
                seen=f"rank {report.rank} and {_listed(apart)} of {host} do not read each other's "
                "memory: what they exchange goes through the network stack",
                why="the system forbids process_vm_readv between them (a container's profile, or "
                "kernel.yama.ptrace_scope above 1), they are in containers of their own, or this "
                "is not Linux",
                remedy="training is right all the same, with about twice the cost of transfers. "
                "Start the ranks of a machine in one container, with --cap-add SYS_PTRACE",
            )
            return


def _bandwidth(report: RankReport) -> Iterator[Finding]:
    most = max(one.num_bytes for one in report.transfers)
    largest = [one for one in report.transfers if one.num_bytes == most]
    slowest = min(one.sent_bytes / one.seconds for one in largest)
    seconds = step_seconds(slowest, report.world_size)
    ranks = plural(report.world_size, "rank")
    yield Finding(
        level=FINE,
        topic="self-test",
        seen=f"all values arrive as they were sent; {ranks} send {size(slowest)}/s each, so a step "
        f"of 1B parameters at stage 3 in bf16 sends for {seconds:.1f} s",
    )
    if most < SIZES[-1] // 2:
        yield Finding(
            level=WARNING,
            topic="self-test",
            seen=f"larger messages than {size(most)} would have taken too long to be tried",
            why=f"a step of 1B parameters at stage 3 would send for {seconds:.0f} s",
            remedy="see which interface the ranks use (above), and how fast it is",
        )


def _training(reports: Sequence[RankReport]) -> Iterator[Finding]:
    done = [(report, report.training) for report in reports if report.training is not None]
    if not done:
        return
    report, worst = max(done, key=lambda one: one[1].largest)
    if not any(training.different for _, training in done):
        yield Finding(
            level=FINE,
            topic="self-test",
            seen=f"a step of {worst.num_parameters:,} parameters at stage 3 equals one process to "
            "the last bit",
        )
        return
    is_wrong = not worst.largest < ROUNDING
    is_expected = report.device != "cpu"
    yield Finding(
        level=PROBLEM if is_wrong else (NOTE if is_expected else WARNING),
        topic="self-test",
        seen=f"after a step at stage 3, {worst.different:,} of {worst.num_parameters:,} parameters "
        f"differ from one process, by at most {worst.largest:.1g} of the step's change",
        why="training computes something else"
        if is_wrong
        else "accelerators add in another order, so that results are rounded differently"
        if is_expected
        else "on CPUs both are equal to the last bit, unless the processors differ",
        remedy="report it with onecopy doctor --json FILE" if not is_expected or is_wrong else "",
    )


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
