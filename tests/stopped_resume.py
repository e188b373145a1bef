"""examples/resume.py in a process that stands still after saving step STOP_AT, if that is set.

The others soon wait for it: so a test can interrupt the run there, however fast or slow the machine
is.
"""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

import onecopy

SCRIPT = Path(__file__).resolve().parent.parent / "examples/resume.py"


def save_and_stop(root: str, *arguments: Any, step: int, **settings: Any) -> Path:
    path = save(root, *arguments, step=step, **settings)
    if step == int(os.environ.get("STOP_AT", "0")):
        signal.pause()
    return path


if __name__ == "__main__":
    save = onecopy.save
    onecopy.save = save_and_stop
    runpy.run_path(str(SCRIPT), run_name="__main__")
