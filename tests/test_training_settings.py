"""Settings from a TOML file and from flags: the same ones, with where each came from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onecopy import cli
from onecopy.errors import ConfigError
from onecopy.training.options import TrainOptions
from onecopy.training.settings_file import read_settings, to_toml

FILE = """\
# A run.
[model]
model = "models/llama"
lora_targets = ["q_proj", "v_proj"]

[data]
data = ["a.txt", "b.txt"]

[train]
lr = 1
seed = 7  # any

[shard]
stage = "hpz"
offload = "cpu"

[run]
quiet = true
checkpoint = "runs/first"
"""
FLAGS = (
    "--model models/llama --lora-targets q_proj v_proj --data a.txt --data b.txt --lr 1 --seed 7 "
    "--stage hpz --offload cpu --quiet --checkpoint runs/first"
)


def parsed(arguments: str, monkeypatch: pytest.MonkeyPatch) -> TrainOptions:
    """What the command gets."""
    got: list[TrainOptions] = []
    monkeypatch.setattr("onecopy.training.dry_run.dry_run", got.append)
    assert cli.main(["train", "--dry-run", *arguments.split()]) == 0
    return got[0]


def test_a_file_says_the_same_as_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    of_file = parsed(f"--config {file}", monkeypatch)
    assert of_file == parsed(FLAGS, monkeypatch)
    assert isinstance(of_file.lr, float)
    assert of_file.checkpoint == Path("runs/first")


def test_a_flag_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    found = parsed(
        f"--config {file} --seed 8 --data c --offload none --no-quiet --lr 0.003", monkeypatch
    )
    assert (found.seed, found.data, found.offload, found.quiet) == (8, (Path("c"),), None, False)
    assert found.origin_of("lr") == "command line"
    assert found.origin_of("stage") == f"{file}:14"
    assert found.origin_of("lora_targets") == f"{file}:4"
    assert found.origin_of("steps") == "default"


def test_what_is_shown_can_be_given_again(tmp_path: Path) -> None:
    first = tmp_path / "run.toml"
    first.write_text(FILE)
    options = read_settings(first, prompt=('a "quoted"\ttext', "\u00e9"), node_size=2)
    second = tmp_path / "again.toml"
    second.write_text(to_toml(options), encoding="utf-8")
    assert read_settings(second) == options
    assert f"seed = 7  # {first}:11" in to_toml(options).splitlines()
    assert "steps = 260  # default" in to_toml(options).splitlines()


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "[train]\nlearning_rate = 1",
            r"run.toml:2: there is no setting 'learning_rate' in \[train\]",
        ),
        ("[train]\n\nsede = 1", r"run.toml:3: .* Did you mean 'seed' in \[train\]\?"),
        ("[train]\nstage = 1", r"Did you mean 'stage' in \[shard\]\?"),
        ("seed = 1", r"'seed' is in no table. Did you mean 'seed' in \[train\]\?"),
        ("[traim]\nseed = 1", r"run.toml:1: there is no table \[traim\]. The tables are \[model\]"),
        ("[train]\nseed = 'x'", r"run.toml:2: seed is \"x\": give a whole number"),
        ("[train]\nseed = true", r"seed is true: give a whole number"),
        ("[train]\nseed = 1.5", r"seed is 1.5: give a whole number"),
        ("[run]\nquiet = 1", r"quiet is 1: give true or false"),
        ("[run]\nrecord = 1", r"record is 1: give a text in quotes"),
        ("[run]\ndry_run = true", r"there is no setting 'dry_run'"),
        ("[train\nseed = 1", r"is not TOML"),
        ("[train]\nseed = -1", r"--seed is -1: give 0 or more"),
    ],
)
def test_mistakes_are_answered_with_file_and_line(text: str, advice: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=advice):
        read_settings(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_settings(tmp_path / "run.toml")


def test_the_file_of_the_page_can_be_read(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "train.md"
    (text,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    file = tmp_path / "run.toml"
    file.write_text(text)
    found = read_settings(file)
    assert (found.context, found.epochs, found.activations) == (2048, 3.0, "device")
