"""Updates made ahead of the step: the same to the last bit, whatever the loop does before it."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from onecopy import Config, Offload
from onecopy.errors import ConfigError
from onecopy.events import Event
from onecopy.planner import room
from tests import models
from tests.pool import Pool

STEPS = 7
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], lr=0.01),
}


def host(*, ahead: bool, **settings: Any) -> Offload:
    """States on the host."""
    return Offload(optimizer="host", gradients="host", speculative_step=ahead, **settings)


def patient() -> Any:
    """Inside, the step waits for the thread, even for what it could make itself meanwhile."""
    return patch.object(Future, "cancel", lambda _: False)


def digest(value: Any) -> str:
    """Of a tensor's bits, or of a number."""
    if not isinstance(value, Tensor):
        return repr(value)
    value = value.detach().cpu().contiguous()
    bits = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(bits).hexdigest()}"


class Loop:
    """A model in training, and what became of updates that were made ahead."""

    def __init__(self, optimizer: str, *, ahead: bool, name: str = "gpt", **settings: Any) -> None:
        self.found: Counter[str] = Counter()
        self.model = models.build(name)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        offload = host(ahead=ahead, **settings.pop("offload", {}))
        with warnings.catch_warnings():
            # Muon leaves some parameters to nobody.
            warnings.filterwarnings("ignore", message=".*trainable parameters are in no optimizer")
            onecopy.shard(
                self.model, self.optimizer, offload=offload, sinks=(self._note,), **settings
            )
        self.number = 0

    def _note(self, event: Event) -> None:
        if event.kind == "speculation":
            self.found[event.what] += 1

    @property
    def pieces(self) -> list[nn.Parameter]:
        """The optimizer's."""
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def backward(self, factor: float = 1.0, *, sync: bool = True) -> float:
        """Of the next batch; its number."""
        batch = models.batch("gpt", self.number, dist.get_rank())
        self.number += 1
        with nullcontext() if sync else onecopy.no_sync(self.model):
            (models.loss(self.model, batch) * factor).backward()
        return float(self.number)

    def step(self) -> None:
        """One, with the gradients that there are."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digests(self) -> list[str]:
        """Of masters and optimizer states, and of the values that the model computes with."""
        found = [digest(piece) for piece in self.pieces]
        for piece in self.pieces:
            state = self.optimizer.state.get(piece, {})
            found += [f"{name} {digest(value)}" for name, value in state.items()]
        with onecopy.full_parameters(self.model):
            found += [digest(value) for value in self.model.parameters()]
        return found


# What a loop may do between backward and step.


def clip(loop: Loop) -> None:
    """By a norm that is exceeded."""
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)


def clip_values(loop: Loop) -> None:
    """Each by itself."""
    if any(parameter.grad is not None for parameter in loop.model.parameters()):
        torch.nn.utils.clip_grad_value_(loop.model.parameters(), 1e-3)


def scale(loop: Loop) -> None:
    """By hand."""
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def write_gradient(loop: Loop) -> None:
    """Another one in its place."""
    parameter = next(loop.model.parameters())
    parameter.grad = torch.ones_like(parameter)


def write_piece_gradient(loop: Loop) -> None:
    """In a way that torch does not count."""
    for piece in loop.pieces:
        if piece.grad is not None:
            piece.grad.data.mul_(2)


def write_piece(loop: Loop) -> None:
    """Decay by hand, uncounted."""
    for piece in loop.pieces:
        piece.data.mul_(0.9)


def replace_piece(loop: Loop) -> None:
    """The same with other memory."""
    for piece in loop.pieces:
        piece.data = piece.data * 0.9


def write_parameter(loop: Loop) -> None:
    """The user's, where there is one to be written into."""
    with onecopy.full_parameters(loop.model), torch.no_grad():
        next(loop.model.parameters()).mul_(1.5)


def write_state(loop: Loop) -> None:
    """Uncounted, through numpy."""
    for state in loop.optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.numel():
                array = value.numpy()
                array[...] = array * 0.5


def replace_state(loop: Loop) -> None:
    """By other tensors."""
    for state in loop.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = value * 0.5


def reload(loop: Loop) -> None:
    """What it has, halved."""
    saved = loop.optimizer.state_dict()
    for state in saved["state"].values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = value * 0.5
    loop.optimizer.load_state_dict(saved)


