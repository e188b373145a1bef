"""What broke prototypes of this design, each as a case that must equal plain PyTorch in stage 3.

A case is a model and what a user does with it in one step, up to and including the backwards. The
ranks run it on their own inputs; one process runs it for every rank in turn, adds the gradients up
in the order of the ranks and steps with a plain optimizer. Parameters must be equal bit for bit,
and after each step nothing may be left gathered.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.handle
from onecopy.core.unit import UnitState
from tests.pool import Pool
from tests.runs import full_values

WIDTH = 5
STEPS = 3


class Block(nn.Module):
    """Layers whose backward reads weights: linear, RMSNorm and PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.act = nn.PReLU(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.norm(self.linear(x)))


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Moment:
    """What a case may depend on."""

    x: Tensor
    step: int
    rank: int


Step = Callable[[nn.Module, Moment], Any]


@dataclass(frozen=True)
class Case:
    """A model, and one step with it."""

    step: Step
    build: Callable[[], nn.Module] = Net


def _loss(value: Tensor) -> Tensor:
    return value.square().mean()


def plain_step(model: nn.Module, now: Moment) -> None:
    """Forward, loss, backward."""
    _loss(model(now.x)).backward()


# Outputs that hooks cannot see ----------------------------------------------------------------


@dataclass
class Output:
    """A plain dataclass."""

    logits: Tensor
    extra: list[Tensor]


class Opaque:
    """Something that no traversal looks into."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class DataclassBlock(Block):
    """Returns a dataclass."""

    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x), [x * self.norm.weight])


class OpaqueBlock(Block):
    """Returns an object of a class of its own."""

    def forward(self, x: Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x))


class PenalisedBlock(Block):
    """Computes a loss on its own weights, and keeps it aside."""

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.linear.weight.square().sum() + self.act.weight.abs().sum()
        return super().forward(x)


class ReluInPlaceBlock(Block):
    """Its output is modified in place by the next module."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(super().forward(x) + 0.1)


class DataclassNet(Net):
    """Passes a block's dataclass on, and uses all of it."""

    def __init__(self) -> None:
        super().__init__(DataclassBlock)

    def forward(self, x: Tensor) -> Output:
        extra: list[Tensor] = []
        for block in self.blocks:
            output = block(x)
            x, extra = output.logits, extra + output.extra
        return Output(self.head(x), extra)


class OpaqueNet(Net):
    """Opaque objects inside and at the end."""

    def __init__(self) -> None:
        super().__init__(OpaqueBlock)

    def forward(self, x: Tensor) -> Opaque:
        for block in self.blocks:
            x = block(x).hidden
        return Opaque(self.head(x))


def _dataclass_step(model: nn.Module, now: Moment) -> None:
    output = model(now.x)
    (_loss(output.logits) + sum(_loss(one) for one in output.extra)).backward()


def _opaque_step(model: nn.Module, now: Moment) -> None:
    _loss(model(now.x).hidden).backward()


def _penalty_step(model: nn.Module, now: Moment) -> None:
    loss = _loss(model(now.x))
    (loss + 0.1 * sum(block.penalty for block in model.blocks)).backward()  # type: ignore[union-attr]


def _penalty_only_step(model: nn.Module, now: Moment) -> None:
    model(now.x)
    sum(block.penalty for block in model.blocks).backward()  # type: ignore[union-attr]


def _view_step(model: nn.Module, now: Moment) -> None:
    y = model(now.x).view(-1)
    y.add_(1)
    _loss(y).backward()


class ViewBlock(Block):
    """Returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1)


class ViewNet(Net):
    """Modifies the views that its blocks return."""

    def __init__(self) -> None:
        super().__init__(ViewBlock)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y.mul_(0.5).add_(1)
            x = y.view(-1, WIDTH)
        return self.head(x)


# Units that get no, some or late gradients ----------------------------------------------------


class TwoHeads(Net):
    """Returns more than a loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        for block in self.blocks:
            x = block(x)
        return [head(x) for head in self.heads]


