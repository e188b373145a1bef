"""Sequence parallelism: attention is exact, and training equals one process on whole sequences."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import onecopy
from onecopy.errors import MismatchError, ShardingError
from onecopy.events import Event
from onecopy.memory.live_tensors import LiveTensors
from onecopy.parallel import attention, position_ids, sequence_parallel, split_sequence
from tests import hf_models, models
from tests.pool import Pool
from tests.runs import full_values

BATCH, HEADS, WIDTH = 2, 12, 8
LENGTH = 24


def world() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))


# Attention ---------------------------------------------------------------------------------------


def qkv(kv_heads: int = HEADS, kv_length: int = LENGTH, of_value: int = WIDTH) -> list[Tensor]:
    """Whole queries, keys and values, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, LENGTH, WIDTH), (kv_heads, kv_length, WIDTH), (kv_heads, kv_length, of_value)]
    return [torch.randn(BATCH, *shape, generator=generator) for shape in shapes]


def mask(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True, "scale": 0.3}),
    "padding": ({}, {"attn_mask": mask(BATCH, 1, 1, LENGTH) > -1}),
    "bias of heads": ({}, {"attn_mask": mask(HEADS, LENGTH, LENGTH)}),
    "mask of two dimensions": ({}, {"attn_mask": mask(LENGTH, LENGTH)}),
    "shared heads": ({"kv_heads": 6}, {"is_causal": True, "enable_gqa": True}),
    "fewer heads than ranks": ({"kv_heads": 1}, {"is_causal": True, "enable_gqa": True}),
    "heads that ranks do not divide": ({"kv_heads": 3}, {"enable_gqa": True}),
    "other keys": ({"kv_length": 36}, {}),
    "other values": ({"of_value": 4}, {"is_causal": True}),
}


def compare_attention() -> list[str]:
    """Each case against torch's function on whole sequences, this rank's part of it."""
    group, different = world(), []
    for name, (sizes, settings) in CASES.items():
        wholes = [one.requires_grad_() for one in qkv(**sizes)]
        expected = F.scaled_dot_product_attention(*wholes, **settings)
        # A gradient that depends on the whole output.
        expected.square().sum().backward()
        parts = [split_sequence(one.detach(), group, dim=2).requires_grad_() for one in wholes]
        found = attention(*parts, **settings, group=group)
        found.square().sum().backward()
        pairs = [(found, split_sequence(expected.detach(), group, dim=2))]
        pairs += [
            (one.grad, split_sequence(whole.grad, group, dim=2))
            for one, whole in zip(parts, wholes, strict=True)
        ]
        repeats = wholes[1].shape[1] % dist.get_world_size() != 0
        for what, (ours, theirs) in zip(("output", "q", "k", "v"), pairs, strict=True):
            exact = not (repeats and what in "kv")
            is_same = torch.equal if exact else partial(torch.allclose, rtol=1e-5, atol=1e-6)
            if not is_same(ours, theirs):
                different.append(f"{name}: {what} by {(ours - theirs).abs().max()}")
    return different


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_attention_is_exact(pool: Pool, world_size: int) -> None:
    """Output and gradients, to the last bit but where heads are repeated."""
    assert pool.run(world_size, compare_attention) == [[]] * world_size


def drop() -> bool:
    """A rank draws for its heads from its own random state."""
    group, rank = world(), dist.get_rank()
    q, k, v = qkv()
    torch.manual_seed(5 + rank)
    parts = (split_sequence(one, group, dim=2) for one in (q, k, v))
    found = attention(*parts, dropout_p=0.5, group=group)
    heads = []
    for other in range(dist.get_world_size()):
        torch.manual_seed(5 + other)
        own = [one.chunk(dist.get_world_size(), 1)[other] for one in (q, k, v)]
        heads.append(F.scaled_dot_product_attention(*own, dropout_p=0.5))
    return torch.equal(found, split_sequence(torch.cat(heads, 1), group, dim=2))


