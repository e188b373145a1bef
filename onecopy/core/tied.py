"""A parameter that two pipeline stages hold: both get the sum of both gradients.

The sum is made once in a step, by whoever first needs it: the norm by which gradients are clipped,
or the step. Each data-parallel rank sums with its counterpart in the other stage what both own of
the parameter. Where the stages cut it otherwise, the whole gradient is gathered for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.comm.groups import Group
    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["Tie"]


class Tie:
    """One stage's side of it.

    Attributes:
        unit, index: the parameter here.
        is_summed: its gradient is the sum already.
        is_counted_elsewhere: norms of the whole model count it in the other stage.

    Args:
        group: this rank and its counterpart.
        is_alike: both stages cut the parameter alike.
    """

    def __init__(
        self, engine: Engine, unit: Unit, index: int, group: Group, *, is_alike: bool
    ) -> None:
        self.unit, self.index = unit, index
        self.is_summed = False
        self.is_counted_elsewhere = group.rank > 0
        self._engine = engine
        self._group = group
        self._is_alike = is_alike

    def sum(self) -> None:
        """Make the sum, unless that is done; a collective of both stages."""
        owned = self._engine.owned
        if not self.is_summed and owned.are_shown:
            owned.change_part(self.unit, self.index, self._summed)
            self.is_summed = True

    def refuse_more(self) -> None:
        """Raises ShardingError where a backward would add to the sum what only this stage has."""
        if self.is_summed:
            raise ShardingError(
                f"a backward would add to the gradient of {self.unit.names[self.index]}, which is "
                "the sum over its pipeline stages already: clipping or the step has made it. Call "
                "optimizer.zero_grad() before, or clip after the last backward"
            )

    def _summed(self, own: torch.Tensor) -> torch.Tensor:
        collectives, unit, index = self._engine.collectives, self.unit, self.index
        if self._is_alike:
            collectives.over(self._group, own)
            return own
        whole = unit.gather_pieces(index, own)
        collectives.over(self._group, unit.slice.in_memory_order(index, whole))
        return unit.slice.own_part(index, whole) if own.numel() else own
