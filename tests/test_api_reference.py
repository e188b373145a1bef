"""The reference is what the docstrings say, and the docstrings say what a caller must know."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.api_names import Public, is_record, modules, public_names

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts/api_reference"
# Functions that leave it to what they call to raise, or cannot fail.
RAISE_NOTHING: set[str] = set()
# What comes from a paper says from which, and from where in it.
FROM_PAPERS = {
    "Activations": "section 6.1",
    "Offload": "ZeRO-Infinity",
    "Quantize": "ZeRO\\+\\+",
    "SummaLinear": "SUMMA",
    "attention": "Ulysses",
    "checkpoint_activations": "section 6.1",
    "micro_batches": "GPipe",
    "sequence_parallel": "Ulysses",
    "shard": "sections 5 and 7",
    "tile_linears": "section 5.1.3",
    "tile_modules": "ALST",
    "tiled_cross_entropy": "ALST",
}
SHAPE = re.compile(r"\((\.\.\.|\w[\w ]*|\d+|own part[\w ]*)(, | / )|0-d|scalar|\bshape|\(\.\.\.\)")
UNITS = {
    "memory|bytes": r"byte|GiB|GB\b|\bsize",
    "seconds|timeout": r"second|how long",
    "read|write|link|network|speed": r"per second|GB/s",
}


PUBLIC: dict[str, Public] = {
    f"{module}.{one.name}": one for module in modules() for one in public_names(module)
}
FUNCTIONS = {name: one for name, one in PUBLIC.items() if isinstance(one.node, ast.FunctionDef)}


def entries(docstring: str) -> dict[str, str]:
    """What a docstring says of each argument, attribute or error that it names."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.splitlines():
        begun = re.match(r" *\*{0,2}([A-Za-z_]\w*(?:, \w+)*): (.*)", line)
        if begun:
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2])
        elif line.strip() and line.startswith(" "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found


def arguments(node: ast.FunctionDef) -> list[ast.arg]:
    plain = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [one for one in plain if one.arg not in ("self", "cls")]


def test_the_pages_are_up_to_date() -> None:
    """`scripts/api_reference` writes them; it needs neither torch nor a host framework."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_is_of_something() -> None:
    assert {"onecopy.shard", "onecopy.parallel.tie", "onecopy.errors.ConfigError"} <= set(PUBLIC)
    assert len(PUBLIC) >= 60


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_described(name: str) -> None:
    one = PUBLIC[name]
    assert one.docstring.strip(), "no docstring"
    for method in one.methods:
        assert (ast.get_docstring(method) or "").strip(), f"{method.name} has no docstring"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_raise(name: str) -> None:
    raises = "\nRaises:\n" in FUNCTIONS[name].docstring
    assert raises != (name in RAISE_NOTHING), "say it, or list it as one that raises nothing"


@pytest.mark.parametrize("name", PUBLIC)
def test_what_raises_itself_says_so(name: str) -> None:
    """Of methods too: a `raise` in the body is told."""
    for method in PUBLIC[name].methods:
        raised = [one for one in ast.walk(method) if isinstance(one, ast.Raise) and one.exc]
        if raised:
            assert "Raises:" in (ast.get_docstring(method) or ""), method.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_have_shapes(name: str) -> None:
    one = FUNCTIONS[name]
    said = entries(one.docstring)
    for argument in arguments(one.node):
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        if re.search(r"\bTensor\b", kind):
            text = said.get(argument.arg, "")
            assert SHAPE.search(text) or text.startswith("the same"), argument.arg
    returns = ast.unparse(one.node.returns) if one.node.returns else ""
    if re.fullmatch(r"(torch\.)?Tensor", returns):
        told = one.docstring.partition("\nReturns:\n")[2].partition("\n\n")[0]
        assert SHAPE.search(told), "Returns:"


@pytest.mark.parametrize("name", PUBLIC)
def test_numbers_have_units(name: str) -> None:
    """Bytes and seconds are said, in the name or in the text."""
    node, said = PUBLIC[name].node, entries(PUBLIC[name].docstring)
    if isinstance(node, ast.FunctionDef):
        numbers = [(one.arg, one.annotation) for one in arguments(node)]
    elif isinstance(node, ast.ClassDef) and is_record(node):
        annotated = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        numbers = [(ast.unparse(one.target), one.annotation) for one in annotated]
    else:
        return
    for argument, kind in numbers:
        if kind is None or not re.search(r"\b(int|float)\b", ast.unparse(kind)):
            continue
        for names, unit in UNITS.items():
            if re.search(rf"(^|_)({names})($|_)", argument):
                # A name that is a unit says how much; the text must still say of what.
                text = f"{argument.replace('_', ' ')} {said.get(argument, '')}"
                assert said.get(argument), f"{argument} is not described"
                assert re.search(unit, text), f"{argument}: in what unit?"


@pytest.mark.parametrize("name", FROM_PAPERS)
def test_algorithms_have_a_source(name: str) -> None:
    (one,) = {(one.source, one.name): one for one in PUBLIC.values() if one.name == name}.values()
    source = re.search(r"^Sources?: ((.|\n)*)", one.docstring, re.MULTILINE)
    assert source, "no Source:"
    assert re.search(FROM_PAPERS[name], source[1]), source[1]
