"""What `onecopy doctor` can be told. Free of torch, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from onecopy.errors import ConfigError
from onecopy.options import bytes_of, check_choices, check_least, describe

__all__ = ["DoctorOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Raises ConfigError for values that cannot work."""

    no_test: bool = field(
        default=False, metadata=describe("only look: start no ranks and send nothing")
    )
    nproc: int = field(
        default=2,
        metadata=describe("ranks to start for the test; torchrun's are taken as they are"),
    )
    device: str = field(
        default="auto",
        metadata=describe(
            "where the test's tensors lie; auto takes accelerators if there is one for each rank",
            choices=("auto", "cpu"),
        ),
    )
    limit: float = field(
        default=30.0,
        metadata=describe(
            "seconds after which something that has not come from another rank counts as stuck",
            metavar="SECONDS",
        ),
    )
    folder: tuple[Path, ...] = field(
        default=(),
        metadata=describe(
            "folders to look at beside the current and the temporary one, for example that of your "
            "checkpoints",
            metavar="DIR",
        ),
    )
    nvme: Path | None = field(
        default=None,
        metadata=describe(
            "a folder for states on NVMe: measures it as training reads and writes them, and says "
            "how long an optimizer step takes",
            metavar="DIR",
        ),
    )
    disk_bytes: str = field(
        default="256MiB",
        metadata=describe(
            "size of the file that is written and read to measure a disk, and removed; 0 measures "
            "none",
            metavar="SIZE",
        ),
    )
    json: Path | None = field(
        default=None,
        metadata=describe(
            "write everything as JSON, for a bug report; - prints it instead of the tables",
            metavar="FILE",
        ),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_least(self, {"nproc": 1, "limit": 1})
        for folder in self.folder:
            if not folder.is_dir():
                raise ConfigError(f"--folder {folder}: there is no such folder.")
        if self.nvme is not None and not self.nvme.is_dir():
            raise ConfigError(f"--nvme {self.nvme}: there is no such folder.")
        if self.is_json_to_file and self.json is not None and not self.json.parent.is_dir():
            raise ConfigError(f"--json {self.json}: make the folder first.")
        if self.disk_bytes.strip() != "0":
            bytes_of(self.disk_bytes)

    @property
    def bytes_to_disk(self) -> int:
        """How much to write and read on each disk."""
        return 0 if self.disk_bytes.strip() == "0" else bytes_of(self.disk_bytes)

    @property
    def is_json_to_file(self) -> bool:
        """JSON goes beside the tables, not in their place."""
        return self.json is not None and str(self.json) != "-"