def set_rate(loop: Loop) -> None:
    """As a scheduler does, in place where the rate is a tensor."""
    for group in loop.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5


def accumulate(loop: Loop) -> None:
    """One backward more than before."""
    loop.backward()


def read_gradient(loop: Loop) -> None:
    """Its values, whole."""
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.abs()


def read_state(loop: Loop) -> None:
    """All of it, and keep it as it is."""
    loop.optimizer.state_dict()
    loop.model.state_dict()


def restart(loop: Loop) -> None:
    """What has arrived counts for nothing."""
    loop.optimizer.zero_grad()
    loop.backward()


CHANGES: list[Callable[[Loop], None]] = [
    clip,
    clip_values,
    scale,
    write_gradient,
    write_piece_gradient,
    write_piece,
    replace_piece,
    write_parameter,
    write_state,
    replace_state,
    reload,
    set_rate,
    accumulate,
]
HARMLESS: list[Callable[[Loop], None]] = [read_gradient, read_state, restart]


def one_change(change: Callable[[Loop], None], stage: int) -> tuple[bool, Counter[str]]:
    """Whether a change before the third step counts as without speculation; what became of it."""
    loops = [Loop("momentum", ahead=ahead, stage=stage) for ahead in (True, False)]
    with patient():
        for loop in loops:
            for _ in range(2):
                loop.backward()
                loop.step()
            loop.found.clear()
            loop.backward()
            change(loop)
            loop.step()
    mine, others = (loop.digests() for loop in loops)
    return mine == others, loops[0].found


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_made_anew(pool: Pool, change: Callable[[Loop], None]) -> None:
    """Gradients, masters, states and settings, in ways that torch counts and in others."""
    total: Counter[str] = Counter()
    for is_equal, found in pool.run(2, one_change, change, CHANGES.index(change) % 4):
        assert is_equal
        total += found
    # A rank that owns nothing of what was touched may keep its own.
    assert total["redone"] + total["dropped"] > 0, total


def nothing_changes(stage: int, optimizer: str, max_norm: float | None) -> tuple[bool, Any, bool]:
    """Whether values are equal, what became of updates, and whether states stay who they are."""
    loops = [
        Loop(optimizer, ahead=ahead, stage=stage, max_grad_norm=max_norm) for ahead in (True, False)
    ]
    with patient():
        for loop in loops:
            for number in range(4):
                loop.backward()
                if not max_norm:
                    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e6)
                loop.step()
                if number == 1:
                    before = [dict(loop.optimizer.state[piece]) for piece in loop.pieces]
                    loop.found.clear()
            after = [loop.optimizer.state[piece] for piece in loop.pieces]
            stays = all(
                now[name] is value
                for was, now in zip(before, after, strict=True)
                for name, value in was.items()
                if isinstance(value, Tensor)
            )
            assert all(type(piece) is nn.Parameter for piece in loop.pieces)
    return loops[0].digests() == loops[1].digests(), loops[0].found, stays


@pytest.mark.parametrize(
    ("stage", "optimizer", "max_norm"),
    [
        (0, "momentum", None),
        (1, "nesterov", 1e6),
        (2, "adamw_fused", 1e6),
        (3, "amsgrad", None),
        (3, "muon", None),
    ],
)
def test_updates_are_kept(pool: Pool, stage: int, optimizer: str, max_norm: float | None) -> None:
    """All of them, where gradients are measured and not clipped; states stay the same tensors."""
    for is_equal, found, stays in pool.run(2, nothing_changes, stage, optimizer, max_norm):
        assert is_equal
        assert stays
        assert set(found) == {"kept"}, found


def accumulating() -> list[Counter[str]]:
    """What becomes of updates, step by step, with two backwards a step."""
    loop, found = Loop("momentum", ahead=True), []
    with patient():
        for _ in range(3):
            loop.found.clear()
            loop.backward()
            loop.backward()
            loop.step()
            found.append(Counter(loop.found))
    return found


def test_the_number_of_backwards_is_learned(pool: Pool) -> None:
    """After one step only the last one counts."""
    for first, *later in pool.run(2, accumulating):
        assert set(first) == {"dropped"}
        assert all(set(found) == {"kept"} for found in later)


