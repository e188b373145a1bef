"""Programs that end, each in its way, while a checkpoint of theirs is still to be written.

Run as `python -m tests.ending_rank` with a JSON list of `Program` as its argument, for
tests/test_async_save.py. It imports torch once, and then forks the ranks of all programs: they end
as interpreters do. It prints the exit codes of each one's ranks. What a rank prints goes to files.
tests/failing_disk_rank.py does the same with another `run`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed import TCPStore

from tests.pool import RANK_ENVIRONMENT, REPOSITORY
from tests.rank import die_with_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How it ends, on how many ranks, in which folder, and the port of its store."""

    how: str
    num_ranks: int
    folder: str
    port: int


def run(program: Program, rank: int) -> None:
    """Train, and begin to save; return, raise, or let go of the process group before."""
    # Imported by each rank for itself, so that what it does at exit comes in the usual order.
    import onecopy
    from onecopy.checkpoint import files
    from onecopy.checkpoint.saving import Job

    write = Job.write

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def late(job: Job, group: Any) -> Path:
        _starve()
        time.sleep(1.0)
        if program.how == "fails" and group.rank == 1:
            files.Writer.write_data = refuse  # type: ignore[method-assign,assignment]
        return write(job, group)

    Job.write = late  # type: ignore[method-assign]
    if program.how != "alone":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer)
    model(torch.randn(2, 8)).mean().backward()
    optimizer.step()
    onecopy.async_save(f"{program.folder}/run", model, optimizer)
    if program.how == "raises":
        raise SystemExit("the loop has failed")
    if program.how not in ("keeps", "alone"):
        dist.destroy_process_group()


def _starve() -> None:
    """Threads of Gloo get on only when nothing else does: they are the last to finish."""
    for task in os.listdir("/proc/self/task") if hasattr(os, "SCHED_IDLE") else ():
        with open(f"/proc/self/task/{task}/comm") as name:
            if "gloo" in name.read():
                os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))


def _become(program: Program, rank: int) -> None:
    """What a launcher does for a rank; its store is served by the test, as by torchrun's agent."""
    die_with_parent()
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with open(f"{program.folder}/{rank}.{name}", "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    if program.how != "alone":
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(program.num_ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(program.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


def main(run: Callable[[Program, int], None]) -> None:
    """Fork all ranks and wait for them; a forked one returns from here when it has run."""
    programs = [Program(**one) for one in json.loads(sys.argv[1])]
    ranks: dict[str, list[int]] = {program.how: [] for program in programs}
    for program in programs:
        for rank in range(program.num_ranks):
            pid = os.fork()
            if not pid:
                _become(program, rank)
                return run(program, rank)
            ranks[program.how].append(pid)
    ended = {
        how: [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for how, pids in ranks.items()
    }
    print(json.dumps(ended))


def ended(module: str, folders: dict[str, Path], ranks: dict[str, int]) -> dict[str, list[int]]:
    """Run a module like this one; by how its programs are to end, the exit codes of their ranks."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in folders]
    programs = [
        Program(how=how, num_ranks=ranks[how], folder=str(folder), port=store.port)
        for (how, folder), store in zip(folders.items(), stores, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(list(map(asdict, programs)))],
        env={**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)},
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes: dict[str, list[int]] = json.loads(done.stdout)
    return codes


if __name__ == "__main__":
    main(run)
