"""Exported files are those that others load: every value, every name once, bounded memory."""

from __future__ import annotations

import errno
import itertools
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import onecopy
import onecopy.handle
from onecopy.errors import CheckpointError, ConfigError, OneCopyError, ShardingError
from onecopy.memory.live_tensors import LiveTensors
from onecopy.memory.tensor_files import FileWriter, TensorSpec
from tests import hf_models, models
from tests.pool import Pool

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)


def tied_by_hand() -> nn.Module:
    """Tied, though its configuration says that it is not."""
    model: Any = hf_models.llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


HF: dict[str, Callable[[], nn.Module]] = {
    "gpt2": hf_models.gpt2,
    "llama": hf_models.llama,
    "tied_llama": hf_models.tied_llama,
    "tied_by_hand": tied_by_hand,
    "t5": hf_models.t5,
    "bert": hf_models.bert,
    "mixtral": hf_models.mixtral,
}


def build(name: str, seed: int = 3) -> nn.Module:
    if name not in HF:
        return models.build(name, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HF[name]()


def read(directory: Path) -> dict[str, Tensor]:
    """By the library of the format, whether in one file or in several."""
    files = sorted(directory.glob("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = load_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
    index = directory / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        places = json.loads(index.read_text())["weight_map"]
        assert places.keys() == tensors.keys()
        assert set(places.values()) == {file.name for file in files}
    return tensors


def assert_loads(name: str, directory: Path, expected: dict[str, Tensor]) -> None:
    """from_pretrained has nothing to complain about, and ties what was tied."""
    model: Any = build(name, seed=4)
    loaded, info = type(model).from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    state = loaded.state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
    if name != "tied_by_hand":
        assert len(list(loaded.parameters())) == len(list(model.parameters()))


# Hugging Face models --------------------------------------------------------------------------


def save_and_export(
    name: str, root: Path, stage: int, settings: dict[str, Any], max_bytes: int
) -> dict[str, Tensor]:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage, **settings)
    onecopy.export(model, root / "live", max_shard_bytes=max_bytes)
    onecopy.save(root / "run", model, optimizer)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    # Nothing is left gathered, or out of step, for what comes next.
    if name in ("gpt2", "llama"):
        models.loss(model, models.batch(f"hf_{name}", 0, dist.get_rank())).backward()
        optimizer.step()
        assert not torch.equal(
            next(iter(model.state_dict().values())), next(iter(expected.values()))
        )
    return expected


@pytest.mark.sampled(
    "name, world, stage, settings, max_bytes",
    list(
        itertools.product(
            HF,
            WORLDS,
            STAGES,
            ({}, {"precision": "bf16"}, {"whole_parameters": True}),
            (8_000, 5_000_000),
        )
    ),
    4,
    always=[
        ("gpt2", 2, 3, {"precision": "bf16"}, 8_000),
        ("t5", 3, 3, {}, 8_000),
        ("tied_llama", 2, 1, {"precision": "bf16"}, 5_000_000),
        ("bert", 2, 0, {}, 8_000),
        ("tied_by_hand", 2, 3, {}, 8_000),
    ],
)
def test_from_pretrained_is_content(  # noqa: PLR0913 - one for each thing that varies
    pool: Pool,
    tmp_path: Path,
    name: str,
    world: int,
    stage: int,
    settings: dict[str, Any],
    max_bytes: int,
) -> None:
    """Of ranks, of a checkpoint and of a plain model alike; the masters, not their roundings."""
    pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
    expected, *_ = pool.run(
        world, save_and_export, name, tmp_path, stage, settings, max_bytes, timeout=120
    )
    plain = build(name)
    onecopy.export(tmp_path / "run", tmp_path / "stored", max_shard_bytes=max_bytes)
    onecopy.export(plain, tmp_path / "plain", max_shard_bytes=max_bytes)
    for key, value in plain.state_dict().items():
        assert torch.equal(expected[key], value), key
    tensors = read(tmp_path / "plain")
    for source in ("live", "stored", "plain"):
        found = read(tmp_path / source)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], value) for key, value in tensors.items())
        assert_loads(name, tmp_path / source, expected)
        sizes = [path.stat().st_size for path in (tmp_path / source).glob("*.safetensors")]
        assert (len(sizes) > 3) == (max_bytes == 8_000)
    # Tied weights are stored once, unless loading would not tie them.
    saved: Any = build(name)
    saved.save_pretrained(tmp_path / "theirs")
    if name not in ("tied_by_hand", "mixtral"):  # mixtral: under the names of its first release
        assert tensors.keys() == read(tmp_path / "theirs").keys()


