"""Pages as a browser shows them: nothing fetched, no fault, no words on other words, any width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onecopy import cli
from tests.browser import NARROW, WIDE, Browser, find_chromium
from tests.run_folders import Recorded

# Width and darkness do not depend on each other.
CIRCUMSTANCES = [(WIDE, False), (NARROW, True)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests here."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    found = Browser(program)
    try:
        yield found
    finally:
        found.close()


def check(browser: Browser, page: Path) -> None:
    """Look at a page; pictures are kept beside it."""
    for width, dark in CIRCUMSTANCES:
        look = browser.look(page, width=width, dark=dark)
        picture = page.with_suffix(f".{width}.{'dark' if dark else 'light'}.png")
        picture.write_bytes(look.picture)
        assert look.faults == [], picture
        assert look.requests == [page.resolve().as_uri()], picture
        assert look.overlaps == [], picture
        assert look.overflow == 0, picture
        assert len(look.texts) > 20, picture
        assert look.background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)"), picture


def test_faults_are_seen(browser: Browser, tmp_path: Path) -> None:
    """What the other tests look for is found where it is."""
    page = tmp_path / "bad.html"
    page.write_text(
        '<body style="width:1500px"><p style="position:absolute;top:4px">one</p>'
        '<p style="position:absolute;top:8px">other</p>'
        '<img src="missing.png"><script>console.log("here"); nothing()</script>'
    )
    look = browser.look(page)
    assert look.overlaps == [("one", "other")]
    assert look.overflow > 100
    assert any("missing.png" in url for url in look.requests)
    assert len(look.faults) == 3


@pytest.mark.parametrize("options", ["7.5B --devices 64", "70B --device-memory 24GB"])
def test_plans(browser: Browser, tmp_path: Path, options: str) -> None:
    page = tmp_path / "plan.html"
    assert cli.main(["plan", *options.split(), "--html", str(page)]) == 0
    check(browser, page)


def test_rehearsals(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    size = "--layers 2 --hidden 64 --sequence 32".split()
    assert cli.main(["plan", "1M", *size, "--devices", "4", "--simulate", "--html", str(page)]) == 0
    check(browser, page)


def write_report(folder: Path, *recorded: Recorded) -> Path:
    """The page of these runs."""
    page = folder / "report.html"
    runs = [str(one.write(folder / f"run{number}")) for number, one in enumerate(recorded)]
    assert cli.main(["report", *runs, "--output", str(page)]) == 0
    return page


EVIL = '"><script>alert(1)</script><img src=missing.png onerror=alert(2)>'
REPORTS = {
    "usual": [Recorded(world_size=4, slow=1)],
    "many ranks, long names, names that bite": [
        Recorded(
            world_size=20,
            num_steps=4,
            units=[EVIL, *(f"base_model.model.transformer.h.{n}.attention" for n in range(30))],
            metrics=lambda rank, step: {"loss": 1e6 / 10**step, EVIL: "nan"},
            status="failed",
            error=EVIL,
        )
    ],
    "several": [
        Recorded(settings={"batch": 16}),
        Recorded(settings={"batch": 32}, num_steps=500, status="killed"),
        Recorded(world_size=1, num_steps=1, detailed=()),
    ],
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports(browser: Browser, tmp_path: Path, name: str) -> None:
    check(browser, write_report(tmp_path, *REPORTS[name]))
