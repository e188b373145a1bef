"""The public names of the package, found by parsing: neither torch nor a host need be installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What has public names of its own: each one's `__all__`. Those of integrations are found.
MODULES = (
    "onecopy",
    "onecopy.policies",
    "onecopy.parallel",
    "onecopy.events",
    "onecopy.errors",
    "onecopy.experimental.summa",
)
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Public:
    """A public name: what users call it by, and where it is defined."""

    module: str
    name: str
    source: str  # the module that defines it
    node: Definition
    comment: str = ""  # above an assignment, which has no docstring

    @property
    def docstring(self) -> str:
        if isinstance(self.node, ast.FunctionDef | ast.ClassDef):
            return ast.get_docstring(self.node) or ""
        return self.comment

    @property
    def methods(self) -> list[ast.FunctionDef]:
        """Those of a class that users call.

        A method without a docstring in a class that derives from another library's is that
        library's own, which describes it.
        """
        if not isinstance(self.node, ast.ClassDef):
            return []
        defined = [one for one in self.node.body if isinstance(one, ast.FunctionDef)]
        defined = [one for one in defined if not one.name.startswith("_") and not _is_setter(one)]
        if all(is_ours(self.source, ast.unparse(base)) for base in self.node.bases):
            return defined
        return [one for one in defined if ast.get_docstring(one)]


def _is_setter(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith(".setter") for one in method.decorator_list)


def modules() -> list[str]:
    """The modules that have a page, in the order of the index."""
    stems = sorted(path.stem for path in (ROOT / "onecopy/integrations").glob("[!_]*.py"))
    # accelerate_states.py is a part of accelerate.py.
    parts = {one for one in stems for other in stems if one.startswith(f"{other}_")}
    hosts = [f"onecopy.integrations.{one}" for one in stems if one not in parts]
    return [*MODULES, *(one for one in hosts if all_of(one))]


def public_names(module: str) -> list[Public]:
    """What the page of a module shows; classes that its functions return come last."""
    found = [find(module, module, name) for name in all_of(module)]
    names = {(one.source, one.name) for one in found}
    for one in list(found):
        for returned in _returned(one):
            if (returned.source, returned.name) not in names | set(shown_in()):
                names.add((returned.source, returned.name))
                found.append(returned)
    return found


def all_of(module: str) -> list[str]:
    """Its `__all__`; empty where it has none."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


@cache
def shown_in() -> dict[tuple[str, str], str]:
    """The module that shows what is defined at (source, name), of those in some `__all__`.

    The first one counts: `onecopy.Config` is not shown again as that of another module.
    """
    found: dict[tuple[str, str], str] = {}
    for module in modules():
        for name in all_of(module):
            one = find(module, module, name)
            found.setdefault((one.source, one.name), module)
    return found


def find(module: str, source: str, name: str) -> Public:
    """The definition of a name, through what modules import, lazily too."""
    body = parsed(source).body
    for node in body:
        if isinstance(node, Definition) and defines(node, name):
            if isinstance(node, ast.Assign) and (real := _alias(source, node.value)):
                return find(module, *real)
            return Public(module, name, source, node, _comment_above(source, node.lineno))
    for imported in ast.walk(parsed(source)):
        if isinstance(imported, ast.ImportFrom) and (imported.module or "").startswith("onecopy."):
            for alias in imported.names:
                if (alias.asname or alias.name) == name:
                    return find(module, str(imported.module), alias.name)
    raise SystemExit(f"{source}: {name} is in __all__, and defined nowhere")


def _alias(source: str, value: ast.expr) -> tuple[str, str] | None:
    """Of `name = imported_module.name` the module, and the name there."""
    if not isinstance(value, ast.Attribute) or not isinstance(value.value, ast.Name):
        return None
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onecopy"):
            for alias in node.names:
                if (alias.asname or alias.name) == value.value.id:
                    return f"{node.module}.{alias.name}", value.attr
    return None


def defines(node: ast.stmt, name: str) -> bool:
    """Whether a statement gives a name its meaning."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(ast.unparse(target) == name for target in node.targets)
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name


def _returned(one: Public) -> Iterator[Public]:
    """Our own classes of which a public function returns an object."""
    if not isinstance(one.node, ast.FunctionDef) or one.node.returns is None:
        return
    for node in ast.walk(one.node.returns):
        if not isinstance(node, ast.Name) or not is_ours(one.source, node.id):
            continue
        found = find(one.module, one.source, node.id)
        if isinstance(found.node, ast.ClassDef):
            yield found


def is_ours(source: str, name: str) -> bool:
    """Whether a name that a module uses is defined in this package."""
    tree = parsed(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onecopy.")
        for alias in node.names
    }
    return name in imported or any(defines(node, name) for node in tree.body)


@cache
def _path(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def parsed(module: str) -> ast.Module:
    """The source of a module."""
    return ast.parse(_path(module).read_text())


def _comment_above(module: str, line: int) -> str:
    lines = _path(module).read_text().splitlines()[: line - 1]
    found: list[str] = []
    while lines and lines[-1].startswith("# "):
        found.insert(0, lines.pop()[2:])
    return "\n".join(found)


def is_record(node: ast.ClassDef) -> bool:
    """A dataclass or a named tuple, whose fields are its arguments."""
    decorators = [ast.unparse(one) for one in node.decorator_list]
    bases = [ast.unparse(one) for one in node.bases]
    return any(one.startswith("dataclass") for one in decorators) or "NamedTuple" in bases
