"""What the pages for those who come from elsewhere call the same, computes the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.test_docs import run_script

PAGE = Path(__file__).resolve().parent.parent / "docs/from-fsdp.md"
PAIRS = re.findall(
    r"## (\w+)\n\nBefore:\n\n```python\n(.*?)```\n\nAfter:\n\n```python\n(.*?)```",
    PAGE.read_text(),
    re.DOTALL,
)


def run_both(before: str, after: str, folder: str) -> tuple[str, str]:
    return run_script(before, folder), run_script(after, folder)


@pytest.mark.parametrize(("name", "before", "after"), PAIRS)
def test_scripts_before_and_after_have_the_same_losses(
    pool: Pool, tmp_path: Path, name: str, before: str, after: str
) -> None:
    theirs, ours = pool.run(2, run_both, before, after, str(tmp_path))[0]
    assert len(ours.splitlines()) == 6
    assert ours == theirs


def test_there_is_a_pair_for_each_host() -> None:
    assert [name for name, _, _ in PAIRS] == ["FSDP2", "DDP"]
