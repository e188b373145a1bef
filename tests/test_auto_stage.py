"""`stage="auto"`: what the planner says of a real model, against ranks that train it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
import onecopy.handle
from onecopy import Config, Offload, Precision
from onecopy.comm.groups import ImaginedWorld
from onecopy.comm.meshes import world_group
from onecopy.core.partition import find_units
from onecopy.errors import ConfigError, MismatchError
from onecopy.memory.live_tensors import LiveTensors
from onecopy.planner import choose
from onecopy.planner.choose import ROOM, Choice, choose_stage
from onecopy.planner.optimizers import num_states
from onecopy.report import memory
from tests.pool import Pool, RankFailed
from tests.test_planner_memory import Tall

STAGES = (0, 1, 2, 3)
PLENTY = 10**12


def build(**_: Any) -> nn.Module:
    """The model of most tests here, 3.3 MB in fp32, always with the same values."""
    torch.manual_seed(0)
    return Tall(frozen=True)


def optimizers_of(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """One of `kind` over what is trained; Muon with AdamW for what it does not take."""
    trained = [one for one in model.parameters() if one.requires_grad]
    if kind != "muon":
        return [
            torch.optim.SGD(trained, lr=0.01, momentum=0.9, fused=True)
            if kind == "sgd"
            else torch.optim.AdamW(trained, lr=0.01, fused=True, amsgrad=kind == "amsgrad")
        ]
    matrices = [one for one in trained if one.ndim == 2]
    rest = [one for one in trained if one.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01, fused=True)]


def considered(
    model: nn.Module, made: Sequence[torch.optim.Optimizer], ranks: int, config: Config
) -> Choice:
    """What `shard` would consider on so many ranks."""
    known = {id(p): one for one in made for group in one.param_groups for p in group["params"]}

    def optimizer_of(parameter: nn.Parameter) -> torch.optim.Optimizer | None:
        return known.get(id(parameter))

    specs = find_units(model, config, optimizer_of)
    _, choice = choose_stage(config, world_group(ImaginedWorld(ranks)), [specs], optimizer_of)
    return choice


def of_tall(ranks: int, memory: int = PLENTY, **settings: Any) -> Choice:
    """The same of this file's model with AdamW."""
    model = build()
    made = optimizers_of(model, "adamw")
    return considered(model, made, ranks, Config(stage="auto", memory=memory, **settings))


def test_nodes_are_considered_where_there_are_several() -> None:
    """Of what fits, what sends least across nodes is taken."""

    def of_nodes(memory: int, *sizes: int) -> Choice:
        model = build()
        config = Config(stage="auto", memory=memory, precision="bf16")
        specs = find_units(model, config, lambda _: None)
        ranks = iter(range(sum(sizes)))
        nodes = [[next(ranks) for _ in range(size)] for size in sizes]
        world = world_group(ImaginedWorld(sum(sizes)))
        _, choice = choose_stage(config, world, [specs], lambda _: None, nodes)
        return choice

    plenty = of_nodes(PLENTY, 4, 4)
    assert list(plenty.memory) == [0, 1, 2, 3, "hpz", "hfsdp", "mics"]
    assert plenty.stage == 2
    # Less than stage 2 needs, and as much as hpZ does: 3 messages across become 2.
    need = plenty.memory["hpz"].total
    assert plenty.memory[3].total < need < plenty.memory[2].total
    tight = of_nodes(int(need / ROOM) + 1, 4, 4)
    assert tight.stage == "hpz"
    assert 'stage="auto" is stage hpz (node/world/world)' in tight.reason
    assert of_nodes(int(plenty.memory[3].total / ROOM) + 1, 4, 4).stage == 3
    # Nodes that differ, and one node, have numbers only.
    assert list(of_nodes(PLENTY, 4, 3).memory) == list(of_nodes(PLENTY, 8).memory) == [0, 1, 2, 3]


# What is said of a rank's memory ------------------------------------------------------------------


