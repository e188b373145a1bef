"""`onecopy report`: the page says what the run's folder says, whatever the run was like."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch.distributed as dist

import onecopy
from onecopy import cli
from onecopy.report.charts import Scale
from onecopy.report.curves import sampled
from onecopy.report.run_folder import RUN_FILE, SPLIT, steps_file
from onecopy.report.summary import Series, names_of
from tests import models
from tests.pool import Pool
from tests.run_folders import Recorded, losses
from tests.runs import OPTIMIZERS

HTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"
HEAD = "the head of the table"
Table = dict[str, tuple[str, ...]]


def report(*folders: Path) -> ElementTree.Element:
    """The page, which is well-formed: every tag ends, every name is escaped."""
    page = folders[0].parent / "page.html"
    assert cli.main(["report", *map(str, folders), "--output", str(page)]) == 0
    return ElementTree.fromstring(page.read_text(encoding="utf-8"))


def words(element: ElementTree.Element) -> str:
    """All text, without that of styles and of what only pointers see."""
    if element.tag in (f"{HTML}style", f"{HTML}head", f"{SVG}title"):
        return element.tail or ""
    inside = "".join(words(one) for one in element)
    return (element.text or "") + inside + (element.tail or "")


def tables(page: ElementTree.Element) -> dict[str, Table]:
    """By caption, the rows by name; the head has the name `HEAD`."""
    found = {}
    for table in page.iter(f"{HTML}table"):
        rows = [[words(cell).strip() for cell in row] for row in table.iter(f"{HTML}tr")]
        caption = table.find(f"{HTML}caption")
        name = "" if caption is None else caption.text or ""
        found[name] = {HEAD: tuple(rows[0]), **{row[0]: tuple(row[1:]) for row in rows[1:]}}
    return found


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Steps as they were written."""
    text = (folder / steps_file(rank)).read_text()
    return [line for line in map(json.loads, text.splitlines()) if "step" in line]


def seconds(text: str) -> float:
    """411 ms as a number."""
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


# Numbers ----------------------------------------------------------------------------------------


def test_time_of_each_rank(tmp_path: Path) -> None:
    """Means of all steps but the first, in three digits."""
    folder = Recorded(world_size=3, slow=1).write(tmp_path / "run")
    page = report(folder)
    table = tables(page)["Time of a step"]
    kinds = [kind for kind in SPLIT if kind != "refresh"]
    for rank in range(3):
        steps = lines(folder, rank)[1:]
        means = [fmean(one["split"][kind] for one in steps) for kind in kinds]
        *split, whole, waiting = table[str(rank)]
        assert [seconds(cell) for cell in split] == pytest.approx(means, rel=5e-3)
        assert seconds(whole) == pytest.approx(fmean(one["seconds"] for one in steps), rel=5e-3)
        waits = sum(means) - sum(
            means[kinds.index(kind)] for kind in ("compute", "optimizer", "io")
        )
        assert waiting == f"{100 * waits / sum(means):.0f} %"
    assert "Rank 1 is the slowest" in words(page)


def test_speed_is_that_of_the_slowest_rank(tmp_path: Path) -> None:
    """Ranks that do not wait for each other make it visible."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"seconds": line["seconds"] + random.Random(line["time"]).random()}

    folder = Recorded(num_steps=31, change=change).write(tmp_path / "run")
    both = zip(lines(folder, 0)[1:], lines(folder, 1)[1:], strict=True)
    expected = median(max(one["seconds"], other["seconds"]) for one, other in both)
    assert f"{1000 * expected:.3g} ms a step" in words(report(folder))


def test_tokens_per_second_of_all_ranks(tmp_path: Path) -> None:
    """The sum over ranks, in a step as long as on the slowest rank."""
    folder = Recorded(
        num_steps=31, metrics=lambda rank, step: {"tokens": 1000 + rank, "loss": 1.0}
    ).write(tmp_path / "run")
    both = zip(lines(folder, 0), lines(folder, 1), strict=True)
    expected = median(2001 / max(one["seconds"], other["seconds"]) for one, other in both)
    page = report(folder)
    assert f"{expected / 1000:.1f}k tokens per second" in words(page)
    titles = [words(one).strip() for one in page.iter(f"{HTML}figcaption")]
    assert titles == ["loss", "steps per second", "tokens per second, all ranks"]


def test_memory_estimated_beside_measured(tmp_path: Path) -> None:
    """Kinds, sum and ratio; the most of any step."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        more = 4_000_000 if line["step"] == 7 else 0
        return line | {"memory": line["memory"] | {"optimizer": 36_000_000 + more}}

    table = tables(report(Recorded(change=change).write(tmp_path / "run")))["Memory of a rank"]
    assert table[HEAD] == ("MB per rank", "estimated", "least measured", "most measured", "ratio")
    assert table["parameters and masters"] == ("16.0", "16.0", "16.0", "1.000")
    assert table["optimizer states"] == ("32.0", "40.0", "40.0", "1.250")
    assert table["gradients on their way"] == ("8.0", "-", "-", "-")
    assert table["sum of what both have"] == ("76.0", "84.0", "84.0", f"{84 / 76:.3f}")
    assert table["whole process, at its peak"] == ("-", "345.0", "350.0", "-")


