"""A tracker that writes TensorBoard's files: `onecopy.record(..., trackers=[TensorBoard(folder)])`.

Look at them with `tensorboard --logdir FOLDER`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from onecopy.extras import missing

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes each number as a scalar of its name, into a folder that a first number makes.

    Every rank may have one: only the first rank's is told anything.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if find_spec("tensorboard") is None:
            raise missing("tensorboard", "TensorBoard(...)")
        self._folder = os.fspath(folder)
        self._writer: SummaryWriter | None = None

    def __repr__(self) -> str:
        return f"TensorBoard({self._folder!r})"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(self._folder)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write what there is and close the file; what is logged afterwards goes to another one."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
