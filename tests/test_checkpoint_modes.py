"""Checkpoints of every way to train: after a load training goes on as if it had never stopped."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import onecopy
from onecopy.core.loss_scale import loss_scale_of
from onecopy.errors import CheckpointError, OneCopyError, ShardingError
from onecopy.memory.live_tensors import LiveTensors
from tests import models
from tests.motley import compare, snapshot
from tests.optimizers import MATRIX, Lion, Make
from tests.pool import Pool
from tests.runs import full_values

STAGES = (0, 1, 2, 3)
BF16 = partial(onecopy.Precision, compute="bf16")


def one(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: [kind(model.parameters(), **options)]


ADAMW = one(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Mode:
    """One way to train.

    backwards: in each step; all but the last under no_sync.
    wrap: what is done to the model before shard; returns what the loop calls.
    factor: of the loss.
    """

    name: str = "gpt"
    make: Make = ADAMW
    settings: dict[str, Any] = field(default_factory=dict)
    backwards: int = 1
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    factor: float = 1.0
    closure: bool = False


def compiled_blocks(model: nn.Module) -> nn.Module:
    blocks: Any = model.blocks
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend="aot_eager")
    return model


def adapted(model: nn.Module) -> nn.Module:
    """As PEFT does it: a frozen base, and small matrices beside its layers."""
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        block.up = LowRank(block.up)
    return model


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return y


def trained_only(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
    return [torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)]


# "odd" has parameters without dimensions, whose states look like counters.
TORCH_OWN = {
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
}
HALF = onecopy.Offload(optimizer="host", gradients="host", fraction=0.5)
MODES = {
    "bf16": Mode(settings={"precision": "bf16"}),
    "split": Mode(settings={"precision": BF16(master="bf16+16")}),
    "split_in_backward": Mode(
        settings={
            "precision": BF16(master="bf16+16"),
            "step_in_backward": True,
            "max_grad_norm": 0.1,
        },
        backwards=2,
    ),
    "pure_bf16": Mode(settings={"precision": BF16(master="bf16")}),
    "bf16_gradients": Mode(settings={"precision": BF16(gradient="bf16")}, backwards=2),
    "fp16": Mode("mlp", settings={"precision": "fp16"}, factor=300.0),
    "clipped": Mode("convgn", settings={"max_grad_norm": 0.1}),
    "in_backward": Mode(settings={"step_in_backward": True, "max_grad_norm": 0.1}),
    "offloaded": Mode("tied", settings={"offload": "cpu", "precision": "bf16"}, backwards=2),
    "half_offloaded": Mode("tied", MATRIX["muon"], {"offload": HALF}),
    "two_pass": Mode(settings={"step_in_backward": "two-pass", "max_grad_norm": 0.1}, closure=True),
    "keep_gathered": Mode(settings={"keep_gathered": ("tokens", "blocks.1")}, backwards=2),
    "lion": Mode("tied", one(Lion)),
    "fused": Mode(make=one(torch.optim.AdamW, lr=1e-2, fused=True)),
    "tensor_lr": Mode(make=one(torch.optim.AdamW, lr=torch.tensor(1e-2), foreach=False)),
    "named": Mode("frozen", lambda model: [torch.optim.AdamW(model.named_parameters())]),
    "frozen": Mode("frozen"),
    "adapted": Mode(make=trained_only, wrap=adapted, settings={"precision": "bf16"}),
    "compiled": Mode(wrap=partial(torch.compile, backend="aot_eager")),
    "compiled_blocks": Mode("tied", wrap=compiled_blocks),
    "user_written": Mode("odd", MATRIX["user_written"], {"whole_parameters": True}),
    **{name: Mode("tied", MATRIX[name]) for name in ("muon", "adafactor", "shampoo")},
    **{name: Mode("odd", one(kind, lr=1e-2)) for name, kind in TORCH_OWN.items()},
}


@dataclass
class Run:
    """A model in training."""

    mode: Mode
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    @property
    def passed(self) -> Any:
        return self.optimizers[0] if len(self.optimizers) == 1 else list(self.optimizers)

    def train(self, first: int, last: int) -> None:
        """Steps, each on the batch of its number."""
        rank, mode = dist.get_rank(), self.mode
        for step in range(first, last):
            batches = [models.batch(mode.name, step, rank, n) for n in range(mode.backwards)]
            for batch in batches[:-1]:
                with onecopy.no_sync(self.model):
                    self.backward(batch)
            if mode.closure:
                self.optimizers[0].step(partial(self.backward, batches[-1]))
            else:
                self.backward(batches[-1])
                for optimizer in self.optimizers:
                    optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def backward(self, batch: models.Batch) -> float:
        loss = models.loss(self.model, batch) * self.mode.factor
        loss.backward()
        return loss.item()

    def snapshot(self) -> dict[str, Any]:
        module = onecopy.handle.inner(self.model)
        named = {str(number): one for number, one in enumerate(self.optimizers)}
        found = snapshot(module, named)
        owner = onecopy.handle.of(module)
        found["steps"] = [one.num_steps for one in owner.bindings]
        if owner.engine.loss_scale is not None:
            found["scale"] = loss_scale_of(module).state_dict()
        if owner.backward.stepper is not None:
            found["norm"] = owner.backward.stepper.norm
        return found


def begin(mode: Mode, stage: int, seed: int = 0) -> Run:
    model = models.build(mode.name, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        called = mode.wrap(model)
    optimizers = mode.make(model)
    onecopy.shard(model, optimizers, stage=stage, **mode.settings)
    return Run(mode, called, optimizers)


def goes_on(root: Path, name: str, stage: int) -> None:
    """A run that is saved half-way, and another one that goes on from there."""
    mode = MODES[name]
    torch._dynamo.reset()
    uninterrupted = begin(mode, stage)
    uninterrupted.train(0, 3)
    path = onecopy.save(root, uninterrupted.model, uninterrupted.passed)
    then = uninterrupted.snapshot()
    if "scale" in then:
        assert then["scale"] != loss_scale_of(begin(mode, stage).model).state_dict()
    uninterrupted.train(3, 5)
    resumed = begin(mode, stage, seed=1)
    resumed.train(7, 8)
    loaded = onecopy.load(path, resumed.model, resumed.passed)
    # Steps that overflow are none.
    assert loaded.step == then["steps"][0] and (loaded.step == 3 or name == "fp16")
    compare("loaded", resumed.snapshot(), then)
    resumed.train(3, 5)
    compare("resumed", resumed.snapshot(), uninterrupted.snapshot())


@pytest.mark.sampled(
    "name, world, stage",
    list(itertools.product(MODES, (1, 2, 3), STAGES)),
    len(MODES) + 2,
    always=[(name, 2 + n % 2, n % 4) for n, name in enumerate(MODES)],
)
def test_goes_on(pool: Pool, tmp_path: Path, name: str, world: int, stage: int) -> None:
    """As if it had never stopped, to the last bit: values, states, counters, scales, norms."""
    pool.run(world, goes_on, tmp_path, name, stage)


# Several models, and optimizers ----------------------------------------------------------------


def pair(seed: int, stage: int) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    """A generator and a critic, each with its optimizer."""
    made = {"generator": models.build("mlp", seed), "critic": models.build("mlp", seed + 10)}
    optimizers = {
        "generator": torch.optim.Adam(made["generator"].parameters(), lr=1e-2),
        "critic": torch.optim.SGD(made["critic"].parameters(), lr=0.1, momentum=0.9),
    }
    for name, model in made.items():
        onecopy.shard(model, optimizers[name], stage=stage)
    return made, optimizers


def train_pair(made: dict[str, nn.Module], optimizers: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for name in made:
            models.loss(made[name], models.batch("mlp", step, dist.get_rank())).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()


def snapshots(made: dict[str, nn.Module], optimizers: Any) -> dict[str, Any]:
    return {name: snapshot(made[name], {name: optimizers[name]}) for name in made}


def several(root: Path, stage: int, as_list: bool) -> None:
    made, optimizers = pair(0, stage)
    pack: Any = (lambda one: list(one.values())) if as_list else dict
    train_pair(made, optimizers, 0, 2)
    onecopy.save(root, pack(made), pack(optimizers), step=7)
    then = snapshots(made, optimizers)
    train_pair(made, optimizers, 2, 4)
    again, their_optimizers = pair(1, stage)
    train_pair(again, their_optimizers, 8, 10)
    assert onecopy.load(root, pack(again), pack(their_optimizers)).step == 7
    compare("loaded", snapshots(again, their_optimizers), then)
    train_pair(again, their_optimizers, 2, 4)
    compare("resumed", snapshots(again, their_optimizers), snapshots(made, optimizers))
    # One of them, which has the same shapes as the other: it must be named.
    key = "0" if as_list else "generator"
    alone, alone_optimizers = pair(2, stage)
    with pytest.raises(CheckpointError, match=r"several models that fit.*say which"):
        onecopy.load(root, alone["generator"])
    onecopy.load(root, {key: alone["generator"]}, {key: alone_optimizers["generator"]})
    named = {"generator": alone["generator"]}
    compare("one", snapshots(named, alone_optimizers), {"generator": then["generator"]})
    with pytest.raises(CheckpointError, match=r"no optimizer 'optimizer'.*several"):
        onecopy.load(root, {key: alone["generator"]}, alone_optimizers["generator"])


@pytest.mark.parametrize("stage, as_list", [(3, False), (1, True)])
def test_several_models(pool: Pool, tmp_path: Path, stage: int, as_list: bool) -> None:
    """A GAN: together as a dict or a list, and one of them alone."""
    pool.run(2, several, tmp_path, stage, as_list)


def shared_optimizer(root: Path) -> None:
    def make(seed: int) -> tuple[list[nn.Module], torch.optim.Optimizer]:
        made = [models.build("mlp", seed), models.build("odd", seed)]
        parameters = [{"params": one.parameters()} for one in made]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        onecopy.shard(made, optimizer, stage=2)
        return made, optimizer

    def train(made: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        for name, model in zip(("mlp", "odd"), made, strict=True):
            models.loss(model, models.batch(name, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()

    made, optimizer = make(0)
    train(made, optimizer)
    with pytest.raises(ShardingError, match="parameters of another sharded model too: pass all"):
        onecopy.save(root, made[0], optimizer)
    onecopy.save(root, made, optimizer)
    again, their_optimizer = make(1)
    onecopy.load(root, again, their_optimizer)
    for _ in range(2):
        for left, right in zip(made, again, strict=True):
            compare("values", full_values(right), full_values(left))
        train(made, optimizer)
        train(again, their_optimizer)


def test_one_optimizer_over_two_models(pool: Pool, tmp_path: Path) -> None:
    """It is saved with both or not at all."""
    pool.run(2, shared_optimizer, tmp_path)


def renamed(root: Path) -> None:
    """Saved without a name, and loaded under one; counters follow."""
    mode = MODES["fp16"]
    first = begin(mode, 3)
    first.train(0, 3)
    onecopy.save(root, first.model, first.passed)
    second = begin(mode, 1, seed=1)
    onecopy.load(root, {"policy": second.model}, {"policy": second.passed})
    compare("renamed", second.snapshot(), first.snapshot())


def test_another_name(pool: Pool, tmp_path: Path) -> None:
    """Loss scale and number of steps, too, are found under the name they were saved with."""
    pool.run(2, renamed, tmp_path)


# Places and times ------------------------------------------------------------------------------


def never_whole(root: Path) -> tuple[int, int]:
    """Peak of live bytes of a load beyond what stays; bytes of all states."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        with onecopy.init_sharded():
            model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        onecopy.shard(model, optimizer, stage=3)
        return model, optimizer

    model, optimizer = make()
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    onecopy.save(root, model, optimizer)
    expected = full_values(model)
    del model, optimizer
    with LiveTensors() as live:
        model, optimizer = make()
        before = live.num_bytes()
        live.peak_bytes = before
        onecopy.load(root, model, optimizer)
        states = live.num_bytes() - before
        peak = live.peak_bytes - live.num_bytes()
    compare("values", full_values(model), expected)
    return peak, states


