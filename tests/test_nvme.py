"""States on disk: the same training to the last bit, and no memory for what rests there."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy
import onecopy.handle
from onecopy import Offload
from onecopy.report.memory import measure, padded_numel
from onecopy.report.states import StateBytes
from tests import models
from tests.optimizers import Replacing
from tests.pool import Pool
from tests.runs import Plan, Run, full_values, train
from tests.test_offload import WAYS, check_equal

# Each unit of the models below is several chunks.
SMALL = 1 << 20
WORLDS, STAGES = (1, 2, 3), (0, 1, 2, 3)
OPTIMIZERS = ("momentum", "sgd", "adamw_fused", "adamw")


def on_disk(path: Path, gradients: str = "nvme", parameters: str = "device") -> Offload:
    """Masters and optimizer states there, the others where it is said."""
    return Offload(
        optimizer="nvme",
        gradients=gradients,
        parameters=parameters,
        path=str(path),
        buffer_bytes=SMALL,
    )


def both(plan: Plan, offload: Offload, reference: Any = None) -> tuple[Run, Run]:
    """The same training with states on the device (or as `reference` says), and on disk."""
    settings = {**plan.settings, **({} if reference is None else {"offload": reference})}
    plain = train(replace(plan, settings=settings))
    return plain, train(replace(plan, settings={**plan.settings, "offload": offload}))


TIERS = ("device", "host", "nvme")
CASES = [
    *itertools.product(WORLDS, STAGES, OPTIMIZERS, TIERS, ("device",)),
    *itertools.product(WORLDS, (3,), OPTIMIZERS, TIERS, ("host", "nvme")),
]


@pytest.mark.sampled(
    "name, world, stage, optimizer, gradients, parameters",
    [(name, *case) for name in ("gpt", "tied", "unused", "frozen") for case in CASES],
    8,
    always=[
        ("tied", 2, 3, "adamw_fused", "nvme", "nvme"),
        ("gpt", 2, 1, "momentum", "nvme", "device"),
        ("gpt", 1, 0, "adamw_fused", "host", "device"),
        ("unused", 2, 2, "adamw", "device", "device"),
        ("frozen", 1, 1, "sgd", "device", "device"),
        ("tied", 2, 3, "momentum", "device", "nvme"),
        ("gpt", 2, 0, "adamw", "device", "device"),
    ],
)
def test_fp32_training_is_the_same(  # noqa: PLR0913
    pool: Pool,
    tmp_path: Path,
    name: str,
    world: int,
    stage: int,
    optimizer: str,
    gradients: str,
    parameters: str,
) -> None:
    """With accumulation, local sums and clipping."""
    plan = Plan(
        name=name, stage=stage, optimizer=optimizer, backwards=2, no_sync=True, max_grad_norm=0.5
    )
    check_equal(pool.run(world, both, plan, on_disk(tmp_path, gradients, parameters)))
    assert not list(tmp_path.iterdir()), "files were left"


@pytest.mark.sampled(
    "way, gradients, parameters",
    list(itertools.product(WAYS, ("device", "nvme"), TIERS)),
    9,
    # Each way somewhere.
    always=list(zip(WAYS, itertools.cycle(("device", "nvme")), itertools.cycle(TIERS))),
)
def test_with_other_settings(
    pool: Pool, tmp_path: Path, way: str, gradients: str, parameters: str
) -> None:
    """Whatever else is switched on."""
    plan = Plan(name="gpt", stage=3, optimizer="momentum", settings=WAYS[way])
    check_equal(pool.run(2, both, plan, on_disk(tmp_path, gradients, parameters)))


@pytest.mark.sampled("gradients", TIERS, 2, always=["device"])
def test_a_part_of_the_units(pool: Pool, tmp_path: Path, gradients: str) -> None:
    """The others are stepped on the device, in the same step."""
    offload = replace(on_disk(tmp_path, gradients), fraction=0.6)
    plan = Plan(name="gpt", stage=2, backwards=2, max_grad_norm=0.5)
    check_equal(pool.run(2, both, plan, offload))


@pytest.mark.sampled("gradients", TIERS, 2, always=["device"])
def test_bf16_means_are_rounded_as_on_the_way_to_the_host(
    pool: Pool, tmp_path: Path, gradients: str
) -> None:
    """Once for each copy: those on the device as sums, those below as they come."""
    at_host = Offload(optimizer="host", gradients="device" if gradients == "device" else "host")
    plan = Plan(name="gpt", stage=3, backwards=2, max_grad_norm=0.5, settings={"precision": "bf16"})
    check_equal(pool.run(2, both, plan, on_disk(tmp_path, gradients), at_host))


def states(stage: int, precision: str | None, offload: Offload) -> tuple[StateBytes, int, int, int]:
    """Bytes after the second backward; elements of this rank's slices, of its means, of all."""
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    onecopy.shard(model, optimizer, stage=stage, precision=precision, offload=offload)
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    models.loss(model, models.batch("gpt", 1, 0)).backward()
    engine = onecopy.handle.of(model).engine
    engine.units[0].slice.disk.files.lane.drain()
    owned = sum(unit.slice.own.numel() for unit in engine.units)
    means = sum(unit.gradients.mean.value.numel() for unit in engine.units)
    return measure(model, optimizer), owned, means, padded_numel(model)


