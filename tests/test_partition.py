"""Automatic units, the policy that overrides them, and what cannot be a unit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onecopy.config import Config
from onecopy.core.partition import find_units
from onecopy.core.unit import UnitSpec
from onecopy.errors import ConfigError
from onecopy.policies import Precision
from tests import models


def units_of(model: nn.Module, **settings: object) -> dict[str, list[str]]:
    """Unit names and the parameters in them."""
    specs = find_units(model, Config.make(None, settings), lambda parameter: None)
    _check(model, specs)
    return {spec.name: [name for name, _ in spec.parameters] for spec in specs}


def _check(model: nn.Module, specs: list[UnitSpec]) -> None:
    """Every parameter with elements is in exactly one unit, below its module."""
    found = [id(parameter) for spec in specs for _, parameter in spec.parameters]
    expected = [id(parameter) for parameter in model.parameters()]
    assert sorted(found) == sorted(expected)
    for spec in specs:
        below = {id(parameter) for parameter in spec.module.parameters()}
        assert all(id(parameter) in below for _, parameter in spec.parameters)


def test_repeated_blocks() -> None:
    """The children of the outermost list of alike modules; the small rest is the root's."""
    names = list(units_of(models.build("gpt")))
    assert names == ["root", "blocks.0", "blocks.1", "blocks.2"]


def test_blocks_with_names() -> None:
    """In a ModuleDict, as pipeline stages have them that keep the numbers of the whole model."""
    model = nn.ModuleDict({"blocks": nn.ModuleDict({str(i): nn.Linear(4, 4) for i in (4, 5)})})
    assert list(units_of(model)) == ["blocks.4", "blocks.5"]


def test_large_leaves() -> None:
    """An embedding and a head beyond 100,000 elements are units of their own."""
    model = nn.ModuleDict({"embed": nn.Embedding(1000, 128), "head": nn.Linear(128, 1000)})
    model["blocks"] = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model["norm"] = nn.LayerNorm(4)
    assert list(units_of(model)) == ["root", "embed", "head", "blocks.0", "blocks.1"]


def test_tied_weights_go_to_a_common_module() -> None:
    """A weight that two leaves share is gathered around the module that contains both."""
    units = units_of(models.build("tied"))
    assert any("weight" in name for name in units["root"])
    model = nn.Sequential(nn.Embedding(1000, 200), nn.Linear(200, 1000, bias=False))
    model[1].weight = model[0].weight
    assert units_of(model) == {"root": ["0.weight"]}


def test_a_block_used_many_times_is_one_unit() -> None:
    """The same module object under several names (ALBERT)."""
    block = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([block] * 4))
    assert units_of(model)["1.0"] == ["1.0.weight", "1.0.bias"]


def test_leaves_that_are_not_called_stay_with_their_parent() -> None:
    """MultiheadAttention reads its projection behind the projection's back."""
    model = nn.MultiheadAttention(400, 4)
    assert list(units_of(model)) == ["root"]


def test_frozen_and_trainable_are_apart() -> None:
    """A module with both gets two units, so that LoRA's base needs no gradients."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    for block in model:
        block[0].requires_grad_(False)
    assert list(units_of(model)) == ["0", "0[2]", "1", "1[2]"]


def test_batch_norms_keep_fp32() -> None:
    """Under bf16 they are units of their own dtype, and so is what the user names."""
    names = list(units_of(models.build("convbn"), precision="bf16"))
    assert names == ["root", "blocks.0", "blocks.0[2]", "blocks.1", "blocks.1[2]"]
    precision = Precision(compute="bf16", keep_fp32=("Linear",))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1))
    assert list(units_of(mixed, precision=precision)) == ["root", "root[2]"]


def test_policy_by_name() -> None:
    """Patterns name modules; the outermost match wins; what matches nothing is an error."""
    model = models.build("gpt")
    assert list(units_of(model, units=("blocks.0", "blocks.2"))) == ["root", "blocks.0", "blocks.2"]
    assert len(units_of(model, units=("blocks.*",))) == 4
    with pytest.raises(ConfigError, match="matches no module"):
        units_of(model, units=("layers.*",))
    with pytest.raises(ConfigError, match="name its children"):
        units_of(model, units=("blocks",))


@pytest.mark.parametrize("name", models.NAMES)
def test_all_models(name: str) -> None:
    """Each parameter of each model is in one unit."""
    if name in models.HF_NAMES:
        pytest.importorskip("transformers", reason="pip install 'onecopy[test]'")
    assert units_of(models.build(name))


def test_memory_formats_are_kept() -> None:
    """A channels_last weight is dense and therefore fine."""
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    assert list(units_of(model)) == ["root"]