def test_a_model_that_is_never_whole(pool: Pool, tmp_path: Path) -> None:
    """Built by init_sharded, filled by load: beyond what stays, one stored item at a time."""
    item = 4 * 200 * 200
    for peak, states in pool.run(2, never_whole, tmp_path):
        assert states >= 8 * item
        assert peak <= 2 * item + (64 << 10), peak / item


def on_a_part(root: Path) -> int:
    """Only ranks 1 and 2 hold a model; rank 0 does something else."""
    mesh = DeviceMesh("cpu", [1, 2])
    if dist.get_rank() == 0:
        return 0
    run = []
    for seed in (0, 1):
        model = models.build("mlp", seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        onecopy.shard(model, optimizer, mesh=mesh)
        models.loss(model, models.batch("mlp", seed, dist.get_rank())).backward()
        optimizer.step()
        run.append((model, optimizer))
    (first, first_optimizer), (second, second_optimizer) = run
    onecopy.save(root, first, first_optimizer)
    loaded = onecopy.load(root, second, second_optimizer)
    compare(
        "mesh", snapshot(second, {"": second_optimizer}), snapshot(first, {"": first_optimizer})
    )
    return loaded.world_size


def test_on_a_part_of_the_ranks(pool: Pool, tmp_path: Path) -> None:
    """The others need not call anything."""
    assert pool.run(3, on_a_part, tmp_path) == [0, 2, 2]


ALONE = """
import torch, onecopy
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.AdamW(model.parameters())
onecopy.shard(model, optimizer)
assert onecopy.load({root!r}, model, optimizer).world_size == 2
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
print(onecopy.save({root!r}, model, optimizer))
"""


def save_linear(root: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer)
    onecopy.save(root, model, optimizer)


def load_linear(root: Path) -> int:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer)
    return onecopy.load(root, model, optimizer).step


