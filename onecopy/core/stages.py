"""What each ZeRO stage cuts, and what follows from it at each moment of a step.

Stages are data. The three states of a model (parameters, gradients, optimizer states) are each
kept whole or cut over the shard group; everything that happens in a step follows from these three
choices and from the two groups. Nothing outside this file compares a stage number.

Source: ZeRO (Rajbhandari et al. 2020) section 5: P_os (1), P_os+g (2), P_os+g+p (3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["STAGES", "Stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Which states are cut over the shard group.

    A model of which nothing is cut has a shard group of one rank, and its gradients are summed
    over the replica group, which is then the whole world.
    """

    cut_parameters: bool
    cut_gradients: bool
    cut_optimizer: bool

    @property
    def shards_anything(self) -> bool:
        """The shard group is the world; else it is this rank alone."""
        return self.cut_optimizer

    @property
    def releases(self) -> bool:
        """Parameters are gathered before use and released after it."""
        return self.cut_parameters

    @property
    def keeps_gradient_buffer(self) -> bool:
        """The buffer of full local gradients stays allocated between steps."""
        return self.cut_optimizer and not self.cut_gradients

    @property
    def with_whole_parameters(self) -> Stage:
        """The same, but parameters stay: for units that ranks may use or not use as they like."""
        return replace(self, cut_parameters=False)

    @property
    def name(self) -> str:
        """The paper's name of this choice."""
        cut = [
            letter
            for letter, is_cut in (
                ("os", self.cut_optimizer),
                ("g", self.cut_gradients),
                ("p", self.cut_parameters),
            )
            if is_cut
        ]
        return "P_" + "+".join(cut) if cut else "data parallel"


STAGES: dict[int, Stage] = {
    0: Stage(cut_parameters=False, cut_gradients=False, cut_optimizer=False),
    1: Stage(cut_parameters=False, cut_gradients=False, cut_optimizer=True),
    2: Stage(cut_parameters=False, cut_gradients=True, cut_optimizer=True),
    3: Stage(cut_parameters=True, cut_gradients=True, cut_optimizer=True),
}
