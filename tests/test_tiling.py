"""Tiled linears against the plain ones: training, memory, state dicts, checkpoints, files."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.handle
from onecopy.checkpoint.folder import latest
from onecopy.checkpoint.source import open_source
from onecopy.checkpoint.unpickle import load_object
from onecopy.checkpoint.values import read_tensor
from onecopy.core.tiled_linear import TiledLinear
from onecopy.core.tiling import tile_linears
from onecopy.errors import OneCopyError, ShardingError
from onecopy.events import Event
from onecopy.memory.live_tensors import LiveTensors
from onecopy.planner.options import PlanOptions
from onecopy.planner.sources import read_model
from onecopy.report import memory
from tests import models, reference
from tests.pool import Pool

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01
    ),
    # Where a gradient is zero but for rounding, Adam's usual eps would make whole steps of that.
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
}
LAYERS = {
    "gpt": ["blocks.*.qkv", "blocks.*.up", "blocks.*.down", "head"],
    "frozen": ["blocks.*.up", "blocks.*.down"],
    "mlp": ["*"],
    "hf_gpt2": ["*.c_attn", "*.c_fc", "*.c_proj"],  # Conv1D; the head is tied
}


def tiled(name: str, factor: int, seed: int = 0) -> nn.Module:
    """A model of tests.models; plain where the factor is 1."""
    model = models.build(name, seed)
    tile_linears(model, factor, modules=LAYERS[name])
    return model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run; `settings` go to shard."""

    name: str = "gpt"
    factor: int = 3
    stage: int = 3
    optimizer: str = "adamw"
    steps: int = 3
    checkpointed: bool = False
    compiled: bool = False
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass
class Run:
    """One rank's view of a run. values: of the state dict."""

    losses: list[float]
    values: dict[str, Tensor]
    events: list[Event]


def train(plan: Plan) -> Run:
    """As a user's loop would."""
    model = tiled(plan.name, plan.factor)
    optimizer = OPTIMIZERS[plan.optimizer](model)
    run = Run([], {}, [])
    settings = {**dict(plan.settings), "sinks": [run.events.append]}
    onecopy.shard(model, optimizer, stage=plan.stage, **settings)
    for block in model.get_submodule("blocks").children() if plan.checkpointed else ():
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)  # type: ignore[method-assign]
    for block in model.get_submodule("blocks").children() if plan.compiled else ():
        block.compile(backend="eager")
    for step in range(plan.steps):
        loss = models.loss(model, models.batch(plan.name, step, dist.get_rank()))
        loss.backward()
        run.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    run.values = model.state_dict()
    return run


