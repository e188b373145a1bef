"""Checkpoints of torch.distributed.checkpoint, of FSDP2 and of DDP: read by onecopy, and read by
them where onecopy has written.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy.checkpoint.files import Reader
from onecopy.errors import CheckpointError
from tests import models
from tests.motley import Counting, compare, snapshot
from tests.pool import Pool
from tests.runs import full_values

Optimizer = torch.optim.Optimizer
MODEL = "tied"


class Counted(nn.Module):
    """A model beside a module with a state of its own, a buffer and a frozen layer."""

    def __init__(self, seed: int, *, has_counter: bool) -> None:
        super().__init__()
        self.gpt = models.build(MODEL, seed)
        if has_counter:
            self.counting = Counting(as_tensor=False)
        self.register_buffer("seen", torch.zeros(3, 2))
        self.gpt.get_submodule("blocks.0").requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += 1
        x: Tensor = self.gpt(tokens)
        return self.counting(x) if hasattr(self, "counting") else x + self.seen.sum()


def adamw(model: nn.Module, *, is_named: bool) -> Optimizer:
    """In two groups, of parameters or, as torch takes them too, of pairs with their names."""
    pairs = list(model.named_parameters())
    groups: list[list[Any]] = [
        [pair if is_named else pair[1] for pair in pairs if (pair[1].dim() > 1) == is_matrix]
        for is_matrix in (True, False)
    ]
    settings = {"params": groups[1], "lr": 3e-2, "weight_decay": 0.0}
    return torch.optim.AdamW([{"params": groups[0]}, settings], lr=1e-2, weight_decay=0.1)


def make(
    seed: int, *, has_counter: bool = True, is_named: bool = False
) -> tuple[Counted, Optimizer]:
    """A plain model and its optimizer."""
    model = Counted(seed, has_counter=has_counter)
    return model, adamw(model, is_named=is_named)


def sharded(seed: int, stage: int = 3, **options: Any) -> tuple[Counted, Optimizer]:
    model, optimizer = make(seed, **options)
    return onecopy.shard(model, optimizer, stage=stage), optimizer


def fsdp2(
    seed: int, *, has_counter: bool = True, is_named: bool = False
) -> tuple[Counted, Optimizer]:
    model = Counted(seed, has_counter=has_counter)
    for block in model.gpt.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    return model, adamw(model, is_named=is_named)


def ddp(seed: int, **options: Any) -> tuple[nn.Module, Optimizer]:
    model, optimizer = make(seed, **options)
    return DistributedDataParallel(model), optimizer


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        tokens = models.batch(MODEL, step, dist.get_rank()).tensors["tokens"]
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    """A tensor without its ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def theirs(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """A snapshot of what another program trains, in the form of ours."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    names = {id(one): name for name, one in inner.named_parameters()}
    found: dict[str, Any] = {
        "parameters": {name: whole(one.detach()).clone() for name, one in inner.named_parameters()},
        "buffers": {name: one.clone() for name, one in inner.named_buffers()},
        "extra": {
            f"{name}._extra_state": module.get_extra_state()
            for name, module in inner.named_modules()
            if isinstance(module, Counting)
        },
    }
    if optimizer is not None:
        states = {
            names[id(one)]: {key: whole(value).clone() for key, value in state.items()}
            for one, state in optimizer.state.items()
        }
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        found["optimizer "] = {"states": states, "groups": groups}
    return found


# Ours, read by them ----------------------------------------------------------------------------


def save_ours(root: Path, stage: int, is_named: bool = False) -> None:
    model, optimizer = sharded(0, stage, has_counter=False, is_named=is_named)
    train(model, optimizer, 0, 2)
    onecopy.save(root, model, optimizer, step=2)
    then = snapshot(model, {"": optimizer})
    train(model, optimizer, 2, 4)
    after = full_values(model)
    if dist.get_rank() == 0:
        torch.save({"then": then, "after": after}, root / "expected.pt")


def expected_of(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(root / "expected.pt", weights_only=True)
    return found


def read_by_torch(root: Path, kind: str, is_named: bool) -> None:
    """Model and optimizer, by torch alone, and on from there."""
    build: dict[str, Callable[..., Any]] = {"plain": make, "fsdp2": fsdp2, "ddp": ddp}
    model, optimizer = build[kind](1, has_counter=False, is_named=is_named)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    assert {"gpt.tokens.weight", "gpt.head.weight"} <= state.keys()
    dcp.load(state, checkpoint_id=root / "step-00000002")
    saved = state.pop("optimizer")
    set_model_state_dict(model, state)
    set_optimizer_state_dict(model, optimizer, saved)
    expected = expected_of(root)
    compare(kind, theirs(model, optimizer), expected["then"])
    if kind != "plain":
        train(model, optimizer, 2, 4)
        found = theirs(model, None)["parameters"]
        compare(kind, found, expected["after"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage, kind", [(3, "fsdp2"), (1, "ddp"), (0, "plain"), (2, "fsdp2")])
def test_what_we_save_torch_reads(pool: Pool, tmp_path: Path, stage: int, kind: str) -> None:
    """Into plain tensors or DTensors, tied names too; on other numbers of ranks, and trained on."""
    is_named = stage > 1
    pool.run(2, save_ours, tmp_path, stage, is_named)
    pool.run(2, read_by_torch, tmp_path, kind, is_named)
    if kind == "fsdp2":
        # On three the sums are others.
        pool.run(3, read_values, tmp_path)


def read_values(root: Path) -> None:
    model, optimizer = fsdp2(1, has_counter=False)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=root / "step-00000002")
    set_optimizer_state_dict(model, optimizer, state.pop("optimizer"))
    set_model_state_dict(model, state)
    compare("three ranks", theirs(model, optimizer), expected_of(root)["then"])


def read_without_ranks(root: Path) -> None:
    """In one process, into the state_dict of a plain model."""
    model, _ = make(1, has_counter=False)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=root / "step-00000002")
    model.load_state_dict(state)
    then = expected_of(root)["then"]
    compare("plain", theirs(model, None), {k: v for k, v in then.items() if "optim" not in k})


def test_dcp_load_and_torch_save(pool: Pool, tmp_path: Path) -> None:
    """dcp.load into a state_dict, and torch's own conversion to one file."""
    pool.run(2, save_ours, tmp_path, 3)
    pool.run(1, read_without_ranks, tmp_path)
    dcp_to_torch_save(tmp_path / "step-00000002", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    then = expected_of(tmp_path)["then"]
    optimizer = found.pop("optimizer")
    compare("states", optimizer["state"], then["optimizer "]["states"])
    names = [group.pop("params") for group in optimizer["param_groups"]]
    compare("groups", optimizer["param_groups"], then["optimizer "]["groups"])
    assert sorted(itertools.chain(*names)) == sorted(then["parameters"])
    model, _ = make(1, has_counter=False)
    model.load_state_dict({name: one for name, one in found.items() if "onecopy." not in name})
    compare("model", theirs(model, None)["parameters"], then["parameters"])


# Theirs, read by us ----------------------------------------------------------------------------


class AppState(Stateful):
    """As in torch's tutorial."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
        }


def flat(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


FORMS: dict[str, Callable[[nn.Module, Optimizer], dict[str, Any]]] = {
    "model_and_optim": lambda model, optimizer: AppState(model, optimizer).state_dict(),
    "app": lambda model, optimizer: {"app": AppState(model, optimizer), "step": 2},
    "flat": flat,
    "top": lambda model, optimizer: {
        **get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    },
    "flat_top": lambda model, optimizer: {
        **flat(model, optimizer)["optimizer"],
        "m": flat(model, optimizer)["model"],
    },
    # Without torch.distributed.checkpoint.state_dict: "module." before names under DDP, and
    # numbers in the place of the optimizer's names.
    "state_dicts": lambda model, optimizer: {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
}


def save_theirs(root: Path, kind: str, form: str) -> None:
    build: dict[str, Callable[..., Any]] = {"fsdp2": fsdp2, "ddp": ddp}
    model, optimizer = build[kind](0, is_named=form in ("app", "flat"))
    train(model, optimizer, 0, 2)
    dcp.save(FORMS[form](model, optimizer), checkpoint_id=root / "theirs")
    then = theirs(model, optimizer)
    train(model, optimizer, 2, 4)
    after = theirs(model, None)["parameters"]
    if dist.get_rank() == 0:
        torch.save({"then": then, "after": after}, root / "expected.pt")


def load_theirs(root: Path, stage: int, goes_on: bool, settings: dict[str, Any]) -> None:
    model, optimizer = sharded(1, stage, **settings)
    train(model, optimizer, 7, 8)
    loaded = onecopy.load(root / "theirs", model, optimizer)
    assert (loaded.step, loaded.extra, loaded.world_size) == (0, None, 0)
    expected = expected_of(root)
    compare("loaded", snapshot(model, {"": optimizer}), expected["then"])
    if goes_on:
        train(model, optimizer, 2, 4)
        compare("after", full_values(model), expected["after"], rtol=1e-4, atol=1e-6)
    weights, _ = sharded(2, stage)
    onecopy.load(root / "theirs", weights)
    compare("weights", full_values(weights), expected["then"]["parameters"])


@pytest.mark.sampled(
    "kind, form, world, stage",
    list(itertools.product(("fsdp2", "ddp"), FORMS, (1, 2, 3), (0, 1, 2, 3))),
    12,
    always=[
        *(("fsdp2", form, 2, n % 4) for n, form in enumerate(FORMS)),
        ("ddp", "model_and_optim", 3, 3),
        ("ddp", "state_dicts", 2, 3),
        ("ddp", "flat", 1, 2),
    ],
)
def test_what_torch_saves_we_read(
    pool: Pool, tmp_path: Path, kind: str, form: str, world: int, stage: int
) -> None:
    """However its dicts are nested; training goes on as there."""
    pool.run(2, save_theirs, tmp_path, kind, form)
    pool.run(world, load_theirs, tmp_path, stage, world == 2, {})


def save_weights(root: Path, kind: str) -> None:
    if kind == "fsdp2":
        model: nn.Module = fsdp2(0)[0]
    else:
        model = make(0)[0]
    dcp.save(model.state_dict(), checkpoint_id=root / "theirs")
    if dist.get_rank() == 0:
        torch.save(theirs(model, None), root / "expected.pt")
    else:
        theirs(model, None)


def load_weights(root: Path) -> None:
    model, optimizer = sharded(1)
    onecopy.load(root / "theirs", model)
    found = snapshot(model, {})
    compare("weights", found, expected_of(root))
    with pytest.raises(CheckpointError, match=r"no optimizer .* but none.*load\(root, model\)"):
        onecopy.load(root / "theirs", model, optimizer)
    # Of more layers than this model has.
    smaller = make(1)[0]
    del smaller.gpt.get_submodule("blocks")[2]  # type: ignore[operator]
    onecopy.shard(smaller)
    with pytest.raises(
        CheckpointError, match=r"12 tensors that this Counted has not: gpt.blocks.2"
    ):
        onecopy.load(root / "theirs", smaller)


@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
def test_weights_alone(pool: Pool, tmp_path: Path, kind: str) -> None:
    """dcp.save(model.state_dict()), with nothing around the names."""
    pool.run(2, save_weights, tmp_path, kind)
    pool.run(3, load_weights, tmp_path)


def other_optimizer(root: Path) -> None:
    model, _ = make(1)
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer)
    with pytest.raises(CheckpointError, match="no group of the saved optimizer has the"):
        onecopy.load(root / "theirs", model, optimizer)


@pytest.mark.parametrize("form", ["model_and_optim", "state_dicts"])
def test_other_groups_are_refused(pool: Pool, tmp_path: Path, form: str) -> None:
    """Also where the parameters have numbers for names, and it would be easy to mix them up."""
    pool.run(2, save_theirs, tmp_path, "ddp", form)
    pool.run(2, other_optimizer, tmp_path)


# What the package leans on ----------------------------------------------------------------------


def test_the_private_parts_of_torch() -> None:
    """Everything without a promise that checkpoints are made of. Where one of these fails:

    - _StorageInfo: `onecopy/checkpoint/files.py` writes and reads the places of items with it.
    - the classes of a metadata pickle: a new one must be added to `_ALLOWED` in
      `onecopy/checkpoint/unpickle.py`, or checkpoints of that torch are refused.
    - the planners' fields: `onecopy/checkpoint/plan.py` makes and reads plans.
    """
    names = [one.name for one in dataclasses.fields(filesystem._StorageInfo)]
    assert names == ["relative_path", "offset", "length", "transform_descriptors"]
    assert issubclass(metadata._MEM_FORMAT_ENCODING, enum.Enum)
    properties = metadata.TensorProperties(dtype=torch.float32)
    assert {type(one) for one in properties.__getstate__()} == {  # type: ignore[no-untyped-call]
        torch.dtype,
        torch.layout,
        bool,
        metadata._MEM_FORMAT_ENCODING,
    }
    fields = {
        metadata.Metadata: "state_dict_metadata planner_data storage_data storage_meta version",
        metadata.TensorStorageMetadata: "properties size chunks",
        metadata.ChunkStorageMetadata: "offsets sizes",
        metadata.MetadataIndex: "fqn offset index",
    }
    for kind, expected in fields.items():
        assert [one.name for one in dataclasses.fields(kind)] == expected.split(), kind
    # Indices are looked up without their hint.
    assert metadata.MetadataIndex("a", [0], 1) == metadata.MetadataIndex("a", [0], 2)
    for function, parameters in {
        dcp.DefaultSavePlanner.set_up_planner: "self state_dict storage_meta is_coordinator",
        dcp.DefaultLoadPlanner.set_up_planner: "self state_dict metadata is_coordinator",
        dcp.StorageWriter.set_up_storage_writer: "self is_coordinator args kwargs",
        dcp.StorageReader.set_up_storage_reader: "self metadata is_coordinator args kwargs",
    }.items():
        assert list(inspect.signature(function).parameters) == parameters.split(), function


def globals_of(data: bytes) -> Iterator[str]:
    """The names that a pickle looks up."""
    strings: list[str] = []
    for code, argument, _ in pickletools.genops(data):
        if code.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            strings.append(argument)
        elif code.name == "STACK_GLOBAL":
            yield f"{strings[-2]}.{strings[-1]}"
        elif code.name == "GLOBAL":
            yield argument.replace(" ", ".")


def save_by_torch(root: Path) -> None:
    state: Mapping[str, Any] = {"a": torch.ones(3), "b": {"c": 1}, "d": [torch.ones(2), 3]}
    dcp.save(dict(state), checkpoint_id=root)


def test_the_metadata_of_this_torch_is_read(pool: Pool, tmp_path: Path) -> None:
    """Tensors, objects, nested: everything that its pickle names is allowed."""
    pool.run(2, save_by_torch, tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    found = Reader(tmp_path).read_metadata()
    assert found.state_dict_metadata.keys() == {"a", "b.c", "d.0", "d.1"}
    assert found.planner_data["d.0"] == ("d", 0)
    assert pickle.loads(data).state_dict_metadata == found.state_dict_metadata
    assert "torch.distributed.checkpoint.filesystem._StorageInfo" in set(globals_of(data))