class Lora(nn.Module):
    """A frozen linear and a trainable low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


class Sometimes(nn.Module):
    """Parameters with gradients on some ranks, in some backwards; one is cut by slice borders."""

    def __init__(self) -> None:
        super().__init__()
        self.first_rank = nn.Parameter(torch.randn(3))
        self.wide = nn.Parameter(torch.randn(70, WIDTH))
        self.last_rank = nn.Parameter(torch.randn(WIDTH))
        self.never = nn.Parameter(torch.randn(40))
        self.always = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, part: int) -> Tensor:
        x = torch.tanh(self.always(x))
        x = x * (1 + self.last_rank) if rank == part else x + 1
        x = x + self.wide.sum(0) if part == 1 else x
        return x * self.first_rank.sum() if rank == 0 and part == 0 else x


class SometimesNet(nn.Module):
    """Such blocks, and a linear that is always used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sometimes() for _ in range(2))
        self.always = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, part: int) -> Tensor:
        for block in self.blocks:
            x = block(x, rank, part)
        return self.always(x)


def _sometimes_step(model: nn.Module, now: Moment) -> None:
    for part in range(3):
        _loss(model(now.x, now.rank, part)).backward()


def _frozen_net() -> nn.Module:
    """All but the head is frozen: nothing before it has a backward."""
    model = Net()
    model.blocks.requires_grad_(False)
    return model


def _frozen_middle() -> nn.Module:
    model = Net()
    model.blocks[1].requires_grad_(False)
    model.head.requires_grad_(False)
    return model


def _some_outputs_step(model: nn.Module, now: Moment) -> None:
    _loss(model(now.x)[now.step % 2]).backward()


def _inputs_step(model: nn.Module, now: Moment) -> None:
    """Gradients for the head only, then for all."""
    head = [model.head.weight]
    _loss(model(now.x)).backward(inputs=head)  # type: ignore[arg-type]
    _loss(model(now.x + 1)).backward()


def _input_gradient_step(model: nn.Module, now: Moment) -> None:
    """A gradient with respect to the input, which no parameter gets, then a plain step."""
    x = now.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_loss(model(x)), x)
    assert gradient.abs().sum() > 0, "it is a real gradient"
    _loss(model(now.x + gradient)).backward()


def _no_backward_step(model: nn.Module, now: Moment) -> None:
    """A forward with a graph that nobody uses, one without a graph, then a plain step."""
    model(now.x)
    with torch.no_grad():
        model(now.x * 2)
    plain_step(model, now)


def _two_graphs_step(model: nn.Module, now: Moment) -> None:
    """Two forwards, then backwards in the other order."""
    first, second = _loss(model(now.x)), _loss(model(now.x - 1))
    second.backward()
    first.backward()


def _retained_step(model: nn.Module, now: Moment) -> None:
    loss = _loss(model(now.x))
    loss.backward(retain_graph=True)
    (2 * loss).backward()


# Second derivatives ---------------------------------------------------------------------------


def _penalty_of_gradient_step(model: nn.Module, now: Moment) -> None:
    """The gradient penalty of WGAN-GP: a backward through a gradient."""
    x = now.x.clone().requires_grad_()
    value = _loss(model(x))
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    (value + gradient.square().sum()).backward()


def _curvature_step(model: nn.Module, now: Moment) -> None:
    """A backward through the gradients of the parameters, as in meta-learning."""
    value = _loss(model(now.x))
    gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    (value + sum(one.square().sum() for one in gradients)).backward()


def _late_curvature_step(model: nn.Module, now: Moment) -> None:
    """As that, with a forward and a backward of its own in between."""
    value = _loss(model(now.x))
    gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    _loss(model(now.x + 1)).backward()
    (value + sum(one.square().sum() for one in gradients)).backward()


def _local_gradients_step(model: nn.Module, now: Moment) -> None:
    """autograd.grad gives each rank its own gradients; here they change the rank's input."""
    gradients = torch.autograd.grad(_loss(model(now.x)), list(model.parameters()))
    shift = torch.tanh(sum(one.sum() for one in gradients))  # type: ignore[arg-type]
    _loss(model(now.x + shift)).backward()


def _create_graph_step(model: nn.Module, now: Moment) -> None:
    """The graph lives until backward has returned; the next forward frees what it held."""
    _loss(model(now.x)).backward(create_graph=True)
    with torch.no_grad():
        model(now.x)


class Smooth(nn.Module):
    """A block whose second derivatives do not vanish."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


# Edits in forward -----------------------------------------------------------------------------


class Clamped(Block):
    """Constrains its weight in forward, as spectral and Wasserstein methods do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


# Checkpointing --------------------------------------------------------------------------------


