"""Programs of two ranks, of which one meets a disk that fails, or is killed while it writes.

Run as tests/ending_rank.py is, for tests/test_nvme_faults.py: nobody catches the error, and the
ranks end as interpreters do.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests import ending_rank
from tests.ending_rank import Program
from tests.test_nvme_faults import FAULTS, VICTIM, meet


def run(program: Program, rank: int) -> None:
    """Train, save, and meet what this one of FAULTS says."""
    dist.init_process_group("gloo")
    folder = Path(program.folder)
    meet(folder / "states", folder / "saved", *FAULTS[program.how], VICTIM)


if __name__ == "__main__":
    ending_rank.main(run)