def test_bytes_beside_the_formula(tmp_path: Path) -> None:
    """And advice where more is sent."""
    page = report(Recorded(sent_more=1.25).write(tmp_path / "run"))
    table = tables(page)["Bytes of a rank"]
    assert table["gather"] == ("32.0", "40.0", "1.250")
    assert table["reduce"] == ("16.0", "20.0", "1.250")
    assert table["all of it"] == ("48.0", "60.0", "1.250")
    assert "25 % more is sent than by formula" in words(page)


def test_bars_are_as_long_as_their_numbers(tmp_path: Path) -> None:
    """In percent of the longest of a figure."""
    page = report(Recorded(world_size=4, slow=2).write(tmp_path / "run"))
    section = next(one for one in page.iter(f"{HTML}section") if one.get("id") == "bytes-sent")
    gather, reduce = list(section.iter(f"{SVG}rect"))[:2]
    widths = [float(one.attrib["width"].removesuffix("%")) for one in (gather, reduce)]
    assert widths == pytest.approx([100 * 2 / 3, 100 / 3], abs=0.01)
    assert float(reduce.attrib["x"].removesuffix("%")) == pytest.approx(widths[0], abs=0.01)


def test_metrics(tmp_path: Path) -> None:
    """First, lowest, highest and last mean over ranks; the loss comes first."""
    folder = Recorded(
        metrics=lambda rank, step: {"accuracy": (step - 5) ** 2 + rank} | losses(rank, step)
    ).write(tmp_path / "run")
    table = tables(report(folder))["Logged, as means over ranks"]
    assert list(table) == [HEAD, "loss", "accuracy"]
    assert table["accuracy"] == ("16.5", "0.5", "3026", "3026", "-")
    means = [fmean(losses(rank, step)["loss"] for rank in range(2)) for step in range(1, 61)]
    cells = [float(cell) for cell in table["loss"][:4]]
    assert cells == pytest.approx([means[0], min(means), max(means), means[-1]], rel=1e-3)


def test_the_detailed_step(tmp_path: Path) -> None:
    """Each unit's lane, in the order of use, and its numbers."""
    recorded = Recorded(detailed=(3, 9))
    page = report(recorded.write(tmp_path / "run"))
    assert "Step 9 of rank 0" in words(page)
    table = tables(page)["Units in step 9"]
    assert list(table)[1:] == recorded.units
    step = recorded.step(0, 9)
    assert table[HEAD][1:3] == ("gathered", "for")
    times, gathered, _, waits, sent = table["transformer.blocks.2"]
    assert (times, waits, sent) == ("2 x", "4 ms", "6.0 MB")
    assert 0 < seconds(gathered) < step["seconds"]
    areas = [one for one in page.iter(f"{SVG}polygon") if one.get("class", "").startswith("fill")]
    assert len(areas) == 4


def test_a_curve_keeps_means_and_extremes() -> None:
    """However many steps become a point."""
    draw = random.Random(0)
    steps = tuple(range(1, 5001))
    values = tuple((draw.random(), draw.random()) for _ in steps)
    found = sampled(Series("loss", steps, values), points=100)
    assert len(found.mean) == 100
    assert fmean(found.mean) == pytest.approx(fmean(value for ranks in values for value in ranks))
    assert min(found.low) == min(min(ranks) for ranks in values)
    assert max(found.high) == max(max(ranks) for ranks in values)
    assert fmean(found.steps) == fmean(steps)


