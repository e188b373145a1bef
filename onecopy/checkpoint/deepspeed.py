"""DeepSpeed's ZeRO checkpoints, read as checkpoints of torch.distributed.checkpoint.

The flat partitions are presented as boxes of named tensors, so that loading at any world size and
stage, exporting and inspecting need no code of their own, and a rank reads what it owns. Parameters
are the fp32 masters, with their optimizer states; frozen parameters and buffers have the precision
in which DeepSpeed keeps them.

Source: DeepSpeed 0.19.8, what runtime/engine.py and runtime/zero write and utils/zero_to_fp32.py
reads.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from onecopy.checkpoint.boxes import Box
from onecopy.checkpoint.deepspeed_catalogue import Catalogue, Entry, path_of
from onecopy.checkpoint.deepspeed_files import find_files, is_deepspeed

__all__ = ["DeepSpeedReader", "is_deepspeed"]


class DeepSpeedReader(StorageReader):
    """Reads a checkpoint of DeepSpeed's ZeRO-1, 2 or 3.

    Its keys are those of onecopy's own checkpoints: parameters and buffers under their names,
    `optimizer.state.<parameter>.<state>` and `optimizer.param_groups.<number>.<setting>`. Tied
    weights are found under each of their names, their states and settings under the first.

    Args:
        path: the root with its `latest`, or the folder of one step.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._catalogue: Catalogue | None = None

    @property
    def checkpoint_id(self) -> Path:
        """Where it reads."""
        return self._path

    @property
    def run(self) -> dict[str, Any]:
        """What is known of the run besides, as far as it is plain data.

        `global_steps`, `global_samples`, `skipped_steps`, `dp_world_size` and `ds_version`;
        `lr_scheduler`, its state; `loss_scale`; `client_state`, what the user gave to
        save_checkpoint.

        Raises:
            CheckpointError: as `read_metadata`.
        """
        return self._open().run

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied weights, and the first ones. Raises as `read_metadata`."""
        return self._open().aliases

    @property
    def files(self) -> list[Path]:
        """All files. Raises as `read_metadata`."""
        return self._open().files

    def check(self, path: Path) -> None:
        """See that one of the files fits the others; values are not read.

        Raises:
            CheckpointError: it is damaged or of another run.
        """
        self._open().check(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Look again, at another place if one is given."""
        self._path = Path(checkpoint_id or self._path)
        self._catalogue = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes, dtypes and boxes of everything.

        Raises:
            CheckpointError: a file is missing, cut off, of another run, or of a kind that is not
                read: with tensor, pipeline or expert parallelism, or without ZeRO.
        """
        catalogue = self._open()
        chunks: dict[int, list[ChunkStorageMetadata]] = {}
        stored: dict[str, Any] = {}
        for key, entry in catalogue.tensors.items():
            # The masters and states of a parameter are cut alike: they share what says so.
            cut = id(getattr(entry, "pieces", entry))
            if cut not in chunks:
                chunks[cut] = [_chunk(box) for box in entry.boxes()]
            properties = TensorProperties(dtype=entry.dtype)
            stored[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks[cut])
        stored |= {key: BytesStorageMetadata() for key in catalogue.objects}
        return Metadata(
            stored,
            planner_data={key: path_of(key) for key in stored},
            storage_meta=StorageMeta(checkpoint_id=self._path.name),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the files say where everything is."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, from those ranks' files that hold it.

        Raises:
            CheckpointError: a file is damaged or of another run.
        """
        catalogue = self._open()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(catalogue.objects[item.storage_index.fqn], buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
            else:
                target = planner.resolve_tensor(item)
                _read(catalogue.tensors[item.storage_index.fqn], item, target.detach())
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self) -> Catalogue:
        if self._catalogue is None:
            self._catalogue = Catalogue(find_files(self._path))
        return self._catalogue

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a DeepSpeed checkpoint."""
        return is_deepspeed(checkpoint_id)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _read(entry: Entry, item: ReadItem, target: torch.Tensor) -> None:
    """Fill a part of a stored box: its place in the box, and the box's in the tensor, add up."""
    box = item.storage_index.offset
    assert box is not None, "items of tensors say which box they are of"
    entry.read(target, [a + b for a, b in zip(box, item.storage_offsets, strict=True)])
