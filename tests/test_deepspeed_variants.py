"""Forms of DeepSpeed's ZeRO checkpoints that its version in the fixtures does not write.

They are written here, by the rules of DeepSpeed's own sources, with plain tensors and dicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onecopy.checkpoint.deepspeed import DeepSpeedReader
from onecopy.errors import CheckpointError

hypothesis = pytest.importorskip("hypothesis")
strategies = hypothesis.strategies

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Group = Mapping[str, torch.Tensor]
Change = Callable[[int, dict[str, Any], dict[str, Any]], None]


def write(
    folder: Path,
    groups: Sequence[Group],
    world_size: int,
    *,
    each: bool,
    change: Change = lambda rank, optimizer, model: None,
) -> None:
    """Write a checkpoint in which the state "momentum" is twice the weights.

    each: as ZeRO-3. change: called for each rank with what will be saved.
    """
    cut = _cut_each if each else _cut_together
    partitions = [cut(group, world_size) for group in groups]
    for rank in range(world_size):
        mine = [flat[rank] for flat, _ in partitions]
        base = {
            "state": {number: {"momentum": 2 * flat} for number, flat in enumerate(mine)},
            "param_groups": [{"params": [n], "lr": 0.1} for n in range(len(groups))],
        }
        saved: dict[str, Any] = {"partition_count": world_size, "zero_stage": 3 if each else 2}
        if each:
            saved |= {"fp32_flat_groups": mine, "optimizer_state_dict": base}
        else:
            paddings = [
                min(flat[rank].numel(), max(0, (rank + 1) * flat[rank].numel() - numel))
                for flat, numel in partitions
            ]
            saved |= {
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": [
                    flat[: flat.numel() - padding]
                    for flat, padding in zip(mine, paddings, strict=True)
                ],
                "group_paddings": paddings,
                "partition_count": [world_size] * len(groups),
            }
        weights = {name: one for group in groups for name, one in group.items()}
        model = {
            "module": {
                name: torch.empty(0) if each else one.bfloat16() for name, one in weights.items()
            },
            "buffer_names": [],
            "param_shapes": [{name: one.shape for name, one in g.items()} for g in groups],
            "shared_params": {},
            "global_steps": 7,
        }
        change(rank, saved, model)
        torch.save(
            {"optimizer_state_dict": saved},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if each:
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(model, folder / "mp_rank_00_model_states.pt")


def _cut_together(group: Group, world_size: int) -> tuple[list[torch.Tensor], int]:
    flat = torch.cat([one.reshape(-1) for one in group.values()])
    padding = -flat.numel() % (2 * world_size)
    return list(torch.cat([flat, torch.zeros(padding)]).chunk(world_size)), flat.numel()


def _cut_each(group: Group, world_size: int) -> tuple[list[torch.Tensor], int]:
    pieces: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    for one in group.values():
        padding = torch.zeros(-one.numel() % world_size)
        for rank, piece in enumerate(torch.cat([one.reshape(-1), padding]).chunk(world_size)):
            pieces[rank].append(piece)
    return [torch.cat(one) for one in pieces], 0


def read(folder: Path) -> dict[str, Any]:
    reader = DeepSpeedReader(folder)
    found = {
        key: torch.full(entry.size, 7, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def numbered(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of which no two elements are the same."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.arange(1.0, 1 + sum(sizes)).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


BOTH = pytest.mark.parametrize("each", [False, True], ids=["together", "each"])


@hypothesis.given(
    shapes=strategies.lists(
        strategies.lists(strategies.integers(1, 5), max_size=4).map(tuple), min_size=2, max_size=7
    ),
    world_size=strategies.integers(1, 5),
    each=strategies.booleans(),
)
def test_any_shapes_and_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    world_size: int,
    each: bool,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    weights = {f"w{n}": one for n, one in enumerate(numbered(*shapes))}
    names = list(weights)
    groups = [{name: weights[name] for name in part} for part in (names[:1], names[1:])]
    write(folder, groups, world_size, each=each)
    found = read(folder)
    for name, weight in weights.items():
        assert torch.equal(found[name], weight)
        assert torch.equal(found[f"optimizer.state.{name}.momentum"], 2 * weight)


@BOTH
def test_a_step_that_the_group_counts(each: bool, tmp_path: Path) -> None:
    """As DeepSpeed's fused Adam does."""

    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        base = optimizer["optimizer_state_dict" if each else "base_optimizer_state"]
        base["param_groups"][0]["step"] = 5
        # One on a GPU is a tensor; so may the learning rate be.
        base["param_groups"][1] |= {"step": torch.tensor([6]), "lr": torch.tensor(0.25)}

    a, b = numbered((3, 4), (5,))
    write(tmp_path, [{"a": a}, {"b": b}], 2, each=each, change=change)
    found = read(tmp_path)
    for name, step in (("a", 5), ("b", 6)):
        assert found[f"optimizer.state.{name}.step"].shape == ()
        assert found[f"optimizer.state.{name}.step"] == step
    assert found["optimizer.param_groups.0.lr"] == 0.1
    assert torch.equal(found["optimizer.param_groups.1.lr"], torch.tensor(0.25))
    assert not any(key.endswith("step") for key in found if "param_groups" in key)


