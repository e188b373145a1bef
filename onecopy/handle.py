"""The one attribute that `shard` leaves on a model, and the only way to read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ATTRIBUTE", "NotCopied", "find", "inner", "of"]

ATTRIBUTE = "_onecopy"


def inner(model: nn.Module) -> nn.Module:
    """The module itself, where `torch.compile` has put wrappers around it."""
    while True:
        found = model._modules.get("_orig_mod")
        if found is None:
            return model
        model = found


def find(model: nn.Module) -> Any | None:
    """The handle of a sharded model, or None."""
    return vars(inner(model)).get(ATTRIBUTE)


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


class NotCopied:
    """A part of a sharded model that copying or pickling the model must not take along."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ShardingError(
            "a part of a sharded model cannot be copied: copy the whole model, on all ranks, with "
            "copy.deepcopy(model)"
        )

    def __reduce__(self) -> str:
        raise ShardingError(
            "a sharded model cannot be pickled: save model.state_dict(), called on all ranks"
        )
