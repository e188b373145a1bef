"""The way in: look, test, and say what was found. One process, or all ranks of a launcher.

Under torchrun every rank runs this. The first rank of each machine looks at it, and the first rank
of all puts everything together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from onecopy.doctor.advice import advise
from onecopy.doctor.advice_ranks import advise_ranks
from onecopy.doctor.environment import launched
from onecopy.doctor.facts import Facts, Launched
from onecopy.doctor.findings import PROBLEM, Finding, by_level, merged
from onecopy.doctor.look import look
from onecopy.doctor.options import DoctorOptions
from onecopy.doctor.results import RankReport
from onecopy.errors import LaunchError

if TYPE_CHECKING:
    from onecopy.doctor.selftest import RankTest

__all__ = ["Examination", "examine"]

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found.

    facts: of this machine; None on a rank that has handed them to the first one.
    reports: of the ranks that were tested, the first rank's first.
    machines: {"facts", "findings"} of the other machines as JSON, by the name of the host.
    is_shown: this process is the one that shows it.
    """

    facts: Facts | None
    findings: tuple[Finding, ...]
    reports: tuple[RankReport, ...] = ()
    machines: Mapping[str, Any] = field(default_factory=dict)
    is_shown: bool = True

    @property
    def has_problem(self) -> bool:
        """Something will not work."""
        return any(finding.level == PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Everything, for a bug report."""
        return {
            "format": FORMAT,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": None if self.facts is None else asdict(self.facts),
            "ranks": [report.to_json() for report in self.reports],
            "machines": dict(self.machines),
        }


def examine(options: DoctorOptions) -> Examination:
    """Look at this machine, and test ranks: those of a launcher if there is one, else own ones."""
    here = launched()
    if here is not None and not options.no_test:
        return _as_rank(options, here)
    if here is not None and here.local_rank:
        return Examination(facts=None, findings=(), is_shown=False)
    facts = look(options.folder, options.bytes_to_disk, options.nvme)
    findings = advise(facts)
    reports: tuple[RankReport, ...] = ()
    if not options.no_test and facts.software.torch is not None:
        reports, more = _start(options, _idle_devices(facts, options))
        findings += more
    return Examination(facts=facts, findings=tuple(by_level(findings)), reports=reports)


def _idle_devices(facts: Facts, options: DoctorOptions) -> int:
    return 0 if options.device == "cpu" else len(facts.accelerators)


def _start(
    options: DoctorOptions, idle_devices: int
) -> tuple[tuple[RankReport, ...], list[Finding]]:
    """Test ranks of this machine's own."""
    from onecopy.doctor.selftest import test_rank
    from onecopy.launcher import launch

    try:
        reports = tuple(launch(test_rank, options.nproc, options.device, options.limit))
    except LaunchError as error:
        finding = Finding(
            level=PROBLEM,
            topic="self-test",
            seen=str(error).partition("\n")[0],
            why="training would end in the same way",
            remedy="run it again with PYTHONFAULTHANDLER=1, and --device cpu to see whether the "
            "accelerator is at fault",
        )
        return (), [finding]
    return reports, advise_ranks(reports, options.nproc, "127.0.0.1", idle_devices)


def _as_rank(options: DoctorOptions, here: Launched) -> Examination:
    from onecopy.doctor.selftest import RankTest

    # First of all: others wait for this rank only so long.
    test = RankTest(options.device, options.limit)
    report = test.run()
    facts = None
    if test.meeting is not None:
        test.meeting.post("report", report.to_json())
    if here.local_rank == 0:
        facts = look(options.folder, options.bytes_to_disk, options.nvme)
    return _of_other(test, report, facts) if here.rank else _of_first(test, report, facts, options)


def _of_other(test: RankTest, report: RankReport, facts: Facts | None) -> Examination:
    """Hand everything to the first rank; show what it may never hear of."""
    findings = [] if facts is None else advise(facts)
    own = advise_ranks([report], report.world_size, _store(facts)) if report.error else []
    if test.meeting is None:
        return Examination(facts=facts, findings=tuple(by_level([*own, *findings])))
    if facts is not None:
        machine = {"facts": asdict(facts), "findings": [asdict(one) for one in findings]}
        test.meeting.post("machine", machine)
    is_shown = bool(own) and facts is not None
    return Examination(facts=None, findings=tuple(own), is_shown=is_shown)


def _of_first(
    test: RankTest, report: RankReport, facts: Facts | None, options: DoctorOptions
) -> Examination:
    """Put together what all ranks have found."""
    assert facts is not None, "the first rank is the first of its machine"
    reports, machines = _collected(test, report, options.limit)
    findings = advise(facts)
    if machines:
        findings = [replace(one, host=facts.network.host.name) for one in findings]
    for host, machine in machines.items():
        findings += [replace(Finding(**one), host=host) for one in machine["findings"]]
    idle_devices = _idle_devices(facts, options)
    more = advise_ranks(reports, report.world_size, _store(facts), idle_devices)
    return Examination(
        facts=facts,
        findings=tuple(by_level([*merged(findings), *more])),
        reports=tuple(reports),
        machines=machines,
    )


def _collected(
    test: RankTest, report: RankReport, limit: float
) -> tuple[Sequence[RankReport], dict[str, Any]]:
    """What the other ranks have posted: their reports, and what the other machines are like."""
    if test.meeting is None:
        return [report], {}
    others = [rank for rank in range(report.world_size) if rank != report.rank]
    posted = test.meeting.collect("report", others, limit / 2)
    reports = [report, *(RankReport.from_json(posted[rank]) for rank in sorted(posted))]
    hosts = {card.rank: card.host for card in report.cards if card.is_first_here and card.rank}
    machines = test.meeting.collect("machine", list(hosts), limit)
    names = {rank: f"{hosts[rank]} (rank {rank})" for rank in sorted(machines)}
    return reports, {name: machines[rank] for rank, name in names.items()}


def _store(facts: Facts | None) -> str:
    """Where ranks meet, for nc."""
    if facts is None:
        return "$MASTER_ADDR $MASTER_PORT"
    variables = facts.environment
    return f"{variables.get('MASTER_ADDR', '?')} {variables.get('MASTER_PORT', '?')}"
