"""Models built without memory: the values of a plain construction, and never more than a unit."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.handle
from onecopy.core import build, cells, initialise
from onecopy.errors import ShardingError
from onecopy.memory.live_tensors import LiveTensors
from tests import models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, full_values, train

Make = Callable[[], nn.Module]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """What shard would make of the parameters and buffers of an unmade model."""
    values = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        view = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        build.write_values(view, tensor)
        values[name] = view
    return values


class Made(nn.Module):
    """A module whose constructor is a function."""

    def __init__(self, constructor: Callable[[Any], Any]) -> None:
        super().__init__()
        constructor(self)


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


def initialised(name: str, *shape: int, **options: Any) -> nn.Module:
    """A parameter that an initialiser of torch.nn.init fills."""
    module = nn.ParameterList([empty(*shape)])
    getattr(nn.init, name)(module[0], **options)
    return module


def arithmetic(module: Any) -> None:
    """Parameters from computed tensors, one of which lives on and is changed."""
    scaled = torch.randn(30, 20) / math.sqrt(20)
    scaled[3] = 0
    module.scaled = nn.Parameter(scaled)
    module.logs = nn.Parameter(torch.log(torch.arange(1, 9).float()))
    scaled.mul_(2)
    module.rows = nn.Parameter(torch.randn(6, 4)[2:4])
    module.transposed = nn.Parameter(torch.randn(3, 4).t())


def by_data(module: Any) -> None:
    """The older habit: everything through .data."""
    module.linear = nn.Linear(40, 50)
    module.linear.weight.data.normal_(0, 0.02)
    module.linear.bias.data = torch.randn(50)
    module.linear.bias.data += 1
    module.other = nn.Linear(40, 50)
    nn.init.trunc_normal_(module.other.weight.data, std=0.02, a=-0.02, b=0.02)
    module.table = nn.Embedding(9, 4, padding_idx=2)


def reading(module: Any) -> None:
    """A constructor that looks at values, of parameters too."""
    module.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
    module.linear = nn.Linear(30, 40)
    if module.linear.weight.sum() > 0:
        module.linear.weight.data.neg_()
    limit = module.linear.weight.data.std()
    module.linear.weight.data.clamp_(-limit, limit)
    module.scale = nn.Parameter(torch.full((3,), module.linear.weight.detach().norm().item()))
    zeros = torch.zeros(3, device=module.linear.weight.device)
    module.register_buffer("shift", zeros + module.linear.bias[0].detach())


def many_writes(module: Any) -> None:
    """Row by row, beyond what is worth recording."""
    module.table = nn.Embedding(600, 3)
    for row in range(600):
        module.table.weight.data[row] = row
    module.copy = copy.deepcopy(module.table)
    module.table.weight.data[5] = -1
    rows = torch.zeros(300, 3)
    for row in range(300):
        rows[row] = row
    module.twice = nn.Parameter(rows * 2)
    rows.add_(1)
    module.rows = nn.Parameter(rows)


def copies(module: Any) -> None:
    """Deep copies, and state dictionaries between modules."""
    module.first = nn.Linear(3, 4)
    module.second = copy.deepcopy(module.first)
    nn.init.ones_(module.first.bias)
    module.others = nn.ModuleList(copy.deepcopy(module.first) for _ in range(2))
    module.others[0].weight.data.mul_(3)
    module.third = nn.Linear(3, 4)
    module.third.load_state_dict(module.others[0].state_dict())


def from_outside(module: Any) -> None:
    """Values that torch did not make stay as they are."""
    module.weight = nn.Parameter(torch.from_numpy(np.random.RandomState(0).randn(3, 4)))
    module.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
    module.linear = nn.Linear(3, 4)
    module.linear.weight.data.copy_(torch.from_numpy(np.ones((4, 3))))


def own_generator(module: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    module.linear = nn.Linear(3, 4)
    nn.init.normal_(module.linear.weight, generator=generator)
    module.weight = nn.Parameter(torch.randn(4, generator=generator))


def tied(module: Any) -> None:
    module.table = nn.Embedding(9, 4)
    module.head = nn.Linear(4, 9)
    module.head.weight = module.table.weight
    nn.init.normal_(module.head.weight)


def double() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(3, 4), Made(own_generator))
    finally:
        torch.set_default_dtype(torch.float32)


class Scripted(nn.Module):
    """A GPT script's habit: apply one function to all modules, then scale some."""

    def __init__(self, scales: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.apply(self._init_weights)
        if scales:
            for block in self.blocks:
                nn.init.normal_(block.weight, std=0.1)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


normed = nn.utils.parametrizations
CASES: dict[str, Make] = {
    "trunc_normal": partial(initialised, "trunc_normal_", 50, 30, std=0.5, a=-0.6, b=0.6),
    "far_trunc_normal": partial(initialised, "trunc_normal_", 50, 30, std=0.5, a=1, b=2),
    "orthogonal": partial(initialised, "orthogonal_", 20, 30),
    "sparse": partial(initialised, "sparse_", 20, 30, sparsity=0.3),
    "dirac": partial(initialised, "dirac_", 8, 8, 3),
    "eye": partial(initialised, "eye_", 8, 8),
    "lstm": lambda: nn.LSTM(5, 7, 2, bidirectional=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
    ),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "weight_norm": lambda: normed.weight_norm(nn.Linear(4, 5)),
    "spectral_norm": lambda: normed.spectral_norm(nn.Linear(4, 5)),
    "orthogonal_norm": lambda: normed.orthogonal(nn.Linear(5, 5)),
    "bf16": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.bfloat16),
    "channels_last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "parameters": lambda: nn.ParameterDict({"a": torch.randn(3), "b": torch.ones(3) * 2}),
    "double": double,
    "scripted": partial(Scripted, scales=True),
    **{
        constructor.__name__: partial(Made, constructor)
        for constructor in (
            *(arithmetic, by_data, reading, many_writes, copies, from_outside),
            *(own_generator, tied),
        )
    },
}