class Counted(Block):
    """Counts its forwards."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


class Checkpointed(Net):
    """Each block under a checkpoint."""

    def __init__(self, block: Callable[[], nn.Module] = Counted, reentrant: bool = False) -> None:
        super().__init__(block)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class OneSegment(Net):
    """All blocks in one checkpoint."""

    def __init__(self, reentrant: bool = True, repeats: int = 1) -> None:
        super().__init__()
        self.reentrant, self.repeats = reentrant, repeats

    def _segment(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(self.repeats):
            x = checkpoint(self._segment, x, use_reentrant=self.reentrant)
        return self.head(x)


class OpaqueInSegment(OneSegment):
    """A segment of blocks whose outputs are opaque."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__(reentrant=reentrant)
        self.blocks = nn.ModuleList(OpaqueBlock() for _ in range(3))

    def _segment(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).hidden
        return x


def _whole_step(reentrant: bool) -> Step:
    def step(model: nn.Module, now: Moment) -> None:
        x = now.x.clone().requires_grad_()
        _loss(checkpoint(model, x, use_reentrant=reentrant)).backward()

    return step


def _counting_step(model: nn.Module, now: Moment) -> None:
    """Each block runs once in forward and once in backward, not more and not less."""
    Counted.calls = 0
    plain_step(model, now)
    assert Counted.calls == 2 * 3, f"{Counted.calls} forwards of 3 checkpointed blocks"


CASES: dict[str, Case] = {
    "plain": Case(plain_step),
    "dataclass output": Case(_dataclass_step, DataclassNet),
    "opaque output": Case(_opaque_step, OpaqueNet),
    "loss on weights": Case(_penalty_step, lambda: Net(PenalisedBlock)),
    "loss on weights alone": Case(_penalty_only_step, lambda: Net(PenalisedBlock)),
    "view of the output modified": Case(_view_step),
    "views of blocks modified": Case(plain_step, ViewNet),
    "output modified in place": Case(plain_step, lambda: Net(ReluInPlaceBlock)),
    "gradients on some ranks": Case(_sometimes_step, SometimesNet),
    "all but the head frozen": Case(plain_step, _frozen_net),
    "frozen between": Case(plain_step, _frozen_middle),
    "LoRA": Case(plain_step, lambda: Net(Lora)),
    "some outputs used": Case(_some_outputs_step, TwoHeads),
    "backward(inputs=...)": Case(_inputs_step),
    "gradient of the input": Case(_input_gradient_step),
    "forward without backward": Case(_no_backward_step),
    "two graphs": Case(_two_graphs_step),
    "retained graph": Case(_retained_step),
    "gradient penalty": Case(_penalty_of_gradient_step, lambda: Net(Smooth)),
    "gradients of gradients": Case(_curvature_step, lambda: Net(Smooth)),
    "gradients of gradients later": Case(_late_curvature_step, lambda: Net(Smooth)),
    "local gradients": Case(_local_gradients_step),
    "create_graph": Case(_create_graph_step, lambda: Net(Smooth)),
    "clamped in forward": Case(plain_step, lambda: Net(Clamped)),
    "checkpoints": Case(_counting_step, Checkpointed),
    "reentrant checkpoints": Case(_counting_step, lambda: Checkpointed(reentrant=True)),
    "one segment": Case(plain_step, lambda: OneSegment(reentrant=False)),
    "one reentrant segment": Case(plain_step, OneSegment),
    "two segments": Case(plain_step, lambda: OneSegment(reentrant=False, repeats=2)),
    "two reentrant segments": Case(plain_step, lambda: OneSegment(repeats=2)),
    "opaque reentrant segment": Case(plain_step, OpaqueInSegment),
    "opaque segment": Case(plain_step, lambda: OpaqueInSegment(reentrant=False)),
    "whole model": Case(_whole_step(reentrant=False)),
    "whole model, reentrant": Case(_whole_step(reentrant=True)),
}


def _build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay shows parameters that are stepped though they have no gradient."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.05, momentum=0.9, weight_decay=0.05)


def _moment(step: int, rank: int) -> Moment:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return Moment(torch.randn(4, WIDTH, generator=generator), step, rank)


def left_gathered(model: nn.Module) -> list[str]:
    """Names of units that hold their values."""
    engine = onecopy.handle.of(model).engine
    return [
        unit.name
        for unit in engine.units
        if unit.state is not UnitState.SHARDED or unit.flat.untyped_storage().nbytes()
    ]


