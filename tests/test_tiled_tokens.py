"""Tiled losses and MLPs: the same values and gradients, while one tile's are in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import onecopy
from onecopy.errors import ConfigError, ShardingError
from onecopy.events import Event
from onecopy.memory.live_tensors import LiveTensors
from onecopy.parallel import (
    sequence_parallel,
    split_sequence,
    tile_loss,
    tile_modules,
    tiled_cross_entropy,
)
from tests import hf_models, models
from tests.pool import Pool
from tests.runs import full_values
from tests.test_sequence import build_hf, mean

ROWS, TOKENS, WIDTH, VOCABULARY = 2, 24, 16, 50


def plain_loss(
    hidden: Tensor, head: nn.Module, targets: Tensor, *, tile_tokens: int = 0, **settings: Any
) -> Tensor:
    """What tiled_cross_entropy must equal."""
    logits = head(hidden).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets.flatten(), **settings)


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(WIDTH, VOCABULARY, dtype=dtype)


def deep(dtype: torch.dtype = torch.float32) -> nn.Module:
    """No linear alone."""
    return nn.Sequential(nn.LayerNorm(WIDTH, dtype=dtype), linear(dtype))


def gradients(
    loss_of: Callable[..., Tensor],
    head: nn.Module,
    settings: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> list[Tensor | None]:
    """The loss, and the gradients of a multiple of it by hidden and by the head's parameters."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (ROWS, TOKENS))
    targets[0, 3:9] = settings.get("ignore_index", -100)
    loss = loss_of(hidden, head, targets, **settings)
    loss.flatten().mul(torch.linspace(2, 3, loss.numel(), dtype=loss.dtype)).sum().backward()
    return [loss.detach().flatten(), hidden.grad, *(p.grad for p in head.parameters())]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "reduction": "sum"},
    {"reduction": "none", "ignore_index": 7},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("tile_tokens", [None, 1, 7, 1000])
@pytest.mark.parametrize("make", [linear, deep])
def test_loss_is_the_plain_one(
    settings: dict[str, Any], tile_tokens: int | None, make: Callable[..., nn.Module]
) -> None:
    """But for rounding: in fp64 the difference is as much smaller as its rounding is."""
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.float64, 1e-14)):
        expected = gradients(plain_loss, make(dtype), settings, dtype)
        tiled = {"tile_tokens": tile_tokens, **settings}
        found = gradients(tiled_cross_entropy, make(dtype), tiled, dtype)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_low_precision(how: str) -> None:
    """Logits are rounded as the plain ones are, and the loss computed in fp32.

    A linear's gradients are rounded once, as the plain ones are; others are sums of rounded ones.
    """
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    for make, tolerance in ((linear, 0.004), (deep, 0.03)):
        with torch.autocast("cpu", torch.bfloat16, how == "autocast"):
            expected = gradients(plain_loss, make(dtype), {}, dtype)
            found = gradients(tiled_cross_entropy, make(dtype), {"tile_tokens": 7}, dtype)
        assert found[0].dtype == torch.float32
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            assert ours.dtype == dtype
            assert (ours - theirs).float().norm() < tolerance * theirs.float().norm()


def test_a_frozen_head_has_no_gradient() -> None:
    head = linear().requires_grad_(False)
    found = gradients(tiled_cross_entropy, head, {"tile_tokens": 5})
    expected = gradients(plain_loss, head, {})
    assert found[2:] == [None, None]
    torch.testing.assert_close(found[1], expected[1], rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("make", [linear, deep])
def test_logits_never_exist_at_once(make: Callable[..., nn.Module]) -> None:
    """At the peak about four tiles are there, where the plain loss has three times all logits."""
    tokens, tile, vocabulary = 512, 16, 2048
    whole, of_tile = (n * vocabulary * 4 for n in (tokens, tile))
    peaks = {}
    for loss_of in (plain_loss, tiled_cross_entropy):
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, vocabulary)
        model = head if make is linear else nn.Sequential(nn.LayerNorm(WIDTH), head)
        hidden = torch.randn(1, tokens, WIDTH, requires_grad=True)
        targets = torch.randint(vocabulary, (1, tokens))
        with LiveTensors() as live:
            loss_of(hidden, model, targets, tile_tokens=tile).backward()
        peaks[loss_of] = live.peak_bytes
        assert live.largest_bytes < whole or loss_of is plain_loss
    # Beside the tiles: gradients of the weight (two at a time) and of hidden.
    others = 3 * 4 * (WIDTH + 1) * vocabulary + 4 * 4 * tokens * WIDTH
    assert peaks[plain_loss] > 2.5 * whole
    assert peaks[tiled_cross_entropy] < 5 * of_tile + others