@pytest.mark.parametrize("low, high", [(0, 1), (1.2, 3.4), (-3e9, 7e9), (0.001, 0.0011), (5, 5)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    """And evenly apart."""
    ticks = Scale(low, high).ticks()
    assert 1 <= len(ticks) <= 6
    assert all(low <= tick <= max(high, low + 1) for tick in ticks)
    apart = [after - before for before, after in pairwise(ticks)]
    assert apart == pytest.approx([apart[0]] * len(apart)) if apart else True


# Runs of every kind -----------------------------------------------------------------------------


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    """Half a line at the end is no step."""
    text = words(report(Recorded(status="killed", num_steps=20).write(tmp_path / "run")))
    assert "Running, or killed: 19 steps" in text
    assert "running or killed" in text


def test_a_run_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first line says why; a terminal gets no escape sequence of it."""
    error = "ValueError: \x1b[31mno such <b>thing</b>\nmore"
    folder = Recorded(status="failed", error=error, num_steps=3).write(tmp_path / "run")
    page = report(folder)
    assert "no such <b>thing</b>." in words(page)
    assert [words(one).strip() for one in page.iter(f"{HTML}pre")] == [
        f"rank 1: {error}".replace("\x1b", "\ufffd")
    ]
    shown = capsys.readouterr().out
    assert shown.startswith("Failed after 3 steps")
    assert "\x1b" not in shown


@pytest.mark.parametrize("num_steps", [0, 1])
def test_hardly_begun(tmp_path: Path, num_steps: int) -> None:
    """Nothing is missing but what cannot be known yet."""
    page = report(Recorded(num_steps=num_steps, detailed=()).write(tmp_path / "run"))
    assert f"{num_steps} step" in words(page)
    assert ("Time of a step" in tables(page)) == bool(num_steps)
    assert "Environment" in words(page)


def test_without_metrics_and_estimates(tmp_path: Path) -> None:
    """A run that logs nothing of a model that the planner does not know."""
    folder = Recorded(metrics=lambda rank, step: {}).write(tmp_path / "run")
    run = json.loads((folder / RUN_FILE).read_text())
    run["models"][0]["estimate"] = None
    (folder / RUN_FILE).write_text(json.dumps(run))
    page = report(folder)
    assert "Logged, as means over ranks" not in tables(page)
    assert "steps per second" in words(page)
    assert tables(page)["Memory of a rank"]["gradients"] == ("-", "16.0", "16.0", "-")


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    """The curve has a gap, and the verdict says where it began."""

    def metrics(rank: int, step: int) -> dict[str, Any]:
        return {"loss": "nan"} if step >= 41 else losses(rank, step)

    page = report(Recorded(metrics=metrics).write(tmp_path / "run"))
    assert "to nan" in words(page)
    assert "loss is not a number in 20 of 60 steps, first in step 41" in words(page)
    assert tables(page)["Logged, as means over ranks"]["loss"][-1] == "20 of 60"
    curve = next(one for one in page.iter(f"{SVG}polyline"))
    points = [tuple(map(float, one.split(","))) for one in curve.attrib["points"].split()]
    assert len(points) == 40
    assert all(map(math.isfinite, (value for point in points for value in point)))


@pytest.mark.parametrize("part", range(4))
def test_odd_records(tmp_path: Path, seed: int, part: int) -> None:
    """Whatever is missing, zero or no number, there is a page."""
    draw = random.Random(f"{seed} {part}")
    odd = ["nan", "inf", "-inf", 0, -1e300, 1.7e308, 5e-324]

    def change(line: dict[str, Any]) -> dict[str, Any]:
        holes = {name: {} for name in ("memory", "expected", "metrics", "sent", "split")}
        holes |= {"seconds": 0.0, "skipped": True, "metrics": {"loss": draw.choice(odd)}}
        return line | {name: value for name, value in holes.items() if draw.random() < 0.2}

    for number in range(10):
        recorded = Recorded(
            world_size=draw.choice([1, 2, 20]),
            num_steps=draw.choice([0, 1, 2, 25]),
            detailed=draw.choice([(), (1,), (50,)]),
            change=change,
        )
        folder = recorded.write(tmp_path / f"run{number}")
        if draw.random() < 0.3:
            (folder / steps_file(0)).unlink()
        report(folder, tmp_path / f"run{draw.randrange(number + 1)}")


def test_many_ranks(tmp_path: Path) -> None:
    """The fastest, the middle and the slowest have bars; the table is folded."""
    folder = Recorded(world_size=80, num_steps=3, slow=17, detailed=(2,)).write(tmp_path / "run")
    page = report(folder)
    names = [one.text for one in page.iter(f"{HTML}span") if one.get("class") == "name"]
    assert "rank 17, slowest" in names
    assert len([name for name in names if name and name.startswith("rank")]) == 6
    table = tables(page)["Time of a step, the 64 slowest of 80 ranks"]
    assert len(table) == 65
    assert list(table)[1] == "17"
    assert "80 on node0 (8), node1 (8)" in tables(page)["run"]["ranks"][0]


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    """About as large as that of a short one."""

    def metrics(rank: int, step: int) -> dict[str, Any]:
        return {f"metric {number}": math.sin(step * number) for number in range(30)}

    folder = Recorded(num_steps=2000, metrics=metrics).write(tmp_path / "run")
    page = report(folder)
    assert (tmp_path / "page.html").stat().st_size < 800_000
    assert "6 more metrics are in the table only" in words(page)


def test_names_are_escaped(tmp_path: Path) -> None:
    """Of metrics, units, settings, models, machines and folders."""
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>\x00\ud800'
    folder = Recorded(
        metrics=lambda rank, step: {evil: step, "loss" + evil: 1.0},
        units=[evil, "'&amp;<b>"],
        settings={evil: evil},
        error=evil,
        status="failed",
    ).write(tmp_path / "<b>&")
    run = json.loads((folder / RUN_FILE).read_text())
    run |= {"hosts": [evil] * 2, "versions": {evil: evil}, "command": [evil]}
    run["models"][0] |= {"kind": evil, "name": evil}
    (folder / RUN_FILE).write_text(json.dumps(run))
    page = report(folder)
    tags = {element.tag.split("}")[1] for element in page.iter()}
    assert not tags & {"script", "img"}
    assert words(page).count("<script>alert(1)</script>") > 8
    assert all(not name.startswith("on") for one in page.iter() for name in one.attrib)


def train(folder: Path) -> list[float]:
    """A recorded run of this rank; returns its losses."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=3)
    found = []
    with onecopy.record(folder, model, optimizer) as run:
        for step in range(6):
            loss = models.loss(model, models.batch("gpt", step, dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            found.append(loss.item())
    return found


def test_a_real_run(pool: Pool, tmp_path: Path) -> None:
    """What two ranks did is what the page says, and the formulas hold."""
    both = pool.run(2, train, tmp_path / "run")
    page = report(tmp_path / "run")
    assert "Finished: 6 steps" in words(page)
    found = tables(page)
    means = [fmean(ranks) for ranks in zip(*both, strict=True)]
    cells = [float(cell) for cell in found["Logged, as means over ranks"]["loss"][:4]]
    assert cells == pytest.approx([means[0], min(means), max(means), means[-1]], rel=1e-3)
    assert found["Bytes of a rank"]["all of it"][-1] == "1.000"
    for name in ("parameters and masters", "gradients", "optimizer states", "gathered units"):
        assert found["Memory of a rank"][name][-1] == "1.000"
    units = next(table for name, table in found.items() if name.startswith("Units in step"))
    assert [units[f"blocks.{number}"][0] for number in range(2)] == ["2 x", "2 x"]
    assert found["Chosen"]["stage"] == ("3", "argument of shard")


def test_settings_that_somebody_chose(tmp_path: Path) -> None:
    """A setting that was given its default is no choice; the stage is always told of."""
    folder = Recorded(settings={"lr": 1e-3}).write(tmp_path / "run")
    found = tables(report(folder))
    assert list(found["Chosen"]) == [HEAD, "lr", "stage", "max_grad_norm"]
    assert found["Chosen"]["max_grad_norm"] == ("1.0", "onecopy.toml")
    assert found["Settings"]["memory"] == ("None", "argument of shard")


# Several runs -----------------------------------------------------------------------------------


def test_several_runs(tmp_path: Path) -> None:
    """Curves over each other, what differs in a table, and nothing of what is the same."""
    one = Recorded(settings={"lr": 1e-3, "seed": 1}).write(tmp_path / "a/run")
    other = Recorded(
        settings={"lr": 3e-4, "seed": 1}, world_size=4, compute=0.1, metrics=lambda r, s: {"acc": s}
    ).write(tmp_path / "b/run")
    page = report(one, other)
    table = tables(page)["Settings that differ, and results"]
    assert table[HEAD] == ("", "a/run", "b/run")
    assert table["lr"] == ("0.001", "0.0003")
    assert table["ranks"] == ("2", "4")
    assert "seed" not in table
    assert table["last loss"][1] == "-"
    assert table["model states of a rank"] == ("64.0 MB", "32.0 MB")
    legends = [words(one).strip() for one in page.iter(f"{HTML}ul") if one.get("class") == "legend"]
    assert "a/runb/run" in legends
    speed = next(
        one for one in page.iter(f"{HTML}figure") if words(one).startswith("steps per second")
    )
    assert len(list(speed.iter(f"{SVG}polyline"))) == 2


def test_names_tell_folders_apart() -> None:
    """As short as they can be."""
    paths = [Path("/x/a/run"), Path("/x/b/run")]
    assert names_of(paths) == ["a/run", "b/run"]
    assert names_of(paths[:1]) == ["run"]
    assert names_of([paths[0], paths[0]]) == ["run", "run"]


# Advice -----------------------------------------------------------------------------------------


def split_of(**kinds: float) -> Any:
    """Change every step's split to these seconds."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        split = dict.fromkeys(SPLIT, 0.0) | kinds
        return line | {"split": split, "seconds": sum(split.values())}

    return change


def test_advice_needs_a_reason(tmp_path: Path) -> None:
    """A run without fault gets none."""
    folder = Recorded(change=split_of(compute=0.9, gather=0.05, optimizer=0.05))
    assert "What may help" not in words(report(folder.write(tmp_path / "run")))


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ({"compute": 0.5, "gather": 0.5}, "prefetch_bytes"),
        ({"compute": 0.5, "gather": 0.5}, "Stage 2 sends a third less"),
        ({"compute": 0.5, "reduce": 0.5}, "no_sync"),
        ({"compute": 0.5, "optimizer": 0.5}, "fused=True"),
        ({"compute": 0.5, "io": 0.5}, "onecopy.async_save"),
    ],
)
def test_advice(tmp_path: Path, split: dict[str, float], said: str) -> None:
    """For what takes the time."""
    page = report(Recorded(num_steps=5, change=split_of(**split)).write(tmp_path / "run"))
    assert said in words(page)


def test_a_slow_machine_is_told_from_uneven_data(tmp_path: Path) -> None:
    """The same rank each time, or another."""
    text = words(report(Recorded(slow=1, world_size=4).write(tmp_path / "machine")))
    assert "Rank 1 on node0 works" in text
    assert "slowest in 100 % of the steps" in text

    def change(line: dict[str, Any]) -> dict[str, Any]:
        rank = line["memory"]["process"] // 1_000_000 % 10
        compute = 1.0 if line["step"] % 3 == rank else 0.4 + rank / 10
        return split_of(compute=compute, gather=0.1)(line)

    text = words(report(Recorded(world_size=3, change=change).write(tmp_path / "data")))
    assert "changes from step to step" in text


def test_skipped_steps(tmp_path: Path) -> None:
    """Many in the second half are worth a word."""
    folder = Recorded(change=lambda line: line | {"skipped": line["step"] % 5 == 0})
    assert "6 of the last 30 steps were skipped" in words(report(folder.write(tmp_path / "run")))


# The command ------------------------------------------------------------------------------------


def test_where_the_page_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into the folder of the run, or the one around several."""
    one = Recorded(num_steps=3).write(tmp_path / "runs/one")
    other = Recorded(num_steps=3).write(tmp_path / "runs/other")
    assert cli.main(["report", str(one)]) == 0
    assert (one / "report.html").exists()
    shown = capsys.readouterr().out
    assert shown.startswith("Finished: 3 steps")
    assert shown.endswith(f"The page: {one / 'report.html'}\n")
    assert cli.main(["report", str(one), str(other)]) == 0
    assert (tmp_path / "runs/report.html").exists()
    assert capsys.readouterr().out.startswith("one: Finished")


def test_what_a_shell_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """runs/* has the page of several runs the next time; runs itself is none."""
    for name in ("one", "two"):
        Recorded().write(tmp_path / name)
    for _ in range(2):
        assert cli.main(["report", *map(str, sorted(tmp_path.iterdir()))]) == 0
    assert (tmp_path / "report.html").is_file()
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert f"There are runs in it, {tmp_path / 'one'}, {tmp_path / 'two'}" in said
    assert cli.main(["report", str(tmp_path / "one" / RUN_FILE)]) != 0
    assert "is a file: give the folder of a run" in capsys.readouterr().err


def test_what_cannot_be_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is said with a name and a remedy."""
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "is no run's folder" in capsys.readouterr().err
    folder = Recorded(num_steps=1).write(tmp_path / "run")
    assert cli.main(["report", str(folder), "--output", str(tmp_path / "no/page.html")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_torch_is_not_needed(tmp_path: Path) -> None:
    """Reports are made on any machine, at once."""
    folder = Recorded(num_steps=3).write(tmp_path / "run")
    program = (
        "import sys\nfrom onecopy import cli\n"
        f"assert cli.main(['report', {str(folder)!r}]) == 0\nsys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
