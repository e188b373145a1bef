"""Optional packages: the error for a missing one names the extra that brings it."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from onecopy.errors import ConfigError
from onecopy.extras import EXTRAS, require

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def test_a_missing_package_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ConfigError, match=r"^--lora-rank needs .* peft.*pip install 'onecopy\[hf\]'"
    ):
        require("peft", "--lora-rank")


def test_what_an_installed_package_misses_is_not_blamed_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        require("broken_package", "this")


def test_a_package_that_is_there_is_returned() -> None:
    assert require("json", "this").dumps([]) == "[]"


def test_each_package_is_in_the_extra_that_the_error_names() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    named = {
        extra: {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
        for extra, requirements in extras.items()
    }
    # transformers itself needs tokenizers.
    named["hf"].add("tokenizers")
    # datasets itself needs pyarrow.
    named["data"].add("pyarrow")
    for package, extra in EXTRAS.items():
        assert package in named[extra], f"{package} is not in the extra {extra}"