def test_without_a_launcher(pool: Pool, tmp_path: Path) -> None:
    """One process that nobody has started in a special way, between runs of two ranks."""
    pool.run(2, save_linear, tmp_path)
    ended = pool.run_in_subprocess(ALONE.format(root=str(tmp_path)))
    assert ended.stdout.strip() == str(tmp_path / "step-00000001"), ended.stderr
    assert pool.run(2, load_linear, tmp_path) == [1, 1]


def written_by_hand(root: Path, stage: int, settings: dict[str, Any]) -> None:
    mode = Mode("tied", settings=settings)
    run = begin(mode, stage)
    run.train(0, 1)
    for parameter in run.model.parameters():
        parameter.data.mul_(0.5)
    with torch.no_grad():
        next(run.model.parameters()).add_(0.25)
    onecopy.save(root, run.model, run.passed)
    expected = full_values(run.model)
    other = begin(mode, stage, seed=1)
    onecopy.load(root, other.model, other.passed)
    compare("written", full_values(other.model), expected)
    with onecopy.full_parameters(run.model), onecopy.full_parameters(other.model):
        for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(one, two)


@pytest.mark.sampled(
    "stage, settings",
    list(itertools.product(STAGES, ({}, {"precision": "bf16"}, MODES["split"].settings))),
    6,
    always=[(0, {}), (2, {"precision": "bf16"}), (3, MODES["split"].settings), (3, {})],
)
def test_what_was_written_by_hand_is_saved(
    pool: Pool, tmp_path: Path, stage: int, settings: dict[str, Any]
) -> None:
    """Through .data, which torch does not count, and in place."""
    pool.run(2, written_by_hand, tmp_path, stage, settings)


