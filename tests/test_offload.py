"""States in host memory: the same training to the last bit, and only the bytes that must move."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
import onecopy.handle
from onecopy import Offload, Precision
from onecopy.errors import ConfigError
from onecopy.report.memory import measure
from onecopy.report.states import StateBytes
from tests import models
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, Run, full_values, train

HOST = Offload(optimizer="host", gradients="host")
ALL_HOST = Offload(optimizer="host", gradients="host", parameters="host")
# The optimizer on the other side of what it needs.
MEANS = Offload(gradients="host")
MASTERS = Offload(optimizer="host")
VALUES = Offload(parameters="host")
MEANS_AND_VALUES = Offload(gradients="host", parameters="host")
HALF = Offload(optimizer="host", gradients="host", fraction=0.5)
WORLDS, STAGES = (1, 2, 3), (0, 1, 2, 3)


def both(plan: Plan, offload: Offload | str) -> tuple[Run, Run]:
    """The same training with states on the device, and in host memory."""
    offloaded = replace(plan, settings={**plan.settings, "offload": offload})
    return train(plan), train(offloaded)


def check_equal(runs: list[tuple[Run, Run]]) -> None:
    """Losses, norms and values of all ranks, to the last bit."""
    for plain, offloaded in runs:
        assert offloaded.losses == plain.losses
        assert offloaded.norms == plain.norms
        for name, value in plain.parameters.items():
            assert torch.equal(offloaded.parameters[name], value), name


CASES = [
    *itertools.product(WORLDS, STAGES, ("momentum", "adamw_fused"), (HOST, HALF)),
    *itertools.product(WORLDS, (3,), ("momentum", "adamw"), (ALL_HOST, "cpu", VALUES)),
    *itertools.product(WORLDS, STAGES, ("momentum", "adamw_fused"), (MEANS, MASTERS)),
]


@pytest.mark.sampled(
    "name, world, stage, optimizer, offload",
    [(name, *case) for name in ("gpt", "tied") for case in CASES],
    7,
    always=[
        ("tied", 2, 3, "momentum", ALL_HOST),
        ("gpt", 2, 1, "adamw_fused", HOST),
        ("gpt", 1, 0, "momentum", HOST),
        ("tied", 2, 1, "adamw_fused", MEANS),
        ("gpt", 2, 3, "momentum", MASTERS),
        ("tied", 2, 3, "momentum", VALUES),
    ],
)
def test_fp32_training_is_the_same(
    pool: Pool, name: str, world: int, stage: int, optimizer: str, offload: Offload | str
) -> None:
    """With accumulation, local sums and clipping."""
    plan = Plan(
        name=name, stage=stage, optimizer=optimizer, backwards=2, no_sync=True, max_grad_norm=0.5
    )
    check_equal(pool.run(world, both, plan, offload))


WAYS: dict[str, dict[str, Any]] = {
    "step in backward": {"step_in_backward": True, "max_grad_norm": 0.5},
    "whole parameters": {"whole_parameters": True},
    "kept gathered": {"keep_gathered": ("blocks.1",)},
    "no prefetch": {"prefetch_bytes": 0},
    "bf16 on fp32 wires": {"precision": Precision(compute="bf16", reduce="fp32")},
    "bf16 gradients": {"precision": Precision(compute="bf16", gradient="bf16")},
}


PLACES = {
    "host": HOST,
    "all host": ALL_HOST,
    "means and values": MEANS_AND_VALUES,
    "masters": MASTERS,
}


@pytest.mark.sampled(
    "way, place",
    list(itertools.product(WAYS, PLACES)),
    9,
    # Each way somewhere.
    always=list(zip(WAYS, itertools.cycle(PLACES))),
)
def test_with_other_settings(pool: Pool, way: str, place: str) -> None:
    """Whatever else is switched on."""
    plan = Plan(name="gpt", stage=3, optimizer="momentum", settings=WAYS[way])
    check_equal(pool.run(2, both, plan, PLACES[place]))


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_means_travel_in_bf16(pool: Pool, stage: int) -> None:
    """So the training is that of means that are kept in bf16."""
    kept = Plan(
        name="gpt",
        stage=stage,
        settings={"precision": Precision(compute="bf16", gradient="bf16")},
    )
    offloaded = replace(kept, settings={"precision": "bf16", "offload": HOST})
    for one, other in zip(pool.run(2, train, kept), pool.run(2, train, offloaded), strict=True):
        assert one.losses == other.losses
        for name, value in one.parameters.items():
            assert torch.equal(other.parameters[name], value), name


def fp16_with_overflow(offload: Offload | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The scale is found by the first steps, which overflow."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["momentum"](model)
    precision = Precision(compute="fp16", reduce="fp32")
    onecopy.shard(model, optimizer, stage=3, precision=precision, offload=offload)
    scales = []
    for step in range(6):
        loss = models.loss(model, models.batch("gpt", step, 0))
        (loss * (1e5 if step < 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(onecopy.handle.of(model).engine.loss_scale.value)
    return scales, full_values(model)


@pytest.mark.parametrize("offload", [HOST, MEANS, MASTERS], ids=["host", "means", "masters"])
def test_fp16_overflow_is_found_on_the_host(pool: Pool, offload: Offload) -> None:
    """The same steps are skipped."""
    for (scales, values), (own_scales, own_values) in zip(
        pool.run(2, fp16_with_overflow, None), pool.run(2, fp16_with_overflow, offload), strict=True
    ):
        assert scales == own_scales
        assert scales[1] < scales[0], "no step was skipped"
        assert all(torch.equal(own_values[name], value) for name, value in values.items())


def swapped_bytes(
    stage: int, offload: Offload, precision: str, backwards: int
) -> tuple[Counter[str], int]:
    """Bytes moved in one step, and elements that this rank owns."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw_fused"](model)
    onecopy.shard(model, optimizer, stage=stage, offload=offload, precision=precision)
    moved: Counter[str] = Counter()

    def count(event: onecopy.events.Event) -> None:
        if event.kind == "swap":
            moved[event.what] += event.num_bytes

    for step in range(3):
        if step == 2:
            onecopy.events.add_sink(model, count)
        for _ in range(backwards):
            models.loss(model, models.batch("gpt", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    units = onecopy.handle.of(model).engine.units
    return moved, sum(unit.layout.slice_numels[unit.slice.rank] for unit in units)


@pytest.mark.sampled(
    "stage, precision, width",
    [(stage, *width) for stage in STAGES for width in (("fp32", 4), ("bf16", 2))],
    4,
    always=[(0, "fp32", 4), (3, "bf16", 2)],
)
def test_bytes_that_move(pool: Pool, stage: int, precision: str, width: int) -> None:
    """Each owned gradient down once a backward, each value up once a step: ZeRO-Offload, 3.3."""
    for moved, numel in pool.run(2, swapped_bytes, stage, HOST, precision, 2):
        assert moved == {"down": 2 * width * numel, "up": width * numel}
    # Sums of means move once a step: down rounded as on the wire, up with all of their digits.
    for moved, numel in pool.run(2, swapped_bytes, stage, MASTERS, precision, 2):
        assert moved == {"down": width * numel, "up": width * numel}
    for moved, numel in pool.run(2, swapped_bytes, stage, MEANS, precision, 2):
        assert moved == {"down": 2 * width * numel, "up": 4 * numel}


def test_bytes_that_move_where_parameters_are_on_the_host(pool: Pool) -> None:
    """Up for each gather: one in forward, one in backward; the last unit is gathered once."""
    (moved, numel), _ = pool.run(2, swapped_bytes, 3, ALL_HOST, "bf16", 1)
    assert moved["down"] == 2 * numel
    assert 2 * numel < moved["up"] <= 2 * 2 * numel
    (others, numel), _ = pool.run(2, swapped_bytes, 3, VALUES, "bf16", 1)
    assert others == moved, "values go down once a step, instead of gradients"


def places(stage: int, offload: Offload) -> list[tuple[bool, bool]]:
    """Of each unit whether its master lies in the flat buffer, and whether it is moved."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage, offload=offload)
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    found = []
    for unit in onecopy.handle.of(model).engine.units:
        first, last = unit.flat.data_ptr(), unit.flat.data_ptr() + unit.flat.nbytes
        master = unit.slice.master
        found.append((first <= master.data_ptr() < last, unit.slice.lane is not None))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_masters_lie_in_memory_of_their_own(pool: Pool, stage: int) -> None:
    """Without an accelerator, too: bytes are really copied."""
    for found in pool.run(2, places, stage, HOST):
        assert found
        assert all(not is_inside and has_lane for is_inside, has_lane in found)
    is_offloaded = [has_lane for _, has_lane in pool.run(2, places, stage, HALF)[0]]
    assert any(is_offloaded)
    assert not all(is_offloaded)


def held(stage: int, offload: Offload) -> tuple[StateBytes, StateBytes]:
    """Bytes of states after a backward, and what they would be on the host if all were there."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw_fused"](model)
    onecopy.shard(model, optimizer, stage=stage, precision="bf16", offload=offload)
    for step in range(2):
        optimizer.step()
        optimizer.zero_grad()
        models.loss(model, models.batch("gpt", step, 0)).backward()
    units = onecopy.handle.of(model).engine.units
    owned = [(unit.layout, unit.slice.rank) for unit in units]
    on_host = StateBytes(
        parameters=4 * sum(layout.slice_numels[rank] for layout, rank in owned),
        # With a flag for each parameter.
        gradients=4 * sum(layout.strides[rank] for layout, rank in owned),
        # Padding has none.
        optimizer=8 * sum(one.numel() for unit in units for one in unit.slice.pieces.values()),
    )
    return measure(model, optimizer), on_host


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_on_the_device_and_on_the_host(pool: Pool, stage: int) -> None:
    """bf16 with Adam: 16 bytes an owned element on the host, 2 an element on the device."""
    for states, on_host in pool.run(2, held, stage, HOST):
        assert states.host == on_host.total
        assert states.optimizer == on_host.optimizer
        # Values in 2 bytes where masters have 4; whole at stages 0 to 2, an owned slice at 3.
        values = on_host.parameters // 2 * (2 if stage in (1, 2) else 1)
        # Gradients of whole units stay between steps at stage 1 alone.
        buffers = states.gradients - on_host.gradients
        assert (buffers > 0) == (stage == 1)
        assert states.device == values + buffers
    for states, on_host in pool.run(2, held, 3, ALL_HOST):
        assert (states.device, states.host) == (0, on_host.total)


@pytest.mark.sampled("stage", STAGES, 2, always=[3])
def test_bytes_where_the_optimizer_is_on_the_other_side(pool: Pool, stage: int) -> None:
    """What is said to be on the host is, and nothing is there twice."""
    plain = [states.total for states, _ in pool.run(2, held, stage, Offload())]
    for (states, each), total in zip(pool.run(2, held, stage, MEANS), plain, strict=True):
        assert states.host == each.gradients
        assert states.total == total
    for (states, each), total in zip(pool.run(2, held, stage, MASTERS), plain, strict=True):
        assert states.host == each.parameters + each.optimizer
        # And the values that the device computes with, where they are not whole anyway.
        assert states.total == total + (each.parameters // 2 if stage == 3 else 0)
    if stage == 3:
        for (states, each), total in zip(pool.run(2, held, 3, VALUES), plain, strict=True):
            assert states.host == each.parameters // 2
            assert states.total == total + states.host


def left_by_zero_grad(offload: Offload) -> tuple[int, int]:
    """Bytes of gradients before and after it, at a stage that keeps no buffers."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=3, offload=offload)
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    optimizer.step()
    before = measure(model, optimizer).gradients
    optimizer.zero_grad()
    return before, measure(model, optimizer).gradients


@pytest.mark.parametrize("offload", [HOST, MEANS, MASTERS], ids=["host", "means", "masters"])
def test_zero_grad_gives_the_memory_of_gradients_back(pool: Pool, offload: Offload) -> None:
    """Wherever they were, so that the next forward has it."""
    ((before, after),) = pool.run(1, left_by_zero_grad, offload)
    assert before > 0
    assert after == 0


def save_and_go_on(root: str, before: Offload | None, after: Offload | None) -> bool:
    """Train two steps, save, load into another placement, train one more; and without a break."""

    def make(offload: Offload | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = models.build("gpt")
        optimizer = OPTIMIZERS["adamw"](model)
        onecopy.shard(model, optimizer, stage=3, offload=offload)
        return model, optimizer

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
        for number in numbers:
            models.loss(model, models.batch("gpt", number, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make(before)
    steps(model, optimizer, 0, 1)
    onecopy.save(root, model, optimizer)
    steps(model, optimizer, 2)
    other, its_optimizer = make(after)
    onecopy.load(root, other, its_optimizer)
    steps(other, its_optimizer, 2)
    values, others = full_values(model), full_values(other)
    return all(torch.equal(others[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, ALL_HOST), (HOST, None), (HALF, HOST), (MEANS, MASTERS), (MASTERS, VALUES)],
    ids=str,
)
def test_checkpoints_do_not_know_of_it(
    pool: Pool, tmp_path: Path, before: Offload | None, after: Offload | None
) -> None:
    """A run goes on in another placement."""
    assert pool.run(2, save_and_go_on, str(tmp_path), before, after) == [True, True]


def written_inside(write: Callable[[nn.Module], None], stage: int, offload: Offload) -> bool:
    """Values that a user writes are in the next forward, the next step and the plain model."""
    plain = models.build("gpt")
    model = models.build("gpt")
    optimizer, reference = OPTIMIZERS["momentum"](model), OPTIMIZERS["momentum"](plain)
    onecopy.shard(model, optimizer, stage=stage, offload=offload)
    for step in range(3):
        with onecopy.full_parameters(model), torch.no_grad():
            write(model)
        with torch.no_grad():
            write(plain)
        models.loss(model, models.batch("gpt", step, 0)).backward()
        models.loss(plain, models.batch("gpt", step, 0)).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    onecopy.unshard(model)
    states_are_equal = all(
        torch.equal(optimizer.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"])
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return states_are_equal and all(
        torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


def clamp(model: nn.Module) -> None:
    """Change some values of every parameter."""
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    "offload", [HOST, ALL_HOST, VALUES, MASTERS], ids=["host", "all host", "values", "masters"]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_writes_reach_masters_on_the_host(pool: Pool, stage: int, offload: Offload) -> None:
    """And unshard brings everything back."""
    if stage == 0 and offload.parameters == "host":
        pytest.skip("parameters stay on the device at stage 0")
    assert pool.run(1, written_inside, clamp, stage, offload) == [True]


def test_unfrozen_parameters_are_offloaded(pool: Pool) -> None:
    """Frozen ones stay on the device, which alone needs them."""
    assert pool.run(2, unfreeze_half_way) == [[False, True]] * 2


def unfreeze_half_way() -> list[bool]:
    """Whether a block is offloaded while it is frozen, and afterwards."""
    model = models.build("gpt")
    block = model.get_submodule("blocks.1")
    block.requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=3, offload=HOST)
    (unit,) = [one for one in onecopy.handle.of(model).engine.units if one.module is block]
    found = []
    for step in range(2):
        models.loss(model, models.batch("gpt", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(unit.slice.lane is not None)
        block.requires_grad_(True)
        models.loss(model, models.batch("gpt", step, 0))
    return found


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "hots", "gradients": "host"}, ["'hots'", "'host'"]),
        ({"fraction": 1.5}, ["fraction=1.5", "from 0 to 1"]),
        ({"optimizer": "nvme", "gradients": "nvme"}, ["offload.path", "a folder"]),
        (
            {"optimizer": "host", "delayed_update": True},
            ["delayed_update", 'gradients="host"'],
        ),
        ({"optimizer": "host", "gradients": "nvme"}, ["gradients='nvme'", 'gradients="host"']),
        ({"parameters": "nvme"}, ["parameters='nvme'", 'optimizer="nvme"']),
        ({"path": "/x"}, ["path='/x'", 'optimizer="nvme"']),
        ({"buffer_bytes": 0}, ["buffer_bytes=0", "1 or more"]),
        ({"pinned_bytes": 4096}, ["pinned_bytes=4096", "16384 at least"]),
    ],
)
def test_what_cannot_be_meant(settings: dict[str, Any], words: list[str]) -> None:
    """Refused with what to write instead."""
    with pytest.raises(ConfigError) as caught:
        Offload(**settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def refused(settings: dict[str, Any]) -> str:
    """What shard says."""
    model = models.build("gpt")
    with pytest.raises(ConfigError) as caught:
        onecopy.shard(model, OPTIMIZERS["sgd"](model), **settings)
    assert onecopy.handle.find(model) is None
    return str(caught.value)


def test_what_does_not_go_together(pool: Pool) -> None:
    """Before anything has changed."""
    (text,) = pool.run(1, refused, {"stage": 2, "offload": ALL_HOST})
    assert "stage 2" in text
    assert "stage=3" in text
    split = Precision(compute="bf16", master="bf16+16")
    (text,) = pool.run(1, refused, {"stage": 2, "offload": HOST, "precision": split})
    assert "bf16+16" in text


def test_in_toml() -> None:
    """As a table of its own."""
    config = onecopy.Config(stage=2, offload=HALF, precision="bf16")
    assert onecopy.Config.from_toml(config.to_toml()) == config
    assert "[offload]" in config.to_toml()
    on_disk = onecopy.Config(offload="nvme:/path")
    assert onecopy.Config.from_toml(on_disk.to_toml()) == on_disk
    assert on_disk.offload == Offload(
        optimizer="nvme", gradients="nvme", parameters="nvme", path="/path"
    )
    with pytest.raises(ConfigError, match="nvme:/path/to/folder"):
        onecopy.Config(offload="nvme")
    with pytest.raises(ConfigError, match=r"offload\.fractoin.*offload\.fraction"):
        onecopy.Config.from_toml("stage = 2\n[offload]\nfractoin = 0.5\n")