def expected(plan: Plan, world: int, factor: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by rank, and values, of one process that trains a plain model or tiles."""
    result = reference.train(
        partial(tiled, plan.name, factor),
        models.batches(plan.name, plan.steps, world),
        OPTIMIZERS[plan.optimizer],
        precision=dict(plan.settings).get("precision", "fp32"),
    )
    model = tiled(plan.name, factor)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(result.parameters[name])
    return [[step[rank][0] for step in result.losses] for rank in range(world)], model.state_dict()


def check(pool: Pool, world: int, plan: Plan) -> list[Run]:
    """Equal to one process with the same tiles, and close to one without."""
    runs = pool.run(world, train, plan, timeout=120)
    losses, values = expected(plan, world, plan.factor)
    _, plain = expected(plan, world, 1)
    is_rounded = dict(plan.settings).get("precision", "fp32") != "fp32"
    tolerance = {"atol": 2e-2 if is_rounded else 1e-5, "rtol": 1e-4}
    for rank, run in enumerate(runs):
        assert run.losses == losses[rank]
        assert run.values.keys() == values.keys() == plain.keys()
        for name, value in values.items():
            assert torch.equal(run.values[name], value), name
            torch.testing.assert_close(run.values[name], plain[name], **tolerance)
    return runs


EVERY = list(
    itertools.product(("gpt", "frozen", "mlp"), (1, 2, 3), (0, 3), ("momentum", "adamw"), (2, 3, 5))
)


@pytest.mark.sampled(
    "name, world, stage, optimizer, factor",
    EVERY,
    5,
    always=[("gpt", 2, 3, "adamw", 3), ("mlp", 1, 0, "momentum", 5), ("frozen", 2, 3, "adamw", 2)],
)
def test_equals_one_process(
    pool: Pool, name: str, world: int, stage: int, optimizer: str, factor: int
) -> None:
    """At numbers of tiles that divide no number of outputs, too."""
    check(pool, world, Plan(name=name, stage=stage, optimizer=optimizer, factor=factor))


@pytest.mark.sampled("stage", [0, 1, 2, 3], 1, always=[3])
def test_conv1d_and_a_tied_head(pool: Pool, stage: int) -> None:
    """GPT-2 of transformers: outputs are the columns of its weights."""
    pytest.importorskip("transformers", reason="pip install 'onecopy[test]' brings transformers")
    check(pool, 2, Plan(name="hf_gpt2", stage=stage))


def test_bf16(pool: Pool) -> None:
    """Input gradients are sums of rounded ones, so closeness to the plain layer is looser."""
    check(pool, 2, Plan(optimizer="momentum", settings=(("precision", "bf16"),)))


def test_blocks_compiled(pool: Pool) -> None:
    """They are compiled in parts, as tiles are gathered in between."""
    check(pool, 2, Plan(compiled=True))


def most_gathered(events: Sequence[Event]) -> dict[str, int]:
    """How many tiles were gathered, or on their way, at the same time in each phase."""
    most: dict[str, int] = {}
    held: set[str] = set()
    for event in events:
        if ".tiles." in event.unit and event.phase in ("forward", "backward"):
            if event.kind == "gather":
                held.add(event.unit)
            elif event.kind == "release":
                held.discard(event.unit)
            most[event.phase] = max(most.get(event.phase, 0), len(held))
    assert not held
    return most


@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_tiles_are_gathered_at_a_time(pool: Pool, checkpointed: bool) -> None:
    """The one in use, and the next one under way: in backward too, and when it recomputes."""
    for run in check(pool, 2, Plan(factor=4, checkpointed=checkpointed)):
        assert most_gathered(run.events) == {"forward": 2, "backward": 2}


# Checkpoints ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run: how the model is tiled and sharded, what it loads and where it saves."""

    name: str = "gpt"
    factor: int = 1
    stage: int = 3
    load: str | None = None
    steps: int = 2
    save: str | None = None
    is_named: bool = False


def run_part(part: Part) -> dict[str, Tensor]:
    """Train on, on batches that all ranks have alike, so that their number does not matter."""
    model = tiled(part.name, part.factor, seed=1 if part.load else 0)
    parameters: Any = model.named_parameters() if part.is_named else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)
    onecopy.shard(model, optimizer, stage=part.stage)
    first = 0 if part.load is None else onecopy.load(part.load, model, optimizer).step
    for step in range(first, first + part.steps):
        models.loss(model, models.batch(part.name, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if part.save is not None:
        onecopy.save(part.save, model, optimizer)
    return model.state_dict()


def stored(root: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything in the latest checkpoint but random states: tensors, and plain objects."""
    folder = latest(root)
    assert folder is not None, "there is a checkpoint"
    source = open_source(folder)
    keys = {
        key: one for key, one in source.metadata.state_dict_metadata.items() if "rng" not in key
    }
    tensors = [key for key, one in keys.items() if isinstance(one, TensorStorageMetadata)]
    data = source.read([], keys.keys() - set(tensors))
    return (
        {key: read_tensor(source, key) for key in tensors},
        {key: load_object(key, one) for key, one in data.items()},
    )


@pytest.mark.sampled(
    "name, saved, loaded",
    [
        (name, saved, loaded)
        for name in ("gpt", "hf_gpt2")
        for saved, loaded in itertools.permutations(
            [(1, 2, 3), (3, 2, 3), (4, 3, 1), (1, 1, 0), (2, 1, 3)], 2
        )
    ],
    4,
    always=[
        ("gpt", (1, 2, 3), (3, 2, 3)),
        ("gpt", (4, 3, 1), (1, 1, 0)),
        ("hf_gpt2", (3, 2, 3), (2, 1, 3)),
    ],
)
def test_checkpoints_are_those_of_the_plain_model(
    pool: Pool, tmp_path: Path, name: str, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    """Saved with some tiles, ranks and stage, loaded with others, all items are the same."""
    (factor, world, stage), (factor2, world2, stage2) = saved, loaded
    one, other = tmp_path / "one", tmp_path / "other"
    is_named = factor > 2
    first = Part(name=name, factor=factor, stage=stage, save=str(one), is_named=is_named)
    pool.run(world, run_part, first)
    again = Part(name=name, factor=factor2, stage=stage2, load=str(one), steps=0, save=str(other))
    pool.run(world2, run_part, replace(again, is_named=is_named))
    (tensors, objects), (tensors2, objects2) = stored(one), stored(other)
    assert tensors.keys() == tensors2.keys() and objects == objects2
    assert tensors.keys() >= set(models.build(name).state_dict())
    assert not any(".tiles." in key for key in (*tensors, str(objects)))
    for key, value in tensors.items():
        assert torch.equal(value, tensors2[key]), key


def test_a_run_goes_on_with_other_tiles(pool: Pool, tmp_path: Path) -> None:
    """As the plain one that was never interrupted: moments and step counters were loaded."""
    pool.run(2, run_part, Part(factor=1, save=str(tmp_path)))
    gone_on = pool.run(1, run_part, Part(factor=3, load=str(tmp_path), save=str(tmp_path)))[0]
    gone_on = pool.run(2, run_part, Part(factor=1, load=str(tmp_path), stage=1))[0]
    whole = pool.run(2, run_part, Part(factor=1, steps=6))[0]
    for name, value in whole.items():
        torch.testing.assert_close(gone_on[name], value, atol=1e-5, rtol=1e-4)


# Memory ---------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Pairs of linears, h -> 4h -> h, far larger than their activations."""

    def __init__(self, hidden: int, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@dataclass
class Memory:
    """Bytes: of the largest tensor in shard and in a step, and of a step's peak beside states."""

    in_shard: int
    in_step: int
    beside_states: int


def memory_of(hidden: int, factor: int, folder: str | None = None) -> Memory:
    """Weights are made by the first rank, or read from files. Plain layers are units, too."""
    x = torch.ones(1, hidden)
    with LiveTensors() as live:
        with onecopy.init_sharded():
            model = Stack(hidden)
        onecopy.tile_linears(model, factor, modules="*")
        if folder is not None:
            onecopy.load_pretrained(model, folder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live.reset_peak()
        onecopy.shard(model, optimizer, stage=3, units=("blocks.*.*",))
        in_shard = live.largest_bytes
        for step in range(3):
            if step == 2:
                live.reset_peak()
            model(x).sum().backward()
            held = memory.measure(model, optimizer).total
            optimizer.step()
            optimizer.zero_grad()
        return Memory(in_shard, live.largest_bytes, live.peak_bytes - held)


def memory_by_factor(hidden: int, folder: str) -> dict[int, Memory]:
    """With weights from files; the factor 0 stands for 8, with weights that are made."""
    found = {factor: memory_of(hidden, factor, folder) for factor in (2, 8)}
    return found | {0: memory_of(hidden, 8)}


def test_the_largest_tensor_falls_by_the_factor(pool: Pool, tmp_path: Path) -> None:
    """At shard too, where values come from files; initialisers make a whole weight."""
    hidden = 128
    weight = 4 * 4 * hidden * hidden
    save_file(Stack(hidden).state_dict(), tmp_path / "model.safetensors")
    ranks = pool.run(2, memory_by_factor, hidden, str(tmp_path))
    assert ranks[0][0].in_shard == weight
    for found in ranks:
        for factor in (2, 8):
            tile = weight / factor
            # A tile's unit has its part of the bias, too, and padding.
            assert tile <= found[factor].in_step <= 1.02 * tile
            assert found[factor].in_shard <= 1.02 * tile
            # The values of two tiles, in use and under way, and the gradients of one.
            assert found[factor].beside_states <= 3.1 * tile
        assert found[0].in_step == found[8].in_step


def test_hidden_sizes_that_fit_pieces_of_memory(pool: Pool) -> None:
    """ZeRO-Infinity, figure 6b: four times the tiles, twice the hidden size.

    There, memory was cut into pieces of 2 GB before. Here nothing is cut: a size fits if no single
    tensor of a step is larger than a piece.
    """
    (largest,) = pool.run(1, largest_tensors)
    piece = 1.05 * 4 * 4 * 64 * 64
    for factor, hidden in ((1, 64), (4, 128), (16, 256)):
        assert largest[factor, hidden] <= piece < largest[factor, 2 * hidden]


def largest_tensors() -> dict[tuple[int, int], int]:
    """In a step, by factor and hidden size."""
    sizes = {1: (64, 128), 4: (128, 256), 16: (256, 512)}
    return {
        (factor, hidden): memory_of(hidden, factor).in_step
        for factor in sizes
        for hidden in sizes[factor]
    }


# Files, values, copies ------------------------------------------------------------------------


def hold_the_values_of(model: nn.Module, plain: nn.Module) -> bool:
    """Whether the state dicts are equal."""
    values, others = model.state_dict(), plain.state_dict()
    assert values.keys() == others.keys()
    return all(torch.equal(values[name], value) for name, value in others.items())


@pytest.mark.sampled(
    "name, way",
    list(itertools.product(("gpt", "hf_gpt2"), ("meta", "unmade", "read", "sharded", "plain"))),
    4,
    always=[("gpt", "read"), ("hf_gpt2", "meta"), ("hf_gpt2", "sharded")],
)
def test_load_pretrained(pool: Pool, tmp_path: Path, name: str, way: str) -> None:
    """Each rank reads its part of each tile; the columns of a Conv1D are not in one place."""
    weights = models.build(name).state_dict()
    weights.pop("lm_head.weight", None)  # tied
    save_file(weights, tmp_path / "model.safetensors")
    for num_bytes in pool.run(2, read_pretrained, name, way, str(tmp_path)):
        if way not in ("plain", "sharded"):
            whole = sum(value.nbytes for value in weights.values())
            assert 0.4 * whole < num_bytes < 0.6 * whole


def read_pretrained(name: str, way: str, folder: str) -> int:
    """The bytes that shard has read."""
    empty = {"meta": torch.device("meta"), "unmade": onecopy.init_sharded()}
    with empty.get("unmade" if way == "read" else way, nullcontext()):
        model = models.build(name, 1)
    if way == "read":
        onecopy.load_pretrained(model, folder)
    onecopy.tile_linears(model, 3, modules=LAYERS[name])
    if way == "sharded":
        onecopy.shard(model)
    if way != "read":
        assert onecopy.load_pretrained(model, folder) == ((), ())
    events: list[Event] = []
    if way != "sharded":
        onecopy.shard(model, sinks=[events.append])
    assert hold_the_values_of(model, models.build(name))
    return sum(event.num_bytes for event in events if event.kind == "read")


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("name", ["gpt", "hf_gpt2"])
def test_init_sharded(name: str, within: bool) -> None:
    """The values are those of a plain construction, whenever it is tiled."""
    with onecopy.init_sharded():
        model = models.build(name)
        if within:
            tile_linears(model, 3, modules=LAYERS[name])
    if not within:
        tile_linears(model, 3, modules=LAYERS[name])
    onecopy.shard(model)
    assert hold_the_values_of(model, models.build(name))


def test_the_meta_device() -> None:
    """Each tile initialises itself, as a linear does."""
    with torch.device("meta"):
        model = Stack(64)
    onecopy.tile_linears(model, 4, modules="*")
    onecopy.shard(model)
    for name, value in model.state_dict().items():
        bound = 1 / (64 if ".0." in name[8:] else 256) ** 0.5
        assert 0.9 * bound < value.abs().max() <= bound, name


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("name", ["gpt", "hf_gpt2"])
def test_export(tmp_path: Path, name: str, is_sharded: bool) -> None:
    model = tiled(name, 3)
    if is_sharded:
        onecopy.shard(model)
    onecopy.export(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    values = models.build(name).state_dict()
    assert stored.keys() - {"lm_head.weight"} == values.keys() - {"lm_head.weight"}
    for key, value in stored.items():
        assert torch.equal(value, values[key]), key


def copies(folder: str) -> None:
    """State dicts, copies, pickles and unshard, on two ranks."""
    model, plain = tiled("gpt", 3), models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=3)
    copied = copy.deepcopy(model)
    assert hold_the_values_of(copied, plain)
    assert hold_the_values_of(pickle.loads(pickle.dumps(copied)), plain)
    other = models.build("gpt", 1)
    model.load_state_dict(other.state_dict())
    assert hold_the_values_of(model, other)
    copied.load_state_dict(model.state_dict(), assign=True)
    assert hold_the_values_of(copied, other)
    with onecopy.full_parameters(model):
        up = model.get_submodule("blocks.0.up")
        assert isinstance(up, TiledLinear)
        whole = torch.cat([tile.weight for tile in up.tiles])
        assert torch.equal(whole, other.get_parameter("blocks.0.up.weight"))
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    optimizer.step()
    trained = model.state_dict()
    onecopy.unshard(model)
    assert isinstance(model.get_submodule("blocks.0.up"), TiledLinear)
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    optimizer.step()


def test_copies(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, copies, str(tmp_path))


def train_lora(factor: int) -> tuple[list[float], list[Tensor]]:
    """Losses, and the adapters that were trained around a frozen base."""
    peft = pytest.importorskip("peft", reason="peft is not installed: the test extra")
    torch.manual_seed(5)
    with warnings.catch_warnings():
        # peft asks transformers for something that transformers wants to rename.
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
        model: nn.Module = peft.get_peft_model(models.build("hf_llama"), config)
    names = tile_linears(model, factor, modules=["*.base_layer", "*.down_proj"])
    assert len(names) == (6 if factor > 1 else 0)
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    onecopy.shard(model, optimizer, stage=3)
    losses = []
    for step in range(3):
        loss = models.loss(model, models.batch("hf_llama", step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with onecopy.full_parameters(model):
        return losses, [one.detach().clone() for one in parameters]


@pytest.mark.slow  # to import peft takes long
def test_adapters_around_tiles(pool: Pool) -> None:
    """First the adapters, then tiles."""
    losses, trained = pool.run(2, train_lora, 1)[0]
    for others, values in pool.run(2, train_lora, 3):
        torch.testing.assert_close(others, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(values, trained, rtol=1e-5, atol=1e-6)


def build_tiled() -> nn.Module:
    """For the planner."""
    model = Stack(64)
    onecopy.tile_linears(model, 4, modules="*")
    return model


def test_the_planner_sees_tiles() -> None:
    """A function that tiles the model that it builds."""
    options = PlanOptions(devices=2)
    shape, _ = read_model("tests.test_tiling:build_tiled", options)
    assert shape.num_parameters == sum(one.numel() for one in Stack(64).parameters())
    assert max(sum(unit.numels) for unit in shape.units) == 64 * 64 + 64
    plans = [onecopy.plan(one, devices=2) for one in (build_tiled, partial(Stack, 64))]
    tiles, whole = (
        next(row.memory.gathered for row in plan.rows if row.stage == 3) for plan in plans
    )
    # Two tiles in the place of two blocks of two linears.
    assert 0 < tiles <= whole / 7.5


# What is refused ------------------------------------------------------------------------------


def test_outputs_and_gradients() -> None:
    """Of one layer: rows that the factor does not divide, no bias, more tiles than outputs."""
    for bias, outputs, factor in itertools.product((True, False), (3, 16), (1, 2, 3, 4, 5, 7)):
        torch.manual_seed(outputs)
        plain = nn.Sequential(nn.Linear(8, outputs, bias=bias)).double()
        model = copy.deepcopy(plain)
        tile_linears(model, factor, modules="0")
        tiles = len(model[0].tiles) if factor > 1 else 1
        assert tiles == min(factor, outputs)
        x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
        x2 = x.detach().clone().requires_grad_()
        y, y2 = plain(x), model(x2)
        torch.testing.assert_close(y2, y, atol=1e-14, rtol=1e-14)
        y.square().sum().backward()
        y2.square().sum().backward()
        torch.testing.assert_close(x2.grad, x.grad, atol=1e-12, rtol=1e-12)
        grads = {name: one.grad for name, one in model.named_parameters()}
        for key, parameter in plain[0].named_parameters():
            found = torch.cat([one for name, one in grads.items() if name.endswith(key)])
            torch.testing.assert_close(found, parameter.grad, atol=1e-12, rtol=1e-12)


def test_which_layers_are_tiled() -> None:
    """Large ones, as many tiles as it takes; tied ones only by leaving them out."""
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 10))
    assert onecopy.tile_linears(model, 3) == ["0"]
    assert [tile.out_features for tile in model[0].tiles] == [134, 133, 133]
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 10))
    assert onecopy.tile_linears(model, max_bytes=4 * 400 * 150) == ["0"]
    assert [tile.out_features for tile in model[0].tiles] == [134, 133, 133]
    assert onecopy.tile_linears(nn.Sequential(nn.Linear(9, 9)), max_bytes=1) == ["0"]
    assert onecopy.tile_linears(nn.Sequential(nn.Linear(9, 9)), 4) == []
    with pytest.warns(UserWarning, match="head is not tiled: another module has its weight too"):
        names = onecopy.tile_linears(models.build("tied"), max_bytes=1)
    assert "blocks.0.up" in names and "head" not in names
    shared = nn.Linear(9, 9)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert onecopy.tile_linears(model, 2, modules="0") == ["0"]
    assert isinstance(model[0], TiledLinear) and model[0] is model[2]
    model.requires_grad_(False)
    assert model.state_dict().keys() == nn.Sequential(shared, nn.ReLU(), shared).state_dict().keys()


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(9, 9))
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "build, arguments, message",
    [
        (partial(Stack, 4), {}, "give one of them"),
        (partial(Stack, 4), {"factor": 2, "max_bytes": 8}, "give one of them"),
        (partial(Stack, 4), {"factor": 0}, "give one of them"),
        (partial(Stack, 4), {"factor": 2, "modules": "up"}, "'up' matches no module"),
        (partial(Stack, 4), {"factor": 2, "modules": "blocks"}, "no nn.Linear or Conv1D"),
        (partial(nn.Linear, 4, 4), {"factor": 2}, "the model is a Linear itself"),
        (partial(models.build, "tied"), {"factor": 2, "modules": "head"}, "a tied head"),
        (hooked, {"factor": 2, "modules": "0"}, "it has hooks"),
        (lambda: onecopy.shard(Stack(4)), {"factor": 2}, "is sharded already"),
    ],
)
def test_refused(build: Callable[[], nn.Module], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OneCopyError, match=message):
        onecopy.tile_linears(build(), **arguments)


def test_a_part_of_a_sharded_model_is_refused() -> None:
    model = onecopy.shard(Stack(8))
    with pytest.raises(ShardingError, match="is sharded already"):
        onecopy.tile_linears(model.blocks, 2)


def test_an_optimizer_that_was_made_before_is_refused() -> None:
    model = Stack(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.tile_linears(model, 2, modules="*")
    with pytest.raises(ShardingError, match=r"blocks.0.0.weight as it was before tile_linears"):
        onecopy.shard(model, optimizer)


def test_optimizers_of_matrices_are_refused() -> None:
    """A step made from a tile alone would be another one."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    onecopy.tile_linears(model, 2, modules="*")
    muon = torch.optim.Muon(model.parameters(), lr=0.1)
    with pytest.raises(ShardingError, match=r"0.tiles.0.weight is a tile .* Muon asks for whole"):
        onecopy.shard(model, muon)
    with pytest.raises(ShardingError, match="whole_parameters=True asks for whole"):
        onecopy.shard(model, whole_parameters=True)


def test_what_is_read_of_a_layer() -> None:
    """Sizes, and an error in the place of the weight; state dicts that do not fit name it."""
    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    onecopy.tile_linears(model, 2, modules="*")
    layer = model[0]
    assert (layer.in_features, layer.out_features, layer.bias) == (8, 6, None)
    with pytest.raises(AttributeError, match="a tiled linear has no weight"):
        layer.weight  # noqa: B018
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .0.weight.\. "):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({"0.weight": torch.zeros(8, 6)})
