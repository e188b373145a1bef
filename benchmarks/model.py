"""The GPTs that are measured, and their batches: the same values in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from onecopy.training.model import Block, GPTConfig

__all__ = ["GPT", "SIZES", "Size", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of a GPT; 125m is GPT-2's, its embedding shared with the head."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tied: bool = False


SIZES = {
    "1m": Size(layers=4, width=128, heads=4, vocabulary=512),
    "5m": Size(layers=6, width=256, heads=4, vocabulary=2048),
    "10m": Size(layers=7, width=320, heads=5, vocabulary=4096),
    "50m": Size(layers=9, width=640, heads=10, vocabulary=8192),
    "125m": Size(layers=12, width=768, heads=12, vocabulary=50257, tied=True),
}


class GPT(nn.Module):
    """Blocks in a ModuleList, between embeddings and a head."""

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        config = GPTConfig(context=context, layers=size.layers, width=size.width, heads=size.heads)
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if size.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss in nats of predicting each token of (batch, time + 1) but the first."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, time, vocabulary)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batch(size: Size, shape: tuple[int, int], step: int, rank: int) -> Tensor:
    """Random tokens, (micro-batch, context + 1) from `shape` (micro-batch, context).

    Only the lower half of the vocabulary occurs, so that there is something to learn and a wrong
    gradient shows in the losses that follow.
    """
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    rows, context = shape
    return torch.randint(size.vocabulary // 2, (rows, context + 1), generator=generator)
