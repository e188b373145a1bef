"""Rank processes of one machine: what they get, what comes back, and how failures look."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onecopy import launcher
from onecopy.errors import ConfigError, LaunchError, OneCopyError
from onecopy.launcher import in_launched_process, launch

pytestmark = pytest.mark.skipif(in_launched_process(), reason="this process is a rank already")


def sum_of_ranks(more: int) -> tuple[int, float, int]:
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + more)])
    dist.all_reduce(total)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, float(total), torch.get_num_threads()


def fail(how: str) -> object:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    if os.environ["RANK"] == "1":
        if how == "raise":
            raise ValueError("rank 1 had enough")
        if how == "advise":
            raise OneCopyError("do it otherwise")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "lambda":
            return lambda: None
    dist.all_reduce(torch.zeros(1))
    return None


def sleep(seconds: float) -> None:
    print(os.getpid(), flush=True)
    time.sleep(seconds)


def leave_a_thread(file: str) -> None:
    def work() -> None:
        time.sleep(0.5)
        Path(file).touch()

    threading.Thread(target=work).start()


POOLS: list[ThreadPoolExecutor] = []


def leave_a_pool() -> int:
    """Somewhere a pool of threads is kept, whose workers wait for more."""
    POOLS.append(ThreadPoolExecutor(1))
    return POOLS[0].submit(int, "7").result()


def a_tensor() -> torch.Tensor:
    return torch.full((300,), float(os.environ["RANK"]))


def test_tensors_outlive_their_rank() -> None:
    zeros, ones = launch(a_tensor, 2)
    assert torch.equal(ones, zeros + 1)


def test_ranks_meet_and_return_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(sum_of_ranks, 2, 5) == [(0, 11.0, 1), (1, 11.0, 1)]


ENDS = [
    ("raise", "rank 1 of 2 failed: ValueError: rank 1 had enough", True),
    ("advise", "rank 1 of 2 failed: OneCopyError: do it otherwise", False),
    ("kill", "rank 1 of 2 failed: the process was ended by SIGKILL", False),
    ("exit", "rank 1 of 2 failed: the process ended with exit code 3 before its", False),
    ("lambda", "rank 1 of 2 failed: .* cannot be sent back", False),
]


@pytest.mark.sampled("how, words, shows_traceback", ENDS, 3, always=[ENDS[0]])
def test_the_rank_that_failed_first_is_named(how: str, words: str, shows_traceback: bool) -> None:
    with pytest.raises(LaunchError, match=words) as caught:
        launch(fail, 2, how)
    assert ("Traceback" in str(caught.value)) == shows_traceback


def test_threads_that_still_work_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may take longer to write than a process is given to exit."""
    end = launcher._end
    monkeypatch.setattr(launcher, "_end", lambda ranks, seconds: end(ranks, seconds=0.0))
    launch(leave_a_thread, 1, str(tmp_path / "written"))
    assert (tmp_path / "written").exists()


def test_a_pool_that_is_still_there_holds_nobody_up() -> None:
    assert launch(leave_a_pool, 2) == [7, 7]


def test_bad_calls_give_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        launch(sleep, 0, 1.0)
    with pytest.raises(ConfigError, match="top level of a module"):
        launch(lambda: None, 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="launcher started"):
        launch(sleep, 2, 1.0)


def test_a_script_that_launches_when_imported_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import onecopy\n\ndef rank(): ...\n\nonecopy.launch(rank, 2)\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    words = "ConfigError: launch() was called while a rank process imports the script. Put the call"
    assert words in done.stderr
    ended = r"LaunchError: rank \d of 2 failed: the process ended with exit code 1"
    # The other one may have been ended before it came as far.
    assert re.search(ended, done.stderr), done.stderr


def test_what_signals_mean() -> None:
    assert "--shm-size" in launcher._death(-signal.SIGBUS)
    assert "memory runs out" in launcher._death(-signal.SIGKILL)
    assert launcher._death(-40) == "the process was ended by signal 40"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.sampled("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], 1)
def test_no_process_outlives_its_launcher(how: signal.Signals) -> None:
    # Shells start what they put into the background deaf to SIGINT, tests among it.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from onecopy.launcher import launch; from tests.test_launcher import sleep; "
    outer = subprocess.Popen(
        [sys.executable, "-c", program + "launch(sleep, 2, 60.0)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with outer:
        assert outer.stdout is not None, "asked for a pipe"
        pids = [int(outer.stdout.readline()) for _ in range(2)]
        outer.send_signal(how)
        outer.wait(30)
        deadline = time.monotonic() + 10
        while any(map(runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            # A zombie has ended; only its parent has not asked yet.
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_cell_of_the_docs_runs_as_it_is_typed_in() -> None:
    """As a notebook does: a function without a file, and what the ranks return below it."""
    page = Path(__file__).resolve().parent.parent / "docs/launching.md"
    (cell,) = re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable], input=cell, capture_output=True, text=True, timeout=200, check=False
    )
    assert re.fullmatch(r"\[\d\.\d+, \d\.\d+\]\n", done.stdout), done.stderr


def test_functions_typed_in_at_a_prompt_can_be_launched() -> None:
    program = (
        "import torch, onecopy.launcher\n"
        "torch.ones(2_000_000).exp().sum()\n"  # starts OpenMP's threads, which do not fork
        "def rank():\n"
        "    import os\n"
        "    torch.ones(2_000_000).exp().sum()\n"
        "    return int(os.environ['RANK'])\n"
        "print(onecopy.launcher.launch(rank, 2))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable],
        input=program,
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.stdout == "[0, 1]\n", done.stderr
