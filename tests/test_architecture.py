"""The package keeps the rules of its architecture, and each rule can be broken."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests import architecture as rules

Rule = Callable[[rules.Sources], list[str]]


def parse(texts: dict[str, str]) -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in texts.items()}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    broken = rule(rules.read_package())
    assert not broken, "\n".join([str(rule.__doc__), *broken])


KEPT_AND_BROKEN: list[tuple[Rule, dict[str, str], dict[str, str]]] = [
    (
        rules.imports_go_down,
        {"core/unit.py": "from onecopy.comm.groups import Group", "comm/groups.py": ""},
        {"comm/groups.py": "from onecopy.core.unit import Unit", "core/unit.py": ""},
    ),
    (
        rules.imports_go_down,
        {
            "comm/groups.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from onecopy.core import unit",
            "core/unit.py": "",
        },
        {"comm/groups.py": "def f():\n    from ..core import unit", "core/unit.py": ""},
    ),
    (
        rules.imports_go_down,
        {"events.py": "from onecopy import errors", "errors.py": ""},
        {"events.py": "import onecopy", "errors.py": ""},
    ),
    (rules.imports_go_down, {"core/new.py": ""}, {"helpers.py": ""}),
    (
        rules.no_import_cycles,
        {"core/a.py": "from onecopy.core import b", "core/b.py": "import onecopy.core.c"},
        {
            "core/a.py": "from onecopy.core import b",
            "core/b.py": "from onecopy.core.c import C",
            "core/c.py": "def f():\n    from .a import A",
        },
    ),
    (
        rules.collectives_only_in_comm,
        {"comm/a.py": "import torch.distributed as dist\ndist.all_reduce(x)"},
        {"core/a.py": "import torch.distributed as dist\ndist.all_reduce(x)"},
    ),
    (
        rules.collectives_only_in_comm,
        {"training/a.py": "import torch.distributed as dist\ndist.destroy_process_group()"},
        {"training/a.py": "import torch\ntorch.distributed.barrier()"},
    ),
    (
        rules.collectives_only_in_comm,
        {"core/a.py": "work.wait()\nbuffers.gather()"},
        {"core/a.py": "from torch.distributed import broadcast_object_list as share"},
    ),
    (
        rules.collectives_only_in_comm,
        {"core/a.py": "group.size()"},
        {"core/a.py": "group.allreduce([x])"},
    ),
    (
        rules.environment_is_read_at_the_edges,
        {"launcher.py": "import os\nos.environ['RANK']", "core/a.py": "import os\nos.getpid()"},
        {"core/a.py": "import os\nos.environ.get('RANK')"},
    ),
    (
        rules.environment_is_read_at_the_edges,
        {"cli.py": "from os import getenv"},
        {"core/a.py": "from os import getenv"},
    ),
    (rules.asserts_have_messages, {"a.py": "assert x, 'why'"}, {"a.py": "assert x"}),
    (
        rules.stages_are_data,
        {
            "core/stages.py": "a = stage == 3",
            "core/unit.py": "if stage is None: a = stage in STAGES",
        },
        {"core/unit.py": "if config.stage == 3: pass"},
    ),
    (rules.stages_are_data, {"core/a.py": "if size < 3: pass"}, {"core/a.py": "a = 0 < new_stage"}),
    (
        rules.stages_are_data,
        {"core/a.py": "match kind:\n    case 3: pass"},
        {"core/a.py": "match stage:\n    case 3: pass"},
    ),
    (
        rules.public_names_are_few,
        {"__init__.py": "__all__ = ['Config', 'shard']"},
        {"__init__.py": "__all__ = ['shard', 'Config']"},
    ),
    (
        rules.public_names_are_few,
        {"__init__.py": f"__all__ = {sorted(str(i) for i in range(25))}"},
        {"__init__.py": f"__all__ = {sorted(str(i) for i in range(26))}"},
    ),
    (
        rules.public_names_are_few,
        {"core/a.py": ""},
        {"__init__.py": "from onecopy.api import shard"},
    ),
]


@pytest.mark.parametrize(("rule", "kept", "broken"), KEPT_AND_BROKEN)
def test_each_rule_can_be_broken(rule: Rule, kept: dict[str, str], broken: dict[str, str]) -> None:
    assert rule(parse(kept)) == []
    assert len(rule(parse(broken))) >= 1


def test_every_rule_has_been_tried() -> None:
    assert {rule for rule, _, _ in KEPT_AND_BROKEN} == set(rules.RULES)
