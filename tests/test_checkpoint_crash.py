"""A rank that is killed at any moment of a save leaves the last good checkpoint as it was."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import onecopy
from onecopy.checkpoint.verify import verify
from tests import checkpoint_rank
from tests.checkpoint_rank import KEEP, WORLD, Outcome, Trial, build, step_of_save, train
from tests.conftest import Sampler
from tests.pool import RANK_ENVIRONMENT, REPOSITORY, Pool
from tests.runs import full_values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")

# The third save removes the first checkpoint, the fourth one replaces the third.
WATCHED = (3, 4)
LONGEST_DELAY = 0.6

Try = Callable[..., Outcome]


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Try]:
    """`attempt(folder, victim=..., ...)`: two ranks of their own save there until they end."""
    log = tmp_path_factory.mktemp("ranks") / "stderr"
    environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", checkpoint_rank.__name__]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=REPOSITORY,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def run(root: Path, **settings: Any) -> Outcome:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            trial = Trial(root=str(root), port=store.port, **settings)
            print(json.dumps(asdict(trial)), file=process.stdin, flush=True)
            line = process.stdout.readline()  # type: ignore[union-attr]
            assert line, log.read_text()
            return Outcome(**json.loads(line))

        try:
            yield run
        finally:
            process.kill()


def resume(root: str) -> dict[str, Any]:
    """What one process finds there, and what it leaves after a step and a save of its own."""
    problems = [str(problem) for one in verify(root, every=True) for problem in one.problems]
    model, optimizer = build()
    onecopy.shard(model, optimizer)
    loaded = onecopy.load(root, model, optimizer)
    plain, reference = build()
    for _ in range(loaded.step):
        train(plain, reference)
    values = full_values(model)
    is_equal = all(torch.equal(values[name], p) for name, p in plain.named_parameters())
    train(model, optimizer)
    train(plain, reference)
    values = full_values(model)
    goes_on = all(torch.equal(values[name], p) for name, p in plain.named_parameters())
    saved = onecopy.save(root, model, optimizer, keep=KEEP)
    return {
        "problems": problems,
        "step": loaded.step,
        "number": loaded.extra["number"],
        "is_equal": is_equal,
        "goes_on": goes_on,
        "saved": saved.name,
        "left": sorted(os.listdir(root)),
    }


def check(
    pool: Pool, root: Path, outcome: Outcome, victim: int, *, may_miss_it: bool = False
) -> None:
    """The survivor knows, what was promised is there, and the next run goes on from it.

    It may miss it where all that was left to do is to tell the other one.
    """
    assert outcome.has_ended == [True] * WORLD, f"a rank hangs: {outcome.said}"
    *_, last = outcome.said[1 - victim]
    if not (may_miss_it and last[0] == "events"):
        assert last[0] == "error", last
        assert last[1] == "CommunicationError" or "has ended during a checkpoint" in last[2], last
    ended = [line[1] for said in outcome.said for line in said if line[0] == "end"]
    begun = [line[1] for said in outcome.said for line in said if line[0] == "begin"]
    (found,) = pool.run(1, resume, str(root))
    assert found["problems"] == []
    assert max(ended) <= found["number"] <= max(begun)
    assert found["step"] == step_of_save(found["number"])
    assert found["is_equal"], "values are not those of the step"
    assert found["goes_on"], "states of the optimizer are not those of the step"
    assert found["left"] == ["latest", f"step-{found['step']:08d}", found["saved"]]


@pytest.fixture(scope="module")
def points(attempt: Try, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[Any]]]:
    """For each watched save, of each rank the operations on files: kind, path, time."""
    found = {}
    for number in WATCHED:
        outcome = attempt(tmp_path_factory.mktemp("watched") / "run", num_saves=number)
        assert [said[-1][0] for said in outcome.said] == ["events"] * WORLD, outcome.said
        found[number] = [said[-1][1] for said in outcome.said]
    return found


def test_kills_before_each_operation(
    pool: Pool,
    attempt: Try,
    points: dict[int, list[list[Any]]],
    tmp_path: Path,
    sampled: Sampler[tuple[int, int, int]],
) -> None:
    """Before and after each file is made, written, flushed, renamed, pointed to and removed."""
    every = [
        (number, rank, point)
        for number, ranks in points.items()
        for rank, events in enumerate(ranks)
        for point in range(len(events))
    ]
    # A rename is what decides; the moment after it is the next point.
    decisive = [
        (number, rank, point + after)
        for number, rank, point in every
        if points[number][rank][point][0] == "os.rename"
        for after in (0, 1)
    ]
    for number, rank, point in sampled(every, 20, always=dict.fromkeys(decisive)):
        root = tmp_path / f"{number}-{rank}-{point}"
        outcome = attempt(root, num_saves=number, victim=rank, by=rank, point=point)
        print("killed before", points[number][rank][point])
        assert outcome.said[rank][-1] == ["begin", number], "it was not killed in this save"
        check(pool, root, outcome, rank)


def test_kills_before_each_operation_of_the_other_rank(
    pool: Pool,
    attempt: Try,
    points: dict[int, list[list[Any]]],
    tmp_path: Path,
    sampled: Sampler[tuple[int, int, int]],
) -> None:
    """What the killed rank had written may become a checkpoint, or not; but not half of one."""
    every = [
        (number, victim, point)
        for number, ranks in points.items()
        for victim in range(WORLD)
        for point in range(len(ranks[1 - victim]))
    ]
    for number, victim, point in sampled(every, 6):
        root, by = tmp_path / f"{number}-{victim}-{point}", 1 - victim
        outcome = attempt(root, num_saves=number, victim=victim, by=by, point=point)
        print(f"rank {victim} killed before", points[number][by][point])
        assert outcome.said[victim][-1] == ["begin", number], "it was not killed in this save"
        check(pool, root, outcome, victim, may_miss_it=True)


def test_kills_at_random_moments(
    request: pytest.FixtureRequest, pool: Pool, attempt: Try, tmp_path: Path, seed: int
) -> None:
    """While both train and save in a loop, in the background or not."""
    draw = random.Random(seed)
    for number in range(60 if request.config.option.all else 5):
        victim, delay = draw.randrange(WORLD), draw.uniform(0, LONGEST_DELAY)
        in_background = bool(number % 2)
        print(f"trial {number}: rank {victim} is killed after {delay} s, {in_background=}")
        root = tmp_path / str(number)
        outcome = attempt(root, victim=victim, delay=delay, in_background=in_background)
        check(pool, root, outcome, victim)


def test_everything_is_flushed_in_order(points: dict[int, list[list[Any]]]) -> None:
    """A machine that loses its power has on its disk what `latest` names there."""
    events = sorted((one for ranks in points[4] for one in ranks), key=lambda one: one[2])
    new = next(path for kind, path, _ in events if kind == "os.mkdir" and path.endswith(".new"))
    root = str(Path(new).parent)

    def at(kind: str, path: str) -> int:
        return next(n for n, one in enumerate(events) if one[:2] == [kind, path])

    renamed, moved = at("os.rename", f"{root}/step-00000003"), at("os.rename", f"{root}/latest")
    files = {path for kind, path, _ in events if kind == "open" and path.startswith(new)}
    expected = {"__0_0.distcp", "__1_0.distcp", ".metadata", "onecopy.json"}
    assert {Path(path).name for path in files} == expected
    manifest = f"{new}/onecopy.json"
    for path in files - {manifest}:
        assert at("open", path) < at("flushed", path) < at("open", manifest)
    assert at("open", manifest) < at("flushed", manifest) < at("flushed", new) < renamed < moved
    assert renamed < at("flushed", root) < at("open", f"{root}/.latest.new")
    assert at("open", f"{root}/.latest.new") < at("flushed", f"{root}/.latest.new") < moved
    after = [one[:2] for one in events[moved:]]
    removed = next(n for n, one in enumerate(after) if one[0] == "os.remove")
    assert ["flushed", root] in after[:removed], "the old one goes when the new one is safe"