def within_accumulation(root: Path, stage: int, settings: dict[str, Any]) -> None:
    results = []
    for is_saved in (False, True):
        run = begin(Mode(settings=settings), stage)
        for step in range(2):
            for micro in range(3):
                batch = models.batch("gpt", step, dist.get_rank(), micro)
                if micro < 2:
                    # It says that these gradients are not saved.
                    with warnings.catch_warnings(), onecopy.no_sync(run.model):
                        warnings.filterwarnings("ignore", "onecopy.save in the midst of")
                        run.backward(batch)
                        if is_saved:
                            onecopy.save(root, run.model, run.passed)
                    with warnings.catch_warnings():
                        warnings.filterwarnings("ignore", "onecopy.save in the midst of")
                        if is_saved:
                            onecopy.save(root, run.model, run.passed)
                else:
                    run.backward(batch)
            run.passed.step()
            run.passed.zero_grad()
        results.append(run.snapshot())
    compare("accumulated", results[1], results[0])


@pytest.mark.sampled(
    "stage, settings",
    list(itertools.product(STAGES, ({}, {"step_in_backward": True}))),
    4,
    always=[(1, {}), (3, {}), (2, {"step_in_backward": True})],
)
def test_a_save_within_an_accumulation_changes_nothing(
    pool: Pool, tmp_path: Path, stage: int, settings: dict[str, Any]
) -> None:
    """Gradients that no_sync keeps stay where they are; nothing is stepped."""
    pool.run(2, within_accumulation, tmp_path, stage, settings)


