"""What one rank has of a model whose modules were not left in one tree: parts of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from onecopy.errors import ConfigError

__all__ = ["Parts", "Rename"]

T = TypeVar("T")
Rename = Callable[[str], str]


class Parts(Generic[T]):
    """Several modules that are parts of one model, or several optimizers that are those of one.

    For `onecopy.save`, `async_save` and `load`, in the place of a model (or an optimizer): the
    checkpoint has them under the names of the whole model, as if they had never been taken apart.
    A rank of an interleaved pipeline has several; names are given where a part's own are others
    than those in the whole model.

        onecopy.save("run", Parts(first, second), Parts(its_optimizer, the_other))
        onecopy.save("run", Parts(stage, names=lambda name: f"decoder.{name}"), optimizer)

    Args:
        parts: the modules, each of which was given to `onecopy.shard`; or the optimizers.
        names: what becomes of a tensor's name in a module: its name in the whole model. One
            function for all modules, or one for each. None keeps the names.

    Raises:
        ConfigError: there are no parts, or another number of functions than of modules.
    """

    def __init__(self, *parts: T, names: Rename | Sequence[Rename] | None = None) -> None:
        if not parts:
            raise ConfigError("Parts() without parts: pass the modules, or the optimizers")
        chosen: Sequence[Rename]
        if names is None or callable(names):
            chosen = [names or str] * len(parts)
        else:
            chosen = list(names)
        if len(chosen) != len(parts):
            raise ConfigError(
                f"Parts of {len(parts)} modules with {len(chosen)} functions for names: give one "
                "function for all of them, or one for each"
            )
        self.parts = parts
        self.names = tuple(chosen)