def test_wrong_arguments_are_named() -> None:
    hidden, targets, head = torch.zeros(2, 3, WIDTH), torch.zeros(2, 3).long(), linear()
    with pytest.raises(ConfigError, match="tile_tokens=0"):
        tiled_cross_entropy(hidden, head, targets, tile_tokens=0)
    with pytest.raises(ConfigError, match="reduction='all'"):
        tiled_cross_entropy(hidden, head, targets, reduction="all")  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=r"hidden has shape \(2, 3, 16\) and targets \(3,\)"):
        tiled_cross_entropy(hidden, head, targets[0])
    assert "forward" not in vars(head)


# Tiled modules -----------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), self.dropout, self.training))


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": MLP(WIDTH, dropout)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["mlp"](x)
        return x


def test_modules_in_tiles_are_the_same() -> None:
    """Also of a copy, with dropout in the recomputation that was in the first one."""
    torch.manual_seed(0)
    plain, x = Stack(), torch.randn(2, 9, WIDTH)
    tiled = copy.deepcopy(plain)
    names = tile_modules(tiled, 4, modules="*.mlp")
    assert names == ["blocks.0.mlp", "blocks.1.mlp"]
    assert list(tiled.state_dict()) == list(plain.state_dict())
    again = copy.deepcopy(tiled)
    with torch.no_grad():
        tiled.blocks[0]["mlp"].up.weight.zero_()  # the copy must not see it
    found = []
    for model in (plain, again):
        model(x).square().sum().backward()
        found.append([model(x), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    noisy = Stack(dropout=0.5)
    tile_modules(noisy, 4, modules="*.mlp")
    x.requires_grad_()
    torch.manual_seed(1)
    noisy(x).sum().backward()
    first = x.grad.clone()
    # With the same drops for every value of x, the function is smooth: its slope is the gradient.
    values = []
    for shift in (-1e-3, 1e-3):
        torch.manual_seed(1)
        values.append(noisy.double()(x.detach().double() + shift).sum())
    slope = (values[1] - values[0]) / 2e-3
    torch.testing.assert_close(first.sum().double(), slope, rtol=1e-3, atol=1e-3)


def test_what_is_inside_a_module_never_exists_at_once() -> None:
    peaks = []
    for tile in (None, 16):
        torch.manual_seed(0)
        model = nn.ModuleDict({"mlp": MLP()})
        if tile is not None:
            tile_modules(model, tile, modules="mlp")
        x = torch.randn(1, 1024, WIDTH, requires_grad=True)
        with LiveTensors() as live:
            model["mlp"](x).sum().backward()
        peaks.append(live.peak_bytes)
    whole, outside = 4 * 1024 * 8 * WIDTH, 4 * 1024 * WIDTH
    assert peaks[0] > 2 * whole
    # Outputs, twice while they are joined, and gradients; a few tiles; gradients of parameters.
    assert peaks[1] < 6 * outside + 6 * whole // 64 + 3 * 4 * 2 * 8 * WIDTH * (WIDTH + 1)


def test_modules_that_cannot_be_tiled_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Mean())
    with pytest.raises(ConfigError, match=r"modules='\*\.mlp' matches no module"):
        tile_modules(model, 4, modules="*.mlp")
    with pytest.raises(ConfigError, match="tile_tokens=-1"):
        tile_modules(model, -1, modules="0")
    tile_modules(model, 2, modules=["0", "1"])
    with pytest.raises(ShardingError, match="the forward of 0 is not that of its class, Linear"):
        tile_modules(model, 4, modules="0")
    with pytest.raises(ShardingError, match="was called with more than one tensor"):
        model[0](torch.zeros(3, 4), 1)
    with pytest.raises(ShardingError, match="does not give one tensor with an output for each"):
        model[1](torch.zeros(1, 4, 4))


class Mean(nn.Module):
    """Of all tokens that it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True)


# Sharded -----------------------------------------------------------------------------------------


class GPT(models.GPT):
    """Computes its own loss, of tokens that do not fill the last tile."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__(101, width=18, tied=tied)
        self.tile = 0

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.hidden(tokens), targets)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not self.tile:
            return plain_loss(hidden, self.head, targets)
        return tiled_cross_entropy(hidden, self.head, targets, tile_tokens=self.tile)


