"""The command: its help, its advice, and one small run from end to end."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

from onecopy import cli
from onecopy.doctor.options import DoctorOptions
from onecopy.errors import ConfigError
from onecopy.report.run_folder import read_run
from onecopy.training.options import TrainOptions
from tests.run_folders import Recorded

SMALL = "--steps 4 --batch 2 --context 16 --layers 2 --width 16 --heads 2 --sample 20 --evals 2"


def run(arguments: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    # The test process must not pass for a rank of somebody's torchrun.
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", *launcher, "onecopy", *arguments.split()]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def help_of_train(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from onecopy import cli\n"
        "helps = ('--help', 'doctor --help', 'plan --help', 'train --help')\n"
        "for line in (*helps, 'train --stag 3'):\n"
        "    try:\n"
        "        cli.main(line.split())\n"
        "    except SystemExit:\n"
        "        pass\n"
        "sys.exit('torch' in sys.modules or 'rich' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_lists_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    raw = help_of_train(capsys)
    text = " ".join(raw.split())
    for _, field in TrainOptions.settings():
        flag = "--" + field.name.replace("_", "-")
        entry = re.search(rf"\n  {flag}\b(?!-).*?\(default:\s+([^)]*)\)", raw, re.DOTALL)
        assert entry, f"{flag} is not in the help"
        default = str(field.default)
        names = {"()": "none", "None": "none", "False": "off"}
        words = " ".join(field.default) if isinstance(field.default, tuple) else default
        assert entry[1] == names.get(default, words.strip()), flag
        assert field.metadata["help"] in text


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("train --stag 3", "Did you mean --stage?"),
        ("train --max_grad_norm=1", "Did you mean --max-grad-norm?"),
        ("train --precision fp8", "choose from"),
        ("train --steps many", "invalid int value"),
        ("trian", "invalid choice"),
        ("", "commands:"),
    ],
)
def test_unknown_words_give_advice(
    arguments: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    assert stop.value.code == 2
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("--stage 4", "stage=4"),
        ("--width 128 --heads 3", "Try --heads 2"),
        ("--steps 1", "--steps is 1: give 2 or more"),
        ("--max-grad-norm -1", "--max-grad-norm is -1.0: give 0 or more"),
        ("--lr nan", "above 0"),
        ("--warmup 1.5", "between 0 and 1"),
        ("--nproc 0", "--nproc is 0"),
        ("--data no/such/file", "There is no file no"),
        ("--save-every 0", "--save-every is 0: give 1 or more"),
        ("--keep 0", "--keep is 0: give 1 or more"),
        ("--record a --checkpoint a", "give two folders"),
    ],
)
def test_bad_values_give_advice(
    arguments: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *arguments.split()]) == 2
    assert advice in capsys.readouterr().err


def test_bad_choices_in_code_give_advice() -> None:
    with pytest.raises(ConfigError, match="--precision is 'fp8': choose one of fp32, bf16"):
        TrainOptions(precision="fp8")


def test_options_reach_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    got: list[TrainOptions] = []
    train = next(one for one in cli.COMMANDS if one.name == "train")
    command = dataclasses.replace(train, run=got.append)
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    assert cli.main(["train"]) == 0
    assert cli.main("train --stage 1 --data a b --data c --lr 0.1 --quiet --record e".split()) == 0
    assert got[0] == TrainOptions()
    files = (Path("a"), Path("b"), Path("c"))
    assert got[1] == TrainOptions(stage=1, data=files, lr=0.1, quiet=True, record=Path("e"))


def test_a_restarted_run_goes_on_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another one is refused before anything starts."""
    folder = Recorded().write(tmp_path / "run")
    got: list[TrainOptions] = []

    def train(options: TrainOptions) -> SimpleNamespace:
        got.append(options)
        return SimpleNamespace(is_stopped=False)

    monkeypatch.setattr("onecopy.training.trainer.train", train)
    arguments = ["train", "--nproc", "1", "--record", str(folder)]
    assert cli.main(arguments) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert cli.main(arguments) == 0
    assert [one.record for one in got] == [folder]


def test_torchrun_leaves_our_options_alone() -> None:
    """It takes what begins like one of its own as a short form, also behind the program."""
    for command, options in (("train", TrainOptions), ("doctor", DoctorOptions)):
        for item in dataclasses.fields(options):
            if item.name in ("nproc", "origins"):  # torchrun says how many
                continue
            ours = [command, f"--{item.name.replace('_', '-')}", "1"]
            theirs = torchrun_parser().parse_args(["--nproc-per-node=2", "-m", "onecopy", *ours])
            assert theirs.training_script_args == ours


@pytest.mark.sampled("stage", [0, 1, 2, 3], 1)  # what differs between them has other tests
def test_train_on_two_processes(stage: int, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes a dull text. " * 100)
    folder = tmp_path / "run"
    command = f"train --stage {stage} --nproc 2 {SMALL} --data {text} --record {folder} --trace 2"
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for words in ("2 processes", "text.txt", "this model after 4 steps", "A sample, 20 tokens"):
        assert words in done.stdout
    # Measured and formula agree to the digits shown.
    for row in ("parameters", "optimizer"):
        measured, formula = re.findall(rf"^{row} +([\d.]+) +([\d.]+)", done.stdout, re.M)[0]
        assert measured == formula, row
    assert f"onecopy report {folder}" in done.stdout
    recorded = read_run(folder)
    assert (recorded.status, len(recorded.ranks)) == ("finished", 2)
    for rank in recorded.ranks:
        assert [one.step for one in rank.steps] == [1, 2, 3, 4]
        assert all(one.metrics.keys() >= {"loss", "lr"} for one in rank.steps)
        assert "held_out_bits" in rank.steps[-1].metrics
        assert {one.step for one in rank.events} == {2, 3}
    assert '"step 3"' in (folder / "trace.json").read_text()
    assert recorded.settings["stage"].value == stage
    assert recorded.settings["steps"].origin == "command line"
    again = run(command)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


@pytest.mark.slow
def test_train_joins_torchrun() -> None:
    launcher = ("torch.distributed.run", "--nproc-per-node=2", "-m")
    done = run(f"train --quiet {SMALL}", *launcher)
    assert done.returncode == 0, done.stderr
    assert "over 2 ranks" in done.stdout


def test_a_failing_rank_is_told_in_one_line(tmp_path: Path) -> None:
    text = tmp_path / "latin.txt"
    text.write_bytes(b"caf\xe9 " * 100)
    done = run(f"train --nproc 2 {SMALL} --data {text}")
    assert done.returncode == 1
    assert "is not UTF-8 text" in done.stderr
    assert "Traceback" not in done.stderr
