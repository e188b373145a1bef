"""Linears on a grid of ranks: blocks equal those of nn.Linear, and the bytes the formula."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import onecopy
from onecopy.errors import MismatchError, ShardingError
from onecopy.events import Event
from onecopy.experimental.summa import SummaLinear, count_in, cut
from tests.pool import Pool

TOKENS, INPUTS, OUTPUTS = 6, 8, 12


def square() -> DeviceMesh:
    q = round(dist.get_world_size() ** 0.5)
    return init_device_mesh("cpu", (q, q), mesh_dim_names=("tp_row", "tp_column"))


def layers(mesh: DeviceMesh, **settings: Any) -> tuple[nn.Linear, SummaLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, **settings)
    return plain, SummaLinear.from_linear(plain, mesh)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor()


def compare(settings: dict[str, Any], frozen: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of ours and theirs: output, and gradients of input, weight and bias."""
    mesh = square()
    plain, layer = layers(mesh, **settings)
    for one in (plain, layer):
        for name in frozen:
            if name != "input":
                one.get_parameter(name).requires_grad_(False)
    dtype = plain.weight.dtype
    x, gradient = torch.randn(TOKENS, 3, INPUTS).to(dtype), torch.randn(TOKENS, 3, OUTPUTS)
    own = cut(x, mesh).requires_grad_("input" not in frozen)
    x.requires_grad_("input" not in frozen)
    gradient = gradient.to(dtype)
    y = plain(x)
    y.backward(gradient)
    found = layer(own)
    found.backward(cut(gradient, mesh))
    pairs = [(found, cut(y.detach(), mesh))]
    if x.grad is not None:
        pairs.append((own.grad, cut(x.grad, mesh)))
    for name, parameter in plain.named_parameters():
        ours = layer.get_parameter(name)
        assert ours.shape == parameter.shape and torch.equal(whole(ours), parameter)
        assert (ours.grad is None) == (parameter.grad is None)
        if parameter.grad is not None:
            pairs.append((whole(ours.grad), parameter.grad))
    return pairs


CASES = [
    ({}, ()),
    ({"bias": False}, ()),
    ({}, ("input",)),
    ({}, ("weight",)),
    ({"dtype": torch.float64}, ()),
    ({"dtype": torch.bfloat16}, ()),
]


def compare_all() -> list[list[tuple[Tensor, Tensor]]]:
    return [compare(*case) for case in CASES]


@pytest.mark.parametrize("world_size", [1, 4])
def test_equal_to_linear(pool: Pool, world_size: int) -> None:
    """On a grid of one rank to the last bit, else but for rounding."""
    tolerances = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}
    for cases in pool.run(world_size, compare_all):
        for pairs in cases:
            for ours, theirs in pairs:
                tolerance = tolerances[theirs.dtype] if world_size > 1 else 0
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=4 * tolerance)