def run_sharded(name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """One rank's run of a case."""
    case = CASES[name]
    model = _build(case)
    optimizer = _optimizer(model)
    onecopy.shard(model, optimizer, stage=3, **settings)
    for step in range(STEPS):
        case.step(model, _moment(step, dist.get_rank()))
        gc.collect()
        assert left_gathered(model) == [], f"after step {step}"
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


def run_plain(name: str, world: int) -> dict[str, Tensor]:
    """The same in one process."""
    case = CASES[name]
    model = _build(case)
    optimizer = _optimizer(model)
    parameters = list(model.parameters())
    for step in range(STEPS):
        totals: list[Tensor | None] = [None for _ in parameters]
        for rank in range(world):
            case.step(model, _moment(step, rank))
            for index, parameter in enumerate(parameters):
                total, gradient = totals[index], parameter.grad
                if gradient is not None:
                    totals[index] = gradient if total is None else total + gradient
                parameter.grad = None
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = None if total is None else total * (1 / world)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# Backwards one after another are reduced one after another: other sums of the same addends.
SUMMED_OTHERWISE = (
    "gradients on some ranks",
    "backward(inputs=...)",
    "two graphs",
    "retained graph",
    "gradients of gradients later",
    "two reentrant segments",
)
WARNINGS = {
    "backward(inputs=...)": "order in which units are used has changed",
    "some outputs used": "order in which units are used has changed",
    "create_graph": "create_graph=True will create a reference cycle",
}


# What a case breaks shows on two ranks; one sends nothing, three cut and add up otherwise.
@pytest.mark.sampled(
    "name, world",
    list(itertools.product(CASES, (1, 2, 3))),
    len(CASES) + 20,
    always=[(name, 2) for name in CASES],
)
def test_equals_plain_training(pool: Pool, name: str, world: int) -> None:
    """In every rank, and nothing stays gathered."""
    runs = pool.run(world, run_sharded, name, {}, record_warnings=True)
    for warning in (one for warned in pool.warnings for one in warned):
        assert name in WARNINGS and WARNINGS[name] in warning.message, warning
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True")
        expected = run_plain(name, world)
    for run in runs:
        check_equal(run, expected, exactly=world == 1 or name not in SUMMED_OTHERWISE)


def check_equal(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, exactly: bool = True
) -> None:
    """Compare all parameters."""
    assert list(found) == list(expected)
    for key, value in expected.items():
        if exactly:
            assert torch.equal(found[key], value), key
        else:
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["opaque output", "checkpoints", "gradient penalty", "LoRA"])
def test_always_watching_changes_nothing(pool: Pool, name: str) -> None:
    """saved_tensors="always" where "auto" stops to watch after the first step."""
    (run,) = pool.run(1, run_sharded, name, {"saved_tensors": "always"})
    check_equal(run, run_plain(name, 1))


# Saved tensors --------------------------------------------------------------------------------


class Spoiled(Net):
    """Modifies in place what a block has saved for its backward."""

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(x * self.head.weight.sum())
        y = self.blocks[0](x)
        x.mul_(2)
        return self.head(y + x)


def spoil() -> list[str]:
    """Errors in the first steps, watched and not."""
    model = Spoiled()
    onecopy.shard(model, stage=3)
    errors = []
    for step in range(2):
        try:
            plain_step(model, _moment(step, 0))
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_modified_saved_tensors_are_noticed(pool: Pool) -> None:
    """The net of saved tensors keeps autograd's check of versions."""
    (errors,) = pool.run(1, spoil)
    assert len(errors) == 2
    for error in errors:
        assert "modified by an inplace operation" in error


