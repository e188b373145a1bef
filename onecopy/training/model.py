"""A GPT, small enough to read in one go.

This file owns the network. It knows nothing of ranks, stages or
onecopy: the trainer shards it like any other `nn.Module`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The sizes of a GPT."""

    context: int = 96
    layers: int = 3
    width: int = 128
    heads: int = 4
    tie_head: bool = False
    vocabulary: int = 256  # as many as there are bytes


class Attention(nn.Module):
    """Causal self-attention: each position looks at itself and at what came before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        batch, time, _ = x.shape
        # Head by head, so that tensor parallel ranks, which have some of the heads, can cut it.
        split = self.query_key_value(x).view(batch, time, -1, 3, self.head_width)
        query, key, value = split.permute(3, 0, 2, 1, 4)  # each (batch, heads, time, head width)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, -1))
        return y


class MLP(nn.Module):
    """Two linear maps around a GELU, applied to each position alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        y: Tensor = self.out(functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """One layer: attention, then the MLP, each on a normalized copy and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT(nn.Module):
    """Predicts the next token of a text from the tokens before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialize()
        if config.tie_head:
            self.head.weight = self.embedding.weight

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Every layer adds twice to the stream: smaller output weights keep its size at any depth.
        for block in self.blocks:
            assert isinstance(block, Block), "blocks holds Block modules only"
            for linear in (block.attention.out, block.mlp.out):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits for each position, or with `targets` the mean loss in nats per token.

        `tokens` and `targets` are (batch, time) int64 with time at most the context; the logits
        are (batch, time, vocabulary), the loss is a scalar in fp32. Targets of -100 are left out.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)  # (batch, time, width)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