@dataclass
class Found:
    """What one rank held, and what was said before."""

    held: memory.StateBytes
    peak: int
    choice: Choice


def _backward(model: nn.Module) -> None:
    model(torch.arange(4)).float().square().mean().backward()


def trained(stage: int, world: int, kind: str, settings: dict[str, Any]) -> Found:
    """A rank that has trained for three steps, of which the last was watched."""
    with LiveTensors() as live:
        model = build()
        made = optimizers_of(model, kind)
        config = Config(stage="auto", memory=PLENTY, **settings)
        choice = considered(model, made, world, config)
        onecopy.shard(model, made, stage=stage, **settings)
        for step in range(3):
            if step == 2:
                live.reset_peak()
            _backward(model)
            for optimizer in made:
                optimizer.step()
            model.zero_grad()
        peak = live.peak_bytes
        _backward(model)
        states = [memory.measure(model, optimizer) for optimizer in made]
        without = memory.measure(model).host
    held = memory.StateBytes(
        parameters=states[0].parameters,
        gradients=states[0].gradients,
        optimizer=sum(one.optimizer for one in states),
        host=without + sum(one.host - without for one in states),
    )
    return Found(held, peak, choice)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("adamw", {}),
    "amsgrad": ("amsgrad", {"precision": "bf16"}),
    "sgd": ("sgd", {"precision": "bf16", "prefetch_bytes": 10**9}),
    "no prefetch": ("adamw", {"precision": "bf16", "prefetch_bytes": 0}),
    "kept gathered": ("adamw", {"precision": "bf16", "keep_gathered": ("blocks.1", "blocks.3")}),
    "step in backward": ("adamw", {"precision": "bf16", "step_in_backward": True}),
    "whole matrices": ("muon", {"precision": "bf16"}),
    "whole matrices, offloaded": ("muon", {"precision": "bf16", "offload": "cpu"}),
    "offload": ("adamw", {"precision": "bf16", "offload": "cpu"}),
    "lean": ("adamw", {"precision": Precision(compute="bf16", master="bf16+16")}),
}