def outlive(watched: bool) -> list[bool]:
    """Whether activations are freed with the loss, without the garbage collector."""
    model = Net(Smooth)
    onecopy.shard(model, stage=3, saved_tensors="always" if watched else "auto")
    kept: list[weakref.ref[Tensor]] = []
    model.blocks[1].register_forward_hook(lambda m, a, output: kept.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            plain_step(model, _moment(step, 0))
        model(_moment(3, 0).x)
        return [one() is None for one in kept]
    finally:
        gc.enable()


@pytest.mark.parametrize("watched", [False, True])
def test_activations_are_freed_with_their_graph(pool: Pool, watched: bool) -> None:
    """Operations that save their own outputs make no cycles with the net of saved tensors."""
    assert pool.run(1, outlive, watched) == [[True] * 4]


# State dicts ----------------------------------------------------------------------------------


def save_later() -> tuple[int, bool, bool]:
    """A state dict taken inside full_parameters and saved after a step."""
    model = _build(CASES["plain"])
    optimizer = _optimizer(model)
    onecopy.shard(model, optimizer, stage=3)
    plain_step(model, _moment(0, 0))
    optimizer.step()
    with onecopy.full_parameters(model):
        state = model.state_dict()
        values = copy.deepcopy(state)
    plain_step(model, _moment(1, 0))
    optimizer.step()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    alone = io.BytesIO()
    torch.save(state["head.bias"], alone)
    own = all(value._base is None and value._version == 0 for value in state.values())
    return len(alone.getvalue()), all(torch.equal(loaded[k], v) for k, v in values.items()), own


def test_a_state_dict_is_the_users_own(pool: Pool) -> None:
    """Saved after its units are released: right, and no larger than it must be."""
    for num_bytes, is_equal, is_own in pool.run(2, save_later):
        assert is_equal and is_own
        assert num_bytes < 2_500, "one small tensor, not the buffer it came from"


# Flags ----------------------------------------------------------------------------------------


def parameters_with_gradients(settings: dict[str, Any]) -> list[str]:
    """After many backwards under no_sync: names of which this rank owns a piece with a gradient."""
    model = _build(CASES["gradients on some ranks"])
    optimizer = _optimizer(model)
    onecopy.shard(model, optimizer, stage=3, **settings)
    x, rank = _moment(0, 0).x, dist.get_rank()
    with onecopy.no_sync(model):
        # last_rank: used by the last rank in one of many backwards; wide: by the second.
        _loss(model(x, 2, 2 if rank == 2 else 0).float()).backward()
        for part in (0, 1, 0, 0):
            _loss(model(x, 5, part if rank == 1 else 0).float()).backward()
    _loss(model(x, 5, 0).float()).backward()
    return [
        unit.names[index]
        for unit in onecopy.handle.of(model).engine.units
        for index, piece in unit.slice.pieces.items()
        if piece.grad is not None
    ]


PLACES = ("", "blocks.0.", "blocks.1.")


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_flags_reach_every_owner(pool: Pool, precision: str | None) -> None:
    """A gradient on one rank, in one of many backwards, counts for all owners of pieces."""
    runs = pool.run(3, parameters_with_gradients, {"precision": precision}, record_warnings=True)
    found = {name for run in runs for name in run}
    expected = {f"{at}always.{name}" for at in PLACES for name in ("weight", "bias")}
    expected |= {f"blocks.{i}.{name}" for i in (0, 1) for name in ("wide", "last_rank")}
    assert found == expected
    owners = sum("blocks.0.wide" in run for run in runs)
    assert owners > 1, "one parameter must be cut by a slice border"


# Exceptions -----------------------------------------------------------------------------------


class Failure(Exception):
    """Raised on purpose."""


def fail_then_train(where: str, stage: int) -> tuple[dict[str, Tensor], list[str]]:
    """In the first and the third step something raises on all ranks; then the step is done."""
    model = _build(CASES["plain"])
    optimizer = _optimizer(model)
    onecopy.shard(model, optimizer, stage=stage)
    left: list[str] = []
    for step in range(4):
        now = _moment(step, dist.get_rank())
        if step in (0, 2):
            with _failing(model, where), contextlib.suppress(Failure):
                plain_step(model, now)
        plain_step(model, now)
        left += left_gathered(model) if stage == 3 else []
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model), left


@contextlib.contextmanager
def _failing(model: nn.Module, where: str) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise Failure

    block = model.get_submodule("blocks.1")
    if where == "forward":
        handle = block.get_submodule("norm").register_forward_pre_hook(fail)
    elif where == "between":
        handle = block.register_forward_hook(lambda m, a, y: y.register_hook(fail) and None)
    else:
        handle = model.get_submodule("blocks.0").register_forward_hook(
            lambda m, a, y: y.register_hook(fail) and None
        )
    try:
        yield
    finally:
        handle.remove()


def train_plain(world: int, steps: int, optimizer_of: Any, before: int = 0) -> dict[str, Tensor]:
    """The case "plain" in one process, after some steps that all ranks make alike."""
    model = _build(CASES["plain"])
    optimizer = optimizer_of(model)
    for step in range(before + steps):
        alike = step < before
        gradients = []
        for rank in range(1 if alike else world):
            plain_step(model, _moment(step, rank))
            gradients.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            parameter.grad = total * (1 / len(parts))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (2, 1), (3, 3)])
