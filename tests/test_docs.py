"""What the README and the docs claim about the code is true: names exist, examples run."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import warnings
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


def _launched(code: str) -> contextlib.AbstractContextManager[None]:
    """What torchrun leaves in the environment, where a host looks for it."""
    if "onecopy.integrations" not in code:
        return contextlib.nullcontext()
    if "lightning" in code:
        from tests.lightning_runs import launched as launched_for_lightning

        return launched_for_lightning()
    from tests.trainers import launched

    return launched()


def run_script(code: str, folder: str) -> str:
    """A whole script, as torchrun would run it, in the process group of the test."""
    with (
        _launched(code),
        mock.patch("torch.distributed.init_process_group"),
        mock.patch("torch.distributed.destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.chdir(folder),
        warnings.catch_warnings(),
    ):
        # What PEFT asks transformers.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("name", _scripts())
def test_scripts_of_the_docs_run(pool: Pool, name: str, tmp_path: Path) -> None:
    """On two ranks in one folder; the first one prints what it found."""
    for host in re.findall(r"^(?:from|import) (\w+)", _scripts()[name], re.MULTILINE):
        pytest.importorskip(host, reason=f"{host} is not installed: the test extra")
    first, _ = pool.run(2, run_script, _scripts()[name], str(tmp_path))
    assert first.strip()


def _pages() -> list[Path]:
    """All Markdown that readers see."""
    folders = ("docs", "benchmarks", "examples")
    return sorted(
        [*ROOT.glob("*.md"), *(one for f in folders for one in ROOT.glob(f"{f}/**/*.md"))]
    )


def _prose(page: Path) -> str:
    """A page without its blocks of code and its code in lines."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "code", text)


def _anchors(page: Path) -> set[str]:
    """What links may point at, by the rule of GitHub: letters, digits and hyphens of headings."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", one) is not None for one in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_at_what_exists(page: Path) -> None:
    """Relative links of all Markdown pages: the file, and the heading in it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"\w+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in _anchors(file), f"{page.name}: {link}"


def test_code_that_pages_link_to_defines_the_name() -> None:
    """[`Unit.release`](../onecopy/core/unit.py): the file has the class, and that the method."""
    found = 0
    for page in _pages():
        links = re.findall(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)", page.read_text())
        for name, target in links:
            tree: ast.AST = ast.parse((page.parent / target).read_text())
            for part in name.split("."):
                # A method is looked for in its class.
                defined = [node for node in ast.walk(tree) if part in _names_of(node)]
                assert defined, f"{page.name}: {name} is not defined in {target}"
                tree = defined[0]
            found += 1
    assert found > 50


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [ast.unparse(target) for target in targets]
    return []


def test_every_page_of_the_docs_is_reached_from_its_index() -> None:
    """docs/README.md leads to each of them, by itself or through the index of a folder."""
    reached = {ROOT / "docs/README.md"}
    for index in (ROOT / "docs/README.md", ROOT / "docs/api/README.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", _prose(index)):
            reached.add((index.parent / target).resolve())
    missing = {str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")} - {
        str(page.relative_to(ROOT)) for page in reached if page.is_relative_to(ROOT)
    }
    assert not missing


def test_the_quick_start_shows_the_example() -> None:
    """Its script is examples/train.py, word for word."""
    page = ROOT / "docs/quick-start.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
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