def act(loop: Loop, choice: random.Random, precision: str) -> None:
    """One step of a loop that does anything; each rank and each run chooses the same."""
    for _ in range(choice.choice([1, 1, 1, 2, 3])):
        overflows = precision == "fp16" and choice.random() < 0.15
        loop.backward(float("inf") if overflows else 1.0, sync=choice.random() < 0.8)
    for change in choice.sample([*CHANGES, *HARMLESS], choice.choice([0, 0, 0, 1, 1, 2])):
        change(loop)
    if choice.random() < 0.5:
        max_norm = choice.choice([0.05, 1e9])
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), max_norm, foreach=False)
    what = choice.random()
    if what < 0.1:
        loop.optimizer.step(loop.backward)
    elif what < 0.9:
        loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=choice.random() < 0.8)


def anything(
    optimizer: str, stage: int, precision: str, seed: int, settings: dict[str, Any]
) -> tuple[bool, Counter[str]]:
    """Whether a run that does anything is the same with speculation; what became of updates."""
    digests = []
    with patient() if seed % 2 else nullcontext():
        for ahead in (True, False):
            choice = random.Random(seed)
            loop = Loop(
                optimizer,
                ahead=ahead,
                stage=stage,
                precision=precision,
                **settings,
            )
            for change in (None, None, clip):
                loop.backward()
                if change is not None:
                    change(loop)
                loop.step()
            for _ in range(STEPS):
                act(loop, choice, precision)
            digests.append(loop.digests())
            if ahead:
                found = loop.found
    return digests[0] == digests[1], found


def draw(seed: int) -> tuple[Any, ...]:
    """Settings of a run."""
    choice = random.Random(seed)
    stage = choice.randrange(4)
    offload: dict[str, Any] = {"fraction": choice.choice([1.0, 1.0, 0.6])}
    if stage == 3 and choice.random() < 0.4:
        offload["parameters"] = "host"
    settings = {"offload": offload, "max_grad_norm": choice.choice([None, None, 0.5, 1e9])}
    return (
        choice.choice(list(OPTIMIZERS)),
        stage,
        choice.choice(["fp32", "bf16", "fp16"]),
        choice.randrange(1000),
        settings,
    )


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_whatever_a_loop_does(
    pool: Pool, sampled: Callable[..., list[int]], world: int, seed: int
) -> None:
    """Random loops, to the last bit of masters and states."""
    total: Counter[str] = Counter()
    # One that is sure to keep some, and to make some anew.
    plain: tuple[Any, ...] = ("momentum", 2, "fp32", 2 * seed + 1, {})
    for drawn in [plain, *(draw(seed + 100 * number + world) for number in sampled(range(6), 2))]:
        for is_equal, found in pool.run(world, anything, *drawn):
            assert is_equal, drawn
            total += found
    assert total["kept"], total
    assert total["redone"], total


def save_in_between(folder: Path) -> list[str]:
    """A checkpoint between backward and step: what it brings back, beside what was there."""
    loop = Loop("momentum", ahead=True, stage=2)
    with patient():
        for _ in range(2):
            loop.backward()
            loop.step()
        before = loop.digests()
        loop.backward()
        onecopy.save(folder, loop.model, loop.optimizer)
        loop.step()
    onecopy.load(folder, loop.model, loop.optimizer)
    return [one for one in loop.digests() if one not in before]


def test_a_checkpoint_has_the_states_of_before(pool: Pool, tmp_path: Path) -> None:
    for changed in pool.run(2, save_in_between, tmp_path):
        assert not changed


def overflowing() -> tuple[list[str], list[str], Counter[str]]:
    """A step that is skipped."""
    loop = Loop("adamw_fused", ahead=True, precision="fp16")
    loop.backward()
    loop.step()
    before = loop.digests()
    loop.found.clear()
    loop.backward(float("inf") if dist.get_rank() else 1.0)
    loop.step()
    return before, loop.digests(), loop.found


def test_an_overflow_leaves_everything(pool: Pool) -> None:
    """On all ranks, of which one had found it."""
    for before, after, found in pool.run(2, overflowing):
        assert before == after
        assert set(found) == {"dropped"}


def needed(kind: str) -> tuple[int, int]:
    """Bytes of host memory that are said to be needed more with speculation, and elements owned."""
    found: list[Any] = []

    def keep(*arguments: Any) -> Any:
        found.append(room_of(*arguments))
        return found[-1]

    room_of = room.room_of
    with patch.object(room, "room_of", keep):
        loops = [Loop(kind, ahead=ahead, stage=2) for ahead in (True, False)]
    with_it, without = (one.needs[2][0] for one in found)
    return with_it - without, sum(piece.numel() for piece in loops[0].pieces)


