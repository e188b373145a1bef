"""States in host memory of a model on an accelerator: no operation mixes both."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onecopy
import onecopy.handle
from onecopy import Offload, Precision
from onecopy.comm.groups import ImaginedWorld
from onecopy.core.offload import HostLane
from onecopy.report.memory import measure
from tests.fake_accelerator import Stream, fake_accelerator
from tests.pool import Pool

HOST = Offload(optimizer="host", gradients="host")
PLACES = {
    "host": HOST,
    "all host": Offload(optimizer="host", gradients="host", parameters="host"),
    "means": Offload(gradients="host"),
    "masters": Offload(optimizer="host"),
    "values": Offload(parameters="host"),
    "a part": Offload(optimizer="host", gradients="host", fraction=0.6),
    "delayed": Offload(optimizer="host", gradients="host", delayed_update=1),
    "ahead": Offload(optimizer="host", gradients="host", speculative_step=True),
}
SETTINGS: list[dict[str, Any]] = [
    {"precision": "bf16", "max_grad_norm": 1.0},
    {"precision": "fp16"},
    {"precision": Precision(compute="bf16", gradient="bf16")},
    {"whole_parameters": True, "keep_gathered": ("1",)},
    {"step_in_backward": True, "max_grad_norm": 1.0},
]
Loop = Callable[[nn.Module, torch.optim.Optimizer, str], None]


def backward(model: nn.Module, device: str) -> None:
    """A loss and its gradients."""
    model(torch.randn(2, 8, device=device)).sum().backward()


def clip(model: nn.Module, _: torch.optim.Optimizer, device: str) -> None:
    """By torch's functions, and by numbers that lie on the device."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    onecopy.clip_grad_norm_(model, 1.0, float("inf"))
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(torch.ones((), device=device) * 2)


def write_gradients(model: nn.Module, _: torch.optim.Optimizer, device: str) -> None:
    """Whole ones."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(1)
        parameter.grad = parameter.grad * 2
    with onecopy.full_parameters(model, grads=True):
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
            parameter.data.mul_(2)


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    """Local sums, zeros, and gradients that somebody has kept."""
    with onecopy.no_sync(model):
        backward(model, device)
    backward(model, device)
    kept = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad()
    for gradient in kept:
        assert gradient is not None
        gradient.add(1)
    backward(model, device)
    optimizer.zero_grad(set_to_none=False)
    backward(model, device)


def look(model: nn.Module, optimizer: torch.optim.Optimizer, _: str) -> None:
    """Whatever reads states."""
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    measure(model, optimizer)


def freeze(model: nn.Module, _: torch.optim.Optimizer, device: str) -> None:
    """Or the other way round."""
    block = model.get_submodule("1")
    block.requires_grad_(not next(block.parameters()).requires_grad)


def nothing(*_: Any) -> None:
    """But the steps."""


def train(device: str, stage: int, offload: Offload, loop: Loop, settings: dict[str, Any]) -> None:
    """Two steps on one of four ranks."""
    model, optimizer = build(device, ImaginedWorld(4, native=True), stage, offload, settings)
    for _ in range(2):
        backward(model, device)
        loop(model, optimizer, device)
        optimizer.step()
        optimizer.zero_grad()
    onecopy.flush(model)
    offloaded = [
        (piece, optimizer.state[piece])
        for unit in onecopy.handle.of(model).engine.units
        if unit.slice.lane is not None
        for piece in unit.slice.pieces.values()
        if piece in optimizer.state
    ]
    assert offloaded
    for piece, state in offloaded:
        assert all(one.is_cpu == piece.is_cpu for one in state.values() if one.dim())
        assert piece.is_cpu == (offload.optimizer == "host")


def pinned(device: str, offload: Offload, width: int) -> list[int]:
    """Bytes of each piece of pinned memory that training takes."""
    found: list[int] = []
    empty = torch.empty

    def count(*sizes: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*sizes, **kwargs)
        if kwargs.get("pin_memory"):
            found.append(made.nbytes)
        return made

    torch.empty = count
    try:
        model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        world = ImaginedWorld(2, native=True)
        onecopy.shard(model, optimizer, mesh=world, stage=3, units=("*",), offload=offload)
        for _ in range(2):
            model(torch.randn(2, width, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.empty = empty
    return found


def pinned_memory_is_bounded(device: str) -> None:
    """Whatever moves, in pieces of constant size that are taken once."""
    for place in PLACES.values():
        # A slice of a unit has 16 KiB.
        found = pinned(device, replace(place, pinned_bytes=4 * 4096), 90)
        assert found == [4096] * 4, found
        found = pinned(device, replace(place, pinned_bytes=100_000), 90)
        assert found == [16384] * 4, found
        # No more than a small model's units can use.
        found = pinned(device, place, 8)
        assert found == [4096] * 4, found


def back(device: str) -> None:
    """A fused optimizer counts steps on the device of its parameters."""
    settings = {"whole_parameters": True}
    model, optimizer = build(device, ImaginedWorld(1), 3, HOST, settings)
    backward(model, device)
    optimizer.step()
    optimizer.zero_grad()
    onecopy.unshard(model)
    for parameter in model.parameters():
        states = optimizer.state[parameter].values()
        assert {one.device for one in states} == {torch.device(device)}


def build(
    device: str, world: ImaginedWorld, stage: int, offload: Offload, settings: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model."""
    blocks = [nn.Sequential(nn.Linear(8, 8, device=device), nn.GELU()) for _ in range(2)]
    ends = nn.Linear(8, 8, device=device), nn.Linear(8, 1, device=device)
    model = nn.Sequential(ends[0], *blocks, ends[1])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    onecopy.shard(
        model, optimizer, mesh=world, stage=stage, offload=offload, units=("1", "2"), **settings
    )
    return model, optimizer


