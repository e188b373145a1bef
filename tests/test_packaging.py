"""What users install: a wheel that needs no compiler; imports that need no POSIX and no numpy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"

# Imports every module of onecopy, except those that bring a host framework with them, and says
# which of them asked for something that not every system has.
IMPORT_ALL = """
import builtins, importlib, json, os, pkgutil, sys

import torch.distributed, torch.distributed.checkpoint, rich, safetensors.torch  # they may

refused, wanted = set(sys.argv[1].split()), []
for name in sys.argv[2].split():
    vars(os).pop(name, None)
builtin_import = builtins.__import__

def without(name, globals=None, *args, **kwargs):
    asks = (globals or {}).get("__name__", "")
    if asks.startswith("onecopy") and name.partition(".")[0] in refused:
        wanted.append(f"{asks} imports {name}")
    return builtin_import(name, globals, *args, **kwargs)

builtins.__import__ = without
import onecopy
for found in pkgutil.walk_packages(onecopy.__path__, "onecopy."):
    if not found.name.startswith("onecopy.integrations.") and found.name != "onecopy.__main__":
        importlib.import_module(found.name)
print(json.dumps([len([name for name in sys.modules if name.startswith("onecopy")]), wanted]))
"""
POSIX_MODULES = "fcntl grp posix pty pwd resource syslog termios tty"
POSIX_NAMES = (
    "O_DIRECT fork geteuid getloadavg killpg posix_fallocate preadv pwritev statvfs sysconf"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built where no compiler can be found."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(ROOT / "onecopy", tree / "onecopy", ignore=_no_byte_code)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    environment = {**os.environ, "PATH": str(folder), "CC": "false", "CXX": "false"}
    subprocess.run(
        [sys.executable, "-c", BUILD, folder],
        cwd=tree,
        env=environment,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def _no_byte_code(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


def test_the_wheel_is_pure_python_and_whole(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if name.startswith("onecopy/")}
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "onecopy").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == sources


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(opened.read(name).decode())
    needs = [one for one in metadata.get_all("Requires-Dist") or [] if "extra ==" not in one]
    assert sorted(one.partition(">")[0] for one in needs) == ["rich", "safetensors[torch]", "torch"]
    assert set(metadata.get_all("Provides-Extra") or []) >= {"hf", "lightning", "data", "track"}
    assert metadata["Version"].startswith("0.")
    assert metadata["License-Expression"] == "Apache-2.0"


def test_what_is_installed_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import onecopy; print(onecopy.__file__); print(onecopy.Config(stage=2).stage)"
    printed = _run("-c", code, cwd=tmp_path, env=environment).splitlines()
    assert printed == [str(tmp_path / "onecopy/__init__.py"), "2"]
    assert "usage: onecopy" in _run("-m", "onecopy", "--help", cwd=tmp_path, env=environment)


@pytest.mark.parametrize(
    ("modules", "names"), [(POSIX_MODULES, POSIX_NAMES), ("numpy", "")], ids=["posix", "numpy"]
)
def test_no_import_needs(modules: str, names: str) -> None:
    num_modules, wanted = json.loads(_run("-c", IMPORT_ALL, modules, names, cwd=ROOT))
    assert num_modules > 200, "most of the package was not imported"
    assert not wanted, "\n".join(wanted)


def _run(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