def refuse() -> list[str]:
    """What does not fit is named; nothing is sent before."""
    group, rank, said = world(), dist.get_rank(), []
    q, k, v = qkv()

    def fails(kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))

    short = torch.zeros(BATCH, HEADS, 7 + rank, WIDTH)
    fails(MismatchError, lambda: attention(short, short, short, group=group))
    odd = torch.zeros(BATCH, 5, 6, WIDTH)
    fails(ShardingError, lambda: attention(odd, odd, odd, group=group))
    fails(ShardingError, lambda: attention(q, k[:, :6], v[:, :6], group=group))
    local = torch.zeros(LENGTH, LENGTH)
    fails(ShardingError, lambda: attention(q, k, v, local, group=group))
    fails(ShardingError, lambda: split_sequence(torch.zeros(1, 7), group))
    fails(MismatchError, lambda: split_sequence(torch.full((1, 8), rank), group))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    fails(ShardingError, lambda: attention(q, k, v, group=grid))
    return said


def test_mistakes_are_named_and_dropout_is_drawn_by_heads(pool: Pool) -> None:
    assert pool.run(2, drop) == [True, True]
    said, _ = pool.run(2, refuse)
    wanted = [
        r"queries, keys or values of attention differ in shape: rank 0 (2, 12, 7, 8), rank 1 (2, "
        "12, 8, 8)",
        "rank 0: 5 heads cannot be dealt to 2 ranks evenly",
        "queries have 12 heads, keys 6 and values 6",
        "attn_mask has shape (24, 24): it must be that of the whole sequences, (..., 48, 48)",
        "rank 0: a batch of shape (1, 7) cannot be cut along dimension 1 into 2 equal parts: pad",
        "ranks [1] have brought another batch to split_sequence than rank 0",
        "this mesh has dimensions ('dp', 'tp')",
    ]
    for text, start in zip(said, wanted, strict=True):
        assert text.startswith(start), text


def cut() -> dict[str, Any]:
    group = world()
    tokens = torch.arange(16).view(2, 8)
    batch = {"tokens": tokens, "more": [tokens + 1, None], "scale": 2}
    part = split_sequence(batch, group)
    return {**part, "positions": position_ids(part["tokens"], group)}


def test_batches_are_cut_along_the_sequence(pool: Pool) -> None:
    """Nested ones too, in the order of the ranks."""
    tokens = torch.arange(16).view(2, 8)
    for rank, part in enumerate(pool.run(2, cut)):
        own = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(part["tokens"], tokens[:, own]) and part["tokens"].is_contiguous()
        assert torch.equal(part["more"][0], tokens[:, own] + 1) and part["more"][1] is None
        assert part["scale"] == 2
        assert torch.equal(part["positions"], torch.arange(8)[None, own])


# Training ----------------------------------------------------------------------------------------

ROWS, TOKENS = 2, 12
STEPS = 2


def batch_of(step: int, group: int, vocabulary: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + group)
    return torch.randint(2, vocabulary, (ROWS, TOKENS + 1), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


class GPT(models.GPT):
    """Of the tests, with the two changes that a model of one's own needs."""

    def part_loss(self, tokens: Tensor, targets: Tensor, group: Any) -> Tensor:
        x = self.tokens(tokens) + self.positions(position_ids(tokens, group))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor, group: Any = None) -> Tensor:
        if group is not None:
            plain = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = partial(attention, group=group, model=self)
            try:
                return self.part_loss(tokens, targets, group)
            finally:
                F.scaled_dot_product_attention = plain
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())


def own_model() -> nn.Module:
    torch.manual_seed(3)
    return GPT(64)


def train_own(stage: int, shape: tuple[int, int]) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, parameters, and the bytes that the last step's exchanges have sent."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))
    model = own_model()
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage, mesh=mesh)
    events: list[Event] = []
    losses = []
    onecopy.events.add_sink(model, events.append)
    for step in range(STEPS):
        events.clear()
        tokens = batch_of(step, mesh.get_local_rank("dp"))
        whole = (tokens[:, :-1], tokens[:, 1:])
        loss = model(*split_sequence(whole, mesh["sp"]), mesh["sp"])
        loss.backward()
        losses.append(mean(loss))
        optimizer.step()
        optimizer.zero_grad()
    sent = sum(one.num_bytes for one in events if one.kind == "exchange")
    return losses, full_values(model), sent