@pytest.mark.parametrize("where", ["forward", "between", "late"])
def test_after_an_exception_all_is_as_before(
    pool: Pool, where: str, world: int, stage: int
) -> None:
    """Training goes on as if the failed attempt had never been made."""
    expected = train_plain(world, 4, _optimizer)
    for run, left in pool.run(world, fail_then_train, where, stage):
        assert left == []
        check_equal(run, expected)


def freeze_for_a_while() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A block does not train in the second step; sharded and plain."""
    results = []
    for is_sharded in (True, False):
        model = _build(CASES["plain"])
        optimizer = _optimizer(model)
        if is_sharded:
            onecopy.shard(model, optimizer, stage=3)
        for step in range(3):
            model.get_submodule("blocks.0").requires_grad_(step != 1)
            plain_step(model, _moment(step, 0))
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_values(model) if is_sharded else dict(model.named_parameters()))
    return results[0], {name: p.detach() for name, p in results[1].items()}


def test_freezing_in_mid_run(pool: Pool) -> None:
    """Parameters may freeze after shard, and train again."""
    for sharded, plain in pool.run(2, freeze_for_a_while, record_warnings=True):
        check_equal(sharded, plain)


# Optimizers -----------------------------------------------------------------------------------


class Counting(torch.optim.AdamW):
    """Overrides step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls = getattr(self, "calls", 0) + 1
        return super().step(closure)


