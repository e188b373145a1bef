"""Models of parallelize_module, sharded over the data dimension of a mesh."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import onecopy
from onecopy import Offload, Precision
from onecopy.core.dtensors import local_of
from onecopy.errors import MismatchError, ShardingError
from tests import tensor_parallel as tp
from tests.pool import Pool
from tests.tensor_parallel import whole

UNITS = ("blocks.*", "head")
STYLES = ["tensor", "sequence", "loss"]
LIMIT = 0.5


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


def make(
    mesh: DeviceMesh, style: str, kind: str = "sgd", **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded where there are settings."""
    model = tp.parallelize(tp.build(), mesh["tp"], style)
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if settings:
        onecopy.shard(model, optimizer, mesh=mesh, units=UNITS, **settings)
    return model, optimizer


Run = tuple[list[float], dict[str, Tensor]]


def reference(style: str, kind: str, clips: bool) -> Run:
    """Two ranks of a tensor group, without onecopy: the mean over two batches."""
    model, optimizer = make(make_mesh(), style, kind)
    seen = []
    for step in range(3):
        gradients: list[Tensor] = []
        for rank in range(2):
            seen.append(tp.backward(model, tp.batch(step, rank), style))
            found = [_as_placed(parameter) for parameter in model.parameters()]
            gradients = [one + two for one, two in zip(gradients, found, strict=False)] or found
            optimizer.zero_grad()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.mul_(0.5)
        if clips:
            # torch's own clipping takes no mixture of plain tensors and DTensors.
            norm = torch.stack([whole(gradient).norm() for gradient in gradients]).norm()
            seen.append(float(norm))
            for gradient in gradients:
                gradient.mul_(torch.clamp(LIMIT / (norm + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: whole(value) for name, value in model.state_dict().items()}


def _as_placed(parameter: Any) -> Tensor:
    """Its gradient: replicas of norms get partial sums of sequence-parallel ranks."""
    gradient: Any = parameter.grad
    if isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.detach().clone()  # type: ignore[no-any-return]


def train(style: str, kind: str, clips: str, **settings: Any) -> Run:
    """Two tensor groups of two ranks, each with a batch of its own."""
    mesh = make_mesh()
    if clips == "config":
        settings["max_grad_norm"] = LIMIT
    model, optimizer = make(mesh, style, kind, **settings)
    seen = []
    for step in range(3):
        seen.append(tp.backward(model, tp.batch(step, mesh["dp"].get_local_rank()), style))
        if clips == "torch":
            seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        elif clips == "onecopy":
            seen.append(float(onecopy.clip_grad_norm_(model, LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    onecopy.flush(model)
    return seen, {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.sampled(
    ("style", "stage"), list(product(STYLES, range(4))), 4, always=[("sequence", 3)]
)
def test_equal_to_tensor_parallelism_alone(pool: Pool, style: str, stage: int) -> None:
    """To the last bit: the mean over the data ranks is the sum of two."""
    seen, values = pool.run(2, reference, style, "sgd", False)[0]
    runs = pool.run(4, partial(train, stage=stage), style, "sgd", "")
    assert [runs[0][0], runs[2][0]] == [seen[0::2], seen[1::2]]
    for _, found in runs:
        for name, value in values.items():
            assert torch.equal(found[name], value), name


@pytest.mark.sampled(
    ("style", "clips", "stage"),
    list(product(STYLES[:2], ["torch", "onecopy", "config"], [0, 2, 3])),
    3,
)
def test_norms_are_those_of_the_whole_gradient(
    pool: Pool, style: str, clips: str, stage: int
) -> None:
    """Parts add up, replicas count once, whoever clips."""
    seen, values = pool.run(2, reference, style, "sgd", True)[0]
    for losses, found in pool.run(4, partial(train, stage=stage), style, "sgd", clips):
        if clips != "config":
            torch.testing.assert_close(losses[1::2], seen[2::3], rtol=1e-6, atol=0)
        for name, value in values.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


SETTINGS: dict[str, dict[str, Any]] = {
    "host": {"offload": "cpu"},
    "all on host": {"offload": Offload(optimizer="host", gradients="host", parameters="host")},
    "nvme": {"offload": "nvme:PATH"},
    "hpz": {"stage": "hpz", "node_size": 1},
    "hybrid": {"stage": "node/node/world", "node_size": 1},
    "in backward": {"step_in_backward": True},
}


@pytest.mark.sampled("name", list(SETTINGS), 2, always=["nvme"])
def test_settings_change_nothing(pool: Pool, tmp_path: Path, name: str) -> None:
    """The papers' 70B and 20T runs in small: tensor parallel ranks that offload."""
    settings: dict[str, Any] = {
        key: value.replace("PATH", str(tmp_path)) if isinstance(value, str) else value
        for key, value in SETTINGS[name].items()
    }
    settings = {"stage": 3, **settings}
    plain = pool.run(4, partial(train, stage=3), "sequence", "adamw", "")
    runs = pool.run(4, partial(train, **settings), "sequence", "adamw", "")
    for (losses, values), (found, of_run) in zip(plain, runs, strict=True):
        assert found == losses
        assert all(torch.equal(of_run[name], value) for name, value in values.items())


LEAN = Precision(compute="bf16", master="bf16+16", gradient="bf16")


@pytest.mark.sampled("precision", ["bf16", "fp16", LEAN], 1)
def test_low_precision(pool: Pool, precision: Any) -> None:
    _, values = pool.run(2, reference, "sequence", "sgd", False)[0]
    for stage in (1, 3):
        runs = pool.run(4, partial(train, stage=stage, precision=precision), "sequence", "sgd", "")
        for name, value in values.items():
            torch.testing.assert_close(runs[0][1][name], value, rtol=0.02, atol=2e-3)
            assert torch.equal(runs[3][1][name], runs[0][1][name]), name


@contextmanager
def overflow(model: nn.Module, *, here: bool) -> Iterator[None]:
    """Inside, one rank's part of one gradient is not finite."""
    parameter = next(iter(model.parameters()))

    def break_it(gradient: Tensor) -> Tensor:
        local_of(gradient).fill_(float("inf"))
        return gradient

    handle = parameter.register_hook(break_it) if here else None
    yield
    if handle is not None:
        handle.remove()


def skip(rank: int) -> list[bool]:
    """Which steps change something, where a rank's gradients overflow in the second."""
    mesh = make_mesh()
    model, optimizer = make(mesh, "loss", stage=2, precision="fp16")
    changed = []
    for step in range(3):
        before = whole(model.get_parameter("blocks.0.mlp.up.weight"))
        with overflow(model, here=step == 1 and dist.get_rank() == rank):
            tp.backward(model, tp.batch(step, mesh["dp"].get_local_rank()), "loss")
        optimizer.step()
        optimizer.zero_grad()
        changed.append(
            not torch.equal(whole(model.get_parameter("blocks.0.mlp.up.weight")), before)
        )
    return changed


def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool) -> None:
    assert pool.run(4, skip, 3) == [[True, False, True]] * 4


def look() -> None:
    """What a user sees of a sharded model: names, classes, values, gradients, copies."""
    mesh = make_mesh()
    model, optimizer = make(mesh, "sequence", "adamw", stage=3)
    plain = tp.build()
    rank = mesh["dp"].get_local_rank()
    weight: Any = model.get_parameter("blocks.0.attention.q.weight")
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
    assert weight.placements == (Shard(0),) and weight.shape == (tp.WIDTH, tp.WIDTH)
    # Methods of DTensor that no function of torch comes before.
    expected = plain.get_parameter("blocks.0.attention.q.weight").detach()
    assert torch.equal(weight.full_tensor().detach(), expected)
    other: Any = model.get_parameter("blocks.1.mlp.up.weight")
    part = (
        plain.get_parameter("blocks.1.mlp.up.weight").detach().chunk(2)[mesh["tp"].get_local_rank()]
    )
    assert torch.equal(other.to_local().detach(), part)
    third: Any = model.get_parameter("blocks.0.mlp.down.weight")
    replicated: Any = third.redistribute(placements=[Replicate()])
    expected_third = plain.get_parameter("blocks.0.mlp.down.weight").detach()
    assert torch.equal(local_of(replicated).detach(), expected_third)
    with torch.no_grad():
        other.mul_(2)
        other.div_(2)
    _look_at_released(model, mesh["dp"].get_local_rank(), part)
    state = model.state_dict()
    for name, parameter in plain.named_parameters():
        assert torch.equal(whole(state[name]), parameter.detach()), name
        kind = type(state[name])
        assert (kind is DTensor) == isinstance(model.get_parameter(name), DTensor)
    _look_at_gradients(model, plain, rank)
    optimizer.step()
    optimizer.zero_grad()
    _go_back(model, optimizer, state, expected)
    # And on with it, at another stage, with the states that it has.
    optimizer.zero_grad()
    onecopy.shard(model, optimizer, stage=1, mesh=mesh["dp"], units=UNITS)
    tp.backward(model, tp.batch(1, rank), "sequence")
    optimizer.step()


def _look_at_released(model: nn.Module, rank: int, part: Tensor) -> None:
    """Code that knows what is in a DTensor, and does not ask torch's functions for it."""
    onecopy.flush(model)
    tp.backward(model, tp.batch(0, rank), "sequence")
    model.zero_grad()
    weight: Any = model.get_parameter("blocks.1.mlp.up.weight")
    # One rank alone: these need no values.
    if rank == 0:
        assert "Released" in repr(weight) and str(tuple(weight.shape)) in f"{weight!r}{weight!s}"
        assert torch.zeros_like(weight).to_local().shape == part.shape
        assert weight.new_ones(3).shape == (3,)
    assert "Released" in repr(weight)
    assert torch.equal(weight._local_tensor.detach(), part)
    tp.backward(model, tp.batch(0, rank), "sequence")
    model.zero_grad()
    names, _ = weight.__tensor_flatten__()
    assert torch.equal(getattr(weight, names[0]).detach(), part)


def _look_at_gradients(model: nn.Module, plain: nn.Module, rank: int) -> None:
    """Against one process."""
    tp.backward(model, tp.batch(0, rank), "sequence")
    for one in range(2):
        tp.backward(plain, tp.batch(0, one), "sequence", 0.5)
    with onecopy.full_parameters(model, grads=True):
        for name, parameter in model.named_parameters():
            gradient = plain.get_parameter(name).grad
            assert gradient is not None
            torch.testing.assert_close(whole(parameter.grad), gradient, rtol=0, atol=1e-6)
    weight = model.get_parameter("blocks.0.attention.q.weight")
    gradient = weight.grad
    assert gradient is not None and gradient.shape == weight.shape
    expected_gradient = plain.get_parameter("blocks.0.attention.q.weight").grad
    assert expected_gradient is not None
    torch.testing.assert_close(gradient.norm(), expected_gradient.norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(whole(gradient + 0), expected_gradient, rtol=0, atol=1e-6)
    shown: Any = gradient
    assert shown.placements == (Shard(0),) and shown.device_mesh.ndim == 1
    torch.testing.assert_close(shown.full_tensor(), expected_gradient, rtol=0, atol=1e-6)
    with torch.no_grad():
        inside = shown.to_local()
        inside.mul_(2)
        torch.testing.assert_close(shown.full_tensor(), 2 * expected_gradient, rtol=0, atol=2e-6)
        inside.div_(2)
    replicated = shown.redistribute(placements=[Replicate()])
    torch.testing.assert_close(whole(replicated), expected_gradient, rtol=0, atol=1e-6)
    plain_gradient = model.get_parameter("blocks.0.attention.out.bias").grad
    assert hasattr(plain_gradient, "full_tensor") and not hasattr(shown, "nothing")


def _go_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], expected: Tensor
) -> None:
    """A state loaded, a copy, and the model made plain."""
    weight: Any = model.get_parameter("blocks.0.attention.q.weight")
    with torch.no_grad():
        weight.zero_()
    model.load_state_dict(state)
    assert torch.equal(weight.full_tensor().detach(), expected)
    copied: Any = copy.deepcopy(model).get_parameter("blocks.0.attention.q.weight")
    assert isinstance(copied, DTensor) and torch.equal(copied.full_tensor().detach(), expected)
    before = optimizer.state_dict()
    optimizer.load_state_dict(before)
    onecopy.unshard(model)
    assert torch.equal(weight.full_tensor().detach(), expected)
    moment = optimizer.state[weight]["exp_avg"]
    assert isinstance(moment, DTensor) and moment.placements == weight.placements


def test_what_a_user_sees(pool: Pool) -> None:
    pool.run(4, look)


def replicas(style: str, **settings: Any) -> list[Tensor]:
    """After some steps, what all ranks should have alike."""
    mesh = make_mesh()
    model, optimizer = make(mesh, style, "adamw", quantize="zero++", node_size=1, **settings)
    for step in range(3):
        tp.backward(model, tp.batch(step, mesh["dp"].get_local_rank()), style)
        optimizer.step()
        optimizer.zero_grad()
    with onecopy.full_parameters(model):
        return [
            local_of(one).detach().clone()
            for one in model.parameters()
            if not isinstance(one, DTensor) or one.placements == (Replicate(),)
        ]


@pytest.mark.sampled(("style", "stage"), list(product(STYLES, [2, 3, "hpz"])), 2)
def test_replicas_stay_alike_where_transfers_are_quantized(
    pool: Pool, style: str, stage: int | str
) -> None:
    """Codes of a block with parts in it would be others on each tensor parallel rank."""
    first, *others = pool.run(4, partial(replicas, stage=stage), style)
    assert len(first) >= 2 * (2 * tp.DEPTH + 1)
    for other in others:
        assert all(map(torch.equal, other, first))


def compiled(stage: int, *names: str) -> Run:
    """With these modules compiled."""
    mesh = make_mesh()
    model, optimizer = make(mesh, "tensor", stage=stage)
    for name in names:
        model.get_submodule(name).compile(backend="aot_eager")
    seen = []
    for step in range(2):
        seen.append(tp.backward(model, tp.batch(step, 0), "tensor"))
        optimizer.step()
        optimizer.zero_grad()
    weight = model.get_parameter("blocks.0.mlp.up.weight")
    torch.save(weight, io.BytesIO())
    assert torch.equal(whole(copy.deepcopy(weight)), whole(weight))
    with onecopy.full_parameters(model):
        return seen, {name: whole(value) for name, value in model.named_parameters()}


@pytest.mark.sampled("stage", [1, 3], 1)
def test_compiled_modules(pool: Pool, stage: int) -> None:
    """Compilers compare what DTensors say with what is in them, which lies in the flat buffer."""
    losses, values = pool.run(2, compiled, stage)[0]
    for found, of_run in pool.run(2, compiled, stage, "blocks.0.mlp", "blocks.1.mlp"):
        assert found == losses
        assert all(torch.equal(of_run[name], value) for name, value in values.items())


def own(stage: int) -> tuple[int, int, int]:
    """Elements that this rank owns, has in its flat buffers, and has of parameters."""
    model, _ = make(make_mesh(), "sequence", stage=stage)
    units = model.__dict__["_onecopy"].engine.units
    parts = sum(local_of(parameter).numel() for parameter in model.parameters())
    held = sum(unit.flat.untyped_storage().nbytes() // 4 for unit in units)
    return sum(unit.slice.own.numel() for unit in units), held, parts


def test_each_rank_owns_its_part_of_its_part(pool: Pool) -> None:
    runs = pool.run(4, own, 3)
    num_units = tp.DEPTH + 2
    for owned, held, parts in runs:
        assert held == 0
        assert parts / 2 <= owned <= parts / 2 + num_units * 32


class Uneven(nn.Module):
    """A vocabulary that two ranks do not divide, and a layer of which one has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.extra = tp.build(13), nn.Linear(tp.WIDTH, 1)
        nn.init.ones_(self.extra.weight)
        nn.init.zeros_(self.extra.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(tokens).flatten(0, 1)
        extra: Tensor = self.extra(torch.ones(2, tp.WIDTH))
        return nn.functional.cross_entropy(logits, tokens.flatten()) + extra.mean()


def uneven(stage: int | None) -> list[float]:
    """Norms of two steps; None: on one process."""
    model, ranks, mesh = Uneven(), [0, 1], None
    if stage is not None:
        mesh = make_mesh()
        tp.parallelize(model.inner, mesh["tp"], "sequence")
        columns = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"extra": columns})
        ranks = [mesh["dp"].get_local_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        onecopy.shard(model, optimizer, stage=stage, mesh=mesh, units=("inner.blocks.*",))
    seen = []
    for step in range(2):
        for rank in ranks:
            (model(tp.batch(step, rank)) / len(ranks)).backward()
        seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_parts_that_differ_in_size(pool: Pool) -> None:
    expected = uneven(None)
    for found in pool.run(4, uneven, 3):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def unequal() -> str:
    """What is said where a norm of the second tensor rank begins otherwise."""
    mesh = make_mesh()
    model = tp.parallelize(tp.build(), mesh["tp"], "tensor")
    with torch.no_grad():
        model.blocks[1].norm2.bias.add_(mesh["tp"].get_local_rank())  # type: ignore[union-attr, operator]
        # Of no use, but alike.
        model.norm.weight.fill_(float("nan"))
        # Last bits do not count.
        model.blocks[0].norm1.weight.mul_(1 + 1e-6 * mesh["tp"].get_local_rank())  # type: ignore[union-attr, operator]
    with pytest.raises(MismatchError) as caught:
        onecopy.shard(model, mesh=mesh)
    return str(caught.value)


def test_replicas_that_differ_are_named(pool: Pool) -> None:
    for said in pool.run(4, unequal):
        assert said.startswith("1 parameters differ")
        assert "blocks.1.norm2.bias" in said and "same seed" in said


# What is refused -------------------------------------------------------------------------------


def without_mesh() -> None:
    model, _ = make(make_mesh(), "tensor")
    onecopy.shard(model)


def whole_parameters() -> None:
    make(make_mesh(), "tensor", stage=2, whole_parameters=True)


def partial_sums() -> None:
    mesh, model = make_mesh(), nn.Linear(4, 4)
    part = DTensor.from_local(torch.zeros(4, 4), mesh["tp"], [Partial()], run_check=False)
    model.weight = nn.Parameter(part)
    onecopy.shard(model, mesh=mesh)


def without_values() -> None:
    mesh = make_mesh()
    model = nn.Linear(4, 4)
    empty = torch.empty(2, 4, device="meta")
    part = DTensor.from_local(empty, mesh["tp"], [Shard(0)], run_check=False)
    model.weight = nn.Parameter(part)
    onecopy.shard(model, mesh=mesh)


REFUSED: dict[str, tuple[Callable[[], None], list[str]]] = {
    "no mesh": (without_mesh, ["over ranks", "mesh of the job"]),
    "whole parameters": (
        whole_parameters,
        ["DTensor", "elementwise"],
    ),
    "partial": (partial_sums, ["weight", "Partial", "parallelize_module"]),
    "no values": (without_values, ["weight", "meta", "to_empty"]),
}


def refuse(name: str) -> str:
    with pytest.raises(ShardingError) as caught:
        REFUSED[name][0]()
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(pool: Pool, name: str) -> None:
    for said in pool.run(4, refuse, name):
        assert all(word in said for word in REFUSED[name][1]), said