def train(tile: int, kind: str, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Losses, weights, and how often each unit was gathered and reduced in the last step."""
    torch.manual_seed(2)
    model = GPT(tied=kind.startswith("tied"))
    model.tile = tile
    if tile:
        tile_modules(model, tile, modules="blocks.*.down")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    onecopy.shard(model, optimizer, **settings)
    events: list[Event] = []
    onecopy.events.add_sink(model, events.append)
    losses = []
    for step in range(3):
        events.clear()
        tokens = models.batch("tied", step, dist.get_rank()).tensors["tokens"]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if kind.endswith("outside"):
            loss = model.loss(model.hidden(inputs), targets)
        else:
            loss = model(inputs, targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    counts: dict[tuple[str, str], int] = {}
    for one in events:
        if one.kind in ("gather", "reduce") and one.num_bytes:
            counts[one.kind, one.unit] = counts.get((one.kind, one.unit), 0) + 1
    return losses, full_values(model), counts


SHARDED: list[tuple[str, dict[str, Any]]] = [
    ("own head", {"stage": 0}),
    ("own head", {"stage": 1, "precision": "bf16"}),
    ("tied", {"stage": 2, "precision": "fp16"}),
    ("own head", {"stage": 3}),
    ("tied", {"stage": 3}),
    ("own head outside", {"stage": 3}),
    ("tied outside", {"stage": 3}),
    ("own head", {"stage": 3, "units": ["head"]}),
    (
        "own head",
        {"stage": 3, "precision": onecopy.Precision(compute="bf16", keep_fp32=("head",))},
    ),
]


def train_twice(kind: str, settings: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [train(0, kind, settings), train(5, kind, settings)]


@pytest.mark.sampled("kind, settings", SHARDED, 5, always=SHARDED[3:5])
def test_sharded_models(pool: Pool, kind: str, settings: dict[str, Any]) -> None:
    """The same training; no unit is gathered more often than by the plain loss."""
    low = "precision" in settings
    for expected, found in pool.run(2, train_twice, kind, settings):
        torch.testing.assert_close(
            torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-3 if low else 2e-6, atol=0
        )
        for name, value in expected[1].items():
            tolerance = {"rtol": 2e-2, "atol": 2e-3} if low else {"rtol": 2e-5, "atol": 2e-6}
            torch.testing.assert_close(found[1][name], value, **tolerance, msg=name)
        assert found[2] == expected[2]


# Models of transformers --------------------------------------------------------------------------


def train_parts(way: str, name: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    """A model of transformers on parts of sequences."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    model: Any = build_hf(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if way == "tile_loss":
        tile_loss(model, 4)
        # Blocks whose MLPs are tiled are computed again as a whole, and their tiles once more.
        onecopy.checkpoint_activations(model)
    onecopy.shard(model, optimizer, stage=stage, mesh=mesh)
    sequence_parallel(model.model if way == "by hand" else model, mesh)
    if way != "plain":
        tile_modules(model, 5, modules="*.mlp")
    losses = []
    for step in range(2):
        tokens = models.batch("hf_llama", step, 0).tensors["tokens"][:, :6]
        labels = tokens.masked_fill(tokens % 5 == step, -100)
        if way == "by hand":
            targets = split_sequence(F.pad(labels, (0, 1), value=-100)[:, 1:], mesh)
            hidden = model.model(input_ids=tokens).last_hidden_state
            loss = tiled_cross_entropy(hidden, model.lm_head, targets, tile_tokens=4)
            loss = loss * onecopy.loss_weight(model, int((targets != -100).sum()))
        else:
            output = model(input_ids=tokens, labels=labels)
            loss = output.loss
            assert (output.logits is None) == (way == "tile_loss")
        loss.backward()
        losses.append(mean(loss))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert model(input_ids=tokens).logits.shape[-1] == 101 or way == "by hand"
    return losses, full_values(model)


def train_ways(ways: list[str], name: str, stage: int) -> list[tuple[list[float], Any]]:
    return [train_parts(way, name, stage) for way in ways]


@pytest.mark.parametrize(
    ("name", "stage", "ways"),
    [("llama", 3, ["plain", "by hand", "tile_loss"]), ("gpt2", 2, ["plain", "tile_loss"])],
)
def test_models_of_transformers(pool: Pool, name: str, stage: int, ways: list[str]) -> None:
    """On parts of sequences whose numbers of labels differ."""
    for plain, *others in pool.run(2, train_ways, ways, name, stage):
        for other in others:
            torch.testing.assert_close(torch.tensor(other[0]), torch.tensor(plain[0]))
            for key, value in plain[1].items():
                torch.testing.assert_close(other[1][key], value, rtol=2e-5, atol=2e-6, msg=key)


def test_tile_loss_makes_no_logits() -> None:
    tokens = torch.arange(8 * 16).view(8, 16) % 101
    largest, values = [], []
    for tiles in (False, True):
        model: Any = build_hf("llama")
        if tiles:
            tile_loss(model, 8)
            model = copy.deepcopy(model)
        with LiveTensors() as live:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        largest.append(live.largest_bytes)
        values.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    assert largest[0] >= 8 * 16 * 101 * 4 > largest[1]


def test_tile_loss_refuses_what_it_cannot_give() -> None:
    sizes = {"vocab_size": 101, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    capped: Any = hf_models._hf("Gemma2ForCausalLM", "Gemma2Config", **sizes, **heads)
    tile_loss(capped, 8)
    tokens, head = torch.arange(6)[None], capped.lm_head
    with pytest.raises(ShardingError, match="the model calls div on its logits before"):
        capped(input_ids=tokens, labels=tokens)
    assert capped.lm_head is head and capped(input_ids=tokens).logits.shape == (1, 6, 101)
    with pytest.raises(ShardingError, match="is tiled already"):
        tile_loss(capped)
    for wrong in (hf_models.bert(), nn.Linear(2, 2)):
        with pytest.raises(ShardingError, match=r"has not the loss|is no model of transformers"):
            tile_loss(wrong)