@pytest.mark.parametrize(
    ("stage", "precision", "gradients"),
    [
        *itertools.product((0, 2, 3), (None, "bf16"), ("nvme",)),
        *[(0, None, "device"), (3, "bf16", "device")],
    ],
)
def test_what_lies_where(
    pool: Pool, tmp_path: Path, stage: int, precision: str | None, gradients: str
) -> None:
    """Nothing of what is on disk has memory between backward and step."""
    offload = on_disk(tmp_path, gradients, "nvme" if stage == 3 else "device")
    for found, owned, means, whole in pool.run(2, states, stage, precision, offload):
        values = owned * 2 if stage == 3 and precision else 0
        # Masters and two states, which have no padding; means have flags beside each slice.
        gone, kept = (4 * means, 0) if gradients == "nvme" else (0, 4 * means)
        assert found.nvme - (12 * owned + gone + values) in range(-owned // 2, 1), found
        assert found.host == 0
        in_use = (0 if stage == 3 else whole) * (2 if precision else 4)
        assert found.device == in_use + kept, found


def comes_down(stage: int, precision: str, offload: Offload) -> tuple[list[int], int, bool]:
    """Bytes of each copy of a step, of how many elements, and whether means lie apart."""
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(96, 128, bias=False), torch.nn.Linear(128, 96, bias=False)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(
        model, optimizer, stage=stage, precision=precision, offload=offload, units=("0", "1")
    )
    found: list[int] = []

    def note(event: onecopy.events.Event) -> None:
        if event.kind == "swap" and event.what == "down":
            found.append(event.num_bytes)

    onecopy.events.add_sink(model, note)
    for _ in range(2):
        # Of a sum of means what is on the way is still each element once.
        model(torch.ones(2, 96)).square().mean().backward()
    assert not found, "a gradient came down before the step"
    means = [unit.gradients.mean for unit in onecopy.handle.of(model).engine.units]
    on_device = [mean.tensors[0] for mean in means]
    optimizer.step()
    # The pieces are on disk, and their gradients stand for what is elsewhere.
    are_apart = all(
        one is not None and one.untyped_storage().nbytes() == one.nbytes and mean.resting
        for one, mean in zip(on_device, means, strict=True)
    )
    return found, sum(piece.numel() for piece in optimizer.param_groups[0]["params"]), are_apart


@pytest.mark.sampled(
    "stage, precision, width",
    [(stage, *width) for stage in STAGES for width in (("fp32", 4), ("bf16", 2))],
    4,
    always=[(0, "fp32", 4), (3, "bf16", 2)],
)
def test_means_come_down_once_a_step_in_chunks(
    pool: Pool, tmp_path: Path, stage: int, precision: str, width: int
) -> None:
    """As they are on the wire, whatever the size of a unit."""
    offload = replace(on_disk(tmp_path, "device"), buffer_bytes=1)
    for found, numel, are_apart in pool.run(2, comes_down, stage, precision, offload):
        assert sum(found) == width * numel
        assert max(found) == width * 4096, "longer than a chunk"
        assert are_apart


def too_large(path: str) -> None:
    """Whole parameters of 16 KiB, and chunks of 4 KiB."""
    offload = Offload(optimizer="nvme", gradients="nvme", path=path, buffer_bytes=3 << 12)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer, stage=1, whole_parameters=True, offload=offload)


def test_whole_parameters_must_fit_into_the_buffers(pool: Pool, tmp_path: Path) -> None:
    """Before the first step, with the size that would do."""
    first, *_ = pool.run(2, too_large, str(tmp_path), expect_failures=True)
    assert "weight" in str(first)
    assert "buffer_bytes=196608" in str(first)


