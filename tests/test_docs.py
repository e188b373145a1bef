"""What the README and the docs claim about the code is true: names exist, examples run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.pool import Pool

ROOT = Path(__file__).resolve().parent.parent


def _paper_rows() -> list[tuple[str, str]]:
    rows = []
    for line in (ROOT / "docs/papers.md").read_text().splitlines():
        found = re.search(r"\| `([\w/]+\.py)` \| `(\w+)` \|$", line)
        if found:
            rows.append((found[1], found[2]))
    return rows


def test_paper_terms_point_at_names_that_exist() -> None:
    """Each row of docs/papers.md names a file and a definition in it."""
    rows = _paper_rows()
    assert len(rows) >= 12
    for file, name in rows:
        text = (ROOT / file).read_text()
        pattern = rf"^\s*(class|def) {name}\b|^{name}\b.*="
        assert re.search(pattern, text, re.MULTILINE), f"{name} is not defined in {file}"


def _scripts() -> dict[str, str]:
    """Every block of Python on the pages of docs/, by page and number."""
    return {
        f"{page.stem}-{number}": code
        for page in sorted(ROOT.glob("docs/*.md"))
        for number, code in enumerate(
            re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        )
    }


def run_script(code: str, folder: str) -> str:
    """A whole script, as torchrun would run it, in the process group of the test."""
    with (
        mock.patch("torch.distributed.init_process_group"),
        mock.patch("torch.distributed.destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.chdir(folder),
    ):
        exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("name", _scripts())
def test_scripts_of_the_docs_run(pool: Pool, name: str, tmp_path: Path) -> None:
    """On two ranks in one folder; the first one prints what it found."""
    if "from transformers" in _scripts()[name]:
        pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
    first, _ = pool.run(2, run_script, _scripts()[name], str(tmp_path))
    assert first.strip()


def test_links_point_at_files() -> None:
    """Relative links of all Markdown pages."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_shows_the_example() -> None:
    """The README's script is examples/train.py, word for word."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = (ROOT / "examples/train.py").read_text()
    assert script.split("\n\n", 1)[1] == code


def run_example(name: str, folder: Path) -> str:
    """What it prints under torchrun on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(ROOT / "examples" / name)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_example_runs_under_torchrun(tmp_path: Path) -> None:
    """It learns, prints on rank 0 alone, saves whole weights and ends cleanly."""
    printed = run_example("train.py", tmp_path)
    losses = [float(line.split()[-1]) for line in printed.splitlines() if "loss" in line]
    assert len(losses) == 8
    assert losses[-1] < 0.5 * losses[0]
    import torch

    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert weights["0.weight"].shape == (64, 16)
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_resuming_example_goes_on_where_it_was(pool: Pool, tmp_path: Path) -> None:
    """From the middle of an epoch, on as many ranks and on others, with the same losses."""
    losses = run_example("resume.py", tmp_path).splitlines()
    assert len(losses) == 12
    code = (ROOT / "examples/resume.py").read_text()
    for world_size in (2, 3):
        for step in (88, 96):
            shutil.rmtree(tmp_path / f"run/step-{step:08d}")
        (tmp_path / "run/latest").write_text("step-00000080\n")
        printed = pool.run(world_size, run_script, code, str(tmp_path))[0].splitlines()
        assert printed[0] == "resumed from step 80 (run/step-00000080, saved by 2 ranks)"
        assert printed[1:] == losses[-2:]