@pytest.mark.sampled(
    "world, stage, case",
    list(itertools.product((1, 2, 3, 4), STAGES, CASES)),
    14,
    always=[(3, 3, case) for case in CASES] + [(2, 1, "whole matrices"), (2, 2, "kept gathered")],
)
def test_a_rank_holds_what_the_choice_was_made_from(
    pool: Pool, world: int, stage: int, case: str
) -> None:
    kind, settings = CASES[case]
    found = pool.run(world, trained, stage, world, kind, settings)
    planned = found[0].choice.memory[stage]
    fullest = max((one.held for one in found), key=lambda held: held.total)
    # A split master keeps a few exact values, and padding has no optimizer states.
    ties = 0.01 * planned.parameters if case == "lean" else 0
    padding = 3 * 4 * 9 * 16 * world
    for name in ("parameters", "gradients", "optimizer"):
        is_whole = kind == "muon"
        said = getattr(planned, name) + getattr(planned.host, name)
        difference = said - getattr(fullest, name)
        assert -ties <= difference <= (padding if name == "optimizer" or is_whole else 0), name
    values = 4 * 4 * (500 + 6 * (300 + 2 * 128))
    # Muon makes temporary tensors, in the size of a matrix.
    values += 4 * 4 * 128 * 500 if kind == "muon" else 0
    # Of whole matrices all three kinds are padded.
    assert 0 <= planned.host.total - fullest.host <= (3 if kind == "muon" else 1) * padding
    assert bool(planned.host.total) == ("offload" in settings)
    # What arrives in host memory is there beside it: twice, as it came and as it is added.
    values += 4 * 128 * 500 if "offload" in settings else 0
    for one in found:
        assert one.choice == found[0].choice
        assert one.peak <= planned.total + planned.host.total + 2 * values


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_plain", [True, False])
def test_states_of_an_optimizer_are_known_before_it_makes_them(name: str, is_plain: bool) -> None:
    parameter = nn.Parameter(torch.ones(8, 8))
    settings = {} if is_plain else OPTIMIZERS[name]
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **settings)
    planned, is_known = num_states(optimizer, [parameter])
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    state = optimizer.state[parameter].values()
    elements = sum(one.numel() for one in state if isinstance(one, torch.Tensor) and one.dim())
    assert is_known
    assert planned == -(-elements // 64)
    of_a_subclass = type("Own", (type(optimizer),), {})([parameter], lr=0.1, **settings)
    assert num_states(of_a_subclass, [parameter]) == (planned, True)


def test_states_of_other_optimizers_are_counted_or_assumed() -> None:
    parameter = nn.Parameter(torch.ones(8))

    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            self.state[parameter] = {"step": torch.ones(()), "a": torch.ones(8)}

    optimizer = Own([parameter], {})
    assert num_states(optimizer, [parameter]) == num_states(None, [parameter]) == (2, False)
    optimizer.step()
    assert num_states(optimizer, [parameter]) == (1, True)


# What is chosen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_stage_that_sends_least_of_those_that_fit(precision: str) -> None:
    needs = {n: one.total for n, one in of_tall(4, precision=precision).memory.items()}
    assert needs[3] < needs[2] < min(needs[0], needs[1])

    def chosen(room: int) -> int | None:
        return of_tall(4, memory=-(-room * ROOM.denominator // ROOM.numerator), **more).stage

    more = {"precision": precision}
    assert chosen(needs[0]) == chosen(needs[2]) == 2
    assert chosen(needs[2] - 2) == chosen(needs[3]) == 3
    assert of_tall(1, **more).stage == 0


def test_what_fits_nowhere_is_refused_with_the_number_of_ranks_that_would_do() -> None:
    memory = int(0.9 * of_tall(2).memory[3].total / ROOM)
    with pytest.raises(ConfigError, match=r"no stage fits on 2 ranks .* Stage 3 needs least") as no:
        of_tall(2, memory=memory)
    for part in ("parameters", "gradients", "optimizer states", "gathered units", "bf16"):
        assert part in str(no.value)
    assert "train on 4 ranks" in str(no.value)
    # Even a stage that sends less.
    assert of_tall(4, memory=memory).stage == 2
    with pytest.raises(ConfigError, match="no stage fits on 3 ranks"):
        of_tall(3, memory=memory // 2)


def test_what_lies_in_host_memory_does_not_count() -> None:
    """Devices that are too small for every stage have room for stage 2 with offload."""
    needs, offloaded = of_tall(4).memory, of_tall(4, offload="cpu").memory
    memory = -(-offloaded[2].total * ROOM.denominator // ROOM.numerator)
    assert offloaded[2].total < min(one.total for one in needs.values())
    with pytest.raises(ConfigError, match='offload="cpu"'):
        of_tall(4, memory=memory)
    found = of_tall(4, memory=memory, offload="cpu")
    assert found.stage == 2
    assert "in host memory" in found.reason
    everything = Offload(optimizer="host", gradients="host", parameters="host")
    assert set(of_tall(4, offload=everything).memory) == {3}
    with pytest.raises(ConfigError, match="Stage 3 needs least"):
        of_tall(4, memory=1000, offload=everything)


def test_the_cpu_needs_to_be_told() -> None:
    with pytest.raises(
        ConfigError, match=r'on the CPU: say what one rank may hold, memory="16GiB"'
    ):
        onecopy.shard(build(), stage="auto")


def lifecycle(folder: Path) -> list[str]:
    """Everything around a choice: announced, kept, saved, grown, undone and made again."""
    model = build()
    onecopy.shard(model, stage="auto", memory="1GB")
    optimizer = optimizers_of(model, "adamw")[0]
    # Attached later: settings are the first call's.
    onecopy.shard(model, optimizer, stage="auto", memory="1kB")
    stages = [onecopy.config_of(model).stage]
    assert onecopy.config_of(model).origin_of("stage").startswith('stage="auto" is stage 2')
    _backward(model)
    optimizer.step()
    model.zero_grad()
    onecopy.save(folder, model, optimizer, step=1)
    model.adapter = nn.Linear(4, 4)
    optimizer.add_param_group({"params": list(model.adapter.parameters())})
    onecopy.shard(model, optimizer)
    stages.append(onecopy.config_of(model).stage)
    onecopy.unshard(model)
    needs = of_tall(2).memory
    tight = (needs[2].total + needs[3].total) // 2
    onecopy.shard(model, optimizer, stage="auto", memory=int(tight / ROOM))
    stages.append(onecopy.config_of(model).stage)
    return [str(one) for one in stages]


def test_the_choice_lives_as_a_number(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, lifecycle, tmp_path) == [["2", "2", "3"]] * 2


def smallest(capacities: Sequence[int]) -> tuple[int | str, str]:
    """Devices of different sizes, as if they were there."""
    rank = torch.distributed.get_rank()
    measured, choose.available_bytes = choose.available_bytes, lambda _: capacities[rank]
    try:
        with onecopy.init_sharded():
            models = [build(), build()]
        optimizer = torch.optim.AdamW([p for one in models for p in one.parameters()])
        onecopy.shard(models, optimizer, stage="auto")
    finally:
        choose.available_bytes = measured
    stages = {onecopy.config_of(one).stage for one in models}
    assert len(stages) == 1
    return stages.pop(), onecopy.config_of(models[0]).to_toml()


def test_the_smallest_device_decides_for_all_models_of_a_call(pool: Pool) -> None:
    needs = of_tall(2).memory
    # Two models need twice as much.
    tight = int((needs[2].total + needs[3].total) / ROOM)
    assert pool.run(2, smallest, [PLENTY, tight]) == [(3, "stage = 3\n")] * 2
    assert pool.run(2, smallest, [PLENTY, PLENTY]) == [(2, "stage = 2\n")] * 2


def divided() -> None:
    """Rank 1 wants something else."""
    stage: int | str = 2 if torch.distributed.get_rank() else "auto"
    onecopy.shard(build(), stage=stage, memory=None if stage == 2 else "1GB")


def test_ranks_that_want_different_things_are_told(pool: Pool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool.run(2, divided)
    for failure in failed.value.failures:
        assert MismatchError.__name__ in str(failure)
        assert "setting stage 'auto'" in str(failure)


def test_the_first_rank_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "onecopy")
    model = build()
    onecopy.shard(
        model,
        optimizers_of(model, "adamw"),
        mesh=ImaginedWorld(4),
        stage="auto",
        memory=int(of_tall(4).memory[3].total / ROOM) + 1,
    )
    (said,) = caplog.messages
    assert said.startswith('stage="auto" is stage 3 (P_os+g+p): model states and buffers take')
    assert "too much: stage 0 with" in said
    assert "stage 2 with" in said
    assert "assumed" not in said


# How it is written --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"stage": "Auto"}, "Did you mean 'auto'"),
        ({"stage": 2, "memory": "80GB"}, 'read for stage="auto" only, and stage is 2'),
        ({"stage": "auto", "memory": "lots"}, "'lots' is no size"),
        ({"stage": "auto", "memory": True}, "memory=True: give a size"),
        ({"stage": "auto", "memory": -1}, "memory=-1: give a size"),
        ({"stage": "auto", "memory": 1.5}, r"memory=1\.5: give a size"),
    ],
)
def test_mistakes_are_told(settings: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        Config(**settings)


def test_a_file_keeps_the_question() -> None:
    config = Config(stage="auto", memory="80GiB", precision="bf16")
    assert config.to_toml().startswith('stage = "auto"\nmemory = "80GiB"\n')
    assert Config.from_toml(config.to_toml()) == config
    assert config.capacity == 80 * 2**30
