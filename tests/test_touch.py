"""Touching released parameters with several ranks: values, writes, gradients and disagreement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from onecopy.events import Event
from tests import models, reference
from tests.pool import Pool
from tests.runs import full_values

WIDTH = 12


class Borrower(nn.Module):
    """Uses weights of modules that it does not call: a tied head, a shared table, a method."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scales = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def encode(self, indices: Tensor) -> Tensor:
        """A method other than forward."""
        hidden = self.tokens(indices)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        # A weight of a block that has been released again, and of modules never called.
        hidden = hidden + F.linear(hidden, self.blocks[0].weight, self.blocks[1].bias)
        return F.layer_norm(hidden, (WIDTH,), self.scales[0].weight, self.scales[1].bias)

    def forward(self, indices: Tensor) -> Tensor:
        return F.linear(self.encode(indices), self.tokens.weight)


UNITS = ("tokens", "blocks.*", "scales.*")


def build() -> nn.Module:
    """Equal on all ranks and in the reference."""
    torch.manual_seed(5)
    return Borrower()


def batches(steps: int, ranks: int, backwards: int) -> list[list[list[models.Batch]]]:
    """batches[step][rank][backward]."""
    generator = torch.Generator().manual_seed(7)

    def indices() -> dict[str, Tensor]:
        return {"indices": torch.randint(0, 31, (2, 5), generator=generator)}

    return [
        [
            [models.Batch("borrower", step, rank, indices()) for _ in range(backwards)]
            for rank in range(ranks)
        ]
        for step in range(steps)
    ]


def regularised(model: nn.Module, batch: models.Batch) -> Tensor:
    """A loss through forward, one on weights outside of it, and one through another method."""
    indices, loss = batch.tensors["indices"], plain(model, batch)
    weights = [p for p in model.parameters() if p.ndim == 2]
    loss = loss + 0.01 * sum((weight**2).sum() for weight in weights)
    # Views outside of any module, and of a unit whose forward has run.
    transposed = model.get_parameter("blocks.2.weight").t()
    loss = loss + 0.1 * (transposed @ transposed).diagonal().sum()
    return loss + 0.05 * model.encode(indices).square().mean()


def plain(model: nn.Module, batch: models.Batch) -> Tensor:
    """The borrowed weights inside forward alone."""
    indices = batch.tensors["indices"]
    return F.cross_entropy(model(indices).flatten(0, 1), indices.flatten())


LOSSES = {"plain": plain, "regularised": regularised}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Shows wrong scales, which Adam hides."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(loss: str, stage: int, steps: int, backwards: int) -> dict[str, Tensor]:
    """Train through the engine."""
    model = build()
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage, units=UNITS)
    for step in batches(steps, dist.get_world_size(), backwards):
        for batch in step[dist.get_rank()]:
            LOSSES[loss](model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            # What a logger reads in between.
            float(sum(p.norm() for p in model.parameters()))
    return full_values(model)


@pytest.mark.sampled(
    "loss,stage,world,backwards",
    [
        (loss, stage, world, backwards)
        for loss in LOSSES
        for stage in (0, 2, 3)
        for world in (1, 2, 3, 4)
        for backwards in (1, 2)
    ],
    5,
    always=[("plain", 3, 2, 2), ("regularised", 3, 2, 2), ("regularised", 3, 3, 1)],
)
def test_borrowed_weights_train_as_in_one_process(
    pool: Pool, loss: str, stage: int, world: int, backwards: int
) -> None:
    """Bit for bit: values, gradients and the order in which they are added up."""
    found = pool.run(world, train, loss, stage, 4, backwards)
    expected = reference.train(build, batches(4, world, backwards), sgd, loss=LOSSES[loss])
    for values in found:
        for name, value in expected.parameters.items():
            assert torch.equal(values[name], value), name


# Writes ---------------------------------------------------------------------------------------


def _init_again(model: nn.Module) -> None:
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter)


def _reset(model: nn.Module) -> None:
    torch.manual_seed(3)
    for block in model.get_submodule("blocks").children():
        block.reset_parameters()  # type: ignore[operator]


