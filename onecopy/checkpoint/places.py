"""Where what a rank has of a tensor lies in the whole one: a tile of a layer, a part of a DTensor.

What a rank saves or loads of a parameter is a range of the part that it has (see ranges.py); the
part is a box of the whole, and so are the boxes that the range consists of, moved to its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from onecopy.core.dtensors import box_of
from onecopy.core.tiled_linear import persistent_tensors, tiles_in
from onecopy.errors import CheckpointError

__all__ = ["Place", "place_of", "places_in"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part lies.

    shape: of the whole tensor. offsets: the part's first element in each dimension of it.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Whether the part has the first element."""
        return not any(self.offsets)


def places_in(model: nn.Module) -> dict[int, Place]:
    """By id of a parameter or buffer: the place of what this rank has of it, where that is a part.

    Raises:
        CheckpointError: see `place_of`.
    """
    found = {key: Place(tile.shape, tile.offsets) for key, tile in tiles_in(model).items()}
    for name, tensor in persistent_tensors(model):
        place = place_of(tensor, name)
        if place is not None:
            found[id(tensor)] = place
    return found


def place_of(tensor: Tensor, name: str) -> Place | None:
    """The place of this rank's part of a DTensor; None where the rank has all of the tensor.

    Args:
        name: for messages.

    Raises:
        CheckpointError: what the rank has is no box: a sum that is not added up yet, or rows that
            lie apart.
    """
    if not isinstance(tensor, DTensor):
        return None
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise CheckpointError(
                f"{name} is a DTensor with the placement {placement}, of which no rank has a box "
                "of values: save parameters and buffers that are sharded or replicated, "
                "tensor.redistribute(placements=...)"
            )
    box = box_of(tensor)
    return None if box is None else Place(tuple(tensor.shape), box[0])