def initialise_by_hand(model: nn.Module) -> nn.Module:
    """What a user may do to a model between its construction and shard."""
    torch.manual_seed(11)

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.3)
            nn.init.trunc_normal_(module.weight, std=0.2, a=-0.1, b=0.1)

    model.apply(fill)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = torch.full((1,), 1.5)
            parameter.mul_(scale)
            scale.zero_()
            parameter[...] += 1
            size = parameter.detach().norm()
            size.clamp_(min=1)
            parameter.div_(size)
    return model.to(torch.float64)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_a_plain_construction(case: str, by_hand: bool) -> None:
    """Bit for bit, and so is the state of the random generator afterwards."""
    finish = initialise_by_hand if by_hand else nn.Module.train
    torch.manual_seed(3)
    plain = finish(CASES[case]())
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with onecopy.init_sharded():
        unmade = CASES[case]()
    unmade = finish(unmade)
    assert torch.equal(torch.get_rng_state(), state)
    values = values_of(unmade)
    assert torch.equal(torch.get_rng_state(), state), "making values draws nothing"
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    assert list(values) == list(expected)
    for name, value in expected.items():
        assert values[name].dtype == value.dtype
        assert torch.equal(values[name], value), name


@pytest.mark.parametrize("name", models.NAMES)
def test_models(name: str) -> None:
    """Nothing is left behind in memory but buffers and what torch did not compute."""
    expected = models.build(name)
    with onecopy.init_sharded():
        unmade = models.build(name)
    real = [key for key, parameter in unmade.named_parameters() if not parameter.is_meta]
    assert all("scalar" in key or "temperature" in key for key in real), real
    assert not any(buffer.is_meta for buffer in unmade.buffers())
    values = values_of(unmade)
    for key, value in (*expected.named_parameters(), *expected.named_buffers()):
        assert torch.equal(values[key], value), key