@pytest.mark.parametrize("dtype", ["bf16", None])
def test_auto_model_loads_the_directory(tmp_path: Path, dtype: str | None) -> None:
    """The configuration says which class, and the dtype of the weights."""
    pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    model: Any = build("gpt2")
    done = onecopy.export(model, tmp_path, dtype=dtype)
    assert {path.name for path in done.files} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.dtype == (torch.bfloat16 if dtype else torch.float32)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value.to(loaded.dtype)), key
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["dtype"] == ("bfloat16" if dtype else "float32")


def test_an_older_name_of_the_dtype_is_kept_right(tmp_path: Path) -> None:
    """A config.json that says torch_dtype says the exported one there too."""

    class Config:
        def to_json_string(self) -> str:
            return json.dumps({"torch_dtype": "float32", "width": 3})

    model: Any = nn.Linear(3, 3)
    model.config = Config()
    onecopy.export(model, tmp_path, dtype=torch.float16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "architectures": ["Linear"],
        "dtype": "float16",
        "torch_dtype": "float16",
        "width": 3,
    }


@pytest.mark.parametrize("is_tied", [True, False])
def test_ties_as_transformers_4_declares_them(tmp_path: Path, is_tied: bool) -> None:
    """Patterns, which hold where the configuration ties at all."""

    class Config:
        tie_word_embeddings = is_tied

        def to_json_string(self) -> str:
            return "{}"

    class Old(nn.Module):
        _tied_weights_keys = (r"head\.we.ght",)

        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.head = nn.Linear(3, 5, bias=False)
            self.embedding = nn.Embedding(5, 3)
            self.embedding.weight = self.head.weight

    onecopy.export(Old(), tmp_path)
    names = {"embedding.weight"} if is_tied else {"embedding.weight", "head.weight"}
    assert read(tmp_path).keys() == names


# Plain modules --------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A tie, buffers of several kinds, a scalar, nothing, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(2**40))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("table", torch.randn(2), persistent=False)


def exported_mixed(directory: Path, stage: int) -> None:
    torch.manual_seed(0)
    model = Mixed()
    onecopy.shard(model, stage=stage)
    onecopy.export(model, directory)


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_any_module_loads_strictly(pool: Pool, tmp_path: Path, stage: int | None) -> None:
    """By the library of the format, and by load_pretrained."""
    torch.manual_seed(0)
    model = Mixed()
    expected = model.state_dict()
    if stage is None:
        onecopy.export(model, tmp_path)
    else:
        pool.run(2, exported_mixed, tmp_path, stage)
    tensors = read(tmp_path)
    assert tensors.keys() == expected.keys() - {"head.weight"}
    for key, value in tensors.items():
        assert value.dtype == expected[key].dtype, key
        assert torch.equal(value, expected[key]), key
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    torch.manual_seed(1)
    other, again = Mixed(), Mixed()
    assert load_model(other, tmp_path / "model.safetensors", strict=True) == (set(), [])
    onecopy.load_pretrained(again, tmp_path)
    for key, value in expected.items():
        assert torch.equal(other.state_dict()[key], value), key
        assert torch.equal(again.state_dict()[key], value), key