def refuse() -> list[str]:
    mesh = square()
    line = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    said = []

    def fails(call: Any, kind: type[Exception] = ShardingError) -> None:
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))

    fails(lambda: SummaLinear(7, 8, mesh=mesh))
    fails(lambda: SummaLinear.from_linear(nn.Linear(8, 9), mesh))
    fails(lambda: SummaLinear(8, 8, mesh=line))
    layer = SummaLinear(INPUTS, OUTPUTS, mesh=mesh)
    fails(lambda: layer(torch.zeros(2, INPUTS)))
    fails(lambda: cut(torch.zeros(3, 4), mesh))
    uneven = torch.zeros(1 + dist.get_rank() % 2, INPUTS // 2)
    fails(lambda: layer(uneven), MismatchError)
    # A layer that is drawn has blocks that differ, and a copy of it computes the same.
    again, x = copy.deepcopy(layer), torch.ones(2, INPUTS // 2)
    assert torch.equal(again(x), layer(x))
    values = whole(layer.weight)
    assert len(values.unique()) == values.numel() and values.abs().max() <= INPUTS**-0.5
    return [*said, repr(layer)]


def test_what_does_not_fit_is_named(pool: Pool) -> None:
    wanted = [
        "7 inputs cannot be cut into 2 equal parts",
        "9 outputs cannot be cut into 2 equal parts",
        "a grid has two dimensions of one size, and this mesh is 1 x 4",
        "a SummaLinear of 8 inputs on a grid of 2 x 2 takes blocks of 4 features, and got (2, 8)",
        "activations of shape (3, 4) cannot be cut",
        "activations of the ranks of a row differ in shape: rank",
        "SummaLinear(8, 12, bias=True, grid=2 x 2)",
    ]
    for said in pool.run(4, refuse):
        for text, start in zip(said, wanted, strict=True):
            assert text.startswith(start), text


# With ZeRO ---------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Two blocks of two layers, each plain or on a grid."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(INPUTS, 4 * INPUTS), (4 * INPUTS, INPUTS)] * 2
        plain = [nn.Linear(*size) for size in sizes]
        linears = [one if mesh is None else SummaLinear.from_linear(one, mesh) for one in plain]
        self.blocks = nn.ModuleList(
            nn.Sequential(linears[number], nn.GELU(), linears[number + 1]) for number in (0, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def data(step: int, group: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + group)
    x = torch.randn(TOKENS, INPUTS, generator=generator)
    return x, x.sin()


LIMIT = 0.1


def train_alone(groups: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process, the mean over the data parallel groups' batches."""
    model = MLP(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = []
    for step in range(3):
        for group in range(groups):
            x, y = data(step, group)
            loss = F.mse_loss(model(x), y)
            (loss / groups).backward()
            seen.append(loss.item())
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: one.detach() for name, one in model.named_parameters()}


def train(shape: tuple[int, int, int], stage: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of this group and norms, whole weights, and bytes of the last step's exchanges."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp_row", "tp_column"))
    grid = mesh["tp_row", "tp_column"]
    model = MLP(grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    onecopy.shard(model, optimizer, stage=stage, mesh=mesh)
    count_in(model)
    events: list[Event] = []
    onecopy.events.add_sink(model, events.append)
    seen = []
    for step in range(3):
        events.clear()
        x, y = (cut(one, grid) for one in data(step, mesh.get_local_rank("dp")))
        # This block's part of the mean over all elements.
        loss = F.mse_loss(model(x), y, reduction="sum") / (TOKENS * INPUTS)
        loss.backward()
        total = loss.detach().clone()
        for name in ("tp_row", "tp_column"):
            dist.all_reduce(total, group=mesh.get_group(name))
        seen += [total.item(), float(onecopy.clip_grad_norm_(model, LIMIT))]
        sent = sum(one.num_bytes for one in events if one.kind == "exchange")
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: whole(one) for name, one in model.state_dict().items()}, sent


def check(runs: list[Any], groups: int) -> None:
    seen, values = train_alone(groups)
    for rank, (found, parameters, _) in enumerate(runs):
        group = rank // (len(runs) // groups)
        expected = [one for step in range(3) for one in (seen[step * (groups + 1) + group], None)]
        expected[1::2] = seen[groups :: groups + 1]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0)
        assert parameters.keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_on_a_grid(pool: Pool, stage: int) -> None:
    """Losses, norms and weights of one process, and the bytes that the formula says."""
    runs = pool.run(4, train, (1, 2, 2), stage)
    check(runs, 1)
    blocks = [TOKENS * n + INPUTS * 4 * INPUTS for n in (INPUTS, 4 * INPUTS)] * 2
    for _, _, sent in runs:
        products = 3 * sum(4 * numel // 4 for numel in blocks)
        # The first layer's input needs no gradient: its weight is not spread, nor its sum sent.
        products -= TOKENS * INPUTS // 4 * 4 + INPUTS * 4 * INPUTS // 4 * 4
        biases = 4 * sum(n // 2 for n in (4 * INPUTS, INPUTS)) * 2
        assert sent == products + biases


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_grids_and_data_parallel_ranks(pool: Pool, stage: int) -> None:
    """2 x 2 x 2: ZeRO cuts each rank's blocks over the data dimension."""
    check(pool.run(8, train, (2, 2, 2), stage), 2)


def save(folder: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "tp_row", "tp_column"))
    model = MLP(mesh["tp_row", "tp_column"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    onecopy.shard(model, optimizer, stage=3, mesh=mesh)
    step_once(model, optimizer, mesh)
    onecopy.save(folder, model, optimizer, step=1)
    step_once(model, optimizer, mesh)
    return {name: whole(one) for name, one in model.state_dict().items()}


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None) -> None:
    x, y = data(0, 0)
    if mesh is not None:
        x, y = (cut(one, mesh["tp_row", "tp_column"]) for one in (x, y))
    (F.mse_loss(model(x), y, reduction="sum") / (TOKENS * INPUTS)).backward()
    optimizer.step()
    optimizer.zero_grad()


def load(folder: str) -> list[dict[str, Tensor]]:
    """Plain layers, cut over the data ranks alone, and a grid of one rank beside them."""
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "tp_row", "tp_column"))
    found = []
    for grid in (None, mesh["tp_row", "tp_column"]):
        model = MLP(grid)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        onecopy.shard(model, optimizer, stage=2, mesh=mesh)
        onecopy.load(folder, model, optimizer)
        step_once(model, optimizer, None if grid is None else mesh)
        values = model.state_dict().items()
        found.append({name: one if grid is None else whole(one) for name, one in values})
    return found


def test_checkpoints_are_those_of_plain_linears(pool: Pool, tmp_path: Path) -> None:
    """Saved on a grid, weights and states go on in nn.Linear on two data parallel ranks."""
    expected = pool.run(4, save, str(tmp_path))[0]
    for models in pool.run(2, load, str(tmp_path)):
        for found in models:
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