EVERY = list(itertools.product(models.NAMES, (1, 2, 3, 4), (0, 1, 2, 3)))


@pytest.mark.sampled(
    "name, world, stage",
    EVERY,
    7,
    always=[("tied", 2, 3), ("odd", 3, 3), ("frozen", 2, 1), ("hf_gpt2", 2, 3)],
)
def test_training_equals_one_process(pool: Pool, name: str, world: int, stage: int) -> None:
    """An optimizer made from unmade parameters; ranks with other seeds get the first's values."""
    if name in models.HF_NAMES:
        pytest.importorskip("transformers", reason="pip install 'onecopy[test]'")
    plan = Plan(name=name, stage=stage, unmade=True)
    expected = reference.train(
        partial(models.build, name), models.batches(name, plan.steps, world), OPTIMIZERS["adamw"]
    )
    for rank, run in enumerate(pool.run(world, train, plan, timeout=120)):
        assert run.losses == [step[rank] for step in expected.losses]
        for key, value in expected.parameters.items():
            assert torch.equal(run.parameters[key], value), f"{key} on rank {rank}"


def bf16_masters(unmade: bool) -> dict[str, Tensor]:
    plan = Plan(name="gpt", stage=3, settings={"precision": "bf16"}, unmade=unmade)
    return train(plan).parameters


def test_masters_hold_more_than_the_compute_dtype(pool: Pool) -> None:
    """Values are made in the parameters' own dtype, and rounded for computing only."""
    (plain, _), (unmade, _) = (pool.run(2, bf16_masters, one) for one in (False, True))
    for name, value in plain.items():
        assert torch.equal(unmade[name], value), name


