"""An examination as text: rows of facts, the table of the self-test, and findings at the end.

Readable at 80 columns and in a log file. Sizes are in powers of ten, as disks and networks count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onecopy.doctor.examine import Examination
from onecopy.doctor.facts import (
    UNLIMITED,
    Accelerator,
    Facts,
    Folder,
    Interface,
    Limit,
    SwapSpeed,
)
from onecopy.doctor.findings import FINE, LEVELS, NOTE, PROBLEM, WARNING, Finding
from onecopy.doctor.results import RankReport, Transfer
from onecopy.report.progress import plural, size
from onecopy.report.tables import new_table, print_table

__all__ = ["print_examination", "print_findings"]

STYLES = {PROBLEM: "bold red", WARNING: "bold yellow", NOTE: "bold blue", FINE: "green"}
Rows = Iterator[tuple[str, str]]
LATENCY_BYTES = 64 << 10


def print_examination(console: Console, examination: Examination) -> None:
    """Print everything, the findings last: they are what a reader looks for."""
    facts = examination.facts
    if facts is not None:
        for heading, section in SECTIONS.items():
            _print_rows(console, heading, list(section(facts)))
    if examination.reports:
        _print_test(console, examination.reports)
    if examination.machines:
        rows = [(host, _count(found["findings"])) for host, found in examination.machines.items()]
        _print_rows(console, "other machines", rows)
    print_findings(console, examination.findings)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print each finding, the worst first, and how many there are."""
    console.print(Text("findings", style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        words = Text(f"{one.host}: {one.seen}" if one.host else one.seen)
        if one.why:
            words.append(f"\n{one.why}", style="dim")
        if one.remedy:
            words.append("\n-> ", style="dim")
            words.append(one.remedy, style="bold")
        table.add_row(Text(one.level, style=STYLES[one.level]), Text(one.topic), words)
    console.print(table)
    console.print()
    levels = Counter(one.level for one in findings)
    counts = [plural(levels[level], level) for level in LEVELS[:-1] if levels[level]]
    console.print(Text(", ".join(counts) or "nothing to change", style="bold"))


def _count(findings: Sequence[Mapping[str, str]]) -> str:
    levels = Counter(one["level"] for one in findings)
    return ", ".join(plural(levels[level], level) for level in LEVELS[:-1] if levels[level]) or FINE


def _print_rows(console: Console, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    if not rows:
        return
    console.print(Text(heading, style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=16)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(f"  {label}"), Text(value))
    console.print(table)
    console.print()


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else size(num_bytes)


# Sections -------------------------------------------------------------------------------------


def _versions(facts: Facts) -> Rows:
    software, torch = facts.software, facts.software.torch
    yield "onecopy", software.onecopy
    yield "python", software.python
    for package in software.packages:
        if package.is_required or package.version:
            use = "" if package.is_required else f"  ({package.purpose})"
            yield package.name, (package.version or "not installed") + use
    if torch is not None:
        kind = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPUs"
        yield "torch is for", kind + (f", {torch.cpu_capability}" if torch.cpu_capability else "")
        yield "backends", ", ".join(torch.backends) or "none"
        if torch.nccl:
            yield "NCCL", torch.nccl
    if software.driver:
        yield "driver", software.driver
    absent = [one.name for one in software.packages if not one.is_required and not one.version]
    if absent:
        yield "not installed", ", ".join(absent)
    yield "system", software.system + (f", in {software.container}" if software.container else "")


def _processors(facts: Facts) -> Rows:
    processors, torch = facts.processors, facts.software.torch
    yield "model", processors.model or "unknown"
    usable, logical = processors.usable or "unknown", processors.logical or "unknown"
    parts = [f"{usable} usable", f"{logical} in the machine"]
    if processors.affinity is not None and processors.affinity != processors.logical:
        parts.append(f"{processors.affinity} by affinity")
    if processors.quota is not None:
        parts.append(f"{processors.quota:g} by the control group")
    if processors.numa_nodes is not None:
        parts.append(plural(processors.numa_nodes, "NUMA node"))
    yield "cores", ", ".join(parts)
    if processors.load is not None:
        yield "load", f"{processors.load:.1f} threads wanted to run in the last minute"
    if torch is not None and torch.threads is not None:
        wish = facts.environment.get("OMP_NUM_THREADS", "not set")
        yield "threads", f"{torch.threads} of torch, OMP_NUM_THREADS {wish}"


def _memory(facts: Facts) -> Rows:
    memory = facts.memory
    yield "host", f"{_size(memory.available)} available of {_size(memory.total)}"
    if memory.group_limit is not None:
        used = _size(memory.group_used)
        yield "control group", f"limit {size(memory.group_limit)}, {used} used"
    if memory.swap_total is not None:
        free = f", {_size(memory.swap_free)} free" if memory.swap_total else ""
        yield "swap", (size(memory.swap_total) if memory.swap_total else "none") + free
    yield "/dev/shm", f"{_size(memory.shm_free)} free of {_size(memory.shm_total)}"
    if memory.transparent_huge_pages is not None:
        reserved = size(memory.huge_pages) if memory.huge_pages else "none"
        yield "huge pages", f"transparent: {memory.transparent_huge_pages}, reserved: {reserved}"


def _accelerators(facts: Facts) -> Rows:
    if facts.accelerator_problem:
        yield "unusable", facts.accelerator_problem
    elif not facts.accelerators:
        yield "none", "torch sees no accelerator"
    for one in facts.accelerators:
        yield f"{one.kind}:{one.index}", _accelerator(one)


def _accelerator(one: Accelerator) -> str:
    parts = [one.name or "unknown"]
    if one.total is not None:
        parts.append(f"{_size(one.free)} free of {size(one.total)}")
    if one.bf16 is not None:
        parts.append("bf16" if one.bf16 else "no bf16")
    return ", ".join(parts)


def _network(facts: Facts) -> Rows:
    network = facts.network
    meaning = ", ".join(network.host.addresses) or network.host.problem
    yield "host name", f"{network.host.name}: {meaning}"
    place = f"{network.gloo_address or 'unknown'} ({network.gloo_interface or '?'})"
    yield "Gloo listens on", f"{place}, by {network.gloo_reason}"
    if facts.accelerators:
        yield "NCCL's sockets", ", ".join(network.nccl_interfaces) or "no interface"
    for one in network.interfaces:
        yield one.name, _interface(one)
    for port in network.infiniband:
        words = (port.layer, port.state, port.rate)
        yield f"{port.device}/{port.port}", ", ".join(one for one in words if one) or "unknown"


def _interface(one: Interface) -> str:
    if one.is_up is None:
        state = "unknown"
    else:
        state = "down" if not one.is_up else "up" if one.has_link else "up, no link"
    parts = [state]
    if one.speed:
        parts.append(f"{one.speed / 1000:g} Gb/s")
    elif not one.is_loopback and one.is_up:
        parts.append("speed unknown")
    if one.mtu:
        parts.append(f"MTU {one.mtu}")
    return ", ".join([*parts, *one.addresses])


def _storage(facts: Facts) -> Rows:
    for folder in facts.folders:
        yield folder.purpose, "\n".join(_folder(folder))
    if facts.swap is not None:
        yield "states on disk", "\n".join(_swap(facts.swap))


def _folder(folder: Folder) -> Iterator[str]:
    yield folder.path
    if folder.mount is not None:
        kind = folder.kind or "unknown kind"
        yield f"{folder.file_system} on {folder.device}, {kind}, mounted on {folder.mount}"
    yield f"{_size(folder.free)} free of {_size(folder.total)}"
    speed = folder.speed
    if speed is None:
        yield f"speed not measured: {folder.not_measured}"
    else:
        how = "past the cache" if speed.is_direct else "through the cache, flushed"
        rates = f"writes {size(speed.write)}/s, reads {size(speed.read)}/s"
        yield f"{rates} ({size(speed.num_bytes)}, {how})"


def _swap(swap: SwapSpeed) -> Iterator[str]:
    yield swap.path
    if swap.not_measured:
        yield f"speed not measured: {swap.not_measured}"
    else:
        yield (
            f"writes {size(swap.write)}/s, reads {size(swap.read)}/s, both at once "
            f"{size(swap.both)}/s together ({size(swap.num_bytes)}, "
            f"{'past' if swap.is_direct else 'through'} the cache)"
        )


def _limits(facts: Facts) -> Rows:
    limits = facts.limits
    yield "open files", _limit(limits.open_files)
    yield "processes", _limit(limits.processes)
    yield "locked memory", _limit(limits.locked_memory, is_size=True)
    yield (
        "core dumps",
        _limit(limits.core_size, is_size=True)
        + (f", to {limits.core_pattern}" if limits.core_pattern else ""),
    )


def _limit(limit: Limit | None, *, is_size: bool = False) -> str:
    if limit is None:
        return "unknown"

    def shown(value: int) -> str:
        return "unlimited" if value == UNLIMITED else size(value) if is_size else f"{value:,}"

    more = "" if limit.hard == limit.soft else f" (may be raised to {shown(limit.hard)})"
    return shown(limit.soft) + more


def _environment(facts: Facts) -> Rows:
    yield from sorted(facts.environment.items())


SECTIONS = {
    "versions": _versions,
    "processors": _processors,
    "memory": _memory,
    "accelerators": _accelerators,
    "network": _network,
    "storage": _storage,
    "limits": _limits,
    "environment": _environment,
}


# The self-test --------------------------------------------------------------------------------


def _print_test(console: Console, reports: Sequence[RankReport]) -> None:
    first = reports[0]
    ways = dict.fromkeys(f"{card.address} ({card.interface})" for card in first.cards)
    machines = sum(card.is_first_here for card in first.cards) or 1
    shown = [*ways][:4] + (["..."] if len(ways) > 4 else [])
    heading = (
        f"self-test: {plural(first.world_size, 'rank')} on {plural(machines, 'machine')}, "
        f"{first.backend or 'no backend'}, {first.device}"
    )
    copies = [report.copy for report in reports if report.copy]
    if not first.transfers:
        rows = [("reached", first.reached)]
        rows += [("copied in memory", f"{size(min(copies))}/s")] if copies else []
        _print_rows(console, heading, rows)
        return
    table = new_table("GB/s (ms) a rank sends", *dict.fromkeys(one.verb for one in first.transfers))
    for num_bytes in dict.fromkeys(one.num_bytes for one in first.transfers):
        row = [one for one in first.transfers if one.num_bytes == num_bytes]
        table.add_row(f"unit of {_binary(num_bytes)}", *map(_transfer, row))
    if copies:
        table.add_row("copied in memory", f"{min(copies) / 1e9:.2f}")
    print_table(console, heading, table, f"over {', '.join(shown)}")


def _binary(num_bytes: int) -> str:
    """These are powers of two, or close to one where the ranks cut them."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= 0.95 * factor:
            return f"{num_bytes / factor:.0f} {unit}"
    return f"{num_bytes} B"


def _transfer(one: Transfer) -> str:
    """Its rate; of a message so small that only its latency matters, its time alone."""
    milliseconds = f"{1000 * one.seconds:.2f}"
    mark = "" if one.is_exact else " WRONG"
    if one.num_bytes < LATENCY_BYTES:
        return f"({milliseconds}){mark}"
    return f"{one.sent_bytes / one.seconds / 1e9:.2f} ({milliseconds}){mark}"
