"""`onecopy checkpoint`: what it shows, what it finds, and how it ends."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

import onecopy
from onecopy import cli
from onecopy.checkpoint.inspect import Inspection, OptimizerInfo, Tensors, inspect
from onecopy.checkpoint.tables import print_inspection
from onecopy.checkpoint.verify import verify
from onecopy.errors import CheckpointError, ConfigError
from onecopy.options import bytes_of
from tests import models
from tests.pool import Pool

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not squeezed."""
    monkeypatch.setenv("COLUMNS", "160")


def command(*arguments: object) -> int:
    return cli.main(["checkpoint", *map(str, arguments)])


def save_run(root: Path, steps: int) -> None:
    model = models.build("tied")
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    onecopy.shard(model, optimizer, stage=2, precision="bf16")
    for step in range(steps):
        models.loss(model, models.batch("tied", step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        onecopy.save(root, model, optimizer, extra={"epoch": step})


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints; not to be changed."""
    root = tmp_path_factory.mktemp("saved") / "run"
    pool.run(2, save_run, root, 2)
    return root


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """What torch itself has written, in one process."""
    torch.manual_seed(0)
    folder = tmp_path / "foreign"
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(
            {"model": nn.Linear(30, 20).state_dict(), "lr": 0.1}, checkpoint_id=folder, no_dist=True
        )
    return folder


# Inspect --------------------------------------------------------------------------------------


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from onecopy import cli\n"
        "for words in ('', 'inspect', 'export', 'verify'):\n"
        "    try:\n"
        "        cli.main(['checkpoint', *words.split(), '--help'])\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code == 0\n"
        "sys.exit('torch' in sys.modules or 'rich' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--max-shard-size SIZE" in done.stdout and "DIR OUT" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("checkpoint", "usage: onecopy checkpoint"),
        ("checkpoint inspect", "required: DIR"),
        ("checkpoint export a b --dtyp bf16", "Did you mean --dtype?"),
        ("checkpoint inspct a", "invalid choice"),
    ],
)
def test_unknown_words_give_advice(arguments: str, advice: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    assert stop.value.code == 2
    assert advice in capsys.readouterr().err


def test_inspect_a_run(saved: Path, capsys: Capture) -> None:
    assert command("inspect", saved) == 0
    text = capsys.readouterr().out
    for words in (
        "step: 2",
        "ranks: 2",
        "state: complete",
        "tied: head.weight = tokens.weight",
        "kind GPT  stage 2",
        "bfloat16 computed, float32 kept",
        "kind AdamW  num_steps 2",
        "onecopy.json",
    ):
        assert words in text, words
    assert re.search(r"step-00000002 \(latest\) .* complete", text)
    assert re.search(r"weight_decay +0.1 +0.01", text)
    assert re.search(r"lr +0.001 +0.0001", text)


def test_inspect_as_json(saved: Path, capsys: Capture) -> None:
    """The numbers are those of the model, and of the files."""
    assert command("inspect", saved, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    model = models.build("tied")
    numel = sum(parameter.numel() for parameter in model.parameters())
    (tensors,) = (one["tensors"] for one in found["models"])
    assert tensors["dtypes"] == {"float32": numel}
    assert (tensors["num_elements"], tensors["num_bytes"]) == (numel, 4 * numel)
    assert tensors["num_tensors"] == len(list(model.parameters()))
    (optimizer,) = found["optimizers"]
    count = len(list(model.parameters()))
    assert optimizer["tensors"]["num_bytes"] == 8 * numel + 4 * count  # two moments, and steps
    assert [group["lr"] for group in optimizer["groups"]] == [1e-3, 1e-4]
    assert sum(group["params"] for group in optimizer["groups"]) == count
    assert found["tied"] == {"head.weight": "tokens.weight"}
    assert found["world_size"] == found["step"] == 2
    assert sorted(found["others"]) == ["onecopy.extra.0", "onecopy.rng.0", "onecopy.rng.1"]
    folder = saved / "step-00000002"
    assert found["files"] == {path.name: path.stat().st_size for path in folder.iterdir()}
    assert [(one["step"], one["health"], one["is_latest"]) for one in found["steps"]] == [
        (1, "complete", False),
        (2, "complete", True),
    ]
    assert found["steps"][1]["num_bytes"] == sum(found["files"].values())
    one = inspect(folder)
    assert (one.steps, one.step, one.time) == ([], 2, found["time"])


def test_inspect_names_the_health_of_each_step(run: Path, capsys: Capture) -> None:
    for step in range(3, 8):
        shutil.copytree(run / "step-00000001", run / f"step-{step:08}")
    (run / ".step-00000009.abcd.new").mkdir()
    (run / "step-00000003/__1_0.distcp").unlink()
    with (run / "step-00000004/__0_0.distcp").open("ab") as file:
        file.write(b"more")
    (run / "step-00000005/onecopy.json").write_text("{}")
    (run / "step-00000006/onecopy.json").unlink()
    shutil.rmtree(run / "step-00000007")
    (run / "step-00000007").mkdir()
    (run / "latest").write_text("step-00000008")
    (run / "notes").mkdir()
    with pytest.raises(CheckpointError, match="step-00000008 is no checkpoint"):
        inspect(run)
    (run / "latest").write_text("step-00000002")
    assert command("inspect", run) == 0
    text = capsys.readouterr().out
    for words in (
        r"step-00000001 .* complete",
        r"step-00000002 \(latest\) .* complete",
        r"step-00000003 .* damaged: __1_0.distcp is missing",
        r"step-00000004 .* damaged: __0_0.distcp has \d+ bytes, not \d+",
        r"step-00000005 .* onecopy.json is damaged",
        r"step-00000006 .* damaged: onecopy.json is missing",
        r"step-00000007 .* unfinished",
        r".step-00000009.abcd.new .* being written",
    ):
        assert re.search(words, text), words
    assert "notes" not in text


def test_inspect_shows_what_is_missing(run: Path, capsys: Capture) -> None:
    (run / "step-00000002/__1_0.distcp").unlink()
    assert command("inspect", run) == 0
    text = capsys.readouterr().out
    assert re.search(r"__1_0.distcp +missing", text)
    assert "state: damaged: __1_0.distcp is missing" in text


def test_inspect_other_folders(foreign: Path, capsys: Capture) -> None:
    assert command("inspect", foreign) == 0
    text = capsys.readouterr().out
    for words in ("by: another program", "Model model: 2 tensors, 620 elements", "others: lr"):
        assert words in text, words
    assert command("inspect", foreign.parent) == 1
    assert "is no checkpoint" in capsys.readouterr().err


def test_long_lists_are_cut_short(capsys: Capture) -> None:
    """Of a thousand ranks; what is missing is always shown."""
    tensors = Tensors(num_tensors=3, num_elements=6, num_bytes=24, dtypes={"float32": 6})
    groups = [{"params": 1, "lr": 0.5 + number} for number in range(10)]
    optimizer = OptimizerInfo(name="a", tensors=tensors, settings={}, groups=groups)
    found = Inspection(
        path="somewhere/[red]",
        writer="onecopy",
        step=3,
        time=None,
        world_size=1000,
        health="complete",
        models=[],
        optimizers=[optimizer],
        tied={},
        others=[f"onecopy.rng.{rank}" for rank in range(1000)],
        files={f"__{rank}_0.distcp": None if rank == 77 else rank for rank in range(1000)},
        steps=[],
        notes=["something"],
    )
    print_inspection(Console(width=120), found)
    text = capsys.readouterr().out
    for words in (
        "somewhere/[red]",
        "onecopy.rng.5 and 994 more",
        "Files: 1000, 499.4 kB",
        "and 984 smaller ones",
        "__999_0.distcp",
        "Parameter groups: 10",
        "and 4 more",
        "note: something",
    ):
        assert words in text, words
    assert re.search(r"__77_0.distcp +missing", text)
    assert "5.5" in text and "6.5" not in text and "__500_0" not in text


# Export ---------------------------------------------------------------------------------------


def test_export(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert command("export", saved, out, "--dtype", "bf16", "--max-shard-size", "4kB") == 0
    text = capsys.readouterr().out
    files = list(out.glob("*.safetensors"))
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= load_file(file)
    assert len(files) > 2 and f"in {len(files) + 1} files" in text
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert tensors.keys() == dict(models.build("tied").named_parameters()).keys()


@pytest.mark.parametrize(
    ("arguments", "code", "advice"),
    [
        ("--dtype int4", 2, "dtype='int4' is no floating-point dtype"),
        ("--max-shard-size much", 2, "'much' is no size: say 5GB"),
        ("--model critic", 1, "has no model 'critic': choose with model=... one of ''"),
    ],
)
def test_export_refuses(
    saved: Path, tmp_path: Path, arguments: str, code: int, advice: str, capsys: Capture
) -> None:
    assert command("export", saved, tmp_path / "out", *arguments.split()) == code
    error = capsys.readouterr().err
    assert error.startswith("onecopy checkpoint export: ") and advice in error


def test_sizes() -> None:
    texts = ("5GB", "500 MB", "2GiB", "1000000", "1.5k", "3b", "4kib")
    sizes = (5 * 10**9, 5 * 10**8, 2**31, 10**6, 1500, 3, 4096)
    assert tuple(map(bytes_of, texts)) == sizes
    for text in ("", "GB", "-1GB", "5XB", "0", "0.1B", "1e9", "5 G B"):
        with pytest.raises(ConfigError, match="is no size"):
            bytes_of(text)


# Verify ---------------------------------------------------------------------------------------


def test_verify_finds_nothing_where_nothing_is_wrong(
    saved: Path, foreign: Path, capsys: Capture
) -> None:
    assert command("verify", saved) == 0
    assert command("verify", saved, "--all") == 0
    assert command("verify", foreign) == 0
    text = capsys.readouterr().out
    assert text.count("no damage") == 4
    assert text.count("all checksums, and that no part") == 3
    (found,) = verify(saved)
    folder = saved / "step-00000002"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    del sizes["onecopy.json"]  # it has its checksum in itself
    assert found.num_bytes == sum(sizes.values())


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def items_of(folder: Path) -> list[tuple[str, int, int]]:
    manifest = json.loads((folder / "onecopy.json").read_text())
    return [
        (name, offset, length)
        for name, file in manifest["files"].items()
        for offset, length, _ in file["items"]
    ]


def test_verify_names_the_item_whatever_byte_is_wrong(run: Path) -> None:
    """One bit at a time: in the first, the last and a byte in the middle of items."""
    folder = run / "step-00000002"
    items = items_of(folder)
    assert len(items) > 100
    for number, (file, offset, length) in enumerate(items):
        if number % 9 and file != ".metadata":
            continue
        place = offset + (0, length // 2, length - 1)[number % 3]
        flip(folder / file, place)
        (found,) = verify(folder)
        flip(folder / file, place)
        (problem,) = [one for one in found.problems if one.file]
        assert problem.file == file
        assert "checksum is not the one that was saved" in problem.what
        assert bool(problem.item) == (file != ".metadata")
    assert not verify(folder)[0].problems


def remove_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def cut_file(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)


def lengthen_file(folder: Path) -> None:
    with (folder / "__1_0.distcp").open("ab") as file:
        file.write(b"more")


def spoil_manifest(folder: Path) -> None:
    flip(folder / "onecopy.json", 100)


def change_manifest(folder: Path) -> None:
    path = folder / "onecopy.json"
    path.write_bytes(path.read_bytes().replace(b'"step":2', b'"step":3'))


def spoil_metadata(folder: Path) -> None:
    flip(folder / ".metadata", 200)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (remove_file, r"__1_0.distcp: No such file or directory, with \d+ items in it"),
        (cut_file, r"__1_0.distcp: .*: the file ends before it, at byte \d+"),
        (lengthen_file, r"__1_0.distcp: has \d+ bytes, not \d+"),
        (spoil_manifest, r"onecopy.json is damaged"),
        (change_manifest, r"onecopy.json is damaged: its checksum is another"),
        (spoil_metadata, r".metadata: its checksum is not the one that was saved"),
    ],
)
def test_verify_ends_with_1(
    run: Path, harm: Callable[[Path], None], words: str, capsys: Capture
) -> None:
    harm(run / "step-00000002")
    assert command("verify", run) == 1
    text = capsys.readouterr()
    assert re.search(words, text.out), text.out
    assert "is damaged (step-00000002), see above" in text.err
    assert "Traceback" not in text.err


def test_verify_all_looks_at_every_step(run: Path, capsys: Capture) -> None:
    """The last one is undamaged; the one before is not. And one may be named that is not there."""
    file, offset, _ = items_of(run / "step-00000001")[0]
    flip(run / "step-00000001" / file, offset)
    assert command("verify", run) == 0
    assert command("verify", run, "--all") == 1
    assert "(step-00000001)" in capsys.readouterr().err
    (run / "latest").write_text("step-00000004")
    assert command("verify", run, "--all") == 1
    assert "(step-00000001, step-00000004)" in capsys.readouterr().err
    assert command("verify", run) == 1
    assert "step-00000004 is no checkpoint" in capsys.readouterr().err


def test_verify_other_folders(foreign: Path, capsys: Capture) -> None:
    """torch.load does not see a changed value; the archive's own checksum shows it."""
    path = foreign / "__0_0.distcp"
    weight = nn.Linear(30, 20)
    state: dict[str, Any] = {"model": weight.state_dict()}
    values = bytes(path.read_bytes())
    metadata: Metadata = dcp.FileSystemReader(foreign).read_metadata()
    (place,) = (
        info for index, info in metadata.storage_data.items() if index.fqn == "model.weight"
    )
    flip(path, place.offset + place.length // 2)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=foreign, no_dist=True)
    assert command("verify", foreign) == 1
    text = capsys.readouterr().out
    assert re.search(r"__0_0.distcp: model.weight from \[0, 0\]: the checksum of its", text), text
    path.write_bytes(values[: place.offset + place.length - 1])
    assert command("verify", foreign) == 1
    assert "the file ends before it" in capsys.readouterr().out
    path.write_bytes(values)
    assert command("verify", foreign) == 0


def test_verify_says_what_could_not_be_checked(tmp_path: Path, capsys: Capture) -> None:
    """What torch.save wrote before it made archives has no checksums."""
    whole = torch.save

    def old(value: object, file: Any, **options: Any) -> None:
        whole(value, file, _use_new_zipfile_serialization=False)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.warns(UserWarning, match="torch.distributed is disabled"),
    ):
        patch.setattr(torch, "save", old)
        dcp.save(nn.Linear(3, 2).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert command("verify", tmp_path) == 0
    assert "2 items without a checksum were only found to be there" in capsys.readouterr().out


def change_metadata(folder: Path, change: Callable[[Metadata], None]) -> list[str]:
    path = folder / ".metadata"
    before = path.read_bytes()
    metadata = pickle.loads(before)
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    (found,) = verify(folder)
    path.write_bytes(before)
    return [str(problem) for problem in found.problems]


def save_cut(folder: Path) -> None:
    """A matrix cut by columns, and a vector."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "matrix": distribute_tensor(torch.arange(24.0).view(2, 12), mesh, [Shard(1)]),
        "vector": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]),
    }
    dcp.save(state, checkpoint_id=folder)


def test_verify_finds_parts_that_are_missing_or_twice(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, save_cut, tmp_path, record_warnings=True)
    assert not verify(tmp_path)[0].problems

    def drop(metadata: Metadata) -> None:
        del metadata.state_dict_metadata["matrix"].chunks[1]  # type: ignore[union-attr]

    def forget(metadata: Metadata) -> None:
        metadata.storage_data = {
            index: info
            for index, info in metadata.storage_data.items()
            if (index.fqn, tuple(index.offset)) != ("matrix", (0, 4))
        }

    def move(metadata: Metadata) -> None:
        chunk = metadata.state_dict_metadata["matrix"].chunks[1]  # type: ignore[union-attr]
        chunk.offsets = torch.Size([0, 3])

    def stick_out(metadata: Metadata) -> None:
        chunk = metadata.state_dict_metadata["vector"].chunks[2]  # type: ignore[union-attr]
        chunk.offsets = torch.Size([5])

    def flatten(metadata: Metadata) -> None:
        chunk = metadata.state_dict_metadata["vector"].chunks[2]  # type: ignore[union-attr]
        chunk.offsets = torch.Size([0, 4])

    def go_outside(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../secret"

    assert "matrix: only 16 of its 24 elements are stored" in change_metadata(tmp_path, drop)[0]
    assert change_metadata(tmp_path, forget) == [
        "matrix from [0, 4]: the metadata does not say where it is"
    ]
    assert "the parts from [0, 0] and [0, 3] overlap" in change_metadata(tmp_path, move)[0]
    assert "ends at [7], outside of its shape [6]" in change_metadata(tmp_path, stick_out)[0]
    assert "another number of dimensions" in change_metadata(tmp_path, flatten)[0]
    assert "points outside of its folder" in change_metadata(tmp_path, go_outside)[0]
