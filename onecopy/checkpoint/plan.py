"""Plans of torch.distributed.checkpoint, made from ranges."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from onecopy.checkpoint.boxes import Box, overlapping
from onecopy.checkpoint.ranges import Part, Range, memory_order
from onecopy.errors import CheckpointError

__all__ = ["LoadRanges", "SaveRanges"]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class SaveRanges(DefaultSavePlanner):
    """Saves ranges of tensors, and objects as bytes.

    Args:
        ranges: what this rank saves.
        objects: by key what torch.save shall write; each key on one rank only.
        paths: by key the keys that lead there in a nested state dict.
    """

    def __init__(
        self,
        ranges: Iterable[Range],
        objects: Mapping[str, bytes],
        paths: Mapping[str, tuple[str | int, ...]],
    ) -> None:
        super().__init__()
        self._ranges = list(ranges)
        self._objects = objects
        self._paths = paths
        # Of the item that is being written.
        self._values: torch.Tensor | None = None
        self._parts: dict[MetadataIndex, Part] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """The ranges take the place of a state dict."""

    def create_local_plan(self) -> SavePlan:
        """One item for each box and object."""
        items = []
        for one in self._ranges:
            properties = TensorProperties(dtype=one.dtype)
            for box, part in one.boxes():
                index = MetadataIndex(one.key, box.offsets)
                self._parts[index] = part
                data = TensorWriteData(_chunk(box), properties, torch.Size(one.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        for key in self._objects:
            items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        return SavePlan(items, planner_data=self._paths)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of one item, in host memory and with no other memory behind them."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn])
        self._values = None  # before there is memory for the next one
        self._values = self._parts[write_item.index].values().detach().to("cpu")
        return _alone(self._values)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a storage that has no others: torch.save writes all of it.

    Valid as long as the tensor is, whose memory it does not hold: torch.save leaves cycles behind,
    so that what it has written would live until Python's collector comes.
    """
    if not tensor.numel():
        return tensor.clone()
    flat = tensor.permute(memory_order(tensor)).view(-1)
    # Through the buffer protocol: a storage that begins and ends with these bytes, without a copy.
    memory = (ctypes.c_char * tensor.nbytes).from_address(flat.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return whole.as_strided(tensor.size(), tensor.stride())


class LoadRanges(DefaultLoadPlanner):
    """Loads ranges of tensors into memory that is there, and objects as bytes.

    Args:
        ranges: what this rank needs; their keys are those of the checkpoint.
        keys: of the objects that it needs.
        where: the checkpoint's folder, for messages.
    """

    def __init__(self, ranges: Iterable[Range], keys: Iterable[str], where: str) -> None:
        super().__init__()
        self._ranges = list(ranges)
        self._keys = list(keys)
        self._where = where
        self._parts: dict[MetadataIndex, Part] = {}
        self.objects: dict[str, bytes] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """The ranges take the place of a state dict."""
        assert metadata is not None, "there is metadata where something is loaded"
        self._metadata = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """What to read: the overlaps of this rank's boxes with the saved ones.

        Raises:
            CheckpointError: something is not in the checkpoint, or not all of it.
        """
        items: list[ReadItem] = []
        for one in self._ranges:
            items += self._items_of(one)
        for key in self._keys:
            if not isinstance(self._metadata.get(key), BytesStorageMetadata):
                raise CheckpointError(f"{self._where} has no object {key}")
            index, nowhere = MetadataIndex(key), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere))
        return LoadPlan(items)

    def _items_of(self, one: Range) -> list[ReadItem]:
        stored = self._metadata.get(one.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self._where} has no tensor {one.key}")
        if tuple(stored.size) != one.shape:
            raise CheckpointError(
                f"{one.key} has shape {tuple(stored.size)} in {self._where} and {one.shape} here: "
                "it was saved from another model"
            )
        chunks = []
        for box, part in one.boxes():
            self._parts[MetadataIndex(one.key, box.offsets)] = part
            chunks.append(_chunk(box))
        items = create_read_items_for_chunk_list(one.key, stored, chunks)
        read = {item.storage_index.index or 0 for item in items}
        twice = next(overlapping([stored.chunks[number] for number in read]), None)
        if twice is not None:
            raise CheckpointError(
                f"{self._where} holds parts of {one.key} twice, those from "
                f"{list(twice[0].offsets)} and {list(twice[1].offsets)} overlap: it is damaged"
            )
        found = sum(item.lengths.numel() for item in items)
        if found != one.numel:
            raise CheckpointError(
                f"{self._where} holds {found} of the {one.numel} elements of {one.key} that this "
                "rank needs: it was not saved completely"
            )
        return items

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep the bytes; who has asked for them knows what they should be."""
        self.objects[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of this rank's memory that an item fills."""
        part = self._parts[read_item.dest_index]
        return part.window(read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It has been written to."""
        self._parts[read_item.dest_index].take(read_item.dest_offsets, tensor)
