"""The one attribute that `shard` leaves on a model, and the only way to read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ATTRIBUTE", "find", "of"]

ATTRIBUTE = "_onecopy"


def find(model: nn.Module) -> Any | None:
    """The handle of a sharded model, or None."""
    return vars(model).get(ATTRIBUTE)


def of(model: nn.Module) -> Any:
    """The handle of a sharded model.

    Raises:
        ShardingError: the model is not sharded.
    """
    found = find(model)
    if found is None:
        raise ShardingError(
            f"this {type(model).__name__} is not sharded. Call onecopy.shard(model, optimizer, "
            "stage=...) first, and pass the module that was given to shard, not a part of it"
        )
    return found
