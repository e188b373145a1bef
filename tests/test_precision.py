"""Dtypes of parameters, modules kept in fp32, casts at the border, masters in state dicts."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, namedtuple
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy.core.kept import kept_parameters
from onecopy.core.precision import Dtypes, cast_floating, dtypes_of
from onecopy.errors import ConfigError
from onecopy.policies import Precision
from tests import hf_models, models, reference
from tests.pool import Pool
from tests.runs import OPTIMIZERS, Plan, full_values, train

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FP64, INT = torch.float64, torch.int64
STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("own", "trainable", "precision", "expected"),
    [
        (FP32, True, None, Dtypes(FP32, FP32, FP32, FP32)),
        (FP64, True, None, Dtypes(FP64, FP64, FP64, FP64)),
        (BF16, True, None, Dtypes(BF16, BF16, FP32, FP32)),
        (FP16, True, None, Dtypes(FP16, FP16, FP32, FP32)),
        (BF16, False, None, Dtypes(BF16, BF16, BF16, BF16)),
        (FP32, True, Precision(compute="bf16"), Dtypes(BF16, BF16, FP32, FP32)),
        (FP32, True, Precision(compute="fp16"), Dtypes(FP16, FP16, FP32, FP32)),
        (BF16, True, Precision(compute="fp32"), Dtypes(FP32, FP32, FP32, FP32)),
        (FP32, True, Precision(compute="bf16", reduce="fp32"), Dtypes(BF16, FP32, FP32, FP32)),
        (INT, False, Precision(compute="bf16"), Dtypes(INT, INT, INT, INT)),
    ],
)
def test_dtypes(
    own: torch.dtype, trainable: bool, precision: Precision | None, expected: Dtypes
) -> None:
    """Masters are fp32 wherever a trainable parameter computes lower."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=own), requires_grad=trainable)
    assert dtypes_of(parameter, precision) == expected


# Kept modules ---------------------------------------------------------------------------------


def kept_names(model: nn.Module, precision: Precision) -> set[str]:
    kept = kept_parameters(model, precision)
    return {name for name, parameter in model.named_parameters() if id(parameter) in kept}


def test_modules_are_kept_by_class_by_base_class_and_by_name() -> None:
    """With all that is inside them; batch norms without being asked for."""

    class OwnNorm(nn.LayerNorm):
        """A user's."""

    untracked = nn.BatchNorm1d(2, track_running_stats=False)
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), untracked)
    model = nn.Sequential(OwnNorm(2), inner, nn.Linear(2, 2))
    bf16 = partial(Precision, compute="bf16")
    assert kept_names(model, Precision()) == set()
    assert kept_names(model, Precision(compute="fp32")) == set()
    norm = {"1.1.weight", "1.1.bias"}
    assert kept_names(model, bf16()) == norm
    first, rest = {"0.weight", "0.bias"}, {"1.2.weight", "1.2.bias"}
    linear = {"1.0.weight", "1.0.bias"}
    assert kept_names(model, bf16(keep_fp32=("LayerNorm",))) == norm | first
    assert kept_names(model, bf16(keep_fp32=("*Norm",))) == norm | first | rest
    assert kept_names(model, bf16(keep_fp32=("1",))) == norm | linear | rest
    assert kept_names(model, bf16(keep_fp32=("1.[01]",))) == norm | linear
    assert kept_names(model.bfloat16(), bf16()) == set(), "statistics in bf16 need no fp32"


def test_names_that_keep_nothing_are_answered() -> None:
    """A typing error would lose precision without a word."""
    model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Did you mean 'LayerNorm'"):
        kept_parameters(model, Precision(compute="bf16", keep_fp32=("LayerNrom",)))
    with pytest.raises(ConfigError, match=r"give a tuple of names, \('LayerNorm',\)"):
        Precision(keep_fp32="LayerNorm")  # type: ignore[arg-type]
    tied = models.build("tied")
    with pytest.raises(ConfigError, match=r"tokens\.weight of a module that computes in bf16"):
        kept_parameters(tied, Precision(compute="bf16", keep_fp32=("head",)))


