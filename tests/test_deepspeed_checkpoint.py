"""Checkpoints that DeepSpeed has written, read without DeepSpeed.

Those in `tests/fixtures/deepspeed` are by DeepSpeed 0.19.8, two by 0.14.5, with what its own
functions said of each parameter at that moment (`generate.py` beside them).
"""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import onecopy
from onecopy import handle
from onecopy.checkpoint.boxes import Box
from onecopy.checkpoint.deepspeed import DeepSpeedReader, is_deepspeed
from onecopy.checkpoint.inspect import inspect
from onecopy.checkpoint.plan import LoadRanges
from onecopy.checkpoint.ranges import Range
from onecopy.checkpoint.verify import verify
from onecopy.errors import CheckpointError
from onecopy.memory.tensor_files import StoredTensor
from onecopy.memory.torch_files import read_torch_file
from tests.fixtures.deepspeed.model import Tiny, make_batch, make_groups
from tests.pool import Pool

FOLDER = Path(__file__).parent / "fixtures" / "deepspeed"
CASES = sorted(path.name for path in FOLDER.iterdir() if (path / "latest").is_file())
WORLD_SIZES = {"stage1-bf16-optimizer-alone": 1}
WORLD_SIZES |= {case: 3 for case in CASES if "fp32" in case and "elastic" not in case}
# Steps that DeepSpeed has made before it saved.
STEPS = 3
FIRST_GROUP = ["embedding.weight", "first.weight", "second.weight"]
# Loading one checkpoint in one process is what torch says it does.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def expected_of(case: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(FOLDER / case / "expected.pt", weights_only=True)
    return found


