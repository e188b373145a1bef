"""Pages as a browser shows them: nothing fetched, no fault, no words on other words, any width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onecopy import cli
from tests.browser import NARROW, WIDE, Browser, find_chromium

CIRCUMSTANCES = [(WIDE, False), (WIDE, True), (NARROW, False), (NARROW, True)]


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
    """Look at a page in every way; pictures are kept beside it."""
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
