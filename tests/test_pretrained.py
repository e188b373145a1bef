"""Weights from Hugging Face's files: the values of from_pretrained, and the bytes that are read."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import onecopy
import onecopy.handle
from onecopy.core.build import write_values
from onecopy.core.pretrained import Keys
from onecopy.errors import CheckpointError, MismatchError, ShardingError
from onecopy.memory.live_tensors import LiveTensors
from onecopy.memory.tensor_files import StoredTensor, open_directory
from tests import models
from tests.pool import Pool
from tests.runs import full_values

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)
# How a model that is about to be loaded may have been made.
BUILT: dict[str, Callable[[], Any]] = {
    "init_sharded": onecopy.init_sharded,
    "meta": lambda: torch.device("meta"),
    "real": lambda: torch.device("cpu"),
}


def save(name: str, directory: Path, seed: int = 5) -> dict[str, Tensor]:
    """A Hugging Face model in many small files; returns what from_pretrained makes of them."""
    pytest.importorskip("transformers", reason="pip install 'onecopy[test]' brings transformers")
    model: Any = models.build(name, seed)
    model.save_pretrained(directory, max_shard_size="5KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return dict(type(model).from_pretrained(directory).state_dict())


def save_plain(model: nn.Module, directory: Path, **others: Tensor) -> dict[str, Tensor]:
    """Any model in one file, tied parameters once."""
    state = {name: value for name, value in model.state_dict().items()}
    kept = {name for name, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    tensors = {name: value.contiguous() for name, value in state.items() if name in kept}
    save_file({**tensors, **others}, directory / "model.safetensors")
    return state


def loaded(
    name: str, directory: Path, built: str, stage: int, precision: str, late: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Masters, gathered values and buffers, and the bytes that this rank has read."""
    torch.manual_seed(dist.get_rank())
    num_bytes: list[int] = []

    def sink(event: onecopy.events.Event) -> None:
        if event.kind == "read":
            num_bytes.append(event.num_bytes)

    with BUILT[built]():
        model = models.build(name, seed=dist.get_rank())
    if not late:
        assert onecopy.load_pretrained(model, directory) == Keys((), ())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=stage, precision=precision, sinks=[sink])
    if late:
        onecopy.load_pretrained(model, directory)
    with onecopy.full_parameters(model):
        gathered = {key: value.detach().clone() for key, value in model.named_parameters()}
        gathered |= dict(model.named_buffers())
    models.loss(model, models.batch(name, 0, 0)).backward()
    return full_values(model), gathered, sum(num_bytes)


EVERY = list(
    itertools.product(
        ("hf_gpt2", "hf_llama"), WORLDS, STAGES, ("fp32", "bf16"), BUILT, (False, True)
    )
)


@pytest.mark.sampled(
    "name, world, stage, precision, built, late",
    EVERY,
    8,
    always=[
        ("hf_gpt2", 3, 3, "fp32", "init_sharded", False),
        ("hf_llama", 2, 3, "bf16", "meta", False),
        ("hf_llama", 2, 1, "bf16", "init_sharded", False),
        ("hf_gpt2", 2, 2, "fp32", "real", True),
        ("hf_gpt2", 2, 0, "bf16", "meta", False),
    ],
)
def test_values_are_those_of_from_pretrained(  # noqa: PLR0913 - one for each thing that varies
    pool: Pool,
    tmp_path: Path,
    name: str,
    world: int,
    stage: int,
    precision: str,
    built: str,
    late: bool,
) -> None:
    """On every rank, in the masters unrounded; each rank reads what it owns and no more."""
    expected = save(name, tmp_path)
    runs = pool.run(world, loaded, name, tmp_path, built, stage, precision, late, timeout=120)
    parameters = dict(models.build(name).named_parameters())
    for masters, gathered, _ in runs:
        assert list(masters) == list(parameters)
        for key, value in masters.items():
            assert torch.equal(value, expected[key]), key
        for key, value in gathered.items():
            # The rotary frequencies are in no file: Hugging Face computes them.
            if key in expected:
                assert torch.equal(value, expected[key].to(value.dtype)), key
    if built != "real" or late:
        whole = 4 * sum(parameter.numel() for parameter in parameters.values())
        read = [num_bytes for _, _, num_bytes in runs]
        assert sum(read) == whole * (world if stage == 0 else 1), read


