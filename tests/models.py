"""The models of the parity tests, each built the same way everywhere from its name and a seed.

`build(name, seed)` makes the model, `batch(name, step, rank)` what one rank sees in one step, and
`loss(model, batch)` one scalar. Nothing here draws from torch's global random state, has dropout or
depends on anything but the arguments, so any process can make the same model and the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import hf_models
from tests.random_tree import WIDTH as TREE_WIDTH
from tests.random_tree import random_tree

__all__ = [
    "HF_NAMES",
    "NAMES",
    "OWN_NAMES",
    "Batch",
    "batch",
    "batches",
    "build",
    "loss",
    "random_tree",
]

ROWS = 2  # samples of one rank in one step
TOKENS = 6


@dataclass(frozen=True)
class Batch:
    """What one rank sees in one step. It knows its model's name, so that `loss` needs no other."""

    name: str
    step: int
    rank: int
    tensors: dict[str, Tensor]


# gpt and tied


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (rows, tokens, width)
        rows, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks in a ModuleList, a norm and a head."""

    def __init__(
        self, vocabulary: int, width: int = 16, depth: int = 3, heads: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(2 * TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, tokens) -> (rows, tokens, vocabulary)
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# convbn and convgn


class ConvNet(nn.Module):
    """Convolutions with a norm between them, in a Sequential of alike blocks."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), norm(6), nn.ReLU())
                for _ in range(2)
            )
        )
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:  # (rows, 3, 6, 6) -> (rows, 5)
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def _mlp() -> nn.Module:
    """Sizes that no world size divides."""
    return nn.Sequential(
        *(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 13), nn.Tanh(), nn.Linear(13, 3))
    )


# nested


@dataclass
class Pair:
    """A dataclass that carries tensors in and out of modules."""

    left: Tensor
    right: Tensor


class NestedBlock(nn.Module):
    """Takes a Pair and a dict, returns a Pair, a tuple and a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(
        self, pair: Pair, extra: dict[str, Tensor], *, scale: float
    ) -> tuple[Pair, tuple[Tensor, dict[str, Tensor]]]:
        left = torch.tanh(self.left(pair.left + extra["shift"]))
        right = torch.tanh(self.right(pair.right) * scale)
        return Pair(left, left + right), (right, {"shift": extra["shift"] + left.mean()})


class Nested(nn.Module):
    """Calls each block twice in one forward, with other inputs."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NestedBlock(width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, tuple[Tensor, Pair]]:
        pair, extra = Pair(inputs["left"], inputs["right"]), {"shift": inputs["shift"]}
        aside: list[Tensor] = []
        for scale in (1.0, 0.5):
            for block in self.blocks:
                pair, (right, extra) = block(pair, extra, scale=scale)
                aside.append(right)
        return {"result": (self.head(pair.left + sum(aside)), pair)}


# unused, odd and frozen


class UnusedBlock(nn.Module):
    """Uses one of its parameters on some ranks and in some steps only, and one never."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always = nn.Linear(width, width)
        self.even_ranks = nn.Parameter(torch.randn(width))
        self.odd_steps = nn.Parameter(torch.randn(width, 3))
        self.never = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        x = torch.tanh(self.always(x))
        if rank % 2 == 0:
            x = x + self.even_ranks
        if step % 2 == 1:
            x = x + self.odd_steps.sum(1)
        return x


class Unused(nn.Module):
    """Parameters without a gradient: on every rank, on some ranks, in some steps."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UnusedBlock(width) for _ in range(2))
        self.spare = nn.Linear(width, 3)  # a whole module that nobody calls
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x, rank, step)
        return self.head(x)


class OddBlock(nn.Module):
    """Parameters of no, of one and of a few elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.single = nn.Parameter(torch.randn(1))
        self.none = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, width))
        self.cube = nn.Parameter(torch.randn(1, width, 3))
        self.transposed = nn.Parameter(torch.randn(width, 3).t())  # not contiguous

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scalar + self.single
        x = x + torch.tanh(x @ self.cube[0]) @ self.transposed
        return x + self.none.sum() + (x @ self.no_rows.t()).sum()


class Odd(nn.Module):
    """A lone scalar beside blocks of odd parameters."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock(width) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.temperature


def _frozen() -> nn.Module:
    """A frozen embedding and block, a frozen bias, and a low-rank addition as in LoRA."""
    model = GPT(31)
    model.tokens.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    for block in list(model.blocks)[1:]:
        assert isinstance(block, Block), "the blocks of a GPT are Blocks"
        block.up.bias.requires_grad_(False)
    return model


# What the tests call