@pytest.mark.parametrize(
    "dtype", ["fp32", "bf16", "fp16", torch.float64, "float8_e4m3fn", torch.float8_e5m2]
)
def test_dtypes(tmp_path: Path, dtype: Any) -> None:
    """All floating-point tensors, buffers too; the others stay as they are."""
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    wanted = names.get(dtype) or (getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    torch.manual_seed(0)
    model = Mixed()
    model.register_buffer("scaled", torch.randn(4).to(torch.float8_e5m2))
    model.register_buffer("complex", torch.randn(4, dtype=torch.complex64))
    onecopy.export(model, tmp_path, dtype=dtype)
    for key, value in read(tmp_path).items():
        stored = model.state_dict()[key]
        kept = key in ("mask", "count", "scaled", "complex")
        assert value.dtype == (stored.dtype if kept else wanted), key
        expected = stored if kept else stored.to(wanted)
        assert torch.equal(value.reshape(-1).view(torch.uint8), bits(expected)), key


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("fp16", 65520.0),
        ("bf16", 3.4e38),
        (torch.float8_e4m3fn, 464.0),
        (torch.float8_e5m2, -61440.0),
    ],
)
def test_values_out_of_range_are_refused(tmp_path: Path, dtype: Any, value: float) -> None:
    """They would become infinite, or smaller, silently. What is infinite already may stay so."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[1] = value
    with pytest.raises(CheckpointError, match=r"bias has values up to .*: choose a dtype of wider"):
        onecopy.export(model, tmp_path, dtype=dtype)
    assert not list(tmp_path.iterdir())
    with torch.no_grad():
        model.bias[1] = torch.inf
    onecopy.export(model, tmp_path, dtype="fp16")
    assert read(tmp_path)["bias"][1] == torch.inf


@pytest.mark.parametrize(
    ("dtype", "value", "rounded"),
    [("fp16", 65519.0, 65504.0), (torch.float8_e4m3fn, -463.0, -448.0)],
)
def test_the_largest_values_that_fit(
    tmp_path: Path, dtype: Any, value: float, rounded: float
) -> None:
    """They round to the largest number of the dtype."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[1] = value
    onecopy.export(model, tmp_path, dtype=dtype)
    assert read(tmp_path)["bias"][1].item() == rounded


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_names_of_wrappers_are_dropped(tmp_path: Path) -> None:
    """torch.compile and activation checkpointing are no part of a model's weights."""
    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict()
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inner.load_state_dict(expected)
    model: Any = nn.Sequential(checkpoint_wrapper(inner[0]), torch.compile(inner[1]))
    paths = [path for path, _ in model.named_modules()]
    assert "0._checkpoint_wrapped_module" in paths and "1._orig_mod" in paths
    onecopy.export(torch.compile(model), tmp_path)
    found = read(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    clash: Any = nn.Module()
    clash.a = nn.Linear(2, 2)
    clash._orig_mod = nn.Module()
    clash._orig_mod.a = nn.Linear(2, 2)
    holder = nn.Module()
    holder.inner = clash
    with pytest.raises(CheckpointError, match=r"two tensors of the model are called inner\.a"):
        onecopy.export(holder, tmp_path / "clash")


class Chatty(nn.Linear):
    """A module with a state of its own."""

    def get_extra_state(self) -> Any:
        return {"words": 3}

    def set_extra_state(self, state: Any) -> None:
        """Nothing."""


def save_chatty(root: Path) -> None:
    model = nn.Sequential(Chatty(2, 2))
    onecopy.shard(model, stage=3)
    onecopy.save(root, model, step=1)


def test_what_is_no_tensor_is_named(pool: Pool, tmp_path: Path) -> None:
    done = onecopy.export(nn.Sequential(Chatty(2, 2)), tmp_path / "plain")
    assert done.left_out == ("0._extra_state",)
    pool.run(2, save_chatty, tmp_path / "run")
    done = onecopy.export(tmp_path / "run", tmp_path / "stored")
    assert done.left_out == ("0._extra_state",)
    assert (done.num_elements, done.num_bytes) == (6, 24)


# Files ----------------------------------------------------------------------------------------


def test_files_end_before_they_become_too_large(tmp_path: Path) -> None:
    """A tensor is never divided, not even one that is larger than a file may be."""
    model = nn.ModuleList(nn.Linear(size, size, bias=False) for size in (8, 8, 30, 8, 8, 8))
    seen: list[tuple[int, int, str]] = []
    done = onecopy.export(
        model,
        tmp_path,
        max_shard_bytes=2 * 4 * 64,
        progress=lambda *one: seen.append(one),
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    places = [index["weight_map"][f"{number}.weight"] for number in range(6)]
    assert places == [f"model-{number:05}-of-00004.safetensors" for number in (1, 1, 2, 3, 3, 4)]
    total = 4 * (5 * 64 + 900)
    assert index["metadata"] == {"total_size": total}
    assert (done.num_bytes, done.num_elements) == (total, total // 4)
    assert [one[2] for one in seen] == [f"{number}.weight" for number in range(6)]
    assert seen[-1][:2] == (total, total)
    assert sorted(done.files) == sorted(tmp_path.iterdir())


def test_every_tensor_begins_where_its_dtype_may(tmp_path: Path) -> None:
    """Readers map files into memory: no odd addresses for wide elements."""
    torch.manual_seed(0)
    model = Mixed()
    model.register_buffer("byte", torch.ones(1, dtype=torch.uint8))
    onecopy.export(model, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    sizes = {"F64": 8, "I64": 8, "F32": 4, "BOOL": 1, "U8": 1}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % sizes[entry["dtype"]] == 0, name


def test_other_weights_are_not_mixed_in(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "notes.txt").write_text("stay")
    (tmp_path / "config.json").write_text("{}")
    onecopy.export(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"holds other weights already \(model.safetensors"):
        onecopy.export(nn.Linear(2, 2), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "adapter_model.safetensors.partial").touch()
    with pytest.raises(CheckpointError, match=r"another export is writing .*, or was killed there"):
        onecopy.export(model, tmp_path)
    (tmp_path / "adapter_model.safetensors.partial").unlink()
    onecopy.export(model, tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be written: File exists"):
        onecopy.export(model, tmp_path / "file")


def test_two_at_once(tmp_path: Path) -> None:
    """The second one finds the first one's file, and leaves it alone."""

    def again(*_: object) -> None:
        with pytest.raises(CheckpointError, match="Call export in one process only"):
            onecopy.export(nn.Linear(3, 3), tmp_path)

    onecopy.export(nn.Linear(2, 2), tmp_path, progress=again)
    assert read(tmp_path)["weight"].shape == (2, 2)


def test_bad_arguments(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def refused(kind: type[OneCopyError], match: str, source: Any = model, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            onecopy.export(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    refused(
        ConfigError, "dtype='int8' is no floating-point dtype: give one of 'fp32'", dtype="int8"
    )
    refused(ConfigError, "dtype=torch.int8 is no", dtype=torch.int8)
    refused(ConfigError, "dtype='save' is no", dtype="save")
    refused(ConfigError, "max_shard_bytes=0", max_shard_bytes=0)
    refused(ConfigError, "model='a' chooses from a checkpoint", model="a")
    refused(CheckpointError, "is no checkpoint", source=tmp_path / "nowhere")
    refused(
        ShardingError,
        "0.weight has no values yet",
        source=nn.Sequential(nn.Linear(2, 2, device="meta")),
    )
    model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    refused(CheckpointError, "wide has dtype torch.complex128, which safetensors files cannot hold")
    sparse = nn.Module()
    sparse.register_buffer("graph", torch.eye(3).to_sparse())
    refused(ShardingError, "graph is a torch.sparse_coo, whose values are not", source=sparse)


def export_around_a_sharded_part(directory: Path) -> str:
    model = nn.Sequential(nn.Linear(2, 2))
    onecopy.shard(model[0], stage=3)
    with pytest.raises(ShardingError) as refused:
        onecopy.export(model, directory)
    return str(refused.value)


def test_a_sharded_part_is_named(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(2, export_around_a_sharded_part, tmp_path / "out"):
        assert message.startswith("module 0 of this Sequential is sharded: export that module")
    assert not (tmp_path / "out").exists()


def test_files_get_names_in_an_order_that_is_never_half_a_model(tmp_path: Path) -> None:
    """All are written under other names before; the index, by which several are found, is last."""
    model: Any = build("gpt2")
    names: list[str] = []
    rename = Path.rename

    def note(self: Path, target: Path) -> Path:
        assert self.name == f"{target.name}.partial"
        assert len(list(tmp_path.glob("*.safetensors*"))) >= 3
        names.append(target.name)
        return rename(self, target)

    with mock.patch.object(Path, "rename", note):
        onecopy.export(model, tmp_path, max_shard_bytes=16_000)
    assert names == [
        "config.json",
        "generation_config.json",
        *(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]


# Failures -------------------------------------------------------------------------------------


def full_disk(self: FileWriter, value: Tensor) -> TensorSpec:
    if "00002" in self.path.name and self.tensors[0].name != "3.weight":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return REAL_WRITE(self, value)


REAL_WRITE = FileWriter.write


def export_on_a_full_disk(directory: Path, stage: int) -> tuple[str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage)
    message = ""
    with mock.patch.object(FileWriter, "write", full_disk):
        try:
            onecopy.export(model, directory, max_shard_bytes=600)
        except CheckpointError as error:
            message = str(error)
    dist.barrier()
    left = len(list(directory.iterdir()))
    dist.barrier()
    # All ranks are still where the others are.
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    onecopy.export(model, directory, max_shard_bytes=600)
    return message, left


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_fail_together(pool: Pool, tmp_path: Path, stage: int) -> None:
    """And nothing is left that could be taken for weights; training goes on."""
    (first, left), (second, _) = pool.run(2, export_on_a_full_disk, tmp_path, stage)
    assert left == 0
    assert f"{tmp_path} cannot be written: No space left on device. Make room" in first
    assert second.startswith("rank 0 cannot export. CheckpointError: ")
    assert len(read(tmp_path)) == 12


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, moment: str) -> None:
    """Ctrl-C while values are written, and while files get their names."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    real, calls = getattr(Path, "rename"), []  # noqa: B009 - the attribute is patched below

    def stop(*_: object) -> None:
        if moment == "write":
            raise KeyboardInterrupt

    def rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if moment == "rename" and len(calls) == 2:
            raise KeyboardInterrupt
        renamed: Path = real(self, target)
        return renamed

    with mock.patch.object(Path, "rename", rename), pytest.raises(KeyboardInterrupt):
        onecopy.export(model, tmp_path, max_shard_bytes=600, progress=stop)
    assert not list(tmp_path.iterdir())


SPLIT = onecopy.Precision(compute="bf16", master="bf16+16")


def train(directory: Path, stage: int, settings: dict[str, Any], often: bool) -> list[Tensor]:
    """Three steps, with exports in between at every moment, or without."""
    model = models.build("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    onecopy.shard(model, optimizer, stage=stage, **settings)
    numbers = itertools.count()

    def export() -> None:
        if often:
            onecopy.export(model, directory / str(next(numbers)), max_shard_bytes=4000)

    for step in range(3):
        loss = models.loss(model, models.batch("tied", step, dist.get_rank()))
        export()
        loss.backward()
        export()
        optimizer.step()
        export()
        optimizer.zero_grad()
    with onecopy.full_parameters(model):
        for parameter in model.parameters():
            parameter.data.mul_(2)
        export()
    export()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.sampled(
    "stage, settings",
    list(itertools.product(STAGES, ({}, {"precision": "bf16"}, {"precision": SPLIT}))),
    3,
    always=[(3, {"precision": "bf16"}), (1, {"precision": SPLIT})],
)
def test_training_does_not_notice(
    pool: Pool, tmp_path: Path, stage: int, settings: dict[str, Any]
) -> None:
    """Between forward, backward and step; inside full_parameters, changes there are written."""
    with_exports = pool.run(2, train, tmp_path, stage, settings, True, timeout=120)
    without = pool.run(2, train, tmp_path, stage, settings, False)
    for values, expected in zip(with_exports, without, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(values, expected, strict=True))
    names = list(models.build("tied").state_dict())
    last = dict(zip(names, without[0], strict=True))
    for number in (9, 10):
        found = read(tmp_path / str(number))
        assert all(torch.equal(value, last[key]) for key, value in found.items())


# Checkpoints ----------------------------------------------------------------------------------


def save_two(root: Path) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(dist.get_rank())
    both = {"generator": Mixed(), "critic": nn.Linear(3, 3)}
    for model in both.values():
        onecopy.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    onecopy.save(root, both, step=1)
    return {
        name: {key: value.clone() for key, value in model.state_dict().items()}
        for name, model in both.items()
    }


def test_one_of_several_models(pool: Pool, tmp_path: Path) -> None:
    expected, _ = pool.run(2, save_two, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"has several models: .* of 'critic', 'generator'"):
        onecopy.export(tmp_path / "run", tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no model 'gen': choose .* 'generator'"):
        onecopy.export(tmp_path / "run", tmp_path / "none", model="gen")
    for name, state in expected.items():
        onecopy.export(tmp_path / "run", tmp_path / name, model=name)
        found = read(tmp_path / name)
        assert found.keys() == state.keys() - {"head.weight"}
        assert all(torch.equal(value, state[key]) for key, value in found.items())


def train_once(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    sum(one.float().sum() for one in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("layout", ["flat", "nested", "deep", "alone"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_folders_of_torch(tmp_path: Path, layout: str) -> None:
    """As users nest them, with optimizers, schedulers, counters and random states beside them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = train_once(model)
    states = get_optimizer_state_dict(model, optimizer)
    weights = model.state_dict()
    rest = {"step": torch.tensor(7), "rng": torch.get_rng_state(), "lr": 0.1}
    saved: dict[str, Any] = {
        "flat": {**weights, **rest, "optimizer": states},
        "nested": {"model": weights, "optim": states, "train": rest},
        "deep": {"app": {"model": weights, "optim": states, **rest}},
        "alone": weights,
    }[layout]
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    onecopy.export(tmp_path / "dcp", tmp_path / "out")
    found = read(tmp_path / "out")
    # A flat dict does not say that the random state is none of the model's.
    assert found.keys() - {"rng"} == weights.keys()
    assert ("rng" in found) == (layout == "flat")
    assert all(torch.equal(found[key], value) for key, value in weights.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_several_models_in_folders_of_torch(tmp_path: Path) -> None:
    teacher, student = nn.Linear(2, 3), nn.Linear(3, 3)
    saved = {"teacher": teacher.state_dict(), "student": student.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="one of 'student', 'teacher'"):
        onecopy.export(tmp_path / "dcp", tmp_path / "out")
    onecopy.export(tmp_path / "dcp", tmp_path / "out", model="student")
    assert torch.equal(read(tmp_path / "out")["weight"], student.weight)
    dcp.save({"rng": torch.get_rng_state()}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(CheckpointError, match="holds no weights of a model"):
        onecopy.export(tmp_path / "other", tmp_path / "nothing")


def save_fsdp(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(ShardingError, match=r"0\.weight is a DTensor.* export that folder"):
        onecopy.export(model, folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def test_folders_of_fsdp(pool: Pool, tmp_path: Path) -> None:
    """Sharded over three ranks, some of which have no part of a tensor."""
    pool.run(3, save_fsdp, tmp_path / "dcp", record_warnings=True)
    onecopy.export(tmp_path / "dcp", tmp_path / "out")
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).state_dict()
    found = read(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def save_plain(root: Path, depth: int, width: int) -> None:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    onecopy.shard(model, stage=3)
    onecopy.save(root, model, step=1)


def test_damage_is_found_before_the_files_have_names(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_plain, tmp_path / "run", 4, 16)
    path = tmp_path / "run/step-00000001/__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged"):
        onecopy.export(tmp_path / "run", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


# Memory ---------------------------------------------------------------------------------------


def peaks_of(export: Callable[[], object]) -> tuple[int, int]:
    """Of tensors, and of everything that Python allocates."""
    tracemalloc.start()
    try:
        with LiveTensors() as live:
            export()
        return live.peak_bytes, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_from_a_checkpoint_is_one_tensor(pool: Pool, tmp_path: Path) -> None:
    """However deep the model is, and however large a file may become."""
    width, tensor = 200, 4 * 200 * 200
    peaks = {}
    for depth in (3, 12):
        root = tmp_path / str(depth)
        pool.run(2, save_plain, root, depth, width)
        onecopy.export(root, root / "warm")
        peaks[depth] = peaks_of(lambda root=root: onecopy.export(root, root / "out"))  # type: ignore[misc]
    # The value itself, what one item was read as, and the view of it that is written.
    assert peaks[12][0] <= 3 * tensor, peaks
    assert peaks[12][0] == peaks[3][0], peaks
    # The item as it was read, and again while torch looks at it.
    assert peaks[12][1] <= 3 * tensor, peaks


def peaks_of_ranks(directory: Path, depth: int, width: int) -> int:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    onecopy.shard(model, stage=3, precision="bf16")
    onecopy.export(model, directory / "warm")
    with LiveTensors() as live:
        # Released now; they count as they are gathered.
        live.watch(unit.flat for unit in onecopy.handle.of(model).engine.units)
        onecopy.export(model, directory / "out")
        return live.peak_bytes


def test_memory_of_a_sharded_model_is_one_unit(pool: Pool, tmp_path: Path) -> None:
    """On every rank: the unit in the compute dtype, and one of its values as a master."""
    width, depth = 200, 12
    unit, value = 2 * (width * width + width), 4 * width * width
    for number, world in enumerate((2, 3)):
        for peak in pool.run(world, peaks_of_ranks, tmp_path / str(number), depth, width):
            # And this rank's part of it on the way; the backend may hold the unit before a moment
            # longer.
            assert peak <= 2 * unit + value + unit // 2, (peak, unit, value)
            assert peak < depth * value / 4
