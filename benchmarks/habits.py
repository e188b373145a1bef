"""Which habits of a training loop keep their meaning, with DDP, FSDP2, DeepSpeed and onecopy.

    python -m benchmarks.habits [--json FILE] [--habits NAME ...] [--sides NAME ...]

Each habit is a small loop (`habit_checks.py`) that is run by one process in plain PyTorch, and by
two ranks of each contender (`habit_sides.py`), on CPU over Gloo. A cell of the table says

    yes     the tensors that come out are those of one process
    wrong   it runs, and others come out
    error   it raises, or a process dies
    hang    it had not ended after `--timeout` seconds
    -       it cannot be measured on CPUs

Each cell has processes of its own. They are forked from this one, which imports everything once
and never computes. DeepSpeed takes part where it can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from benchmarks.habit_checks import HABITS, Different, Habit
from benchmarks.habit_sides import SIDES, WORLD, NotHere, make_side

CONTENDERS = tuple(name for name in SIDES if name != "plain")
HEADINGS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed ZeRO-3",
    "onecopy-2": "onecopy stage 2",
    "onecopy-3": "onecopy stage 3",
}
# What torch and onecopy import when it is first used: once here, not in each rank.
IMPORTED_LATE = (
    "onecopy.api",
    "onecopy.core.uneven",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """word: yes, wrong, error or hang. detail: what was wrong, or the first line of the error."""

    word: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank has to say: the values, or what kept it from having any."""

    word: str
    detail: str = ""
    values: list[Tensor] | None = None
    when: float = 0.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and return 1 where onecopy has another cell than yes."""
    options = _parser().parse_args(arguments)
    sides = [name for name in options.sides if name != "deepspeed" or _has_deepspeed()]
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    table: dict[str, dict[str, Cell]] = {}
    for name in options.habits:
        expected = _run("plain", name, 1, options.timeout)[0]
        assert expected.values is not None, f"{name} fails in plain PyTorch: {expected.detail}"
        table[name] = {}
        for side in sides:
            answers = _run(side, name, WORLD, options.timeout)
            table[name][side] = cell = judge(HABITS[name], expected.values, answers)
            print(f"{name:24} {side:10} {cell.word:5} {cell.detail}", file=sys.stderr, flush=True)
    print(markdown(table, sides))
    if options.json:
        record = {
            "versions": _versions(sides),
            "habits": {
                name: {"text": HABITS[name].text, **{side: asdict(row[side]) for side in sides}}
                for name, row in table.items()
            },
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    ours = [row[side].word for row in table.values() for side in sides if "onecopy" in side]
    return int(any(word != "yes" for word in ours))


def judge(habit: Habit, expected: list[Tensor], answers: list[Answer]) -> Cell:
    """A cell, from what the ranks have answered."""
    failed = sorted((one for one in answers if one.word != "yes"), key=lambda one: one.when)
    for word in ("-", "hang", "error", "wrong"):
        found = [one for one in failed if one.word == word]
        if found:
            refused = habit.may_refuse and word == "error" and len(found) == len(answers)
            return Cell(word="yes" if refused else word, detail=found[0].detail)
    for rank, answer in enumerate(answers):
        assert answer.values is not None
        difference = differing(expected, answer.values, habit.tolerance)
        if difference:
            return Cell(word="wrong", detail=f"rank {rank}: {difference}")
    return Cell(word="yes")


def differing(expected: list[Tensor], values: list[Tensor], tolerance: float) -> str:
    """The first difference in words, or nothing."""
    for index, (one, other) in enumerate(zip(expected, values, strict=True)):
        if one.shape != other.shape:
            return f"tensor {index} has shape {tuple(other.shape)}, not {tuple(one.shape)}"
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
            most = (one - other).abs().max().item()
            return f"tensor {index} of {len(values)} is off by {most:.2g}"
    return ""


def markdown(table: dict[str, dict[str, Cell]], sides: list[str]) -> str:
    """The table: a row for each habit."""
    headings = [HEADINGS[side] for side in sides]
    lines = [f"| habit | {' | '.join(headings)} |", f"|---|{'---|' * len(sides)}"]
    for name, row in table.items():
        lines.append(f"| {HABITS[name].text} | {' | '.join(row[side].word for side in sides)} |")
    return "\n".join(lines)


# Processes --------------------------------------------------------------------------------------


def _run(side: str, habit: str, world: int, timeout: float) -> list[Answer]:
    """One habit with one contender, in processes of its own."""
    context = multiprocessing.get_context("fork")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank, args=(theirs, side, habit, rank, world, store.port), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    deadline = time.monotonic() + timeout
    answers = [_answer(process, ours, deadline) for process, ours in ranks]
    for process, _ in ranks:
        process.kill()
        process.join()
    return answers


def _answer(process: Any, ours: connection.Connection, deadline: float) -> Answer:
    if not ours.poll(max(0.0, deadline - time.monotonic())):
        return Answer(word="hang")
    try:
        answer: Answer = pickle.loads(ours.recv_bytes())
        return answer
    except EOFError:
        process.join()
        return Answer(word="error", detail=f"the process died, exit code {process.exitcode}")


def _rank(
    reports: connection.Connection, side: str, habit: str, rank: int, world: int, port: int
) -> None:
    """The main function of a rank: answer, and stay for the others' sake until killed."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1), os.dup2(nowhere.fileno(), 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        if side != "plain":
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        values = HABITS[habit].check(make_side(side))
        answer = Answer(word="yes", values=[one.detach() for one in values])
    except Different as different:
        answer = Answer(word="wrong", detail=str(different), when=time.time())
    except NotHere as missing:
        answer = Answer(word="-", detail=str(missing), when=time.time())
    except BaseException as error:
        lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
        detail = f"{type(error).__name__}: {' '.join(lines)}"
        answer = Answer(word="error", detail=detail, when=time.time())
    reports.send_bytes(pickle.dumps(answer))
    if answer.word == "error":
        os._exit(1)  # as a script would end: others hear of it by their connections
    with contextlib.suppress(EOFError):
        reports.recv_bytes()
    os._exit(0)


def _has_deepspeed() -> bool:
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: without its column", file=sys.stderr)
        return False
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # noqa: F401  # once, for all that are forked
    return True


def _versions(sides: list[str]) -> dict[str, str]:
    found = {"torch": torch.__version__}
    if "deepspeed" in sides:
        found["deepspeed"] = importlib.import_module("deepspeed").__version__
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.habits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--habits", nargs="+", choices=HABITS, default=list(HABITS))
    parser.add_argument("--sides", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until it is a hang")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with what was wrong in each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