def _fill_data(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(number)


def _through_aliases(model: nn.Module) -> None:
    torch.manual_seed(3)
    for alias in [parameter.data for parameter in model.parameters()]:
        alias.normal_()


def _set_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.ones_like(parameter)


def _numpy(model: nn.Module) -> None:
    model.get_parameter("blocks.0.weight").detach().numpy()[1:3] = 4.0


def _foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def _load_a_part(model: nn.Module) -> None:
    state = {"weight": torch.ones(WIDTH, WIDTH), "bias": torch.ones(WIDTH)}
    model.get_submodule("blocks.1").load_state_dict(state)


def _broadcast(model: nn.Module) -> None:
    """As a trainer does that does not know of sharding."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    dist.all_reduce(model.get_parameter("blocks.1.weight").data, dist.ReduceOp.MAX)


def _vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(2.0 * vector, model.parameters())


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "nn.init": _init_again,
    "reset_parameters": _reset,
    "data.fill_": _fill_data,
    "data, then fill": _through_aliases,
    "set data": _set_data,
    "numpy": _numpy,
    "foreach": _foreach,
    "load a part": _load_a_part,
    "collectives": _broadcast,
    "vector": _vector,
}


def write(how: str, stage: int, precision: str) -> dict[str, Tensor]:
    """Change values by touch, then train a step: the masters must have them."""
    model = build()
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage, units=UNITS, precision=precision)
    WRITES[how](model)
    (step,) = batches(1, dist.get_world_size(), 1)
    plain(model, step[dist.get_rank()][0]).backward()
    optimizer.step()
    return full_values(model)


@pytest.mark.sampled(
    "how,stage,world",
    [(how, stage, world) for how in WRITES for stage in (0, 1, 3) for world in (1, 2, 3)],
    8,
    always=[("data, then fill", 3, 2), ("numpy", 3, 3)],
)
def test_writes_reach_the_masters(pool: Pool, how: str, stage: int, world: int) -> None:
    """What is written to released parameters is what the next step starts from."""

    def changed() -> nn.Module:
        model = build()
        if how == "collectives":
            return model
        WRITES[how](model)
        return model

    found = pool.run(world, write, how, stage, "fp32")
    expected = reference.train(changed, batches(1, world, 1), sgd, loss=plain)
    for values in found:
        for name, value in expected.parameters.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=0, msg=name)


def read_only() -> tuple[bool, bool]:
    """Reading bf16 values must not round fp32 masters; writing changes the written ones alone."""
    model = build()
    onecopy.shard(model, sgd(model), stage=3, units=UNITS, precision="bf16")
    before = full_values(model)
    for parameter in model.parameters():
        parameter.data.sum()
    parameter = model.get_parameter("blocks.0.weight")
    parameter.data[0, 0] = 7.0
    after = full_values(model)
    changed = {name: (before[name] != after[name]).sum().item() for name in before}
    return changed.pop("blocks.0.weight") == 1, not any(changed.values())


def test_reading_keeps_the_precision_of_masters(pool: Pool) -> None:
    assert pool.run(2, read_only) == [(True, True)] * 2


# Disagreement and memory ----------------------------------------------------------------------


def touch_on_first_rank(how: str) -> None:
    """What a user does who prints a norm on rank 0."""
    model = build()
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=3, units=UNITS)
    for step in batches(3, 2, 1):
        plain(model, step[dist.get_rank()][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            if how == "norm":
                model.get_parameter("blocks.0.weight").norm()
            else:
                model.get_submodule("blocks.1")(torch.zeros(1, WIDTH))
    if how == "norm":
        dist.barrier()


@pytest.mark.parametrize("how", ["norm", "call"])
def test_a_touch_on_one_rank_is_a_named_error(pool: Pool, how: str) -> None:
    """Not a hang, and not a wrong value: the ranks and what they want are named."""
    errors = pool.run(2, touch_on_first_rank, how, expect_failures=True)
    texts = [str(error) for error in errors]
    assert any("DivergenceError" in text for text in texts), texts
    wanted = "the values of parameter blocks.0.weight (norm)" if how == "norm" else "unit blocks.1"
    assert any(wanted in text and "rank 1 wants" in text for text in texts), texts


def sizes_of_touches() -> list[list[str]]:
    """Which units hold values after each of some touches."""
    model = build()
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=3, units=UNITS)
    engine = onecopy.handle.of(model).engine

    def held() -> list[str]:
        return [unit.name for unit in engine.units if unit.flat.untyped_storage().nbytes()]

    seen = [held()]
    model.get_parameter("blocks.0.weight").norm()
    seen.append(held())
    alias = model.get_parameter("blocks.1.weight").data
    seen.append(held())
    model.get_parameter("blocks.2.weight").norm()
    seen.append(held())
    del alias
    plain(model, batches(1, 2, 1)[0][dist.get_rank()][0]).backward()
    seen.append(held())
    loss = model.get_parameter("blocks.1.weight").square().sum()
    model.get_parameter("blocks.2.weight").norm()
    loss = loss + plain(model, batches(1, 2, 1)[0][dist.get_rank()][0])
    seen.append(held())
    loss.backward()
    return [*seen, held()]


def test_touched_units_are_released_again(pool: Pool) -> None:
    """One at a time, unless a tensor or a graph holds their memory; none after a backward."""
    for seen in pool.run(2, sizes_of_touches):
        assert seen == [
            [],
            ["blocks.0"],
            ["blocks.1"],
            ["blocks.1", "blocks.2"],
            [],
            ["blocks.1"],
            [],
        ]


def count_gathers() -> list[list[tuple[str, str]]]:
    """The gathers of some steps of a model that borrows weights in forward."""
    model = build()
    optimizer = sgd(model)
    events: list[Event] = []
    onecopy.shard(model, optimizer, stage=3, units=UNITS, sinks=(events.append,))
    found = []
    for step in batches(4, 2, 1):
        events.clear()
        plain(model, step[dist.get_rank()][0]).backward()
        optimizer.step()
        found.append([(one.kind, one.unit) for one in events if one.kind == "gather"])
    return found


def test_borrowed_weights_are_foreseen(pool: Pool) -> None:
    """From the second step on their gathers are in the schedule, and the same on all ranks."""
    first, second = pool.run(2, count_gathers)
    assert first == second
    assert sorted(first[2]) == sorted(first[3])
    assert len(first[3]) < 26


def most_held_while(what: str, precision: str) -> tuple[int, int]:
    """The most units that were gathered at one time, and the number of units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(6)))
    onecopy.shard(model, sgd(model), stage=3, precision=precision)
    state = model.state_dict()
    held: set[str] = set()
    most = 0

    def count(event: Event) -> None:
        nonlocal most
        if event.kind == "gather":
            held.add(event.unit)
            most = max(most, len(held))
        elif event.kind == "release":
            held.discard(event.unit)

    onecopy.events.add_sink(model, count)
    if what == "save":
        again = model.state_dict()
        assert all(torch.equal(value, again[name]) for name, value in state.items())
    elif what == "part":
        part = model[2].state_dict()
        assert all(torch.equal(value, state[f"2.{name}"]) for name, value in part.items())
        assert all(value.dtype == torch.float32 for value in part.values())
    else:
        model.load_state_dict({name: value + 0.1 for name, value in state.items()})
        after = model.state_dict()
        assert all(torch.equal(value + 0.1, after[name]) for name, value in state.items())
    return most, 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["save", "load", "part"])
