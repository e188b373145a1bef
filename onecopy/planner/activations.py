"""Bytes of activations along a backward, fused attention assumed.

At its beginning all blocks' values exist, and the loss's; then block after block lets go of its
own, while one has gradients inside of it. The loop is taken to keep the logits until backward has
ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecopy.planner.shapes import TransformerShape

__all__ = ["Activations", "Batch", "activations_of"]

# Bytes of a token's small things: what it is, where, its segment, what follows (and that shifted),
# masks and experts, most in int64.
INDICES = 8 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one rank computes at a time: samples, tokens of each, and backwards per step."""

    samples: int
    sequence: int
    backwards: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one backward."""
        return self.samples * self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes at the moments of a backward.

    outside: kept around the blocks. stacks: number of blocks, and what each keeps.
    inside: of the block that backward is in, beside what it keeps, with the logits.
    loss: where the loss's own gradient is made. head: where it goes through the head.
    on_host: kept in host memory, and not among all these.
    """

    outside: int
    stacks: tuple[tuple[int, int], ...]
    inside: int
    loss: int
    head: int
    on_host: int = 0

    @property
    def kept(self) -> int:
        """What all blocks keep from forward to backward."""
        return self.outside + sum(count * kept for count, kept in self.stacks)

    @property
    def most(self) -> int:
        """At the moment when they take most."""
        return self.kept + max(self.inside, self.loss)


def activations_of(
    transformer: TransformerShape,
    batch: Batch,
    width: int,
    *,
    recompute: bool,
    on_host: bool = False,
    num_parts: int = 1,
) -> Activations:
    """What a model keeps for one backward.

    Args:
        width: bytes of the compute dtype.
        recompute: only the inputs of blocks are kept, and one block is computed again at a time.
        on_host: they are in host memory: on the device is that of one block, and the next one's.
        num_parts: as many ranks keep a part of each; on the device is one that is whole.
    """
    tokens, sequence, inside = batch.tokens, batch.sequence, 0
    stacks, moved = [], 0
    for stack in transformer.stacks:
        saved = stack.saved.num_bytes(width, sequence)
        kept = tokens * saved
        if recompute:
            kept = -(-tokens * stack.hidden // num_parts) * width
        moved += stack.count * kept if on_host else 0
        stacks.append((stack.count, 0 if on_host else kept))
        # Where attention writes its weights out, so do their gradients.
        matrix = 16 * stack.saved.positions * sequence
        norms = max(16 * stack.hidden, 8 * stack.normed)
        working = max(norms, 2 * width * stack.widest, matrix)
        inputs = stack.hidden * width if on_host or num_parts > 1 else 0
        coming = stack.hidden * width // num_parts if on_host else 0
        inside = max(inside, working + (saved + inputs + coming if recompute else 0))
    outside = transformer.outside.num_bytes(width, sequence) + INDICES
    logits = tokens * transformer.vocabulary
    # Logits, their logarithms, and two gradients of these.
    loss = 4 * width if not transformer.upcasts_logits else 12 + width
    return Activations(
        outside=tokens * outside,
        stacks=tuple(stacks),
        inside=tokens * inside + width * logits,
        loss=loss * logits,
        head=2 * width * logits,
        on_host=moved,
    )
