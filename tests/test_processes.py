"""Processes of this machine are told apart, and their end is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onecopy.comm import processes
from onecopy.comm.processes import has_ended, own_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SAY_AND_WAIT = (
    "import sys; from onecopy.comm.processes import own_process;"
    "print(own_process(), flush=True); sys.stdin.read()"
)


def test_a_killed_process_has_ended() -> None:
    """Also while its parent has not asked what became of it, and when its number is forgotten."""
    with subprocess.Popen(
        [sys.executable, "-c", SAY_AND_WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        said = child.stdout.readline().strip()
        assert not has_ended(said)
        child.kill()
        # Waits for its end, and leaves the zombie that it is then.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(said)
    assert has_ended(said)


def test_a_number_that_is_used_again_is_another_process() -> None:
    """This process has the number of one that began at another time."""
    assert not has_ended(own_process())
    *parts, started = own_process().split()
    assert has_ended(" ".join([*parts, str(int(started) - 1)]))


@pytest.mark.parametrize("place", [0, 1], ids=["machine", "namespace"])
def test_nothing_is_said_of_other_machines(place: int) -> None:
    """Numbers mean nothing there."""
    parts = own_process().split()
    parts[place], parts[2] = "other", "999999999"
    assert not has_ended(" ".join(parts))


def test_nothing_is_said_where_the_kernel_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on systems without /proc."""
    own = own_process()
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert own_process() == ""
    assert not has_ended("")
    assert not has_ended(own)