def repeatedly(root: Path) -> list[str]:
    run = begin(MODES["bf16"], 3)
    run.train(0, 1)
    first = onecopy.save(root, run.model, run.passed)
    same = onecopy.save(root, run.model, run.passed)
    run.train(1, 2)
    second = onecopy.save(root, run.model, run.passed)
    expected = run.snapshot()
    run.train(2, 3)
    again = onecopy.save(root, run.model, run.passed, step=2)
    assert (first, second) == (same, again)
    after = run.snapshot()
    # Back and forth within one run.
    onecopy.load(first, run.model, run.passed)
    run.train(1, 2)
    compare("from the first", run.snapshot(), expected)
    onecopy.load(root, run.model, run.passed)
    compare("the latest", run.snapshot(), after)
    return sorted(path.name for path in root.iterdir())


def test_saves_and_loads_in_one_run(pool: Pool, tmp_path: Path) -> None:
    """The same step again replaces it; loads go back and forth."""
    for names in pool.run(2, repeatedly, tmp_path):
        assert names == ["latest", "step-00000001", "step-00000002"]


def weights_only(root: Path, stage: int) -> None:
    saved = begin(MODES["fp16"], stage)
    saved.train(0, 3)
    onecopy.save(root, saved.model, saved.passed)
    other = begin(MODES["fp16"], stage, seed=1)
    other.train(5, 7)
    before, random_before = other.snapshot(), (torch.get_rng_state(), random.getstate())
    onecopy.load(root, other.model)
    assert torch.equal(torch.get_rng_state(), random_before[0])
    assert random.getstate() == random_before[1]
    expected = {**before, "parameters": full_values(saved.model)}
    compare("weights", other.snapshot(), expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_without_an_optimizer_only_the_model_is_loaded(
    pool: Pool, tmp_path: Path, stage: int
) -> None:
    """Its states, the loss scale, counters and random numbers stay as they are."""
    pool.run(2, weights_only, tmp_path, stage)


def later(root: Path, stage: int) -> None:
    """An optimizer attached after the weights; a group added after a load; unshard after a load."""
    run = begin(Mode("mlp"), stage)
    run.train(0, 2)
    onecopy.save(root, run.model, run.passed)
    model = models.build("mlp", 1)
    onecopy.shard(model, stage=stage)
    onecopy.load(root, model)
    optimizer = ADAMW(model)[0]
    onecopy.shard(model, optimizer)
    compare("weights", full_values(model), full_values(run.model))
    onecopy.load(root, model, optimizer)
    second = Run(run.mode, model, [optimizer])
    second.train(2, 3)
    run.train(2, 3)
    compare("trained", second.snapshot(), run.snapshot())
    # Plain again, with whole states.
    for one in (model, run.model):
        onecopy.unshard(one)
    left, right = optimizer.state_dict(), run.passed.state_dict()
    compare("unsharded", left, right)
    compare("unsharded", dict(model.state_dict()), dict(run.model.state_dict()))


@pytest.mark.parametrize("stage", [1, 3])
def test_attached_later_and_unsharded(pool: Pool, tmp_path: Path, stage: int) -> None:
    """The order of shard, load and attach does not matter."""
    pool.run(2, later, tmp_path, stage)


def added_group(root: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter]]:
        model = models.build("mlp", seed)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[:2], lr=1e-2)
        for parameter in parameters[2:]:
            parameter.requires_grad_(False)
        onecopy.shard(model, optimizer)
        return model, optimizer, parameters[2:]

    def unfreeze(optimizer: torch.optim.Optimizer, rest: list[nn.Parameter]) -> None:
        for parameter in rest:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": rest, "lr": 3e-2})

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        models.loss(model, models.batch("mlp", step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()

    first, second = make(0), make(1)
    train(*first[:2], 0)
    onecopy.save(root, *first[:2])
    onecopy.load(root, *second[:2])
    for made in (first, second):
        unfreeze(*made[1:])
        train(*made[:2], 1)
    compare("added", snapshot(second[0], {"": second[1]}), snapshot(first[0], {"": first[1]}))
    path = onecopy.save(root, *first[:2])
    third = make(2)
    with pytest.raises(CheckpointError, match=r"no parameters of this AdamW.*load the model alone"):
        onecopy.load(path, *third[:2])
    unfreeze(*third[1:])
    # Added, and not yet stepped.
    onecopy.load(path, *third[:2])
    for made in (first, third):
        train(*made[:2], 2)
    compare("added", snapshot(third[0], {"": third[1]}), snapshot(first[0], {"": first[1]}))


def test_a_group_that_was_added(pool: Pool, tmp_path: Path) -> None:
    """After a load, and before one."""
    pool.run(2, added_group, tmp_path)


def scaler(root: Path) -> None:
    """GradScaler and a loop by hand."""
    made = []
    for seed in (0, 1):
        model = models.build("mlp", seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        onecopy.shard(model, optimizer, stage=2)
        made.append((model, optimizer, torch.amp.GradScaler("cpu", growth_interval=2)))

    def train(model: nn.Module, optimizer: Any, scaler: Any, first: int, last: int) -> None:
        for step in range(first, last):
            loss = models.loss(model, models.batch("mlp", step, dist.get_rank()))
            scaler.scale(loss * (1e36 if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    one, two = made
    train(*one, 0, 3)
    onecopy.save(root, *one[:2], extra={"scaler": one[2].state_dict()})
    train(*one, 3, 6)
    train(*two, 8, 9)
    two[2].load_state_dict(onecopy.load(root, *two[:2]).extra["scaler"])
    train(*two, 3, 6)
    compare("scaled", snapshot(two[0], {"": two[1]}), snapshot(one[0], {"": one[1]}))
    assert two[2].state_dict() == one[2].state_dict() != made[1][2].__class__("cpu").state_dict()


def test_grad_scaler(pool: Pool, tmp_path: Path) -> None:
    """Its state in `extra`; a step that overflowed was none."""
    pool.run(2, scaler, tmp_path)


def compiled_and_plain(root: Path) -> None:
    torch._dynamo.reset()
    for number, name in enumerate(("compiled", "compiled_blocks")):
        plain = Mode(MODES[name].name)
        for first, second in ((MODES[name], plain), (plain, MODES[name])):
            saved, loaded = begin(first, 3), begin(second, 2, seed=1)
            saved.train(0, 1)
            path = onecopy.save(root / str(number), saved.model, saved.passed)
            onecopy.load(path, loaded.model, loaded.passed)
            found = {
                key.replace("_orig_mod.", ""): value
                for key, value in full_values(onecopy.handle.inner(loaded.model)).items()
            }
            expected = full_values(onecopy.handle.inner(saved.model))
            compare(name, found, {k.replace("_orig_mod.", ""): v for k, v in expected.items()})


def test_compiled_and_plain(pool: Pool, tmp_path: Path) -> None:
    """Names are those of the plain model, whatever torch.compile makes of them."""
    pool.run(2, compiled_and_plain, tmp_path)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


def random_numbers(root: Path, saves: bool) -> list[float]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer)
    rank = dist.get_rank()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(rank + 10 * saves)
    if saves:
        onecopy.save(root, model, optimizer)
    else:
        onecopy.load(root, model, optimizer)
    return draw()


def test_random_numbers(pool: Pool, tmp_path: Path) -> None:
    """Each rank draws what it would have drawn; one that is new draws something of its own."""
    drawn = pool.run(2, random_numbers, tmp_path, True)
    found = pool.run(3, random_numbers, tmp_path, False)
    assert found[:2] == drawn
    assert len({one[0] for one in found}) == 3
    assert found == pool.run(3, random_numbers, tmp_path, False)


# Precision -------------------------------------------------------------------------------------


def other_precision(root: Path, saved: str, loaded: str, stage: int) -> None:
    run = begin(MODES[saved], stage)
    run.train(0, 2)
    onecopy.save(root, run.model, run.passed)
    other = begin(MODES[loaded], 3 - stage, seed=1)
    onecopy.load(root, other.model, other.passed)
    dtype = {"pure_bf16": torch.bfloat16}.get(loaded, torch.float32)
    expected, found = run.snapshot(), other.snapshot()
    for name, value in expected["parameters"].items():
        compare(name, found["parameters"][name], value.to(dtype))
    for name, states in expected["optimizer 0"]["states"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            value = found["optimizer 0"]["states"][name][key]
            compare(f"{name}.{key}", value, states[key].to(dtype))
    other.train(2, 4)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    "saved, loaded", [("bf16", "pure_bf16"), ("pure_bf16", "split"), ("fused", "bf16")]
)
def test_another_precision(pool: Pool, tmp_path: Path, saved: str, loaded: str, stage: int) -> None:
    """Values and states become those of the masters, so that the optimizer can go on."""
    pool.run(2, other_precision, tmp_path, saved, loaded, stage)


# Errors ----------------------------------------------------------------------------------------


class Running(torch.optim.Optimizer):
    """Keeps something for a piece that has no value for each of its elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["history"] = torch.zeros(3)


def errors(root: Path) -> dict[str, str]:
    """What each of these says; nothing is changed by any."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    onecopy.save(root, model, optimizer)
    said: dict[str, str] = {}

    def expect(name: str, action: Callable[[], Any]) -> None:
        with pytest.raises(OneCopyError) as caught:
            action()
        said[name] = str(caught.value)

    def other(*layers: nn.Module, make: Any = torch.optim.AdamW) -> tuple[nn.Module, Any]:
        made = nn.Sequential(*layers)
        its = make(made.parameters())
        onecopy.shard(made, its)
        return made, its

    larger = other(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    before = snapshot(larger[0], {"": larger[1]})
    expect("missing", lambda: onecopy.load(root, *larger))
    compare("unchanged", snapshot(larger[0], {"": larger[1]}), before)
    expect("unexpected", lambda: onecopy.load(root, *other(nn.Linear(8, 8))))
    expect("shape", lambda: onecopy.load(root, *other(nn.Linear(8, 8), nn.Linear(8, 9))))
    for name, kind in {"rule": torch.optim.SGD, "other rule": torch.optim.RMSprop}.items():
        made = other(nn.Linear(8, 8), nn.Linear(8, 8), make=partial(kind, lr=0.1))
        expect(name, partial(onecopy.load, root, *made))
        assert not made[1].state
    onecopy.load(root, *other(nn.Linear(8, 8), nn.Linear(8, 8), make=torch.optim.Adam))
    expect("plain model", lambda: onecopy.save(root, nn.Linear(8, 8)))
    expect("part", lambda: onecopy.load(root, model[0]))
    fresh = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    expect("not attached", lambda: onecopy.save(root, model, fresh))
    expect("held", lambda: inside(model, lambda: onecopy.save(root, model)))

    both = [other(nn.Linear(8, 8))[0] for _ in range(2)]
    named = {"a": both[0], "a.b": both[1]}
    expect("names", lambda: onecopy.save(root, named))
    expect("own name", lambda: onecopy.save(root, {"optimizer": both[0]}))

    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])

    expect(
        "groups",
        lambda: onecopy.load(root, *other(nn.Linear(8, 8), nn.Linear(8, 8), make=two_groups)),
    )
    only_model = onecopy.save(root / "model", model, step=3)
    expect("no optimizer", lambda: onecopy.load(only_model, model, optimizer))
    expect("extra", lambda: onecopy.save(root, model, extra={"loop": {"f": nn.Linear(1, 1)}}))
    of_one = nn.Linear(1, 1) if rank == 0 else None
    expect("extra of one", lambda: onecopy.save(root, model, extra=of_one))
    expect("steps", lambda: onecopy.save(root, model, step=rank))
    running = other(nn.Linear(8, 8), nn.Linear(8, 8), make=Running)
    running[0](torch.ones(1, 8)).sum().backward()
    running[1].step()
    expect("state of a piece", lambda: onecopy.save(root, *running))
    return said


def inside(model: nn.Module, action: Callable[[], Any]) -> None:
    with onecopy.full_parameters(model):
        action()


def test_errors_name_the_thing_and_the_remedy(pool: Pool, tmp_path: Path) -> None:
    """On every rank, and before anything is changed."""
    first, second = pool.run(2, errors, tmp_path)
    said = {name: (first[name], second[name]) for name in first}
    expected = {
        "missing": ["lacks 2 of the 6 tensors", "2.weight, 2.bias", "another model"],
        "unexpected": ["has 2 tensors that this Sequential has not: 1.weight", "Build the model"],
        "shape": ["1.weight has shape (8, 8)", "(9, 8) here"],
        "rule": [
            "that was saved, AdamW, has no",
            "this one is SGD",
            "load(root, model)",
        ],
        "other rule": ["has no 'alpha', and this one is RMSprop"],
        "plain model": ["this Linear is not sharded", "onecopy.shard(model"],
        "part": ["this Linear is not sharded", "the module that was given to shard"],
        "not attached": ["this AdamW is attached to none of the models", "onecopy.shard"],
        "held": ["inside full_parameters", "outside of it"],
        "names": ["called 'a' and another 'a.b'", "none begins with another"],
        "own name": ["called 'optimizer'", "rename it"],
        "groups": ["no group of the saved optimizer has the 1 parameters", "[4]", "load(root"],
        "no optimizer": ["no optimizer 'optimizer' for this AdamW, but none", "load(root, model)"],
        "extra": ["extra['loop']['f'] (Linear) cannot be saved", "state_dict()"],
        "extra of one": ["on rank 0", "extra (Linear) cannot be saved"],
        "steps": ["rank 0 step 0", "rank 1 step 1", "Pass the same root and step"],
        "state of a piece": [".history is a Tensor", "whole_parameters=True"],
    }
    assert said.keys() == expected.keys()
    for name, parts in expected.items():
        for text in said[name]:
            for part in parts:
                assert part in text, f"{name}: {text}"