def held_gradients(path: str, gradients: str) -> list[bool]:
    """Gradients of the pieces, held across zero_grad and the next backward."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = Offload(optimizer="nvme", gradients=gradients, path=path)
    onecopy.shard(model, optimizer, stage=2, offload=offload)
    held, copies = [], []
    for step in range(3):
        model(torch.full((2, 64), 1.0 + step)).square().sum().backward()
        pieces = optimizer.param_groups[0]["params"]
        held.append([piece.grad for piece in pieces])
        copies.append([gradient.clone() for gradient in held[-1]])
        optimizer.zero_grad()
    return [
        torch.equal(one, other)
        for ones, others in zip(held, copies, strict=True)
        for one, other in zip(ones, others, strict=True)
    ]


@pytest.mark.parametrize("gradients", ["device", "nvme"])
def test_a_gradient_that_is_held_keeps_its_values(
    pool: Pool, tmp_path: Path, gradients: str
) -> None:
    """As in plain PyTorch, although the next one takes its place."""
    for found in pool.run(2, held_gradients, str(tmp_path), gradients):
        assert len(found) >= 3
        assert all(found)


def written(offload: Offload | None) -> list[torch.Tensor]:
    """Weights where the loop reads and writes this rank's gradients in every way."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(70, 70) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    onecopy.shard(model, optimizer, stage=2, offload=offload, units=("0", "1", "2", "3"))
    pieces = optimizer.param_groups[0]["params"]
    views = []
    for step in range(3):
        for _ in range(2):
            model(torch.full((2, 70), 0.1 + step)).square().mean().backward()
            # Held over the next backward, and the step.
            views.append(pieces[0].grad.view(-1)[:3])
        pieces[1].grad.mul_(2)
        pieces[2].grad = torch.full_like(pieces[2], 0.5)
        sum(piece.grad.sum() for piece in pieces)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        next(model.parameters()).grad.add_(0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    values = [value.clone() for value in full_values(model).values()]
    return [*values, *(view.clone() for view in views)]


@pytest.mark.parametrize("gradients", ["device", "nvme"])
def test_gradients_that_the_loop_writes_count(pool: Pool, tmp_path: Path, gradients: str) -> None:
    """Where they rest, in whatever order they are looked at."""
    offload = replace(on_disk(tmp_path, gradients), buffer_bytes=1)
    plain, swapped = pool.run(2, written, None), pool.run(2, written, offload)
    for one, other in zip(plain, swapped, strict=True):
        assert all(map(torch.equal, one, other))


class Exchange(torch.optim.Optimizer):
    """Two states that change their places, and one of the step before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for piece in self.param_groups[0]["params"]:
            if piece.grad is None:
                continue
            state = self.state[piece]
            if not state:
                state.update(a=torch.zeros_like(piece), b=torch.ones_like(piece))
                state.update(now=torch.zeros_like(piece), before=torch.zeros_like(piece))
            state["a"].add_(piece.grad)
            state["a"], state["b"] = state["b"], state["a"]
            state["now"], state["before"] = piece.grad.clone(), state["now"]
            piece.sub_(state["a"] + state["before"], alpha=0.01)


def exchange(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [Exchange(model.parameters())]


def replacing(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [Replacing(model.parameters())]


def two_of_one_kind(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """For the same parameters."""
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=by) for by in (0.5, 0.9)]


def trained_by(make: Any, offload: Offload | None) -> list[torch.Tensor]:
    """Weights after a few steps, in units of several chunks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 99), torch.nn.Tanh(), torch.nn.Linear(99, 65))
    optimizers = make(model)
    onecopy.shard(model, optimizers, stage=3, offload=offload)
    for step in range(4):
        model(torch.full((2, 64), 0.1 * step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return list(model.state_dict().values())


@pytest.mark.parametrize("make", [exchange, replacing, two_of_one_kind])
def test_each_state_has_a_place_of_its_own(pool: Pool, tmp_path: Path, make: Any) -> None:
    """Where an optimizer exchanges tensors, and where another one has states of the same names."""
    offload = replace(on_disk(tmp_path), buffer_bytes=1)
    plain, swapped = pool.run(2, trained_by, make, None), pool.run(2, trained_by, make, offload)
    for one, other in zip(plain, swapped, strict=True):
        assert all(map(torch.equal, one, other))


class Hidden(torch.optim.Optimizer):
    """Momentum in an attribute, and counters that are changed in place."""

    def __init__(self, parameters: Any, *, hides: bool) -> None:
        super().__init__(parameters, {"lr": 0.05, "count": torch.zeros(1)})
        self.buffers: dict[Any, torch.Tensor] = {}
        self.box = {"steps": 0}
        self.hides = hides

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.box["steps"] += 1
        for group in self.param_groups:
            group["count"] += 1
            for one in group["params"]:
                if one.grad is None:
                    continue
                kept = self.buffers if self.hides else self.state[one]
                buffer = kept.setdefault(one if self.hides else "buffer", torch.zeros_like(one))
                buffer.mul_(0.9).add_(one.grad)
                one.sub_(buffer * group["lr"] / group["count"] / self.box["steps"])


def hidden(path: str, hides: str) -> list[list[float]]:
    """Losses with states on the device, in host memory and on disk, and the counters."""
    found = []
    for offload in (None, Offload(optimizer="host"), on_disk(Path(path))):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(3)))
        optimizer = Hidden(model.parameters(), hides=bool(hides))
        onecopy.shard(model, optimizer, stage=2, units=("0", "1", "2"), offload=offload)
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 40)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        count = optimizer.param_groups[0]["count"]
        found.append([*losses, float(count), float(optimizer.box["steps"])])
    return found


def test_counters_advance_once_a_step(pool: Pool, tmp_path: Path) -> None:
    """Also those that are changed in place: in a tensor of a group, in a dict."""
    for found in pool.run(2, hidden, str(tmp_path), ""):
        assert found[0] == found[1] == found[2]
        assert found[0][-2:] == [3.0, 3.0]


def test_states_outside_of_state_are_refused(pool: Pool, tmp_path: Path) -> None:
    """They would be new ones in each chunk."""
    first, *_ = pool.run(2, hidden, str(tmp_path), "hides", expect_failures=True)
    assert "'buffers'" in str(first)
    assert "self.state[parameter]" in str(first)
