"""The rules of the architecture, as functions from parsed sources to the lines that break them.

A source is known by its path below `onecopy/`, such as "core/unit.py". Nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

PACKAGE = Path(__file__).resolve().parent.parent / "onecopy"
MAX_PUBLIC_NAMES = 25

# From the bottom to the top; what stands together may use each other, without cycles.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("handle",),
    ("events",),
    ("checks", "config", "deepspeed_config", "extras", "options", "policies"),
    ("comm",),
    ("memory",),
    ("core",),
    ("report",),
    ("planner",),
    ("api", "__init__"),
    ("checkpoint", "simulator", "recording", "parallel", "integrations", "launcher"),
    ("training", "doctor"),
    ("cli",),
    ("__main__", "experimental"),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

COLLECTIVE = re.compile(
    r"all_gather\w*|all_reduce\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|reduce|gather"
    r"|scatter|isend|irecv|send|recv|batch_isend_irecv|(monitored_)?barrier|\w*_object(_list|s)?"
)
# The same on a process group itself.
GROUP_METHODS = {"allreduce", "allgather", "_allgather_base", "_reduce_scatter_base", "alltoall"}
MAY_READ_ENVIRONMENT = {
    "cli.py",
    "launcher.py",
    "comm/groups.py",
    "doctor/environment.py",
    "recording/environment.py",
}

Sources = Mapping[str, ast.Module]
Node = TypeVar("Node", bound=ast.AST)


def read_package() -> dict[str, ast.Module]:
    """Every source file there is."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(), str(path))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports_go_down(sources: Sources) -> list[str]:
    """A file imports from its own layer and from those below."""
    broken = []
    for path, tree in sources.items():
        if path == "__init__.py":
            continue  # the public names, whatever their layer, lazily
        own = _layer(path)
        if own not in LEVELS:
            broken.append(f"{path}: {own!r} is in no layer of tests/architecture.py")
            continue
        for line, target in _imports(path, tree, sources):
            other = _layer(target)
            if LEVELS.get(other, -1) > LEVELS[own]:
                broken.append(f"{path}:{line}: {own} imports {other} ({target}), a layer above it")
    return broken


def no_import_cycles(sources: Sources) -> list[str]:
    """No file imports itself by way of others, not even inside functions."""
    graph = {
        path: sorted({target for _, target in _imports(path, tree, sources)} - {path})
        for path, tree in sources.items()
    }
    done: set[str] = set()
    broken: list[str] = []

    def visit(path: str, trail: list[str]) -> None:
        if path in trail:
            broken.append(" -> ".join([*trail[trail.index(path) :], path]))
        elif path not in done:
            for target in graph.get(path, []):
                visit(target, [*trail, path])
            done.add(path)

    for path in sources:
        visit(path, [])
    return broken


def collectives_only_in_comm(sources: Sources) -> list[str]:
    """torch.distributed's collectives are named in comm/ only: they are counted there."""
    broken = []
    for path, tree in sources.items():
        if _layer(path) == "comm":
            continue
        for line, name in _names_used(tree):
            module, _, function = name.rpartition(".")
            if module.startswith("torch.distributed") and COLLECTIVE.fullmatch(function):
                broken.append(f"{path}:{line}: {name} outside comm/")
        for node in _nodes(tree, ast.Attribute):
            if node.attr in GROUP_METHODS:
                broken.append(f"{path}:{node.lineno}: .{node.attr} of a group outside comm/")
    return broken


def environment_is_read_at_the_edges(sources: Sources) -> list[str]:
    """The environment is looked at where processes start, not in the core."""
    return [
        f"{path}:{line}: {name}"
        for path, tree in sources.items()
        if path not in MAY_READ_ENVIRONMENT
        for line, name in _names_used(tree)
        if re.match(r"os\.(environb?|getenvb?|putenv)\b", name)
    ]


def asserts_have_messages(sources: Sources) -> list[str]:
    """A failed assertion says what was expected."""
    return [
        f"{path}:{node.lineno}: an assert without a message"
        for path, tree in sources.items()
        for node in _nodes(tree, ast.Assert)
        if node.msg is None
    ]


def stages_are_data(sources: Sources) -> list[str]:
    """Only core/stages.py knows what a stage's number means."""
    broken = []
    orders = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    for path, tree in sources.items():
        if path == "core/stages.py":
            continue
        for compare in _nodes(tree, ast.Compare):
            sides = [compare.left, *compare.comparators]
            ordered = any(isinstance(order, orders) for order in compare.ops)
            if ordered and any(map(_is_stage, sides)):
                broken.append(f"{path}:{compare.lineno}: {ast.unparse(compare)}")
        for match in _nodes(tree, ast.Match):
            if _is_stage(match.subject):
                broken.append(f"{path}:{match.lineno}: match {ast.unparse(match.subject)}")
    return broken


def public_names_are_few(sources: Sources) -> list[str]:
    """`onecopy.__all__` is a literal, sorted, and small."""
    tree = sources.get("__init__.py")
    if tree is None:
        return []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign), "only these have targets"
            return _faults_of_names(node.value)
    return ["__init__.py: no __all__"]


RULES: tuple[Callable[[Sources], list[str]], ...] = (
    imports_go_down,
    no_import_cycles,
    collectives_only_in_comm,
    environment_is_read_at_the_edges,
    asserts_have_messages,
    stages_are_data,
    public_names_are_few,
)


def _faults_of_names(value: ast.expr | None) -> list[str]:
    try:
        names = list(ast.literal_eval(value)) if value is not None else []
    except ValueError:
        return ["__init__.py: __all__ is not a literal"]
    broken = []
    if names != sorted(names):
        broken.append("__init__.py: __all__ is not sorted")
    if len(names) > MAX_PUBLIC_NAMES:
        broken.append(f"__init__.py: {len(names)} public names, at most {MAX_PUBLIC_NAMES}")
    return broken


def _layer(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def _is_stage(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name == "stage" or name.endswith("_stage")


def _nodes(tree: ast.AST, kind: type[Node]) -> Iterator[Node]:
    return (node for node in ast.walk(tree) if isinstance(node, kind))


def _at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from _at_run_time(other)
            continue
        yield node
        yield from _at_run_time(node)


def _imports(path: str, tree: ast.AST, sources: Sources) -> Iterator[tuple[int, str]]:
    """(line, path of the source imported) for each import of our own at run time."""
    for node in _at_run_time(tree):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            # Either a module of a package or a name in a module: the sources know.
            wanted = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in wanted:
            if name == "onecopy" or name.startswith("onecopy."):
                yield node.lineno, _find(name, sources)


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parents = ["onecopy", *path.split("/")[:-1]]
    parents = parents[: len(parents) - (node.level - 1)]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _find(name: str, sources: Sources) -> str:
    """The source of onecopy.a.b: a module, a package, or where the name b may be from."""
    parts = name.split(".")[1:]
    for length in (len(parts), len(parts) - 1):
        inner = "/".join(parts[:length]) if length > 0 else ""
        for candidate in (f"{inner}.py", f"{inner}/__init__.py".lstrip("/")):
            if candidate in sources:
                return candidate
    return f"{parts[0]}.py" if len(parts) > 1 else "__init__.py"


def _names_used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of what is used of imported modules, and of names imported."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = full
                yield node.lineno, full
    for attribute in _nodes(tree, ast.Attribute):
        root, _, rest = ast.unparse(attribute).partition(".")
        if root in bound:
            yield attribute.lineno, f"{bound[root]}.{rest}"