def test_lists_of_hugging_face() -> None:
    """The plain list holds for fp16 alone, the strict one for bf16 too, wherever the model is."""
    pytest.importorskip("transformers", reason="pip install 'onecopy[test]'")
    model = nn.ModuleDict({"t5": hf_models.t5()})
    wo = {name for name, _ in model.named_parameters() if ".wo." in name}
    assert wo and kept_names(model, Precision(compute="fp16")) == wo
    assert kept_names(model, Precision(compute="bf16")) == set()
    model["t5"]._keep_in_fp32_modules_strict = {"lm_head", "block.*.q.weight"}
    strict = {"t5.shared.weight"}  # tied to the head
    strict |= {name for name, _ in model.named_parameters() if name.endswith(".q.weight")}
    assert kept_names(model, Precision(compute="bf16")) == strict


class Router(nn.Module):
    """Picks from two experts by the probabilities of a small linear module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Kept(nn.Module):
    """One module of each kind that is often kept in fp32, in blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), Router(width), nn.RMSNorm(width), nn.BatchNorm1d(width)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


KEPT = ("LayerNorm", "RMSNorm", "gate", "BatchNorm1d")


def kept_loss(model: nn.Module, batch: models.Batch) -> Tensor:
    x = batch.tensors["x"].repeat(3, 1)
    return model(x).float().square().mean()