def peak_of_loading(directory: Path, depth: int, width: int) -> tuple[int, int]:
    """Peak of live bytes beyond what stays, at shard; bytes of one unit."""
    with LiveTensors() as live:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        onecopy.load_pretrained(model, directory)
        onecopy.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        unit = onecopy.handle.of(model).engine.units[-1]
        return live.peak_bytes - live.num_bytes(), 4 * unit.layout.padded_numel


def test_peak(pool: Pool, tmp_path: Path) -> None:
    """No more than one unit beside the slices."""
    save_plain(nn.Sequential(*(nn.Linear(200, 200) for _ in range(8))), tmp_path)
    for peak, unit in pool.run(2, peak_of_loading, tmp_path, 8, 200):
        assert peak <= unit + (16 << 10), peak / unit


def own_models(
    name: str, directory: Path, stage: int, settings: dict[str, Any]
) -> dict[str, Tensor]:
    """Load after shard, into a model that has trained, and train on."""
    model = models.build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer, stage=stage, **settings)
    models.loss(model, models.batch(name, 0, 0)).backward()
    optimizer.step()
    onecopy.load_pretrained(model, directory)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    models.loss(model, models.batch(name, 1, 0)).backward()
    optimizer.step()
    return values


@pytest.mark.sampled(
    "name, world, stage",
    list(itertools.product(("tied", "convbn", "odd", "frozen", "unused"), WORLDS, STAGES)),
    4,
    always=[("tied", 2, 3), ("convbn", 3, 1)],
)
def test_own_models_after_shard(
    pool: Pool, tmp_path: Path, name: str, world: int, stage: int
) -> None:
    """Tied parameters, buffers, scalars, transposed and frozen ones."""
    expected = save_plain(models.build(name, seed=5), tmp_path)
    for values in pool.run(world, own_models, name, tmp_path, stage, {}):
        for key, value in expected.items():
            assert torch.equal(values[key], value), key


@pytest.mark.sampled(
    "stage, settings",
    list(
        itertools.product(
            STAGES,
            (
                {"whole_parameters": True},
                {"precision": onecopy.Precision(compute="bf16", master="bf16+16")},
            ),
        )
    ),
    3,
)
def test_other_slices_and_masters(
    pool: Pool, tmp_path: Path, stage: int, settings: dict[str, Any]
) -> None:
    """Parameters that are not cut, and masters that are kept in two parts."""
    expected = save_plain(models.build("tied", seed=5), tmp_path)
    for values in pool.run(2, own_models, "tied", tmp_path, stage, settings):
        for key, value in expected.items():
            assert torch.equal(values[key], value), key


def values_of(model: nn.Module) -> dict[str, Tensor]:
    values = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        write_values(values[name], tensor)
    return values


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("built", BUILT)
def test_before_shard(tmp_path: Path, built: str, inside: bool) -> None:
    """What is done to a loaded parameter afterwards counts; dtypes are converted."""
    save_plain(nn.Linear(3, 4).to(torch.float16), tmp_path)
    stored = open_directory(tmp_path / "model.safetensors")
    weight = torch.empty(4, 3)
    assert stored["weight"].read(weight) == 24
    with BUILT[built]():
        model = nn.Linear(3, 4)
        if inside:
            onecopy.load_pretrained(model, tmp_path)
    if not inside:
        onecopy.load_pretrained(model, tmp_path)
    assert torch.equal(values_of(model)["weight"], weight)
    with torch.no_grad():
        model.bias.fill_(2)
        model.weight.mul_(3)
    model.to(torch.float64)
    assert torch.equal(values_of(model)["weight"], weight.mul(3).double())
    assert torch.equal(values_of(model)["bias"], torch.full((4,), 2.0).double())


def test_channels_last(pool: Pool, tmp_path: Path) -> None:
    """The order in memory is not that of the file."""
    expected = save_plain(nn.Conv2d(3, 4, 3), tmp_path)
    for values in pool.run(2, channels_last, tmp_path):
        assert torch.equal(values["weight"], expected["weight"])


