"""The table of docs/habits.md: onecopy's cells stay `yes`, and every habit has its row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.habit_checks import HABITS
from benchmarks.habit_sides import WORLD, make_side
from benchmarks.habits import HEADINGS, Answer, judge
from onecopy.errors import DivergenceError
from tests.pool import Pool, RankFailed

ROOT = Path(__file__).resolve().parent.parent
Sampler = Callable[..., list[str]]


def run_habits(names: list[str], side: str) -> list[list[Tensor]]:
    """What habits return on this rank."""
    return [[one.detach() for one in HABITS[name].check(make_side(side))] for name in names]


def _check(pool: Pool, names: list[str], side: str) -> None:
    # A habit may be worth a warning: parameters that no optimizer has yet.
    ranks = pool.run(WORLD, run_habits, names, side, record_warnings=True, timeout=150)
    for number, (name, expected) in enumerate(zip(names, run_habits(names, "plain"), strict=True)):
        answers = [Answer(word="yes", values=values[number]) for values in ranks]
        cell = judge(HABITS[name], expected, answers)
        assert cell.word == "yes", f"{name}: {cell.detail}"


def test_habits_keep_their_meaning(pool: Pool) -> None:
    """As in one process in plain PyTorch, at stage 3."""
    _check(pool, [name for name in HABITS if not HABITS[name].may_refuse], "onecopy-3")


def test_habits_keep_their_meaning_at_stage_2(pool: Pool, sampled: Sampler) -> None:
    """The same where parameters are whole; some of them."""
    _check(pool, sampled(list(HABITS), 12), "onecopy-2")


@pytest.mark.parametrize("name", [name for name in HABITS if HABITS[name].may_refuse])
def test_one_rank_alone_is_an_error_and_no_hang(pool: Pool, name: str) -> None:
    """The only habit that stage 3 answers with an error, on all ranks."""
    with pytest.raises(RankFailed) as failed:
        pool.run(WORLD, run_habits, [name], "onecopy-3")
    assert len(failed.value.failures) == WORLD
    assert all(one.is_a(DivergenceError) for one in failed.value.failures)


def _rows(page: str) -> dict[str, list[str]]:
    """Rows of the page's first table, by habit."""
    lines = (ROOT / page).read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_the_page_has_every_habit() -> None:
    """In the order of the code, and with a cell for each contender; onecopy's are the tested."""
    rows = _rows("docs/habits.md")
    assert rows["habit"] == list(HEADINGS.values())
    assert list(rows)[1:] == [habit.text for habit in HABITS.values()]
    for text, cells in list(rows.items())[1:]:
        assert len(cells) == len(HEADINGS), text
        assert set(cells) <= {"yes", "wrong", "error", "hang", "-"}, text
        assert cells[-2:] == ["yes", "yes"], text


def test_the_readme_is_in_keeping_with_the_page() -> None:
    """Each row of the README's table is one of the page's, without stage 2."""
    measured = {text: cells[:3] + cells[4:] for text, cells in _rows("docs/habits.md").items()}
    section = (ROOT / "README.md").read_text().split("## Habits that keep working")[1]
    lines = section.split("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert len(rows) > 10
    for text, *cells in rows[1:]:
        assert cells == measured[text], text
