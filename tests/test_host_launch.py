"""The scripts of docs/accelerate.md and docs/lightning.md, started as users start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pool import RANK_ENVIRONMENT

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Its way for several GPUs, whose processes the script keeps on CPUs: for those it needs MPI.
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
STARTS = {
    "accelerate launch": ("accelerate", [*ACCELERATE, "--num_machines", "1"]),
    "accelerate torchrun": ("accelerate", TORCHRUN),
    "lightning alone": ("lightning", []),
    "lightning torchrun": ("lightning", TORCHRUN),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_script_runs_on_two_processes(tmp_path: Path, start: str) -> None:
    """It trains, saves, and goes on from what it has saved."""
    host, command = STARTS[start]
    if find_spec(host) is None:
        pytest.skip(f"{host} is not installed")
    page = (ROOT / f"docs/{host}.md").read_text()
    script = tmp_path / "script.py"
    script.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *command, str(script)],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(re.findall(r"^loss \d+\.\d+$", ended.stdout, re.MULTILINE)) in (1, 4), ended.stdout
    folder = {"accelerate": "run/onecopy", "lightning": "run/last.ckpt"}[host]
    # A file of each rank.
    assert len(list((tmp_path / folder).glob("step-*/*.distcp"))) == 2