@BOTH
def test_states_that_are_not_of_parameters_are_named(each: bool, tmp_path: Path) -> None:
    """As the buffers in which 1-bit Adam keeps the errors of its compression."""

    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        base = optimizer["optimizer_state_dict" if each else "base_optimizer_state"]
        base["state"][0] |= {"worker_error": torch.ones(3), "initialized": True, "none": None}
        base["state"][0]["mu"] = 0.5

    write(tmp_path, [{"a": torch.ones(4, 5)}], 2, each=each, change=change)
    with pytest.warns(UserWarning, match=r"initialized, worker_error of the optimizer's states"):
        found = read(tmp_path)
    assert found["optimizer.state.a.mu"] == 0.5
    assert {key for key in found if "state" in key} == {
        "optimizer.state.a.mu",
        "optimizer.state.a.momentum",
    }


def test_tied_weights_before_deepspeed_0_9_3(tmp_path: Path) -> None:
    """They were not listed; in ZeRO-1 and 2 they lie in one place."""

    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        del model["shared_params"]
        model["module"]["again"] = model["module"]["a"]
        model["module"]["other"] = model["module"]["a"].clone()

    (a,) = numbered((30, 10))
    write(tmp_path, [{"a": a}], 2, each=False, change=change)
    found = read(tmp_path)
    assert torch.equal(found["again"], a), "not what is rounded"
    assert torch.equal(found["other"], a.bfloat16())


def test_parameters_that_nobody_trains(tmp_path: Path) -> None:
    """Neither frozen nor in the optimizer; and empty ones."""

    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        model["module"] |= {"free": torch.ones(2, dtype=torch.bfloat16), "empty": torch.ones(0, 3)}

    write(tmp_path, [{"a": torch.ones(3)}], 2, each=False, change=change)
    found = read(tmp_path)
    assert torch.equal(found["free"], torch.ones(2, dtype=torch.bfloat16))
    assert found["empty"].shape == (0, 3)


@pytest.mark.parametrize("partitioned", [False, True])
def test_frozen_parameters_of_zero_3(partitioned: bool, tmp_path: Path) -> None:
    frozen, bias, empty = *numbered((3, 5), ()), torch.ones(0, 2)
    pieces, _ = _cut_each({"frozen": frozen}, 2)

    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        whole = {"frozen": frozen, "bias": bias, "empty": empty}
        model["frozen_param_shapes"] = {name: one.shape for name, one in whole.items()}
        fragments = {**whole, "frozen": pieces[rank]} if partitioned else whole
        model["frozen_param_fragments"] = fragments
        model["module"] |= dict.fromkeys(whole, torch.empty(0))

    write(tmp_path, [{"a": torch.ones(3)}], 2, each=True, change=change)
    found = read(tmp_path)
    assert torch.equal(found["frozen"], frozen) and torch.equal(found["bias"], bias)
    assert found["empty"].shape == (0, 2)


