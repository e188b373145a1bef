"""A transformer for tensor parallelism, and what its ranks do with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

VOCABULARY, WIDTH, DEPTH, HEADS, TOKENS, ROWS = 12, 8, 2, 4, 6, 2


class Attention(nn.Module):
    """With q, k and v apart, as tensor parallelism wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (rows, tokens, width)
        rows, tokens, _ = x.shape
        shape = rows, tokens, -1, WIDTH // HEADS
        q, k, v = (one(x).view(shape).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class MLP(nn.Module):
    """Up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(vocabulary: int = VOCABULARY) -> GPT:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(vocabulary)


def parallelize(model: GPT, mesh: DeviceMesh, style: str) -> GPT:
    """As "tensor" (columns and rows, norms are plain), "sequence" (norms on parts of sequences) or
    "loss" (that, and logits cut over the vocabulary).
    """
    in_sequence = style != "tensor"
    rows: Any = RowwiseParallel(output_layouts=Shard(1)) if in_sequence else RowwiseParallel()
    for block in model.blocks:
        plan: dict[str, Any] = {
            **{f"attention.{one}": ColwiseParallel() for one in "qkv"},
            "attention.out": rows,
            "mlp.up": ColwiseParallel(),
            "mlp.down": rows,
        }
        if in_sequence:
            whole = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            norm = SequenceParallel()
            plan |= {"norm1": norm, "norm2": norm, "attention": whole, "mlp": whole}
        parallelize_module(block, mesh, plan)
    outer: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    if in_sequence:
        is_loss = style == "loss"
        outer = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if is_loss else Replicate(),
                use_local_output=not is_loss,
            ),
        }
    parallelize_module(model, mesh, outer)
    return model


def whole(tensor: Any) -> Tensor:
    """The values of all ranks of the tensor group, a copy."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def batch(step: int, data_rank: int) -> Tensor:
    """(rows, tokens)"""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    return torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)


def backward(model: nn.Module, tokens: Tensor, style: str, factor: float = 1.0) -> float:
    """One forward and backward; returns the loss."""
    if style == "loss":
        with loss_parallel():
            return _backward(model, tokens, factor)
    return _backward(model, tokens, factor)


def _backward(model: nn.Module, tokens: Tensor, factor: float) -> float:
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    (loss * factor).backward()
    return float(loss.detach())
