"""What each ZeRO stage cuts, and what follows from it at each moment of a step.

Stages are data. The three states of a model (parameters, gradients, optimizer states) are each kept
whole on every rank, cut over the ranks of a node, or cut over the world; everything that happens in
a step follows from these three choices. Nothing outside this file compares a stage number.

Sources: ZeRO (Rajbhandari et al. 2020) section 5: P_os (1), P_os+g (2), P_os+g+p (3); MiCS (Zhang
et al. 2022); hpZ of ZeRO++ (Wang et al. 2023) section 3.2; PaRO (Wu et al. 2023) section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from onecopy.config import CUTS, HYBRIDS
from onecopy.config import STAGES as NUMBERS

__all__ = ["STAGES", "Stage", "stage_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Which states are cut, and how far: "whole", "node" or "world".

    Whoever owns a part of an optimizer state needs no more than that part of the gradient, and of
    the parameters: what comes first here is never cut further than what comes after it.
    """

    parameters: str
    gradients: str
    optimizer: str

    @property
    def shards_anything(self) -> bool:
        """The shard group is more than this rank alone."""
        return self.optimizer != "whole"

    @property
    def needs_nodes(self) -> bool:
        """Something is cut inside a node."""
        return "node" in (self.parameters, self.gradients, self.optimizer)

    @property
    def releases(self) -> bool:
        """Parameters are gathered before use and released after it."""
        return self.parameters != "whole"

    @property
    def cut_gradients(self) -> bool:
        """The buffer of full local gradients is given back, unit by unit."""
        return self.gradients != "whole"

    @property
    def keeps_gradient_buffer(self) -> bool:
        """The buffer of full local gradients stays allocated between steps."""
        return self.shards_anything and not self.cut_gradients

    @property
    def keeps_secondary(self) -> bool:
        """Ranks of a node keep the parameters together that all ranks own (hpZ's secondary)."""
        return self.parameters == "node" and self.optimizer == "world"

    @property
    def sums_at_boundary(self) -> bool:
        """Backwards sum gradients inside nodes; across nodes they are summed once a step."""
        return self.gradients == "node"

    @property
    def with_whole_parameters(self) -> Stage:
        """The same, but parameters stay: for units that ranks may use or not use as they like."""
        return replace(self, parameters="whole")

    @property
    def on_one_node(self) -> Stage:
        """What it comes to where all ranks are in one node."""
        cuts = (self.parameters, self.gradients, self.optimizer)
        return _made(*("world" if cut == "node" else cut for cut in cuts))

    @property
    def name(self) -> str:
        """The paper's name of this choice; where nodes matter, what is cut and how far."""
        if self.needs_nodes:
            known = (name for name, cuts in HYBRIDS.items() if stage_of(cuts) == self)
            return next(known, self.cuts)
        cut = [
            letter
            for letter, is_cut in (
                ("os", self.shards_anything),
                ("g", self.cut_gradients),
                ("p", self.releases),
            )
            if is_cut
        ]
        return "P_" + "+".join(cut) if cut else "data parallel"

    @property
    def cuts(self) -> str:
        """As `Config.stage` takes it: "parameters/gradients/optimizer"."""
        return f"{self.parameters}/{self.gradients}/{self.optimizer}"


@cache
def _made(parameters: str, gradients: str, optimizer: str) -> Stage:
    assert all(cut in CUTS for cut in (parameters, gradients, optimizer)), "Config has checked"
    return Stage(parameters=parameters, gradients=gradients, optimizer=optimizer)


def stage_of(stage: int | str) -> Stage:
    """The row of the table that `Config.stage` names: a number, a preset, or three cuts."""
    cuts = NUMBERS[stage] if isinstance(stage, int) else HYBRIDS.get(stage, stage)
    return _made(*cuts.split("/"))


STAGES: dict[int, Stage] = {number: stage_of(number) for number in NUMBERS}
