"""What the planner knows of a model: its units, and what its blocks save for backward.

This file owns the records, not where they come from. Integers only: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onecopy.planner.estimate import ElementWidths
from onecopy.policies import Offload

__all__ = ["ModelShape", "Saved", "Stack", "TransformerShape", "UnitShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShape:
    """Units that are alike: parameters that are gathered, used and released together.

    name: of the first of them. numels: elements of each parameter, in order.
    count: how many there are. trainable: else they have no gradients and optimizer states.
    surrounds: its module contains other units' modules, so it stays gathered while these run.
    joins: it is of the same module as the unit before, so both are gathered at once (what is frozen
        and what is not, as with adapters).
    stays: its parameters are whole at every stage (`Config.keep_gathered`).
    owners: the rank that has each parameter whole; None where slices cut anywhere.
    widths: bytes of each state; None where the plan's precision says it.
    offload: which of their states lie in host memory, whatever its fraction; None for none.
    """

    name: str
    numels: tuple[int, ...]
    count: int = 1
    trainable: bool = True
    surrounds: bool = False
    joins: bool = False
    stays: bool = False
    owners: tuple[int, ...] | None = None
    widths: ElementWidths | None = None
    offload: Offload | None = None

    @property
    def num_parameters(self) -> int:
        """Elements of all of them, without padding."""
        return self.count * sum(self.numels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one token makes autograd keep until backward, in elements.

    compute: in the compute dtype. fp32: in fp32 whatever that is. masks: of one byte (dropout).
    positions: fp32 elements for each token *and* each position that it attends to, where
        attention writes its matrix out.
    """

    compute: int = 0
    fp32: int = 0
    masks: int = 0
    positions: int = 0

    def __add__(self, other: Saved) -> Saved:
        return Saved(
            compute=self.compute + other.compute,
            fp32=self.fp32 + other.fp32,
            masks=self.masks + other.masks,
            positions=self.positions + other.positions,
        )

    def num_bytes(self, width: int, sequence: int) -> int:
        """Bytes per token, where the compute dtype has `width` bytes."""
        return width * self.compute + 4 * (self.fp32 + self.positions * sequence) + self.masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A run of alike blocks.

    hidden: elements of a token between blocks. widest: elements of a token inside of one, where
    it is widest. saved: per token and block. normed: elements of a token that attention itself
    normalises in fp32, if it does.
    """

    count: int
    hidden: int
    widest: int
    saved: Saved
    normed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A model's blocks and its head.

    stacks: one, or encoder and decoder. outside: what a token makes autograd save before and after
    the blocks, beside the logits. vocabulary: 0 where it is not known.
    upcasts_logits: the loss is made from fp32 logits, as Hugging Face's causal models do.
    context: the longest sequence, if there is a limit.
    """

    stacks: tuple[Stack, ...]
    outside: Saved = Saved()
    vocabulary: int = 0
    upcasts_logits: bool = True
    context: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as the planner sees it.

    name: what the user called it. units: in the order of use, as near as is known.
    transformer: None where activations cannot be told. notes: what was assumed, in sentences.
    """

    name: str
    units: tuple[UnitShape, ...]
    transformer: TransformerShape | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once."""
        return sum(unit.num_parameters for unit in self.units)

    @property
    def num_blocks(self) -> int:
        """How many units are repetitions of others."""
        return sum(unit.count for unit in self.units if unit.count > 1)

    def with_blocks(self, num_blocks: int) -> ModelShape:
        """The same model with more or fewer of its repeated blocks, all kinds in proportion."""
        whole = self.num_blocks
        units = tuple(
            replace(unit, count=unit.count * num_blocks // whole) if unit.count > 1 else unit
            for unit in self.units
        )
        return replace(self, units=units, transformer=self._transformer_of(num_blocks))

    def with_offload(self, offload: Offload | None) -> ModelShape:
        """The same model, the first of its units with states in host memory, as `shard` would."""
        if offload is None or offload.is_all_on_device:
            return self
        # As the runtime places units: a unit that would cross the border stays on the device.
        left = int(offload.fraction * self.num_parameters)
        units: list[UnitShape] = []
        for unit in self.units:
            size = sum(unit.numels)
            num_chosen = min(unit.count, max(left, 0) // size) if size else 0
            left -= unit.num_parameters
            parts = ((num_chosen, offload), (unit.count - num_chosen, None))
            units += [replace(unit, count=count, offload=own) for count, own in parts if count]
        return replace(self, units=tuple(units))

    def _transformer_of(self, num_blocks: int) -> TransformerShape | None:
        if self.transformer is None:
            return None
        stacks = tuple(
            replace(stack, count=max(1, stack.count * num_blocks // self.num_blocks))
            for stack in self.transformer.stacks
        )
        return replace(self.transformer, stacks=stacks)