class Deep(nn.Module):
    """Blocks of equal size, initialised in the constructor and once more after it."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def peak_of_building(depth: int, width: int, how: str, precision: str) -> tuple[int, int, int, int]:
    """Peaks of construction and of shard, bytes at rest after it, bytes of one unit."""
    with LiveTensors() as live:
        with onecopy.init_sharded() if how == "init_sharded" else torch.device("meta"):
            model = Deep(depth, width)
        optimizer = torch.optim.AdamW(model.parameters())
        construction = live.peak_bytes
        live.reset_peak()
        onecopy.shard(model, optimizer, stage=3, precision=precision)
        peak = live.peak_bytes
        unit = onecopy.handle.of(model).engine.units[-1]
        return construction, peak, live.num_bytes(), 4 * unit.layout.padded_numel


@pytest.mark.sampled(
    "world, depth, how, precision",
    list(itertools.product((2, 4), (6, 12), ("init_sharded", "torch.device"), ("fp32", "bf16"))),
    3,
    always=[(4, 12, "init_sharded", "fp32"), (2, 12, "torch.device", "bf16")],
)
def test_peak_is_the_slices_and_one_unit(
    pool: Pool, world: int, depth: int, how: str, precision: str
) -> None:
    """However deep the model is, while it is built and while it is sharded."""
    runs = pool.run(world, peak_of_building, depth, 256, how, precision)
    for construction, peak, rest, unit in runs:
        small = 64 << 10  # generator states, biases
        assert construction <= unit + small
        assert rest <= depth * unit / world + small
        assert peak <= rest + unit + small, (peak - rest) / unit


def hooks_and_optimizers() -> None:
    """What holds a parameter before shard holds it afterwards."""
    seen: list[str] = []
    with onecopy.init_sharded():
        model = models.build("tied")
    parameter = model.tokens.weight
    parameter.note = "mine"
    parameter.register_hook(lambda grad: seen.append("grad"))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    copied = copy.deepcopy(model)
    onecopy.shard(model, optimizer, stage=3)
    assert model.tokens.weight is parameter is model.head.weight
    assert parameter.note == "mine"
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    plain = models.build("tied")
    reference_optimizer = torch.optim.Adagrad(
        plain.parameters(), lr=0.1, initial_accumulator_value=0.5
    )
    for step in range(2):
        for one, stepping in ((model, optimizer), (plain, reference_optimizer)):
            models.loss(one, models.batch("tied", step, 0)).backward()
            stepping.step()
            stepping.zero_grad()
        scheduler.step()
        reference_optimizer.param_groups[0]["lr"] *= 0.5
    assert seen == ["grad", "grad"]
    for name, value in full_values(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    values = values_of(copied)
    assert all(torch.equal(values[name], p) for name, p in models.build("tied").named_parameters())


def test_hooks_and_optimizers(pool: Pool) -> None:
    pool.run(1, hooks_and_optimizers)


def counters_without_values() -> None:
    """A fused Adagrad makes its counters where the parameters are: nowhere yet."""
    with onecopy.init_sharded():
        model = models.build("tied")
    optimizer = torch.optim.Adagrad(model.parameters(), fused=True)
    with pytest.raises(ShardingError, match=r"state step of .* make the optimizer after"):
        onecopy.shard(model, optimizer, stage=3)


def test_counters_without_values_are_refused(pool: Pool) -> None:
    pool.run(1, counters_without_values)


def load_before_shard() -> None:
    """A state dictionary loaded into a model without values is not lost."""
    state = models.build("convbn", seed=5).state_dict()
    with onecopy.init_sharded():
        model = models.build("convbn", seed=dist.get_rank())
    model.load_state_dict(state)
    onecopy.shard(model, stage=3)
    with onecopy.full_parameters(model):
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name


def test_load_before_shard(pool: Pool) -> None:
    pool.run(2, load_before_shard)


def test_what_others_hold_must_not_change() -> None:
    """Values from outside are not copied where they are large, so a change is noticed."""
    values = torch.ones(300, 300)
    with onecopy.init_sharded():
        model = nn.Linear(300, 300)
        model.weight.data.copy_(values)
    assert torch.equal(values_of(model)["weight"], values)
    values.zero_()
    for use in (values_of, initialise.prepare):
        with pytest.raises(ShardingError, match=r"\(300, 300\).*changed in place before shard"):
            use(model)


def test_looking_before_shard(tmp_path: Path) -> None:
    """Values can be read and computed with, but not be saved or trained."""
    with onecopy.init_sharded():
        model = models.build("mlp")
    plain, x = models.build("mlp"), torch.ones(2, 7)
    assert model[0].bias.tolist() == plain[0].bias.tolist()
    assert np.array_equal(
        model[0].weight.detach()[1:].numpy(), plain[0].weight.detach()[1:].numpy()
    )
    assert model[0].weight.norm().item() == plain[0].weight.norm().item()
    assert "device='meta'" in repr(model[0].weight)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    with pytest.raises(ShardingError, match=r"no values to save yet: call onecopy\.shard"):
        torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(RuntimeError):
        model(x).sum().backward()


def test_sizes_are_final() -> None:
    with onecopy.init_sharded():
        model = nn.Linear(3, 4)
        with pytest.raises(ShardingError, match="change its size before"):
            model.weight.data.resize_(2, 2)


def test_nothing_stays_behind() -> None:
    """Neither hooks of torch nor records, after an error either."""
    before = len(cells.all_cells())
    with pytest.raises(ZeroDivisionError):
        with onecopy.init_sharded(), onecopy.init_sharded():
            model = nn.Linear(3, 4)
            _ = 1 // 0
    assert not nn.Linear(2, 2).weight.is_meta
    del model
    assert len(cells.all_cells()) == before


def test_shard_comes_after_the_block() -> None:
    with pytest.raises(ShardingError, match="Leave the block"), onecopy.init_sharded():
        onecopy.shard(nn.Linear(3, 4))


def without_elements() -> None:
    """Parameters that no unit has."""
    with onecopy.init_sharded():
        model = nn.ModuleList([nn.Linear(3, 4), nn.ParameterList([empty(0, 3)])])
        model[1].requires_grad_(False)
    onecopy.shard(model, stage=3)
    assert not model[1][0].is_meta
    assert type(model[1][0]) is nn.Parameter


def test_without_elements(pool: Pool) -> None:
    pool.run(1, without_elements)


def test_the_default_device_must_not_be_meta() -> None:
    with pytest.raises(ShardingError, match=r"leave torch\.device"), torch.device("meta"):
        with onecopy.init_sharded():
            pass


# Meta tensors that torch made -----------------------------------------------------------------

BARE: dict[str, Make] = {
    **{
        name: partial(models.build, name)
        for name in ("gpt", "tied", "convbn", "nested", "frozen", "hf_llama", "hf_t5")
    },
    "lstm": lambda: nn.LSTM(4, 5),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "scripted": Scripted,
}


@pytest.mark.parametrize("name", BARE)
def test_meta_device(name: str) -> None:
    """Modules initialise themselves, in the order of their constructors: the same values."""
    torch.manual_seed(0)
    plain = BARE[name]()
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = BARE[name]()
    # models.build() has its own seed 0; others start here.
    torch.manual_seed(0)
    initialise.prepare(model)
    if name not in models.NAMES:
        assert torch.equal(torch.get_rng_state(), state)
    values = values_of(model)
    for key, value in (*plain.named_parameters(), *plain.named_buffers()):
        assert torch.equal(values[key], value), key


def meta_training(stage: int) -> dict[str, Tensor]:
    seen = []
    with torch.device("meta"):
        model = models.build("tied")
    model.norm.weight.register_hook(lambda grad: seen.append(grad.shape))
    optimizer = OPTIMIZERS["adamw"](model)
    torch.manual_seed(dist.get_rank())
    onecopy.shard(model, optimizer, stage=stage)
    for step in range(2):
        models.loss(model, models.batch("tied", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 2
    return full_values(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_meta_device_trains(pool: Pool, stage: int) -> None:
    """As the same model does that was built with the first rank's seed."""
    plain = models.build("tied")
    optimizer = OPTIMIZERS["adamw"](plain)
    for step in range(2):
        models.loss(plain, models.batch("tied", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in pool.run(2, meta_training, stage):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(values[name], value)


def test_meta_device_with_real_parts() -> None:
    """What has values keeps them, even where its neighbour in the module has none."""
    with torch.device("meta"):
        model = Scripted()
    model.blocks[0] = nn.Linear(4, 4)
    model.blocks[1].bias = nn.Parameter(torch.ones(4))
    expected = model.blocks[0].weight.detach().clone()
    initialise.prepare(model)
    values = values_of(model)
    assert torch.equal(values["blocks.0.weight"], expected)
    assert torch.equal(values["blocks.1.bias"], torch.ones(4))
    assert values["blocks.1.weight"].any()


def test_meta_device_without_initialiser() -> None:
    """The error names the parameter and its module; the model is as it was."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Made(arithmetic))
    for _ in range(2):
        with pytest.raises(ShardingError, match=r"1\.scaled.*class Made.*init_sharded"):
            initialise.prepare(model)
    assert type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize(
    ("change", "name"),
    [("constructor", "blocks.0"), ("user", "table"), ("copied", "copy"), ("moved", "blocks.1")],
)
def test_meta_device_with_lost_initialisation(change: str, name: str) -> None:
    """Torch keeps no trace of it but a count."""
    with torch.device("meta"):
        model: Any = Scripted(scales=change == "constructor")
        if change == "copied":
            model.copy = copy.deepcopy(model.blocks[0])
    if change == "user":
        nn.init.uniform_(model.table.weight)
    if change == "moved":
        model.blocks[1] = nn.Linear(4, 4).to("meta")
    with pytest.raises(ShardingError, match=rf"{re.escape(name)}\.weight was written .* no trace"):
        initialise.prepare(model)