@dataclass(frozen=True)
class _Kind:
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], dict[str, Tensor]]
    loss: Callable[[nn.Module, Batch], Tensor]


def _draw_tokens(vocabulary: int) -> Callable[[torch.Generator], dict[str, Tensor]]:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        # One extra token: the targets are the inputs moved by one. Tokens 0 and 1 are T5's own.
        return {"tokens": torch.randint(2, vocabulary, (ROWS, TOKENS + 1), generator=generator)}

    return draw


def _draw_normal(*shape: int) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda generator: {"x": torch.randn(ROWS, *shape, generator=generator)}


def _draw_images(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(ROWS, 3, 6, 6, generator=generator)
    return {"images": images, "labels": torch.randint(5, (ROWS,), generator=generator)}


def _draw_nested(generator: torch.Generator) -> dict[str, Tensor]:
    shapes = {"left": 9, "right": 9, "shift": 1, "left2": 9, "right2": 9, "shift2": 1}
    return {name: torch.randn(ROWS, n, generator=generator) for name, n in shapes.items()}


def _token_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch.tensors["tokens"]
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.tensors["images"]).float(), batch.tensors["labels"])


def _square_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.tensors["x"]).float().square().mean()


def _nested_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Two forwards before the one backward."""
    first = model({name: batch.tensors[name] for name in ("left", "right", "shift")})
    again = {name: batch.tensors[f"{name}2"] for name in ("left", "right", "shift")}
    (one, pair), (two, _) = first["result"], model(again)["result"]
    return (one.float() * two.float()).mean() + pair.right.float().square().mean()


def _unused_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.tensors["x"], batch.rank, batch.step).float().square().mean()


def _hf_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch.tensors["tokens"]
    result: Tensor = model(input_ids=tokens, labels=tokens).loss
    return result.float()


def _hf_seq2seq_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch.tensors["tokens"]
    result: Tensor = model(input_ids=tokens[:, :4], labels=tokens[:, 4:].contiguous()).loss
    return result.float()


_OWN = {
    "gpt": _Kind(lambda: GPT(64), _draw_tokens(64), _token_loss),
    "convbn": _Kind(lambda: ConvNet(nn.BatchNorm2d), _draw_images, _image_loss),
    "convgn": _Kind(lambda: ConvNet(lambda n: nn.GroupNorm(2, n)), _draw_images, _image_loss),
    # A vocabulary of 101, times any width that is not, is divided by none of the worlds 2, 3, 4.
    "tied": _Kind(lambda: GPT(101, width=18, tied=True), _draw_tokens(101), _token_loss),
    "mlp": _Kind(_mlp, _draw_normal(7), _square_loss),
    "nested": _Kind(Nested, _draw_nested, _nested_loss),
    "unused": _Kind(Unused, _draw_normal(8), _unused_loss),
    "odd": _Kind(Odd, _draw_normal(5), _square_loss),
    "frozen": _Kind(_frozen, _draw_tokens(31), _token_loss),
}
_HF = {
    "hf_gpt2": _Kind(hf_models.gpt2, _draw_tokens(101), _hf_loss),
    "hf_llama": _Kind(hf_models.llama, _draw_tokens(101), _hf_loss),
    "hf_t5": _Kind(hf_models.t5, _draw_tokens(101), _hf_seq2seq_loss),
    "hf_mixtral": _Kind(hf_models.mixtral, _draw_tokens(101), _hf_loss),
}
# "tree" is a random tree whose structure, too, comes from the seed.
_TREE = _Kind(lambda: random_tree(torch.initial_seed()), _draw_normal(TREE_WIDTH), _square_loss)
_KINDS = {**_OWN, **_HF, "tree": _TREE}

OWN_NAMES = tuple(_OWN)
HF_NAMES = tuple(_HF)
NAMES = (*OWN_NAMES, *HF_NAMES)


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of this name with the weights of this seed; skips without transformers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _KINDS[name].build()


def batch(name: str, step: int, rank: int, micro: int = 0) -> Batch:
    """What `rank` sees in the `micro`-th backward of `step`."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1_009 * rank + micro)
    return Batch(name, step, rank, _KINDS[name].draw(generator))


def batches(name: str, steps: int, ranks: int, backwards: int = 1) -> list[list[list[Batch]]]:
    """All batches of a run, by step, rank and backward, as `reference.train` takes them."""
    return [
        [[batch(name, step, rank, micro) for micro in range(backwards)] for rank in range(ranks)]
        for step in range(steps)
    ]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """One scalar, in fp32."""
    return _KINDS[batch.name].loss(model, batch)