def dtype_of(case: str) -> torch.dtype:
    """In which the model computed."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
        case.split("-")[1]
    ]


def read_all(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint, by its key."""
    reader = DeepSpeedReader(path)
    found = {
        key: torch.full(entry.size, 7, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def copy_case(case: str, folder: Path) -> Path:
    """A copy that may be damaged; returns the folder of its step."""
    shutil.copytree(FOLDER / case, folder / case)
    return folder / case / f"global_step{STEPS}"


def test_every_form_is_among_the_fixtures() -> None:
    assert len(CASES) == 10
    each = {case: "fp32_flat_groups" in read_optimizer(case) for case in CASES}
    assert [case for case in CASES if each[case]] == [c for c in CASES if c.startswith("stage3")]
    paddings = [read_optimizer(case).get("group_paddings") for case in CASES]
    assert any(one is not None and any(one) for one in paddings)
    gaps = read_optimizer("stage1-bf16-aligned")["param_alignment_paddings"]
    assert any(map(any, gaps))
    assert len(read_optimizer("stage3-fp32-sub-groups")["fp32_flat_groups"]) == 3
    assert isinstance(read_optimizer("stage1-fp32-elastic")["base_optimizer_state"], list)


def read_optimizer(case: str) -> dict[str, Any]:
    """Of the last rank."""
    path = sorted((FOLDER / case / f"global_step{STEPS}").glob("*optim_states.pt"))[-1]
    found: dict[str, Any] = read_torch_file(path)["optimizer_state_dict"]
    return found


# What is read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_masters_and_states_are_deepspeeds_own(case: str) -> None:
    found = read_all(FOLDER / case)
    expected = expected_of(case)["now"]
    trained = [name for name, p in Tiny().named_parameters() if p.requires_grad]
    assert sorted(expected) == sorted(trained)
    for name in trained:
        for key, value in expected[name].items():
            ours = name if key == "fp32" else f"optimizer.state.{name}.{key}"
            assert found[ours].dtype is torch.float32, ours
            assert torch.equal(found[ours], value), ours
        step = found[f"optimizer.state.{name}.step"]
        assert step.dtype is torch.float32 and step.shape == () and step == STEPS


OLDER = FOLDER / "by-0.14.5"


@pytest.mark.parametrize("case", ["stage2-bf16", "stage3-fp32-sub-groups"])
def test_masters_and_states_of_an_older_version(case: str) -> None:
    found = read_all(OLDER / case)
    expected = torch.load(OLDER / case / "expected.pt", weights_only=True)["now"]
    for name, values in expected.items():
        for key, value in values.items():
            ours = name if key == "fp32" else f"optimizer.state.{name}.{key}"
            assert torch.equal(found[ours], value), ours
        assert found[f"optimizer.state.{name}.step"] == STEPS
    assert DeepSpeedReader(OLDER / case).run["ds_version"] == "0.14.5"
    assert {key for key in found if not key.startswith("optimizer.")} == set(Tiny().state_dict())


@pytest.mark.parametrize("case", CASES)
def test_names_are_those_of_the_model(case: str) -> None:
    found = read_all(FOLDER / case)
    model = Tiny()
    assert {key for key in found if not key.startswith("optimizer.")} == set(model.state_dict())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {key for key in found if key.startswith("optimizer.state.")} == {
        f"optimizer.state.{name}.{state}"
        for name in trained
        for state in ("step", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("case", CASES)
def test_frozen_parameters_and_buffers(case: str) -> None:
    found = read_all(FOLDER / case)
    torch.manual_seed(0)
    model = Tiny()
    for name in ("frozen.weight", "frozen.bias"):
        parameter = model.get_parameter(name).detach()
        assert torch.equal(found[name], parameter.to(dtype_of(case)))
        assert found[name].dtype is dtype_of(case)
    assert torch.equal(found["gain"], model.gain) and found["seen"] == 3


@pytest.mark.parametrize("case", CASES)
def test_tied_weights_have_all_their_names(case: str) -> None:
    found = read_all(FOLDER / case)
    assert torch.equal(found["head.weight"], found["embedding.weight"])
    assert found["head.weight"].dtype is torch.float32
    assert DeepSpeedReader(FOLDER / case).aliases == {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("case", CASES)
def test_groups(case: str) -> None:
    found = read_all(FOLDER / case)
    groups: list[dict[str, Any]] = [{}, {}]
    for key, value in found.items():
        if key.startswith("optimizer.param_groups."):
            _, _, number, setting = key.split(".")
            groups[int(number)][setting] = value
    assert groups[0]["params"] == FIRST_GROUP
    assert sorted(groups[1]["params"]) == ["first.bias", "norm.bias", "norm.weight", "second.bias"]
    if "elastic" in case:
        # DeepSpeed saves no settings in this form.
        assert [set(group) for group in groups] == [{"params"}, {"params"}]
        return
    assert [group["lr"] for group in groups] == [0.01, 0.025]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [tuple(group["betas"]) for group in groups] == [(0.8, 0.95)] * 2
    # It was one of numpy's.
    assert type(groups[1]["lr"]) is float


@pytest.mark.parametrize("case", CASES)
def test_the_run(case: str) -> None:
    run = DeepSpeedReader(FOLDER / case).run
    world_size = WORLD_SIZES.get(case, 2)
    assert run == {
        "global_steps": STEPS,
        "global_samples": STEPS * 2 * world_size,
        "skipped_steps": 0,
        "dp_world_size": world_size,
        "ds_version": "0.19.8",
        "lr_scheduler": None,
        "loss_scale": 256.0 if "fp16" in case else None,
        # But for what is no plain data: an argparse.Namespace with a path.
        "client_state": {"epoch": 4, "best": {"loss": 1.5, "names": ["a", "b"]}},
    }


@pytest.mark.parametrize("case", CASES)
def test_boxes_cover_every_element_once(case: str) -> None:
    metadata = DeepSpeedReader(FOLDER / case).read_metadata()
    cut = 0
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        times = torch.zeros(entry.size)
        for chunk in entry.chunks:
            box = times
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dim, start, size)
            box += 1
        assert (times == 1).all(), key
        cut += len(entry.chunks) > 1
    assert cut or WORLD_SIZES.get(case) == 1


# Reading parts ------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The file and the bytes of each read of values."""
    found: list[tuple[str, int]] = []
    read_part = StoredTensor.read_part

    def counted(stored: StoredTensor, target: torch.Tensor, offset: int) -> int:
        num_bytes = read_part(stored, target, offset)
        found.append((stored.path.name, num_bytes))
        return num_bytes

    monkeypatch.setattr(StoredTensor, "read_part", counted)
    return found


def read_range(reader: DeepSpeedReader, key: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) as a rank of onecopy reads what it owns."""
    entry = reader.read_metadata().state_dict_metadata[key]
    values = torch.full((stop - start,), 7.0)
    order = tuple(range(len(entry.size)))
    shape = tuple(entry.size)
    one = Range(key, shape, values.dtype, start, stop - start, lambda a, b: values[a:b], order)
    dcp.load({}, storage_reader=reader, planner=LoadRanges([one], [], "here"), no_dist=True)
    return values


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_what_it_owns_and_no_more(case: str, reads: list[tuple[str, int]]) -> None:
    reader = DeepSpeedReader(FOLDER / case)
    whole = read_all(FOLDER / case)
    for key in ("second.weight", "optimizer.state.embedding.weight.exp_avg"):
        numel = whole[key].numel()
        for start in range(0, numel, 7):
            for stop in range(start + 1, numel + 1, 11):
                reads.clear()
                values = read_range(reader, key, start, stop)
                assert torch.equal(values, whole[key].view(-1)[start:stop])
                assert sum(num_bytes for _, num_bytes in reads) == 4 * (stop - start)


@pytest.mark.parametrize("case", ["stage2-fp32-round-robin", "stage3-fp32-sub-groups"])
def test_only_files_with_something_of_it_are_opened(
    case: str, reads: list[tuple[str, int]], tmp_path: Path
) -> None:
    step = copy_case(case, tmp_path)
    reader = DeepSpeedReader(step)
    reader.read_metadata()
    # Its own pickle would be damaged; it is read when something of the file is needed.
    other = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    other.write_bytes(other.read_bytes().replace(b"optimizer_state_dict", b"optimizer_state_dock"))
    read_range(reader, "first.weight", 0, 5)
    assert {name for name, _ in reads} == {"zero_pp_rank_0_mp_rank_00_optim_states.pt"}
    with pytest.raises(CheckpointException, match=re.escape(str(other))):
        read_range(reader, "first.weight", 0, 35)


@pytest.mark.parametrize("case", CASES)
def test_boxes_that_are_cut_otherwise(case: str) -> None:
    """Every box of a tensor of three dimensions, as tensor parallelism would need it."""
    reader = DeepSpeedReader(FOLDER / case)
    reader.read_metadata()
    whole = read_all(FOLDER / case)["second.weight"]
    for box in boxes_within(tuple(whole.shape)):
        target = torch.full(box.sizes, 7.0)
        one = _BoxOf("second.weight", tuple(whole.shape), box, target)
        dcp.load({}, storage_reader=reader, planner=LoadRanges([one], [], ""), no_dist=True)
        place = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(target, whole[place]), box


class _BoxOf:
    """What LoadRanges asks of a range."""

    def __init__(self, key: str, shape: tuple[int, ...], box: Box, target: torch.Tensor) -> None:
        self.key, self.shape, self.numel = key, shape, box.numel
        self._box, self._target = box, target

    def boxes(self) -> Iterator[tuple[Box, _PartOf]]:
        yield self._box, _PartOf(self._target)


class _PartOf:
    """What LoadRanges asks of a part."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def window(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        places = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        return self._target[places]

    def take(self, offsets: Sequence[int], window: torch.Tensor) -> None:
        """It was written to as it is."""


def boxes_within(shape: tuple[int, int, int]) -> Iterator[Box]:
    bounds = [
        [(start, stop) for start in range(0, size, 2) for stop in range(start + 1, size + 1, 2)]
        for size in shape
    ]
    for planes in bounds[0]:
        for rows in bounds[1]:
            for columns in bounds[2]:
                cuts = (planes, rows, columns)
                yield Box(tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts), 0)


# Going on -----------------------------------------------------------------------------------------


def plain_from(case: str) -> tuple[Tiny, torch.optim.AdamW]:
    """A plain model and optimizer, loaded by torch's own functions."""
    torch.manual_seed(99)
    model = Tiny()
    optimizer = torch.optim.AdamW(make_groups(model), lr=0.5)
    states = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    # DeepSpeed's own Adam has not all the settings that torch's has.
    planner = DefaultLoadPlanner(allow_partial_load="cpu-adam" in case)
    reader = DeepSpeedReader(FOLDER / case)
    dcp.load(states, storage_reader=reader, planner=planner, no_dist=True)
    set_optimizer_state_dict(model, optimizer, states.pop("optimizer"))
    set_model_state_dict(model, states)
    return model, optimizer


WITH_SETTINGS = [case for case in CASES if "elastic" not in case]


@pytest.mark.parametrize("case", [c for c in WITH_SETTINGS if "round-robin" not in c])
def test_the_next_step_is_deepspeeds_next_step(case: str) -> None:
    """With the gradients that DeepSpeed had, but for rounding: other processors made the files."""
    model, optimizer = plain_from(case)
    expected = expected_of(case)
    assert optimizer.param_groups[1]["lr"] == 0.025
    scale = DeepSpeedReader(FOLDER / case).run["loss_scale"] or 1.0
    for name, gradient in expected["gradients"].items():
        model.get_parameter(name).grad = gradient / scale
    optimizer.step()
    exact = "cpu-adam" not in case
    for name, values in expected["next"].items():
        parameter = model.get_parameter(name)
        found = {"fp32": parameter.detach(), **optimizer.state[parameter]}
        for key, value in values.items():
            # Where torch's AdamW made the step: the last bit depends on the vector instructions.
            tolerance = {"rtol": 5e-7, "atol": 1e-8} if exact else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(found[key], value, **tolerance)
        assert found["step"] == STEPS + 1
        assert not torch.equal(values["fp32"], expected["now"][name]["fp32"])


@pytest.mark.parametrize("case", [c for c in WITH_SETTINGS if dtype_of(c) is torch.float32])
def test_training_goes_on_in_one_process(case: str) -> None:
    """Forward, backward and step on the batch of all ranks; sums have another order."""
    model, optimizer = plain_from(case)
    expected = expected_of(case)
    loss = model(make_batch(STEPS, WORLD_SIZES[case]))
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-6)
    loss.backward()
    optimizer.step()
    for name, values in expected["next"].items():
        torch.testing.assert_close(
            model.get_parameter(name).detach(), values["fp32"], rtol=1e-4, atol=1e-6
        )


def load_as_dtensors(folder: str) -> list[torch.Tensor]:
    """On one rank: weights cut by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (2,))
    wanted = {
        "second.weight": zeros(5, 7, 3, device_mesh=mesh, placements=[Shard(1)]),
        "optimizer.state.first.weight.exp_avg": zeros(
            7, 5, device_mesh=mesh, placements=[Shard(1)]
        ),
    }
    dcp.load(wanted, storage_reader=DeepSpeedReader(folder))
    return [one.full_tensor() for one in wanted.values()]


@pytest.mark.parametrize("case", ["stage2-bf16", "stage3-fp32-sub-groups"])
def test_sharded_tensors_of_torch(case: str, pool: Pool) -> None:
    expected = read_all(FOLDER / case)
    for found in pool.run(2, load_as_dtensors, str(FOLDER / case)):
        assert torch.equal(found[0], expected["second.weight"])
        assert torch.equal(found[1], expected["optimizer.state.first.weight.exp_avg"])


# In onecopy ---------------------------------------------------------------------------------------


def go_on(folder: str, again: str, stage: int) -> dict[str, Any]:
    """On one rank: load, save as it is, make the next step."""
    torch.manual_seed(99)
    model = Tiny()
    optimizer = torch.optim.AdamW(make_groups(model), lr=0.5)
    precision = "fp16" if "fp16" in folder else "fp32"
    onecopy.shard(model, optimizer, stage=stage, precision=precision)
    loaded = onecopy.load(folder, model, optimizer)
    onecopy.save(again, model, optimizer)
    found: dict[str, Any] = {
        "loaded": loaded,
        "groups": [group["lr"] for group in optimizer.param_groups],
        "scale": None if precision == "fp32" else model_scale(model),
    }
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokens = make_batch(STEPS, world_size)[2 * rank : 2 * rank + 2]
    model(tokens).backward()
    optimizer.step()
    with onecopy.full_parameters(model):
        found["next"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def model_scale(model: torch.nn.Module) -> float:
    return handle.of(model).engine.loss_scale.value


@pytest.mark.sampled(
    ("case", "world_size", "stage"),
    [(case, n, stage) for case in CASES for n in (1, 2, 3) for stage in (1, 2, 3)],
    14,
    always=[
        ("stage3-fp32-sub-groups", 3, 2),
        ("stage2-fp32-round-robin", 3, 3),
        ("stage1-fp32-elastic", 2, 3),
        ("stage2-fp16", 2, 3),
    ],
)
def test_load(case: str, world_size: int, stage: int, pool: Pool, tmp_path: Path) -> None:
    """Masters, states and counters are those of DeepSpeed on any number of ranks."""
    arguments = (str(FOLDER / case), str(tmp_path), stage)
    results = pool.run(world_size, go_on, *arguments)
    expected = read_all(FOLDER / case)
    again = {
        key: torch.empty_like(value)
        for key, value in expected.items()
        if value is not None and not isinstance(value, (list, str, int, float, tuple))
    }
    dcp.load(again, checkpoint_id=tmp_path / f"step-{STEPS:08d}", no_dist=True)
    for key, value in again.items():
        # A frozen parameter may be kept in the precision of the model here.
        assert torch.equal(value, expected[key]), key
    for found in results:
        loaded = found["loaded"]
        assert loaded.step == STEPS and loaded.world_size == WORLD_SIZES.get(case, 2)
        assert loaded.extra["client_state"]["epoch"] == 4
        assert found["groups"] == ([0.01, 0.03] if "elastic" in case else [0.01, 0.025])
        assert found["scale"] == (256.0 if "fp16" in case else None)
        same = "fp32" in case and "elastic" not in case
        if same and WORLD_SIZES.get(case) == world_size:
            for name, values in expected_of(case)["next"].items():
                torch.testing.assert_close(
                    found["next"][name], values["fp32"], rtol=1e-4, atol=1e-6
                )


@pytest.mark.parametrize("case", CASES)
def test_inspect(case: str) -> None:
    found = inspect(FOLDER / case)
    assert found.writer == "DeepSpeed 0.19.8" and found.health == "complete"
    assert found.step == STEPS and found.world_size == WORLD_SIZES.get(case, 2)
    assert found.tied == {"head.weight": "embedding.weight"}
    assert [one.tensors.num_tensors for one in found.models] == [11]
    assert [group["params"] for group in found.optimizers[0].groups] == [3, 4]


@pytest.mark.parametrize("case", CASES)
def test_export(case: str, tmp_path: Path) -> None:
    onecopy.export(FOLDER / case, tmp_path)
    expected = read_all(FOLDER / case)
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(Tiny().state_dict()) - {"head.weight"}  # tied: once
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("case", CASES)
def test_verify(case: str, tmp_path: Path) -> None:
    step = copy_case(case, tmp_path)
    (good,) = verify(step.parent)
    assert good.problems == [] and good.num_items == len(list(step.glob("*.pt")))
    for path in sorted(step.glob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            sizes = {one.filename: one.file_size for one in archive.infolist()}
        storage = max((name for name in sizes if "/data/" in name), key=sizes.__getitem__)
        with zipfile.ZipFile(path) as archive:
            values = archive.read(storage)
        whole = path.read_bytes()
        assert whole.count(values) >= 1
        path.write_bytes(whole.replace(values, bytes([values[0] ^ 1]) + values[1:]))
        (found,) = verify(step.parent)
        assert [one.file for one in found.problems] == [path.name]
        assert storage in found.problems[0].what
        path.write_bytes(whole)


# What is refused ----------------------------------------------------------------------------------


def test_what_is_a_deepspeed_checkpoint(tmp_path: Path) -> None:
    for case in CASES:
        assert is_deepspeed(FOLDER / case) and is_deepspeed(FOLDER / case / f"global_step{STEPS}")
    step = copy_case("stage3-bf16", tmp_path)
    next(step.glob("*rank_0*optim_states.pt")).unlink()
    assert is_deepspeed(step), "a damaged one is still one"
    assert not is_deepspeed(tmp_path / "nowhere")
    (tmp_path / "run" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("step-00000001\n")
    (tmp_path / "run" / "step-00000001" / ".metadata").write_bytes(b"")
    assert not is_deepspeed(tmp_path / "run")
    (tmp_path / "run" / "latest").write_text("step-00000002\n")
    assert not is_deepspeed(tmp_path / "run")
    assert not is_deepspeed(tmp_path / "run" / "latest"), "a file"
    assert DeepSpeedReader.validate_checkpoint_id(FOLDER / CASES[0])


def test_latest_names_nothing(tmp_path: Path) -> None:
    step = copy_case("stage3-bf16", tmp_path)
    (step.parent / "latest").write_text("global_step4")
    with pytest.raises(CheckpointError, match=r"global_step4 cannot be read: No such file"):
        DeepSpeedReader(step.parent).read_metadata()


MISSING = [
    ("stage2-bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("stage2-bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("stage3-fp32-sub-groups", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("stage3-fp32-sub-groups", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
    ("stage3-fp32-sub-groups", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("stage3-fp32-sub-groups", "zero_pp_rank_2_mp_rank_00_model_states.pt"),
]


@pytest.mark.parametrize(("case", "name"), MISSING)
def test_a_missing_file_is_named(case: str, name: str, tmp_path: Path) -> None:
    step = copy_case(case, tmp_path)
    (step / name).unlink()
    with pytest.raises(
        CheckpointError, match=rf"{name} is missing.* copy them all into one folder"
    ):
        DeepSpeedReader(step).read_metadata()


@pytest.mark.parametrize("kind", ["optim_states", "model_states"])
@pytest.mark.parametrize("case", ["stage1-bf16-aligned", "stage3-bf16"])
def test_a_kind_of_files_is_missing(case: str, kind: str, tmp_path: Path) -> None:
    step = copy_case(case, tmp_path)
    for path in step.glob(f"*{kind}.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=rf"has no \*_{kind}\.pt.* not copied completely"):
        DeepSpeedReader(step.parent).read_metadata()


@pytest.mark.parametrize("case", ["stage2-bf16", "stage3-bf16"])
def test_a_file_that_is_cut_off_is_named(case: str, tmp_path: Path) -> None:
    for path in sorted(copy_case(case, tmp_path).glob("*.pt")):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match=rf"{path.name} is cut off.* Copy it again"):
            DeepSpeedReader(path.parent).read_metadata()
        path.write_bytes(whole)


def test_files_of_more_ranks(tmp_path: Path) -> None:
    step = copy_case("stage2-bf16", tmp_path)
    shutil.copy(
        step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        step / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(CheckpointError, match=r"rank_2_.* is of another run: .*by 2 ranks"):
        DeepSpeedReader(step).read_metadata()


@pytest.mark.parametrize(
    ("case", "name", "message"),
    [
        (
            "stage2-fp32-round-robin",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            r"bf16_zero_pp_rank_0\S+ and zero_pp_rank_0",
        ),
        (
            "stage3-bf16",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            r"mp_rank_00_model\S+ and zero_pp_rank_0",
        ),
    ],
)
def test_files_of_two_runs(case: str, name: str, message: str, tmp_path: Path) -> None:
    step = copy_case("stage2-bf16", tmp_path)
    shutil.copy(FOLDER / case / step.name / name, step)
    with pytest.raises(CheckpointError, match=f"has files of two runs: {message}"):
        DeepSpeedReader(step).read_metadata()


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_01_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_00-model_states.pt",
        "layer_0_expert_3_mp_rank_00_model_states.pt",
        "expert_0_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_other_parallelism_is_refused(name: str, tmp_path: Path) -> None:
    step = copy_case("stage2-bf16", tmp_path)
    shutil.copy(step / "mp_rank_00_model_states.pt", step / name)
    with pytest.raises(CheckpointError, match=rf"{name}: .*parallelism.* save it again"):
        DeepSpeedReader(step).read_metadata()


def test_a_rank_of_another_model(tmp_path: Path) -> None:
    step = copy_case("stage3-fp32-sub-groups", tmp_path)
    other = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(FOLDER / "stage3-bf16" / step.name / f"bf16_{other.name}", other)
    with pytest.raises(CheckpointException, match=rf"{other.name} has 2 groups.* different runs"):
        read_all(step)


def test_a_rank_of_another_world_size(tmp_path: Path) -> None:
    step = copy_case("stage2-fp32-round-robin", tmp_path)
    other = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(FOLDER / "stage2-bf16" / step.name / f"bf16_{other.name}", other)
    with pytest.raises(CheckpointException, match=rf"{other.name} has 97 elements.* 66 should be"):
        read_all(step)


@pytest.mark.parametrize("case", CASES)
def test_no_class_of_deepspeed_is_imported(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files name classes that are not there, and need not be."""
    names = set()
    for path in (FOLDER / case / f"global_step{STEPS}").glob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            names |= set(
                re.findall(rb"cdeepspeed\.[\w.]+\n\w+", archive.read(f"{path.stem}/data.pkl"))
            )
    assert names
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    read_all(FOLDER / case)