def mean(loss: Tensor) -> float:
    value = loss.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train_alone(model: nn.Module, loss_of: Any, groups: int) -> tuple[list[float], dict[str, Any]]:
    """One process on the whole sequences of all groups."""
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        loss = sum(loss_of(model, step, group) for group in range(groups)) / groups
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: one.detach() for name, one in model.named_parameters()}


def check(run: tuple[Any, ...], alone: tuple[list[float], dict[str, Tensor]]) -> None:
    """Sums over tokens are made in parts: equal but for rounding."""
    losses, parameters = alone
    torch.testing.assert_close(torch.tensor(run[0]), torch.tensor(losses), rtol=2e-6, atol=0)
    assert run[1].keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(run[1][name], value, rtol=2e-5, atol=2e-6, msg=name)


def own_loss(model: nn.Module, step: int, group: int) -> Tensor:
    tokens = batch_of(step, group)
    return model(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_one_process(pool: Pool, stage: int) -> None:
    """A model of one's own, whose exchanges send what the formula says."""
    runs = pool.run(2, train_own, stage, (1, 2))
    alone = train_alone(own_model(), own_loss, 1)
    # q, k, v and the output of each block, once in forward and once in backward; half stays.
    part = ROWS * TOKENS // 2 * 16 * 4
    for run in runs:
        check(run, alone)
        assert run[2] == 2 * 3 * 4 * part // 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_and_sequence_parallel(pool: Pool, stage: int) -> None:
    """States are cut over DP x SP as one group."""
    alone = train_alone(own_model(), own_loss, 2)
    for run in pool.run(4, train_own, stage, (2, 2)):
        check(run, alone)


# Models of transformers --------------------------------------------------------------------------


def build_hf(name: str) -> nn.Module:
    torch.manual_seed(4)
    kinds = {"gpt2": hf_models.gpt2, "llama": hf_models.llama, "window": window, "qwen": qwen}
    kinds["lora"] = hf_models.llama
    model: Any = kinds[name]()
    model.set_attn_implementation("sdpa")
    if name == "lora":
        peft = pytest.importorskip("peft", reason="peft is not installed: the test extra")
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated there
            model = peft.get_peft_model(model, lora)
    return model


def qwen() -> nn.Module:
    """With norms of queries and keys."""
    sizes = {"vocab_size": 101, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return hf_models._hf("Qwen3ForCausalLM", "Qwen3Config", **sizes, **heads)


def window() -> nn.Module:
    """Few heads of keys, and a window over the last tokens."""
    sizes = {"vocab_size": 101, "hidden_size": 16, "intermediate_size": 24, "sliding_window": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return hf_models._hf("MistralForCausalLM", "MistralConfig", **sizes, **heads)


def hf_batch(step: int, group: int, padded: bool) -> dict[str, Tensor]:
    """Rows of different lengths, whose padding has no label."""
    tokens = batch_of(step, group, 101)[:, :-1]
    if not padded:
        return {"input_ids": tokens, "labels": tokens}
    visible = torch.ones_like(tokens)
    visible[0, 5 + group :] = 0
    labels = tokens.masked_fill(visible == 0, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": visible}


def train_hf(name: str, stage: int, shape: tuple[int, int], padded: bool) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))
    model = build_hf(name)
    optimizer = sgd(model)
    if name == "llama":
        onecopy.checkpoint_activations(model)
    onecopy.shard(model, optimizer, stage=stage, mesh=mesh)
    parallel = sequence_parallel(model, mesh)
    if (name, stage) == ("qwen", 2):
        for layer in model.model.layers:
            layer.compile(backend="eager")
    losses = []
    for step in range(STEPS):
        loss = model(**hf_batch(step, mesh.get_local_rank("dp"), padded)).loss
        loss.backward()
        losses.append(mean(loss))
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ShardingError, match="cache of keys and values"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=1, pad_token_id=0)
    parallel.remove()
    with torch.no_grad():
        logits = model(torch.arange(5)[None]).logits
    return losses, full_values(model), logits.shape


def hf_loss(model: nn.Module, step: int, group: int, padded: bool) -> Tensor:
    return model(**hf_batch(step, group, padded)).loss


NAMES = ["gpt2", "llama", "qwen", "window", "lora"]
HF = [("gpt2", 0, False), ("qwen", 1, True), ("window", 2, True), ("llama", 3, False)]


@pytest.mark.parametrize(("name", "stage", "padded"), HF)
def test_models_of_transformers(pool: Pool, name: str, stage: int, padded: bool) -> None:
    """Unmodified, by one line: labels, positions, padding and windows are those of one process."""
    alone = train_alone(build_hf(name), partial(hf_loss, padded=padded), 1)
    for run in pool.run(2, train_hf, name, stage, (1, 2), padded):
        check(run, alone)
        assert run[2] == (1, 5, 101)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_models_of_transformers_on_a_grid(pool: Pool, name: str, stage: int, padded: bool) -> None:
    """DP 2 x SP 2. The loss is the mean over the data parallel ranks' means, as always."""
    alone = train_alone(build_hf(name), partial(hf_loss, padded=padded), 2)
    for run in pool.run(4, train_hf, name, stage, (2, 2), padded):
        check(run, alone)


def train_with_tensors(stage: int) -> tuple[Any, ...]:
    """Two ranks have parts of the sequences, and two of the heads and of what is inside MLPs."""
    names = ("dp", "sp", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    model: Any = build_hf("llama")
    plan: dict[str, Any] = {f"self_attn.{one}_proj": ColwiseParallel() for one in "qkv"}
    plan |= {f"mlp.{one}_proj": ColwiseParallel() for one in ("gate", "up")}
    plan |= {one: RowwiseParallel() for one in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage, mesh=mesh)
    sequence_parallel(model, mesh)
    losses = []
    for step in range(STEPS):
        loss = model(**hf_batch(step, 0, padded=True)).loss
        loss.backward()
        losses.append(mean(loss))
        optimizer.step()
        optimizer.zero_grad()
    values = model.state_dict()
    wholes = (one.full_tensor() if isinstance(one, DTensor) else one for one in values.values())
    return losses, dict(zip(values, wholes, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sequence_and_tensor_parallel(pool: Pool, stage: int) -> None:
    alone = train_alone(build_hf("llama"), partial(hf_loss, padded=True), 1)
    for run in pool.run(4, train_with_tensors, stage):
        check(run, alone)


def peak() -> int:
    """Live bytes of one forward and backward, without those of parameters."""
    model = build_hf("llama")
    sequence_parallel(model, world())
    tokens = torch.arange(2 * 512).view(2, 512) % 101
    with LiveTensors() as live:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return live.peak_bytes


def test_activations_are_divided_by_the_ranks(pool: Pool) -> None:
    (alone,), parts = pool.run(1, peak), pool.run(2, peak)
    for part in parts:
        assert 0.45 * alone < part < 0.55 * alone


def misuse() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    model = build_hf("llama")
    parallel = sequence_parallel(model, mesh)
    copy.deepcopy(model)
    tokens = batch_of(0, 0, 101)[:, :-1]
    packed = torch.cat([torch.arange(6), torch.arange(6)])[None]
    calls = [
        {"input_ids": tokens[:, :5]},
        {"input_ids": tokens + dist.get_rank()},
        {"input_ids": tokens, "position_ids": packed},
        {"input_ids": tokens, "pixel_values": torch.zeros(1)},
        {"input_ids": tokens, "logits_to_keep": 1},
    ]
    said = []
    for call in calls:
        with pytest.raises((ShardingError, MismatchError)) as caught:
            model(**call)
        said.append(str(caught.value))
    with pytest.raises(ShardingError) as caught:
        model.model(tokens)
    said.append(str(caught.value))
    for wrong in (nn.Linear(2, 2), hf_models.t5()):
        with pytest.raises(ShardingError) as caught:
            sequence_parallel(wrong, mesh)
        said.append(str(caught.value))
    parallel.remove()
    return said


def test_misuse_of_models_of_transformers(pool: Pool) -> None:
    wanted = [
        "cannot be cut",
        "ranks [1] have brought another batch",
        "several sequences are packed",
        "pixel_values",
        "logits_to_keep",
        "LlamaAttention was reached with 12 tokens that have not been cut",
        "no model of transformers",
        "has an encoder and a decoder",
    ]
    for said in pool.run(2, misuse):
        for text, part in zip(said, wanted, strict=True):
            assert part in text
