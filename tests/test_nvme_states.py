"""States on disk are looked at, saved, loaded and replaced as if they were in memory."""

from __future__ import annotations

import copy
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from onecopy import Offload, Precision
from onecopy.memory.live_tensors import LiveTensors
from tests import models
from tests.pool import Pool
from tests.runs import OPTIMIZERS, full_values

# Of one unit that is on disk little more than this may be in memory.
BUFFER = 1 << 16


def on_disk(path: Path, parameters: str = "device", gradients: str = "nvme") -> Offload:
    return Offload(
        optimizer="nvme",
        gradients=gradients,
        parameters=parameters,
        path=str(path),
        buffer_bytes=BUFFER,
    )


def make(
    name: str, optimizer: str, stage: int = 3, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = models.build(name, 0)
    made = OPTIMIZERS[optimizer](model)
    onecopy.shard(model, made, stage=stage, **settings)
    return model, made


def train(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    """Every rank sees all batches, so that the number of ranks makes little difference."""
    losses = []
    for step in steps:
        loss = models.loss(model, models.batch(name, step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of this rank's, piece by piece."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in optimizer.state.get(piece, {}).items()
        }
        for group in optimizer.param_groups
        for piece in group["params"]
    ]


def check_states(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), name


def check_values(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


Outcome = tuple[list[float], dict[str, Tensor], list[dict[str, Any]]]


def outcome(losses: list[float], model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    return losses, full_values(model), states(optimizer)


def check_equal(outcomes: list[list[Outcome]]) -> None:
    """All ways of one rank, on every rank."""
    for first, *others in outcomes:
        for other in others:
            assert other[0] == first[0]
            check_values(other[1], first[1])
            check_states(other[2], first[2])


# Checkpoints ----------------------------------------------------------------------------------

SETTINGS = [
    ("gpt", "adamw", 3, {}),
    ("tied", "momentum", 1, {}),
    ("gpt", "adamw_fused", 2, {"precision": Precision(compute="bf16", gradient="bf16")}),
    ("convgn", "adamw", 3, {"whole_parameters": True}),
]


def save_both(
    root: Path, name: str, optimizer: str, stage: int, settings: dict[str, Any], offload: Offload
) -> list[Outcome]:
    found = []
    for folder, more in (("plain", {}), ("disk", {"offload": offload})):
        model, made = make(name, optimizer, stage, **settings, **more)
        losses = train(name, model, made, range(2))
        onecopy.save(root / folder, model, made)
        found.append(outcome(losses, model, made))
    return found


def load_all(
    root: Path, name: str, optimizer: str, stage: int, settings: dict[str, Any], offload: Offload
) -> list[Outcome]:
    """Into memory and onto disk, from either: into what is new, and what has trained on."""
    found = []
    for folder, steps, more in (
        ("plain", 0, {}),
        ("disk", 0, {}),
        ("plain", 0, {"offload": offload}),
        ("disk", 0, {"offload": offload}),
        ("plain", 1, {"offload": offload}),
    ):
        model, made = make(name, optimizer, stage, **settings, **more)
        train(name, model, made, range(7, 7 + steps))
        onecopy.load(root / folder, model, made)
        before = outcome([], model, made)
        losses = train(name, model, made, range(2, 4))
        after = outcome(losses, model, made)
        found.append(
            (
                losses,
                before[1] | {f"then {k}": v for k, v in after[1].items()},
                before[2] + after[2],
            )
        )
    return found


@pytest.mark.sampled(
    "number, world",
    [(number, world) for number in range(len(SETTINGS)) for world in (2, 3)],
    3,
    # One is loaded by another number of ranks than has saved it.
    always=[(0, 3), (2, 2)],
)
def test_checkpoints_go_from_tier_to_tier(
    pool: Pool, tmp_path: Path, number: int, world: int
) -> None:
    name, optimizer, stage, settings = SETTINGS[number]
    parameters = "nvme" if stage == 3 else "device"
    swap, root = tmp_path / "swap", tmp_path / "root"
    swap.mkdir()
    offload = on_disk(swap, parameters, "device" if number == 0 else "nvme")
    check_equal(pool.run(2, save_both, root, name, optimizer, stage, settings, offload))
    check_equal(pool.run(world, load_all, root, name, optimizer, stage, settings, offload))


def save_and_train(root: Path, offload: Offload | None) -> tuple[Outcome, Outcome]:
    """Save in the background while training changes everything; what was saved, and was then."""
    model, optimizer = make("gpt", "adamw", offload=offload)
    train("gpt", model, optimizer, range(2))
    for step in (2, 3):
        before = outcome([], model, optimizer)
        pending = onecopy.async_save(root / f"{offload is None}", model, optimizer)
        train("gpt", model, optimizer, range(step, step + 1))
        pending.wait()
        onecopy.load(pending.folder, model, optimizer)
        after = outcome([], model, optimizer)
    return before, after


def test_a_save_in_the_background_has_the_values_of_its_moment(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    check_equal(pool.run(2, save_and_train, tmp_path, on_disk(tmp_path / "swap", "nvme")))


# Whatever else looks at states ---------------------------------------------------------------


def copies(model: nn.Module) -> list[dict[str, Tensor]]:
    """What ways of reading a whole model give."""
    copied = copy.deepcopy(model)
    found = [dict(model.state_dict()), dict(copied.state_dict())]
    with onecopy.full_parameters(model):
        found.append({name: value.detach().clone() for name, value in model.named_parameters()})
    return found


def packed(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer's state_dict, through a file."""
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    return torch.load(io.BytesIO(stream.getvalue()))


def go_through(offload: Offload | None, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Train, and between the steps do all that reads, brings back or takes away states."""
    name = "tied"
    model, optimizer = make(name, "adamw", offload=offload, **settings)
    first = packed(optimizer)
    losses = train(name, model, optimizer, range(1))
    optimizer.load_state_dict(first)  # before the first step there was nothing
    losses += train(name, model, optimizer, range(1, 3))
    values, middle = copies(model), packed(optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    losses += train(name, model, optimizer, range(3, 5))
    optimizer.load_state_dict(middle)
    model.load_state_dict(weights)
    losses += train(name, model, optimizer, range(3, 5))
    values.append(full_values(model))
    before = states(optimizer)
    onecopy.unshard(model)
    whole = states(optimizer)
    values.append({name: value.detach().clone() for name, value in model.named_parameters()})
    # Partitioned anew, with an optimizer that has states already.
    onecopy.shard(model, stage=3, offload=offload, **settings)
    onecopy.shard(model, optimizer)
    losses += train(name, model, optimizer, range(5, 7))
    values.append(full_values(model))
    return losses, values, [before, whole, states(optimizer)]


def ways(settings: dict[str, Any], *offloads: Offload) -> list[tuple[Any, ...]]:
    return [go_through(offload, settings) for offload in (None, *offloads)]


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_everything_that_reads_or_replaces(
    pool: Pool, tmp_path: Path, precision: str | None
) -> None:
    settings = {"precision": Precision(compute=precision, gradient=precision)} if precision else {}
    offload = on_disk(tmp_path, "nvme", "nvme" if precision else "device")
    for plain, other in pool.run(2, ways, settings, offload):
        assert other[0] == plain[0]
        for mine, theirs in zip(other[1], plain[1], strict=True):
            check_values(mine, theirs)
        for one, them in zip(other[2], plain[2], strict=True):
            check_states(one, them)
    assert not list(tmp_path.iterdir()), "files were left"


def thaw(offload: Offload | None) -> Outcome:
    """Some is frozen at first, and gets a group of its own later."""
    model = models.build("gpt", 0)
    model.blocks[1].requires_grad_(False)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    onecopy.shard(model, optimizer, stage=3, offload=offload)
    losses = train("gpt", model, optimizer, range(2))
    model.blocks[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 3e-3})
    losses += train("gpt", model, optimizer, range(2, 4))
    return outcome(losses, model, optimizer)


def of_several(offload: Offload | None) -> Outcome:
    """Two models under one optimizer; the second has another one as well."""
    pair = [models.build("gpt", seed) for seed in (0, 1)]
    later = [*pair[1].blocks[2].parameters()]
    of_both = [p for model in pair for p in model.parameters() if all(p is not q for q in later)]
    optimizers = [torch.optim.AdamW(of_both, lr=1e-2), torch.optim.SGD(later, lr=0.1, momentum=0.9)]
    onecopy.shard(pair, optimizers, stage=3, offload=offload)
    losses = []
    for step in range(3):
        for model in pair:
            loss = models.loss(model, models.batch("gpt", step, dist.get_rank()))
            loss.backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = {
        f"{number}.{name}": value
        for number, model in enumerate(pair)
        for name, value in full_values(model).items()
    }
    return losses, values, [one for optimizer in optimizers for one in states(optimizer)]


def both_ways(run: Any, offload: Offload) -> list[Outcome]:
    return [run(None), run(offload)]


@pytest.mark.sampled(
    "run, parameters, gradients",
    list(itertools.product((thaw, of_several), ("device", "nvme"), ("device", "nvme"))),
    4,
    always=[
        (thaw, "device", "nvme"),
        (thaw, "nvme", "device"),
        (of_several, "nvme", "nvme"),
        (of_several, "device", "device"),
    ],
)
def test_what_is_trained_later_or_together(
    pool: Pool, tmp_path: Path, run: Any, parameters: str, gradients: str
) -> None:
    check_equal(pool.run(2, both_ways, run, on_disk(tmp_path, parameters, gradients)))


def of_tiles(root: Path, offload: Offload | None) -> list[Outcome]:
    """Tiles of a linear: trained, exported, and trained on from what was exported."""
    found = []
    for turn in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        onecopy.tile_linears(model, 4, modules="0")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        onecopy.shard(model, optimizer, stage=3, offload=offload)
        if turn:
            onecopy.load_pretrained(model, root / f"{offload is None} 0")
        for _ in range(2):
            model(torch.ones(2, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        onecopy.async_save(root / "run" / f"{offload is None} {turn}", model, optimizer).wait()
        onecopy.load(root / "run" / f"{offload is None} {turn}", model, optimizer)
        onecopy.export(model, root / f"{offload is None} {turn}")
        found.append(outcome([], model, optimizer))
    return found


def test_tiles_exports_and_weights_from_files(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    plain = pool.run(2, of_tiles, tmp_path, None)
    disk = pool.run(2, of_tiles, tmp_path, on_disk(tmp_path / "swap", "nvme"))
    for rank in range(2):
        check_equal([list(pair) for pair in zip(plain[rank], disk[rank], strict=True)])


# Memory ---------------------------------------------------------------------------------------

# Parts are large beside the plans, which grow with the number of tensors.
WIDTH = 512


def save_behind(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    onecopy.async_save(root, model, optimizer).wait()


def peaks(root: Path, depth: int, offload: Offload) -> list[int]:
    """Bytes above rest at the peak of a save, one in the background, and a load."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onecopy.shard(model, optimizer, stage=3, units=("?",), offload=offload)
    found: list[int] = []
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for call in (onecopy.save, save_behind, onecopy.load):
        with LiveTensors() as live:
            # Without their guards, or they would be brought in.
            with torch._C.DisableTorchFunctionSubclass():
                kept = [one for state in optimizer.state.values() for one in state.values()]
                live.watch([*kept, *optimizer.state])
            at_rest = live.num_bytes()
            call(root / str(depth), model, optimizer)
        found.append(live.peak_bytes - at_rest)
    assert all(
        type(value) is not Tensor or not value.dim()
        for state in optimizer.state.values()
        for value in state.values()
    ), "at rest"
    return found


def test_memory_does_not_grow_with_the_model(pool: Pool, tmp_path: Path) -> None:
    """Of a save and a load: a part of a tensor, and little more."""
    swap = tmp_path / "swap"
    swap.mkdir()
    for few, many in zip(
        *(pool.run(2, peaks, tmp_path, depth, on_disk(swap, "nvme")) for depth in (2, 8)),
        strict=True,
    ):
        assert max(many) < 4 * WIDTH * WIDTH, many
        assert max(many) < 1.1 * max(few), (few, many)