def cases() -> list[tuple[int, str, Loop, dict[str, Any]]]:
    """Everything with everything would take minutes."""
    loops = (clip, write_gradients, accumulate, look, freeze)
    found: list[tuple[int, str, Loop, dict[str, Any]]] = []
    for place in PLACES:
        stages = (1, 3) if PLACES[place].parameters == "device" else (3,)
        found += [(stage, place, loop, {}) for stage in stages for loop in loops]
        found += [
            (stage, place, nothing, settings)
            for stage in stages
            for settings in SETTINGS
            if not (place in ("delayed", "ahead") and "step_in_backward" in settings)
        ]
    return found


def through_pinned_memory(folder: str) -> None:
    """Real values take the way of an accelerator: piece by piece through pinned memory."""
    # Files take what is in real memory, and nothing else. A unit is several chunks.
    on_disk = Offload(optimizer="nvme", path=folder, buffer_bytes=1)
    empty, begin = torch.empty, HostLane.__init__

    def take(*sizes: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*sizes, **kwargs)

    def with_stream(self: HostLane, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._stream = Stream()  # type: ignore[assignment]

    torch.empty = take  # type: ignore[assignment]
    torch.accelerator.current_stream = lambda device=None: Stream()  # type: ignore[assignment,return-value]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment]
    HostLane.__init__ = with_stream  # type: ignore[method-assign]
    plain = trained(None)
    for name, place in {**PLACES, "on disk": on_disk}.items():
        if name != "delayed":
            found = trained(replace(place, pinned_bytes=4 * 4096))
            assert all(map(torch.equal, found, plain)), name
    print("all are equal")


def trained(offload: Offload | None) -> list[torch.Tensor]:
    """Parameters after two steps, of units several times as long as a part."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(70, 70) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    onecopy.shard(model, optimizer, mesh=ImaginedWorld(1), stage=3, units=("*",), offload=offload)
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(3, 70)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    onecopy.unshard(model)
    return [parameter.detach() for parameter in model.parameters()]


def test_values_survive_pinned_memory(pool: Pool, tmp_path: Path) -> None:
    """In whatever pieces they go through it."""
    start = "from tests.test_offload_devices import through_pinned_memory as run"
    code = f"{start}; run({str(tmp_path)!r})"
    done = pool.run_in_subprocess(code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all are equal" in done.stdout


def main(chosen: list[int]) -> None:
    """Print which of the chosen cases fail."""
    every = cases()
    with fake_accelerator() as device:
        back(device)
        pinned_memory_is_bounded(device)
        for stage, place, loop, settings in (every[number] for number in chosen):
            try:
                train(device, stage, PLACES[place], loop, settings)
            except Exception:
                print(f"stage {stage}, {place}, {loop.__name__}, {settings}", file=sys.stderr)
                traceback.print_exc(limit=-4)
    print("all were tried")


def test_no_operation_mixes_devices(pool: Pool, sampled: Callable[..., list[int]]) -> None:
    """Of what loops do, in every place of states."""
    numbers = range(len(cases()))
    # Every fourth: so each place meets some loops and settings, and each of these some places.
    chosen = sampled(numbers, 40, always=numbers[::4])
    done = pool.run_in_subprocess(f"from tests.test_offload_devices import main; main({chosen})")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all were tried" in done.stdout
    failed = [line for line in done.stderr.splitlines() if line.startswith("stage ")]
    assert not failed, done.stderr[-3000:]