def train_kept(stage: int, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Kept()
    optimizer = OPTIMIZERS["momentum"](model)
    keep = tuple(name if name != "gate" else "*.gate" for name in KEPT)
    policy = Precision(compute=precision, keep_fp32=keep)
    onecopy.shard(model, optimizer, stage=stage, precision=policy)
    seen: dict[str, set[torch.dtype]] = {}
    for module in model.modules():
        module.register_forward_hook(
            lambda module, args, out: seen.setdefault(type(module).__name__, set()).add(
                module.weight.dtype if hasattr(module, "weight") else FP32
            )
        )
    losses = []
    rank = torch.distributed.get_rank()
    for step in range(3):
        loss = kept_loss(model, models.batch("unused", step, rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert seen["LayerNorm"] == seen["RMSNorm"] == seen["BatchNorm1d"] == {FP32}
    assert {FP32, torch.float16 if precision == "fp16" else BF16} == seen["Linear"]
    return losses, full_values(model)


def build_kept() -> nn.Module:
    torch.manual_seed(0)
    return Kept()


@pytest.mark.sampled(
    "world, stage, precision",
    list(itertools.product((1, 2, 3), (1, 2, 3), ("bf16", "fp16"))),
    3,
    always=[(2, 3, "bf16"), (2, 3, "fp16")],
)
def test_kept_modules_train(pool: Pool, world: int, stage: int, precision: str) -> None:
    """LayerNorm, RMSNorm, a router and BatchNorm in fp32 between modules that compute lower."""
    runs = pool.run(world, train_kept, stage, precision)
    expected = reference.train(
        build_kept,
        models.batches("unused", 3, world),
        OPTIMIZERS["momentum"],
        precision=precision,
        loss_scale=2.0**16 if precision == "fp16" else 1.0,
        keep=KEPT,
        loss=kept_loss,
    )
    for rank, (losses, values) in enumerate(runs):
        assert losses == [step[rank][0] for step in expected.losses]
        for name, value in expected.parameters.items():
            assert torch.equal(values[name], value), name


def compile_kept(compiles: bool) -> list[float]:
    model = build_kept()
    if compiles:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    optimizer = OPTIMIZERS["sgd"](model)
    policy = Precision(compute="fp16", keep_fp32=("LayerNorm", "RMSNorm", "*.gate"))
    onecopy.shard(model, optimizer, stage=3, precision=policy)
    losses = []
    for step in range(3):
        loss = kept_loss(model, models.batch("unused", step, 0))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_kept_modules_inside_a_compiled_block(pool: Pool) -> None:
    """Casts are part of its one graph."""
    assert pool.run(1, compile_kept, True, timeout=120) == pool.run(1, compile_kept, False)


@pytest.mark.parametrize("stage", [2, 3])
def test_t5_in_fp16(pool: Pool, stage: int) -> None:
    """Its `wo` stays in fp32 because its list says so, and its own code casts for it."""
    pytest.importorskip("transformers", reason="pip install 'onecopy[test]'")
    plan = Plan(name="hf_t5", stage=stage, optimizer="sgd", settings={"precision": "fp16"})
    runs = pool.run(2, train, plan, timeout=120)
    expected = reference.train(
        partial(models.build, "hf_t5"),
        models.batches("hf_t5", 3, 2),
        OPTIMIZERS["sgd"],
        precision="fp16",
        loss_scale=2.0**16,
        keep=("wo",),
        keep_casts=False,
    )
    for rank, run in enumerate(runs):
        assert run.losses == [step[rank] for step in expected.losses]
        for name, value in expected.parameters.items():
            assert torch.equal(run.parameters[name], value), name


# Borders --------------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    """Buffers that must not lose precision, and one that the model computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.tensor([1.0001, 2.0003]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.linear(x), "f": self.frequencies * 2, "n": self.count + 1}


def outputs(settings: dict[str, Any]) -> dict[str, torch.dtype]:
    model = WithBuffers()
    onecopy.shard(model, stage=3, **settings)
    assert model.frequencies.tolist() == torch.tensor([1.0001, 2.0003]).tolist()
    with torch.no_grad():
        evaluated = {name: value.dtype for name, value in model(torch.ones(2, 4)).items()}
    result = {name: value.dtype for name, value in model(torch.ones(2, 4)).items()}
    assert result == evaluated
    return result


def test_outputs_and_buffers(pool: Pool) -> None:
    """bf16 leaves as it is unless asked, fp16 becomes fp32; buffers keep their dtype."""
    cases: list[tuple[dict[str, Any], torch.dtype, torch.dtype]] = [
        ({"precision": "fp32"}, FP32, FP32),
        ({"precision": "bf16"}, BF16, FP32),
        ({"precision": Precision(compute="bf16", cast_outputs="fp32")}, FP32, FP32),
        ({"precision": Precision(compute="bf16", cast_outputs="bf16")}, BF16, BF16),
        ({"precision": "fp16"}, FP32, FP32),
        ({"precision": Precision(compute="fp16", cast_outputs="fp16")}, FP16, FP16),
        ({"precision": Precision(compute="fp16", loss_scale=1.0)}, FP32, FP32),
    ]
    for settings, y, f in cases:
        (dtypes,) = pool.run(1, outputs, settings)
        assert dtypes == {"y": y, "f": f, "n": INT}, settings


@dataclass
class Pair:
    """An input of the user's."""

    one: torch.Tensor
    other: str


Point = namedtuple("Point", "x y")


class Named(dict):  # type: ignore[type-arg]
    """A dict that is built from other arguments, as Hugging Face's outputs are."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def test_nested_inputs_are_cast() -> None:
    """Containers keep their types; integers, strings and None pass."""
    x, n = torch.ones(2), torch.ones(2, dtype=INT)
    named = Named("me")
    named["x"] = x
    value = [
        {"a": x, "n": n},
        (x, None),
        Point(x, 1),
        Pair(x, "s"),
        defaultdict(list, k=[x]),
        named,
    ]
    cast = cast_floating(value, BF16)
    assert cast[0]["a"].dtype == BF16
    assert cast[0]["n"] is n
    assert (cast[1][0].dtype, cast[1][1]) == (BF16, None)
    assert (type(cast[2]), cast[2].x.dtype, cast[2].y) == (Point, BF16, 1)
    assert (cast[3].one.dtype, cast[3].other) == (BF16, "s")
    assert (type(cast[4]), cast[4]["k"][0].dtype) == (defaultdict, BF16)
    assert (type(cast[5]), cast[5].name, cast[5]["x"].dtype) == (Named, "me", BF16)
    assert x.dtype == value[0]["a"].dtype == FP32, "the caller's own values are left alone"


class Adds(nn.Module):
    """Adds a table of positions to what it gets, as models do that compute in one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + self.table)


def add_fp32() -> list[str]:
    model = Adds()
    onecopy.shard(model, OPTIMIZERS["sgd"](model), precision="bf16")
    try:
        model(torch.ones(1, 4))
    except RuntimeError as error:
        return list(error.__notes__)
    return []


def test_errors_about_dtypes_name_buffers(pool: Pool) -> None:
    """torch's message names no module; most often a buffer is the reason."""
    (notes,) = pool.run(1, add_fp32)
    assert len(notes) == 1 and "table (float32)" in notes[0] and "to(x.dtype)" in notes[0]


# Sums -----------------------------------------------------------------------------------------


@pytest.mark.sampled(
    "world, stage, no_sync, settings",
    list(
        itertools.product(
            WORLDS,
            (1, 2, 3),
            (False, True),
            (Precision(compute="bf16"), Precision(compute="fp16", loss_scale=64.0)),
        )
    ),
    3,
    always=[(4, 3, True, Precision(compute="bf16")), (3, 2, False, Precision(compute="bf16"))],
)
def test_sums_are_made_in_fp32(
    pool: Pool, world: int, stage: int, no_sync: bool, settings: Precision
) -> None:
    """Over the ranks and over backwards, whatever travels between them: SGD shows each bit."""
    plan = Plan(
        name="tied",
        stage=stage,
        optimizer="sgd",
        backwards=3,
        no_sync=no_sync,
        settings={"precision": settings},
    )
    runs = pool.run(world, train, plan, timeout=120)
    expected = reference.train(
        partial(models.build, "tied"),
        models.batches("tied", plan.steps, world, 3),
        OPTIMIZERS["sgd"],
        no_sync=no_sync,
        precision=str(settings.compute),
        loss_scale=settings.loss_scale or 1.0,
    )
    for run in runs:
        for name, value in expected.parameters.items():
            assert torch.equal(run.parameters[name], value), name


@pytest.mark.parametrize("stage", [0, 3])
def test_fp32_that_travels_as_fp16(pool: Pool, stage: int) -> None:
    """Scaled like all fp16 gradients, so that small ones arrive."""
    plan = Plan(name="mlp", stage=stage, optimizer="sgd", settings={"precision": "fp32"})
    low = replace(plan, settings={"precision": Precision(reduce="fp16", loss_scale=2.0**10)})
    for exact, run in zip(pool.run(2, train, plan), pool.run(2, train, low), strict=True):
        assert run.losses[0] == exact.losses[0]
        for name, value in exact.parameters.items():
            torch.testing.assert_close(run.parameters[name], value, rtol=1e-3, atol=1e-4)


# Masters in state dicts -----------------------------------------------------------------------


def _trained(stage: int, precision: Any, optimizer: str = "momentum") -> nn.Module:
    model = models.build("tied")
    one = OPTIMIZERS[optimizer](model)
    onecopy.shard(model, one, stage=stage, precision=precision)
    for step in range(2):
        models.loss(model, models.batch("tied", step, torch.distributed.get_rank())).backward()
        one.step()
        one.zero_grad()
    return model


def round_trip(stage: int, precision: str | Precision) -> None:
    model = _trained(stage, precision)
    masters = full_values(model)
    state = model.state_dict()
    for name, value in masters.items():
        assert state[name].dtype == FP32
        assert torch.equal(state[name], value), name
        assert state[name].untyped_storage().nbytes() == value.nbytes
    assert torch.equal(state["head.weight"], state["tokens.weight"])
    assert not all(torch.equal(v, v.bfloat16().float()) for v in masters.values())
    other = models.build("tied", seed=1)
    onecopy.shard(other, OPTIMIZERS["sgd"](other), stage=stage, precision=precision)
    for target in (model, other):
        assert not target.load_state_dict(state).missing_keys
        for name, value in full_values(target).items():
            assert torch.equal(value, masters[name]), name
    # Inside full_parameters too, with a change by hand and one name of a tied weight missing.
    del state["tokens.weight"]
    state["norm.bias"] += 0.123
    with onecopy.full_parameters(other):
        other.load_state_dict(state, strict=False)
        with torch.no_grad():
            other.norm.weight[0] = 0.5
        again = other.state_dict()
    for name, value in full_values(other).items():
        assert torch.equal(again[name], value), name
        if name == "norm.weight":
            assert value[0] == 0.5 and torch.equal(value[1:], masters[name][1:])
        else:
            assert torch.equal(value, state.get(name, masters[name])), name


@pytest.mark.sampled(
    "world, stage, precision",
    list(
        itertools.product(
            (1, 2, 3), STAGES, ("bf16", "fp16", Precision(compute="bf16", master="bf16+16"))
        )
    ),
    3,
)
def test_state_dict_has_the_masters(
    pool: Pool, world: int, stage: int, precision: str | Precision
) -> None:
    """The values that the optimizer updates; loading them brings them back bit for bit."""
    pool.run(world, round_trip, stage, precision)


class Renames(nn.Linear):
    """Loads other values than those under its parameter's name."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state = {key: -value for key, value in state.items()}
        super()._load_from_state_dict(state, prefix, *args)


def load_negated() -> dict[str, Tensor]:
    model = nn.Sequential(Renames(3, 3))
    onecopy.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    model.load_state_dict({"0.weight": torch.full((3, 3), 0.3), "0.bias": torch.zeros(3)})
    return full_values(model)


def test_loading_code_of_a_module_has_the_last_word(pool: Pool) -> None:
    """What it loads is taken, as exactly as what it is given."""
    for values in pool.run(2, load_negated):
        assert torch.equal(values["0.weight"], torch.full((3, 3), -0.3))


def loaded_in_bf16(stage: int) -> dict[str, Tensor]:
    """Masters and Adam's moments are fp32, though nobody asked for it."""
    model = models.build("gpt").bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    onecopy.shard(model, optimizer, stage=stage)
    for step in range(3):
        models.loss(model, models.batch("gpt", step, torch.distributed.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    moments = [
        state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    assert {one.dtype for one in [*pieces, *moments]} == {FP32}
    assert next(model.parameters()).dtype == BF16
    return full_values(model)


def test_a_model_in_bf16_trains_with_fp32_masters(pool: Pool) -> None:
    """Steps smaller than bf16 can tell apart add up."""
    runs = pool.run(2, loaded_in_bf16, 3)
    expected = reference.train(
        lambda: models.build("gpt").bfloat16().float(),
        models.batches("gpt", 3, 2),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        precision="bf16",
    )
    for name, value in expected.parameters.items():
        assert torch.equal(runs[0][name], value), name


# What is said ---------------------------------------------------------------------------------


def said(settings: dict[str, Any], level: int) -> str:
    logging.getLogger("onecopy").setLevel(level)
    model = models.build("frozen")
    with redirect_stderr(StringIO()) as written:
        onecopy.shard(model, OPTIMIZERS["sgd"](model), **settings)
    return written.getvalue()


def test_the_dtypes_are_printed_once(pool: Pool) -> None:
    """On the first rank, unless all is fp32 or the logger is told to be silent."""
    policy = Precision(compute="bf16", keep_fp32=("LayerNorm",))
    first, second = pool.run(2, said, {"precision": policy}, logging.NOTSET)
    assert second == ""
    assert first == (
        "onecopy: 11.1k parameters, compute bf16, reduce bf16, masters fp32, gradients fp32; "
        "frozen: 3.8k in bf16; in fp32: 7 LayerNorm\n"
    )
    (scaled,) = pool.run(1, said, {"precision": "fp16"}, logging.NOTSET)
    assert "loss scale 65536 (dynamic)" in scaled and "in fp32" not in scaled
    assert pool.run(1, said, {"precision": "fp32"}, logging.NOTSET) == [""]
    assert pool.run(1, said, {"precision": policy}, logging.WARNING) == [""]
