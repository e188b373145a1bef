"""Parameters that stay gathered from one use to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from onecopy import handle

__all__ = ["keep_gathered"]


@contextmanager
def keep_gathered(models: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
    """Inside, what a forward or a backward has gathered stays gathered until the block ends.

    For several forwards and backwards between two steps (micro-batches, tiles of a loss): each unit
    travels once, for the memory of all that were used. Units that nobody uses are not gathered. At
    stages where parameters are not cut there is nothing to do. All ranks must use it alike;
    `optimizer.step()` is refused inside.

    Args:
        models: a sharded model, or several.

    Raises:
        ShardingError: a model is not sharded.
    """
    several = [models] if isinstance(models, nn.Module) else list(models)
    engines = [handle.of(one).engine for one in several]
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.keep())
        yield
