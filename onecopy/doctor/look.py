"""Everything that `onecopy doctor` looks at on this machine, as one record."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from onecopy.doctor.environment import launched, variables_of_user
from onecopy.doctor.facts import Accelerator, Facts
from onecopy.doctor.files import within
from onecopy.doctor.host import look_at_limits, look_at_memory, look_at_processors
from onecopy.doctor.network import look_at_network
from onecopy.doctor.software import look_at_accelerators, look_at_software
from onecopy.doctor.storage import look_at_folders
from onecopy.doctor.swap_speed import look_at_swap
from onecopy.memory.cgroup import read_limits

__all__ = ["look"]

DRIVER_SECONDS = 30.0  # the first use of many devices takes a while, and a broken driver forever


def look(folders: Sequence[Path] = (), disk_bytes: int = 0, nvme: Path | None = None) -> Facts:
    """Look at this machine. What cannot be found out is None.

    Args:
        folders: beside the current and the temporary one.
        disk_bytes: to write and to read, to measure disks; 0 measures none.
        nvme: a folder to be measured for states on disk.
    """
    variables = variables_of_user()
    group = read_limits()
    accelerators, problem = _accelerators()
    return Facts(
        software=look_at_software(),
        processors=look_at_processors(group),
        memory=look_at_memory(group),
        network=look_at_network(variables),
        limits=look_at_limits(),
        accelerators=accelerators,
        accelerator_problem=problem,
        folders=look_at_folders(_purposes(folders, nvme), disk_bytes),
        swap=None if nvme is None else look_at_swap(nvme, disk_bytes),
        environment=variables,
        launched=launched(),
    )


def _accelerators() -> tuple[tuple[Accelerator, ...], str]:
    try:
        return within(DRIVER_SECONDS, look_at_accelerators), ""
    except ImportError:
        return (), ""  # no torch, which is said elsewhere
    except (OSError, RuntimeError) as error:
        return (), str(error).partition("\n")[0]


def _purposes(folders: Sequence[Path], nvme: Path | None) -> dict[Path, str]:
    """Each folder once; what a user names counts most."""
    found = {folder.resolve(): "--folder" for folder in folders}
    if nvme is not None:
        found[nvme.resolve()] = "--nvme"
    found.setdefault(Path.cwd(), "current folder")
    found.setdefault(Path(tempfile.gettempdir()).resolve(), "temporary files")
    return found