def channels_last(directory: Path) -> dict[str, Tensor]:
    with onecopy.init_sharded():
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    onecopy.load_pretrained(model, directory)
    onecopy.shard(model, stage=3)
    values = full_values(model)
    assert values["weight"].is_contiguous(memory_format=torch.channels_last)
    return values


def test_prefixes(tmp_path: Path) -> None:
    """A base model's files in a model with a head, the reverse, and a wrapper's."""
    inner = nn.ModuleDict({"blocks": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    expected = save_plain(inner, tmp_path)
    with torch.device("meta"):
        outer = nn.ModuleDict({"base": nn.ModuleDict({"blocks": nn.Linear(2, 2)})})
        outer["base"]["norm"] = nn.LayerNorm(2)
        outer["head"] = nn.Linear(2, 2)
    outer.base_model_prefix = "base"
    keys = onecopy.load_pretrained(outer, tmp_path, strict=False)
    assert keys == Keys(("head.weight", "head.bias"), ())
    outer["head"] = nn.Linear(2, 2)
    assert torch.equal(values_of(outer)["base.blocks.weight"], expected["blocks.weight"])
    save_plain(nn.ModuleDict({"module": inner}), tmp_path)
    with torch.device("meta"):
        again = nn.ModuleDict({"blocks": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    onecopy.load_pretrained(again, tmp_path)
    assert torch.equal(values_of(again)["norm.weight"], expected["norm.weight"])


def partly_loaded(directory: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    assert len(onecopy.load_pretrained(model, directory, strict=False).missing) == 2
    onecopy.shard(model, stage=3)
    return full_values(model)


def test_what_is_not_stored_is_initialised(pool: Pool, tmp_path: Path) -> None:
    """With strict=False; and what is stored is not, although its module has an initialiser."""
    expected = save_plain(nn.Sequential(nn.Linear(3, 4)), tmp_path)
    for values in pool.run(2, partly_loaded, tmp_path):
        assert torch.equal(values["0.weight"], expected["0.weight"])
        assert values["1.weight"].abs().max() <= 0.5
        assert values["1.weight"].any()


def adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft", reason="pip install 'onecopy[test]' brings peft")
    with warnings.catch_warnings():
        # peft asks transformers for something that transformers wants to rename.
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


def lora(directory: Path) -> tuple[dict[str, Tensor], int]:
    """Adapters on a base that is never whole; masters, and the bytes read."""
    num_bytes: list[int] = []
    with onecopy.init_sharded():
        model = models.build("hf_llama")
        onecopy.load_pretrained(model, directory)
        model = adapted(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    onecopy.shard(
        model,
        torch.optim.AdamW(trained),
        sinks=[lambda event: num_bytes.append(event.num_bytes * (event.kind == "read"))],
    )
    return full_values(model), sum(num_bytes)


@pytest.mark.slow  # to import peft takes long
def test_lora(pool: Pool, tmp_path: Path) -> None:
    """Injected inside the block, where everything is recorded; the base is still read in parts."""
    save("hf_llama", tmp_path)
    model: Any = models.build("hf_llama", seed=5)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    expected = adapted(model)
    runs = pool.run(2, lora, tmp_path)
    assert sum(num_bytes for _, num_bytes in runs) == whole
    for values, _ in runs:
        for key, value in expected.named_parameters():
            assert torch.equal(values[key], value), key


# Errors ---------------------------------------------------------------------------------------


def test_errors_of_files(tmp_path: Path) -> None:
    """Each says which file, and what to do."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))

    def load(match: str, where: Path = tmp_path) -> None:
        with pytest.raises(CheckpointError, match=match):
            onecopy.load_pretrained(model, where)

    load("does not exist. Give a directory", tmp_path / "nowhere")
    load(r"there are nothing\)")
    (tmp_path / "pytorch_model.bin").touch()
    load(r"there are pytorch_model\.bin\)")
    save_plain(model, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    load(rf"is cut off: it has {len(whole) - 1} bytes, .* promises {len(whole)}")
    path.write_bytes(whole[:5])
    load("no safetensors file")
    path.write_bytes(b"\xff" * 100)
    load("header is longer than the file")
    path.write_bytes(whole.replace(b'"F32"', b'"F99"', 1))
    load("has dtype F99, which torch cannot convert")
    path.write_bytes(whole.replace(b"[4,3]", b"[4,4]", 1))
    load("does not fit bytes")
    path.write_bytes(whole)
    index = {"weight_map": {"0.weight": "model.safetensors", "0.bias": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load(r"model-2\.safetensors does not exist, but .* places 0\.bias")
    index["weight_map"] = {"other": "model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load("does not contain other")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    load("no index of safetensors files")


def test_errors_of_names_and_shapes(tmp_path: Path) -> None:
    """The first few are listed, and nothing is changed."""
    save_plain(nn.Linear(3, 4), tmp_path, strange=torch.ones(2))
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    with pytest.raises(CheckpointError, match=r"0\.weight, .*2\.weight and 3 more.*strange"):
        onecopy.load_pretrained(model, tmp_path)
    wrong = nn.Linear(3, 5)
    before = wrong.bias.detach().clone()
    with pytest.raises(CheckpointError, match=r"weight has shape \(5, 3\) in the model and \(4, 3"):
        onecopy.load_pretrained(wrong, tmp_path, strict=False)
    assert torch.equal(wrong.bias, before)
    keys = onecopy.load_pretrained(nn.Linear(3, 4), tmp_path, strict=False)
    assert keys == Keys((), ("strange",))


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    """Between the look at its header and the reading."""
    save_plain(nn.Linear(3, 4), tmp_path)
    stored = open_directory(tmp_path)["weight"]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(stored.first_byte + 8)
    with pytest.raises(CheckpointError, match="ends within weight"):
        stored.read(torch.empty(4, 3))


def one_rank_fails(directories: list[Path], early: bool) -> str:
    """A directory that is good on one rank and bad on another."""
    mine = directories[dist.get_rank()]
    with onecopy.init_sharded():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    try:
        if early:
            # One rank forgets it.
            if dist.get_rank() == 0:
                onecopy.load_pretrained(model, mine)
            onecopy.shard(model, stage=3)
        else:
            onecopy.shard(model, stage=1)
            onecopy.load_pretrained(model, mine)
    except (CheckpointError, MismatchError) as error:
        return str(error)
    return ""


def test_ranks_fail_together(pool: Pool, tmp_path: Path) -> None:
    """No rank is left waiting for another."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    save_plain(model, tmp_path / "one")
    good, other, bad = tmp_path / "one", tmp_path / "two", tmp_path / "none"
    first, second = pool.run(2, one_rank_fails, [good, bad], False)
    assert "rank 1 cannot load the weights" in first
    assert "none does not exist" in second
    save_plain(model, other, more=torch.ones(1))
    first, second = pool.run(2, one_rank_fails, [good, other], False)
    assert "rank 1" in first
    assert "more" in second
    for message in pool.run(2, one_rank_fails, [good, good], True):
        assert "parameters from files" in message


def refused(directory: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    onecopy.shard(model, stage=3)
    with pytest.raises(ShardingError, match="Load outside of it"), onecopy.full_parameters(model):
        onecopy.load_pretrained(model, directory)
    with pytest.raises(ShardingError, match="module inner of this ModuleDict is sharded"):
        onecopy.load_pretrained(nn.ModuleDict({"inner": model}), directory)


def test_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, refused, tmp_path)


def test_parts_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are joined, whatever their size and the dtype."""
    monkeypatch.setattr("onecopy.memory.tensor_files.BLOCK_NUMEL", 7)
    values = torch.randn(5, 8).to(torch.bfloat16)
    save_file({"x": values}, tmp_path / "x.safetensors")
    stored: StoredTensor = open_directory(tmp_path)["x"]
    for offset, numel in ((0, 40), (3, 20), (39, 1), (40, 0)):
        part = torch.empty(numel)
        assert stored.read_part(part, offset) == 2 * numel
        assert torch.equal(part, values.flatten()[offset : offset + numel].float())