@pytest.mark.parametrize(("kind", "width"), [("momentum", 8), ("adamw_fused", 12)])
def test_the_second_copy_is_counted(pool: Pool, kind: str, width: int) -> None:
    """Where `shard` looks for room."""
    for more, numel in pool.run(2, needed, kind):
        # Slices are padded, and as long as gradients with their flags.
        assert width * numel <= more <= 1.1 * width * numel + 4096


# Optimizers of users' own.


class Noisy(torch.optim.SGD):
    """Draws random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """SGD with noise."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad + torch.randn_like(one), alpha=-group["lr"])


class Counts(torch.optim.SGD):
    """Keeps a list."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> Any:
        """SGD that grows."""
        self.seen.append(1)
        return super().step(closure)


class Holds(torch.optim.SGD):
    """Has an object of which nobody knows what it does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.held = random.Random(0)


class Nested(torch.optim.SGD):
    """Keeps lists as states."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """SGD with all gradients so far."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one].setdefault("all", []).append(one.grad.clone())
                    one.sub_(sum(self.state[one]["all"]), alpha=group["lr"])


def own_optimizer(kind: type[torch.optim.Optimizer]) -> tuple[bool, str]:
    """Whether it goes on as without, and what was said."""
    values, said = [], ""
    for ahead in (True, False):
        torch.manual_seed(0)
        OPTIMIZERS["own"] = lambda p: kind(p, lr=0.01)  # type: ignore[call-arg]
        loop = Loop("own", ahead=ahead)
        with warnings.catch_warnings(record=True) as caught, patient():
            warnings.simplefilter("always")
            for _ in range(3):
                loop.backward()
                loop.step()
        said += " ".join(str(one.message) for one in caught)
        seen = getattr(loop.optimizer, "seen", None)
        values.append((loop.digests(), seen, digest(torch.rand(1))))
    # Lists hold other tensors in each run.
    return [one[1:] for one in values] == [values[0][1:]] * 2 and _plain(values), said


def _plain(values: list[Any]) -> bool:
    first, second = ([one for one in value[0] if not one.startswith("all")] for value in values)
    return first == second


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Noisy, "random numbers"),
        (Counts, "in place"),
        (Holds, "Random in attributes['held']"),
        (Nested, "a list as 'all'"),
    ],
)
def test_what_cannot_be_made_ahead(
    pool: Pool, kind: type[torch.optim.Optimizer], words: str
) -> None:
    """Is made at the step, with one warning."""
    for is_equal, said in pool.run(2, own_optimizer, kind):
        assert is_equal
        assert said.count("speculative_step") == 1
        assert words in said


class Fails(torch.optim.SGD):
    """Raises where a gradient is large."""

    def step(self, closure: Any = None) -> Any:
        """SGD for the brave."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.grad.abs().max() > 1e3:
                    raise ValueError("the optimizer is not well")
        return super().step(closure)


def failing() -> bool:
    """An error in the thread, of which the step knows nothing; then one in the step."""
    OPTIMIZERS["own"] = lambda p: Fails(p, lr=0.01)
    loop = Loop("own", ahead=True)
    loop.backward(1e9)
    clip(loop)
    loop.step()
    loop.backward(1e9)
    with pytest.raises(ValueError, match="not well"):
        loop.step()
    loop.optimizer.zero_grad()
    loop.backward()
    loop.step()
    return True


def test_an_error_of_the_optimizer_is_one_of_the_step(pool: Pool) -> None:
    """And training goes on after it."""
    assert pool.run(2, failing) == [True, True]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Offload(speculative_step=True), 'optimizer="host"'),
        (
            lambda: Offload(optimizer="nvme", gradients="nvme", path="/tmp", speculative_step=True),
            'optimizer="host"',
        ),
        (lambda: Offload(optimizer="host", speculative_step=True), 'gradients="host"'),
        (lambda: host(ahead=True, delayed_update=True), "Leave one of both out"),
        (
            lambda: Config(offload=host(ahead=True), step_in_backward=True),
            "Leave one of both out",
        ),
        (lambda: host(ahead=3), "True or False"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_go_together(make: Callable[[], Any], words: str) -> None:
    """Is refused with what to do."""
    with pytest.raises(ConfigError, match=words):
        make()