def test_state_dicts_go_unit_by_unit(pool: Pool, what: str, precision: str) -> None:
    """No rank holds the whole model on its device, to save it or to load it."""
    for most, _ in pool.run(2, most_held_while, what, precision):
        assert most <= 2


# A parameter outlives its model ---------------------------------------------------------------


def keep_parameter() -> str:
    """The values of a released parameter are gone with its model."""
    model: nn.Module | None = build()
    onecopy.shard(model, stage=3)
    parameter = model.get_parameter("blocks.0.weight")  # type: ignore[union-attr]
    model = None
    import gc

    gc.collect()
    try:
        parameter.norm()
    except onecopy.OneCopyError as error:
        return str(error)
    return "no error"


def test_a_parameter_that_outlives_its_model(pool: Pool) -> None:
    for message in pool.run(2, keep_parameter):
        assert "has been deleted, and its values with it" in message


def kept_on_one_rank(stage: int) -> list[float]:
    """All ranks touch, and one keeps what it got."""
    model = build()
    optimizer = sgd(model)
    onecopy.shard(model, optimizer, stage=stage, units=UNITS)
    kept, norms = [], []
    for step in batches(2, dist.get_world_size(), 1):
        for parameter in model.parameters():
            value = parameter.detach()
            if dist.get_rank() == 0:
                kept.append(value)
            del value
        norms += [float(parameter.detach().norm()) for parameter in model.parameters()]
        plain(model, step[dist.get_rank()][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(bool(value.isfinite().all()) for value in kept)
    return norms


def test_tensors_kept_on_one_rank(pool: Pool) -> None:
    """What a rank does with the values is its own affair."""
    first, second = pool.run(2, kept_on_one_rank, 3, record_warnings=True)
    assert first == second


def tied_into_a_block() -> bool:
    """One module with parameters of two units: its state takes both."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1][0].weight = model[0].weight
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    onecopy.shard(model, stage=3)
    state = model.state_dict()
    return all(torch.equal(state[name], value) for name, value in expected.items())


def test_states_of_modules_of_two_units(pool: Pool) -> None:
    """The unit that was touched first has been released by then."""
    assert pool.run(2, tied_into_a_block) == [True, True]
