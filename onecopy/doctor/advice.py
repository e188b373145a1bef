"""From the facts about one machine to findings. Nothing is looked at here; each rule is a function.

What the network and the disks deserve is in advice_ways.py, what ranks found in advice_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onecopy.doctor.advice_ways import DISKS, NETWORK
from onecopy.doctor.facts import UNLIMITED, Facts, Limit
from onecopy.doctor.findings import FINE, NOTE, PROBLEM, WARNING, Finding, by_level
from onecopy.report.progress import plural, size

__all__ = ["advise"]

Rule = Callable[[Facts], Iterator[Finding]]

GIB = 1 << 30
LEAST_SHM = GIB
LEAST_FILES, LEAST_PROCESSES = 4096, 1024
RESERVED = 0.2  # of a device's memory, before somebody else must be using it


def advise(facts: Facts) -> list[Finding]:
    """Everything there is to say about one machine, the worst first."""
    return by_level(finding for rule in (*MACHINE, *NETWORK, *DISKS) for finding in rule(facts))


def _packages(facts: Facts) -> Iterator[Finding]:
    is_good = True
    for package in facts.software.packages:
        if package.version is None and package.is_required:
            is_good = False
            yield Finding(
                level=PROBLEM,
                topic="versions",
                seen=f"{package.name} is not installed",
                why=f"needed: {package.purpose}",
                remedy=f"pip install '{package.name}{package.wants}'",
            )
        elif not package.fits:
            is_good = False
            yield Finding(
                level=PROBLEM if package.is_required else WARNING,
                topic="versions",
                seen=f"{package.name} {package.version} is installed, {package.wants} is wanted",
                why=f"used for: {package.purpose}; calls that onecopy makes are missing or mean "
                "something else in other versions",
                remedy=f"pip install '{package.name}{package.wants}'",
            )
    if is_good:
        torch = facts.software.version_of("torch")
        yield Finding(level=FINE, topic="versions", seen=f"torch {torch} and what belongs to it")


def _backends(facts: Facts) -> Iterator[Finding]:
    torch = facts.software.torch
    if torch is None:
        return
    if "gloo" not in torch.backends:
        yield Finding(
            level=PROBLEM,
            topic="backends",
            seen="this torch was built without Gloo",
            why="ranks on CPUs talk through it, and ranks on accelerators agree through it",
            remedy="install a wheel of torch from pytorch.org",
        )
    native = {"cuda": "nccl", "xpu": "xccl"}
    wanted = {native[one.kind] for one in facts.accelerators if one.kind in native}
    for name in sorted(wanted - set(torch.backends)):
        yield Finding(
            level=PROBLEM,
            topic="backends",
            seen=f"this torch was built without {name.upper()}",
            why="ranks with accelerators gather and reduce through it",
            remedy="install a wheel of torch from pytorch.org that is made for these devices",
        )


def _devices(facts: Facts) -> Iterator[Finding]:
    software, torch = facts.software, facts.software.torch
    if facts.accelerator_problem:
        yield Finding(
            level=PROBLEM,
            topic="accelerators",
            seen=f"torch cannot use the accelerators: {facts.accelerator_problem}",
            why="training would fail or fall back to CPUs",
            remedy="make the vendor's own tool work first (nvidia-smi, rocm-smi), in the same "
            "container",
        )
    elif torch and (torch.cuda or torch.hip) and not facts.accelerators:
        yield Finding(
            level=WARNING,
            topic="accelerators",
            seen=f"torch is built for {'CUDA' if torch.cuda else 'ROCm'} and sees no device"
            + ("" if software.driver else "; no driver is loaded"),
            why="training would run on CPUs",
            remedy="look at nvidia-smi (rocm-smi), give a container its devices (docker run --gpus "
            "all), and look at CUDA_VISIBLE_DEVICES",
        )
    elif torch and software.driver and not (torch.cuda or torch.hip):
        index = "cu130" if software.driver.startswith("NVIDIA") else "rocm7.1"
        yield Finding(
            level=WARNING,
            topic="accelerators",
            seen=f"the driver {software.driver} is loaded, and torch is built for CPUs only",
            why="the devices are not used",
            remedy=f"pip install torch --index-url https://download.pytorch.org/whl/{index}",
        )
    ranks = facts.ranks_here
    if facts.accelerators and ranks is not None and ranks > len(facts.accelerators):
        yield Finding(
            level=PROBLEM,
            topic="accelerators",
            seen=f"{plural(ranks, 'rank')} here share {plural(len(facts.accelerators), 'device')}",
            why="NCCL refuses two ranks on one device",
            remedy=f"torchrun --nproc-per-node={len(facts.accelerators)}",
        )


def _device_memory(facts: Facts) -> Iterator[Finding]:
    for one in facts.accelerators:
        if one.free is not None and one.total and one.free < (1 - RESERVED) * one.total:
            yield Finding(
                level=WARNING,
                topic="accelerators",
                seen=f"{one.kind}:{one.index} has {size(one.free)} of {size(one.total)} free",
                why="another process uses the rest; a plan counts on all of it",
                remedy="end that process, or plan with what is left: onecopy plan ... "
                f"--device-memory {one.free / 1e9:.0f}GB",
            )
    without = [f"{one.kind}:{one.index}" for one in facts.accelerators if one.bf16 is False]
    if without:
        yield Finding(
            level=NOTE,
            topic="accelerators",
            seen=f"no bf16 on {', '.join(without)}",
            why='precision="bf16" would be emulated or refused',
            remedy='onecopy.shard(..., precision="fp16")',
        )


def _threads(facts: Facts) -> Iterator[Finding]:
    cores, ranks = facts.processors.usable, facts.ranks_here
    wish = facts.environment.get("OMP_NUM_THREADS", "")
    threads = int(wish) if wish.isdigit() else None
    if cores is None:
        return
    each = max(1, cores // (ranks or 1))
    if threads is None and ranks is not None and ranks > 1:
        yield Finding(
            level=WARNING,
            topic="threads",
            seen=f"OMP_NUM_THREADS is not set, with {plural(ranks, 'rank')} on "
            f"{plural(cores, 'core')}",
            why=f"each rank starts a thread for every core, {ranks * cores} in all",
            remedy=f"export OMP_NUM_THREADS={each}",
        )
    elif threads is not None and threads * (ranks or 1) > cores:
        together = f", {threads * ranks} together" if ranks and ranks > 1 else ""
        yield Finding(
            level=WARNING,
            topic="threads",
            seen=f"OMP_NUM_THREADS={threads}{together}, on {plural(cores, 'usable core')}",
            why="threads wait for each other; a step takes several times as long",
            remedy=f"export OMP_NUM_THREADS={each}",
        )
    elif threads == 1 and ranks is not None and each >= 4 and not facts.accelerators:
        yield Finding(
            level=NOTE,
            topic="threads",
            seen=f"OMP_NUM_THREADS=1, with {each} cores for each rank",
            why="torchrun sets 1 where nothing is set; on CPUs a rank could compute with more",
            remedy=f"OMP_NUM_THREADS={each} torchrun ...",
        )


def _cores(facts: Facts) -> Iterator[Finding]:
    processors = facts.processors
    visible = processors.affinity or processors.logical
    if processors.quota is None or visible is None or processors.quota >= visible:
        return
    cores = max(1, int(processors.quota))
    if facts.environment.get("OMP_NUM_THREADS", "") not in map(str, range(1, cores + 1)):
        yield Finding(
            level=WARNING,
            topic="threads",
            seen=f"the control group gives {processors.quota:g} cores' worth of time, and "
            f"{visible} cores are visible",
            why="libraries start a thread for each core that they see, and all are held up",
            remedy=f"export OMP_NUM_THREADS={cores}",
        )


def _load(facts: Facts) -> Iterator[Finding]:
    cores, load = facts.processors.usable, facts.processors.load
    if cores is not None and load is not None and load > max(2.0, 0.75 * cores):
        yield Finding(
            level=NOTE,
            topic="processors",
            seen=f"{load:.1f} threads of other programs wanted to run, on {plural(cores, 'core')}",
            why="what was measured here is slower than the machine is",
            remedy="end them (top), and run onecopy doctor again",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory.group_limit is not None and memory.total and memory.group_limit < memory.total:
        yield Finding(
            level=NOTE,
            topic="memory",
            seen=f"the control group (container) may use {size(memory.group_limit)} of the "
            f"{size(memory.total)} that free and /proc/meminfo show",
            why="beyond it the kernel ends a process with SIGKILL, without a message",
            remedy="plan with the lower one, or raise it: docker run --memory, SLURM --mem, "
            "resources.limits.memory",
        )
    left = [one for one in (memory.available, _left_in_group(facts)) if one is not None]
    if left and min(left) < 2 * GIB:
        yield Finding(
            level=WARNING,
            topic="memory",
            seen=f"only {size(min(left))} of host memory are left",
            why="a process that imports torch takes some 300 MB before it does anything",
            remedy="end what uses it: ps aux --sort=-rss | head",
        )


def _left_in_group(facts: Facts) -> int | None:
    limit, used = facts.memory.group_limit, facts.memory.group_used
    return None if limit is None or used is None else limit - used


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    total = facts.memory.shm_total
    if total is None:
        return
    if total >= LEAST_SHM:
        yield Finding(level=FINE, topic="shared memory", seen=f"/dev/shm has {size(total)}")
        return
    yield Finding(
        level=WARNING,
        topic="shared memory",
        seen=f"/dev/shm has {size(total)}",
        why="workers of a DataLoader pass batches through it and die of a bus error when it is "
        "full; NCCL uses it between the ranks of a machine",
        remedy="docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium "
        "Memory at /dev/shm",
    )


def _locked_memory(facts: Facts) -> Iterator[Finding]:
    limit = facts.limits.locked_memory
    if limit is None or limit.soft == UNLIMITED or not facts.network.infiniband:
        # CUDA's driver pins memory for itself; only RDMA's registered memory counts here.
        return
    yield Finding(
        level=PROBLEM if limit.soft < 64 << 20 else WARNING,
        topic="limits",
        seen=f"this process may lock {size(limit.soft)} of memory, and there is InfiniBand (RDMA)",
        why="NCCL registers its buffers with the adapter as locked memory, and fails with "
        '"ibv_reg_mr ... Cannot allocate memory"',
        remedy="ulimit -l unlimited; docker run --ulimit memlock=-1; SLURM: "
        "PropagateResourceLimitsExcept=MEMLOCK",
    )


def _limits(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    if _is_below(limits.open_files, LEAST_FILES):
        assert limits.open_files is not None, "it is known, or it would not be below"
        yield Finding(
            level=NOTE,
            topic="limits",
            seen=f"a process may open {limits.open_files.soft} files",
            why='each peer, worker and checkpoint file takes one or more: "Too many open files" '
            "comes with many ranks or workers",
            remedy=_raised("-n", limits.open_files, 65536),
        )
    if _is_below(limits.processes, LEAST_PROCESSES):
        assert limits.processes is not None, "it is known, or it would not be below"
        yield Finding(
            level=WARNING,
            topic="limits",
            seen=f"the user may run {limits.processes.soft} processes and threads",
            why="a rank has dozens of threads; starting one more fails",
            remedy=_raised("-u", limits.processes, 65536),
        )


def _is_below(limit: Limit | None, least: int) -> bool:
    return limit is not None and limit.soft != UNLIMITED and limit.soft < least


def _raised(flag: str, limit: Limit, wish: int) -> str:
    if limit.hard == UNLIMITED or limit.hard >= wish:
        return f"ulimit {flag} {wish}"
    if limit.hard > limit.soft:
        return f"ulimit {flag} {limit.hard}; more by /etc/security/limits.conf"
    name = {"-n": "nofile", "-u": "nproc"}[flag]
    return f"{name} in /etc/security/limits.conf, or docker run --ulimit {name}={wish}"


def _slow_settings(facts: Facts) -> Iterator[Finding]:
    for name, value in facts.environment.items():
        words = SLOW.get(name)
        if words and value.upper() in words[0]:
            yield Finding(
                level=WARNING,
                topic="environment",
                seen=f"{name}={value}",
                why=words[1],
                remedy=f"unset {name}",
            )


# For finding a fault: the values that switch them on, and what they cost.
ON = ("1", "ON", "TRUE", "YES")
SLOW: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (ON, "the host waits for every kernel: nothing overlaps"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "every rank writes pages of messages"),
    "NCCL_IB_DISABLE": (ON, "NCCL does not use InfiniBand, which may be ten times as fast"),
    "NCCL_P2P_DISABLE": (ON, "devices of a machine do not talk directly (NVLink, PCIe)"),
    "NCCL_SHM_DISABLE": (ON, "ranks of a machine talk through the network"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (ON, "each tensor is asked of the driver"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "each collective is compared over all ranks first"),
}

MACHINE: tuple[Rule, ...] = (
    _packages,
    _backends,
    _devices,
    _device_memory,
    _threads,
    _cores,
    _load,
    _memory,
    _shared_memory,
    _locked_memory,
    _limits,
    _slow_settings,
)
