"""Accelerate's save_state, load_state and save_model of models that onecopy has sharded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import accelerate_resume as scripts
from tests.pool import Pool, RankFailed

# Looked for, not imported: that takes seconds.
pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed"
)


def test_a_script_goes_on_as_if_it_had_never_ended(pool: Pool, tmp_path: Path) -> None:
    """On as many ranks to the last bit, random numbers included."""
    folder = str(tmp_path)
    gone_on = pool.run(2, scripts.save_and_go_on, folder, 3)
    assert not torch.equal(gone_on[0]["begin"]["random"], gone_on[1]["begin"]["random"])
    for stage in (3, 1):
        for one, expected in zip(
            pool.run(2, scripts.load_and_go_on, folder, stage), gone_on, strict=True
        ):
            _assert_same(one, expected)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])
def test_another_number_of_ranks(pool: Pool, tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    """All but the random states is as it was."""
    expected = pool.run(saved_by, scripts.save_and_go_on, str(tmp_path), 3)[0]["begin"]
    for one in pool.run(loaded_by, scripts.load_and_go_on, str(tmp_path), 3):
        _assert_same({**one["begin"], "random": None}, {**expected, "random": None})


def test_a_resumed_script_equals_accelerates_own(pool: Pool, tmp_path: Path) -> None:
    ours = pool.run(2, scripts.save_and_go_on, str(tmp_path / "ours"), 3)
    theirs = pool.run(2, scripts.save_and_go_on, str(tmp_path / "theirs"), None)
    for one, other in zip(ours, theirs, strict=True):
        _assert_same(one, other)


def test_automatic_names_limits_and_a_load_right_after(pool: Pool, tmp_path: Path) -> None:
    for one in pool.run(2, scripts.save_often, str(tmp_path)):
        _assert_same(one["loaded"], one["saved"])
        assert one["names"] == ["checkpoint_1", "checkpoint_2"]
        assert one["steps"] == ["latest", "step-00000004"]


def test_saved_models_are_plain_files(pool: Pool, tmp_path: Path) -> None:
    expected, loaded = pool.run(2, scripts.save_models, str(tmp_path))[0]
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    pickled = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) > 1
    for found in (whole, pickled, loaded):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_several_models_and_one_that_is_not_sharded(pool: Pool, tmp_path: Path) -> None:
    theirs = pool.run(2, scripts.two_models, str(tmp_path / "theirs"), None)
    for one, other in zip(
        pool.run(2, scripts.two_models, str(tmp_path / "ours"), 3), theirs, strict=True
    ):
        _assert_same(one, other)
        _assert_same(one["loaded"], one["expected"])


def test_a_checkpoint_without_onecopy_is_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"onecopy\.load_pretrained") as caught:
        pool.run(2, scripts.load_of_ddp, str(tmp_path))
    assert all(one.is_a("CheckpointError") for one in caught.value.failures)


def _assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