def test_a_buffer_with_other_strides(tmp_path: Path) -> None:
    (buffer,) = numbered((4, 6))

    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        model["module"]["buffer"] = buffer.t()
        model["buffer_names"] = ["buffer"]

    write(tmp_path, [{"a": torch.ones(3)}], 1, each=False, change=change)
    assert torch.equal(read(tmp_path)["buffer"], buffer.t())


def test_states_in_bf16(tmp_path: Path) -> None:
    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        state = optimizer["base_optimizer_state"]["state"][0]
        state["momentum"] = state["momentum"].bfloat16()

    write(tmp_path, [{"a": numbered((3, 5))[0]}], 2, each=False, change=change)
    found = read(tmp_path)["optimizer.state.a.momentum"]
    assert torch.equal(found, (2 * numbered((3, 5))[0]).bfloat16())


def test_before_the_first_step(tmp_path: Path) -> None:
    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        optimizer["optimizer_state_dict"]["state"] = {}

    write(tmp_path, [{"a": torch.ones(3)}], 2, each=True, change=change)
    found = read(tmp_path)
    assert torch.equal(found["a"], torch.ones(3))
    assert not any("state" in key for key in found)


# What is refused ----------------------------------------------------------------------------------


def refuse(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        DeepSpeedReader(folder).read_metadata()


def test_without_zero(tmp_path: Path) -> None:
    write(tmp_path, [{"a": torch.ones(3)}], 1, each=False)
    path = next(tmp_path.glob("*optim_states.pt"))
    torch.save({"optimizer_state_dict": {"state": {}, "param_groups": []}}, path)
    refuse(tmp_path, rf"{path.name} is not what DeepSpeed writes.*from a run without ZeRO")
    torch.save(torch.ones(3), path)
    refuse(tmp_path, rf"{path.name} is not what DeepSpeed writes")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("mp_world_size", 2, "tensor parallelism"),
        ("ds_autoep_layers", [], "expert parallelism"),
        ("param_shapes", None, "is not what DeepSpeed writes"),
        ("param_shapes", [{"a": (3, -1)}], "has shape"),
        ("param_shapes", [{"a": (3,)}, {"b": (3,)}], "2 groups of parameters.* different runs"),
        ("param_shapes", [{"a": (9,)}], "2 elements of masters in group 0, and 6 should be there"),
    ],
)
def test_a_model_of_another_kind(key: str, value: Any, match: str, tmp_path: Path) -> None:
    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        model[key] = value

    write(tmp_path, [{"a": torch.ones(3)}], 2, each=False, change=change)
    refuse(tmp_path, match)


def test_experts(tmp_path: Path) -> None:
    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        optimizer["partition_count"] = [2, 1]

    write(tmp_path, [{"a": torch.ones(3)}, {"b": torch.ones(3)}], 2, each=False, change=change)
    refuse(tmp_path, "experts have groups of their own")


def test_values_that_were_offloaded_to_nvme(tmp_path: Path) -> None:
    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        optimizer["fp32_flat_groups"] = [torch.empty(0)]

    write(tmp_path, [{"a": torch.ones(3)}], 2, each=True, change=change)
    refuse(tmp_path, "has 0 elements of masters.* offloaded to NVMe.* save it again")


@BOTH
def test_a_rank_without_a_state(each: bool, tmp_path: Path) -> None:
    def change(rank: int, optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        base = optimizer["optimizer_state_dict" if each else "base_optimizer_state"]
        if rank == 1:
            del base["state"][0]["momentum"]

    write(tmp_path, [{"a": torch.ones(4, 5)}], 2, each=each, change=change)
    with pytest.raises(
        CheckpointException, match=r"rank_1_\S* has no elements of momentum in group 0"
    ):
        read(tmp_path)