def _on(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    return lambda model: make(model.parameters(), **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW loop": _on(torch.optim.AdamW, lr=0.01, foreach=False),
    "AdamW foreach": _on(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": _on(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW amsgrad": _on(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adam": _on(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "SGD": _on(torch.optim.SGD, lr=0.1),
    "SGD nesterov": _on(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": _on(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": _on(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adamax": _on(torch.optim.Adamax, lr=0.01),
    "NAdam": _on(torch.optim.NAdam, lr=0.01),
    "RAdam": _on(torch.optim.RAdam, lr=0.01),
    "Rprop": _on(torch.optim.Rprop, lr=0.01),
    "Adadelta": _on(torch.optim.Adadelta, lr=0.5),
    "ASGD": _on(torch.optim.ASGD, lr=0.1, t0=1, lambd=0.1),
    "overridden step": _on(Counting, lr=0.01),
}


def train_with(names: list[str], before: int) -> dict[str, dict[str, Tensor]]:
    """Each optimizer on a model of its own; the first steps before shard."""
    results = {}
    for name in names:
        model = _build(CASES["plain"])
        optimizer = OPTIMIZERS[name](model)
        for step in range(before):
            plain_step(model, _moment(step, 0))
            optimizer.step()
            optimizer.zero_grad()
        onecopy.shard(model, optimizer, stage=3)
        for step in range(before, before + 3):
            plain_step(model, _moment(step, dist.get_rank()))
            optimizer.step()
            optimizer.zero_grad()
        results[name] = full_values(model)
    return results


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_elementwise_optimizers(pool: Pool, world: int, before: int) -> None:
    """All of torch.optim's, new and with states that shard cuts."""
    names = list(OPTIMIZERS)
    runs = pool.run(world, train_with, names, before)
    for name in names:
        expected = train_plain(world, 3, OPTIMIZERS[name], before)
        for run in runs:
            check_equal(run[name], expected)


def step_with(how: str) -> dict[str, Tensor]:
    """Other ways to step than the plain one."""
    model = _build(CASES["plain"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if how == "new group":
        optimizer = torch.optim.AdamW(model.blocks.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch))
    onecopy.shard(model, optimizer, stage=3)
    if how == "new group":
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.02})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch))
    for step in range(3):
        now = _moment(step, dist.get_rank())

        def closure(now: Moment = now) -> float:
            optimizer.zero_grad()
            loss = _loss(model(now.x))
            loss.backward()
            return loss.item()

        if how == "closure":
            assert optimizer.step(closure) > 0
        elif how == "closure by name":
            assert optimizer.step(closure=closure) > 0
        else:
            plain_step(model, now)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return full_values(model)


@pytest.mark.parametrize("how", ["scheduler", "closure", "closure by name", "new group"])
def test_ways_to_step(pool: Pool, how: str) -> None:
    """Schedulers made before shard, closures, groups added after it."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch))
        optimizer.register_step_post_hook(lambda *_: None)
        original = optimizer.zero_grad

        def zero_grad_and_schedule() -> None:
            original()
            scheduler.step()

        optimizer.zero_grad = zero_grad_and_schedule  # type: ignore[method-assign,assignment]
        return optimizer

    expected = train_plain(2, 3, optimizer_of)
    runs = pool.run(2, step_with, how, record_warnings=how == "new group")
    for run in runs:
        check_equal(run, expected)


def add_wrong_group(is_stranger: bool) -> None:
    """A new group with a parameter of no sharded model, or one that another group has."""
    model = _build(CASES["plain"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3)
    wrong = nn.Parameter(torch.ones(7)) if is_stranger else model.head.weight
    optimizer.add_param_group({"params": [wrong]})
    plain_step(model, _moment(0, 0))
    optimizer.step()


def test_wrong_new_groups_are_refused(pool: Pool) -> None:
    """Gradients would never be averaged, or a parameter be stepped twice."""
    for is_stranger, said in ((True, "(7,)"), (False, "number 0 of group 1 (shape (2, 5))")):
        (error,) = pool.run(1, add_wrong_group, is_stranger, expect_failures=True)
        assert error.type_name == "ShardingError", str(error)
        assert said in error.message


# Several models -------------------------------------------------------------------------------


def interleave(stage: int, mixed: bool) -> list[dict[str, Tensor]]:
    """Two models in one loss; with `mixed` ranks run them in different orders."""
    models = [_build(CASES["plain"]), _build(CASES["gradient penalty"])]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
    onecopy.shard(models, optimizer, stage=stage)
    rank = dist.get_rank()
    for step in range(3):
        now = _moment(step, rank)
        order = models[::-1] if mixed and rank else models
        losses = {id(model): _loss(model(now.x)) for model in order}
        for model in models:
            losses[id(model)].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full_values(model) for model in models]


@pytest.mark.parametrize(("stage", "mixed"), [(3, False), (2, True), (1, True), (0, True)])
def test_two_models_side_by_side(pool: Pool, stage: int, mixed: bool) -> None:
    """Their messages do not meet, whatever the order of their forwards where none is needed."""
    runs = pool.run(2, interleave, stage, mixed)
    for index, name in enumerate(("plain", "gradient penalty")):
        model = _build(CASES[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            gradients = []
            for rank in range(2):
                plain_step(model, _moment(step, rank))
                gradients.append([p.grad for p in model.parameters()])
                model.zero_grad()
            for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
                parameter.grad = (first + second) * 0.5
            optimizer.step()
            optimizer.zero_grad()
        for run in runs:
            check_equal(run[index], {key: p.detach() for key, p in model.named_parameters()})


def adversaries(stage: int) -> dict[str, Tensor]:
    """A generator and its critic with two optimizers, as GANs are trained."""
    generator, critic, optimizers = _adversaries()
    onecopy.shard(generator, optimizers[0], stage=stage)
    onecopy.shard(critic, optimizers[1], stage=stage)
    for step in range(3):
        _fight(generator, critic, optimizers, _moment(step, 0).x)
    return full_values(generator) | {f"critic.{k}": v for k, v in full_values(critic).items()}


def _adversaries() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(1)
    generator, critic = nn.Sequential(Smooth(), Smooth()), Net(Smooth)
    return generator, critic, [_optimizer(generator), _optimizer(critic)]


def _fight(
    generator: nn.Module, critic: nn.Module, optimizers: list[torch.optim.Optimizer], x: Tensor
) -> None:
    fake = generator(x)
    loss = critic(fake.detach()).mean() - critic(x).mean()
    mixed = (0.5 * (x + fake.detach())).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    (loss + (slope.norm() - 1) ** 2).backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
    (-critic(generator(x)).mean()).backward()
    optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (2, 2)])
def test_a_generator_and_its_critic(pool: Pool, world: int, stage: int) -> None:
    """Gradients of one model's parameters are dropped where only the other is stepped.

    All ranks see the same inputs, so their mean is what one process computes.
    """
    runs = pool.run(world, adversaries, stage)
    generator, critic, optimizers = _adversaries()
    for step in range(3):
        _fight(generator, critic, optimizers, _moment(step, 0).x)
    expected = dict(generator.named_parameters())
    expected |= {f"critic.{name}": p for name, p in critic.named_parameters()}
    for run in runs:
        check_equal(run, {name: p.detach() for name, p in expected.items()})
