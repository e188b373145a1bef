"""save(frozen=False): what nothing trains is not saved, and stays as it is when one loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy.errors import CheckpointError
from tests import models
from tests.pool import Pool
from tests.runs import full_values

STAGES = (0, 1, 2, 3)


def make(stage: int, trained: float, *, thaw: bool = False) -> tuple[nn.Module, torch.optim.SGD]:
    """The first half of the parameters is a frozen base; the others begin with one value."""
    model = models.build("mlp")
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        if name in names[: len(names) // 2]:
            parameter.requires_grad_(thaw)
        else:
            nn.init.constant_(parameter, trained)
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    onecopy.shard(model, optimizer, stage=stage)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    models.loss(model, models.batch("mlp", number, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder: Path, stage: int) -> tuple[set[str], dict[str, Tensor]]:
    """What was trained, and all values after one more step."""
    model, optimizer = make(stage, 0.01)
    step(model, optimizer, 0)
    onecopy.save(folder, model, optimizer, frozen=False)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    step(model, optimizer, 1)
    return trained, full_values(model)


def load(folder: Path, stage: int) -> dict[str, Tensor]:
    model, optimizer = make(stage, 0.5)
    onecopy.load(folder, model)  # the model alone
    onecopy.load(folder, model, optimizer)
    step(model, optimizer, 1)
    return full_values(model)


def train_what_is_not_there(folder: Path) -> None:
    model, optimizer = make(3, 0.5, thaw=True)
    onecopy.load(folder, model, optimizer)


@pytest.mark.sampled(
    "stage, saved, loaded",
    [(stage, saved, loaded) for stage in STAGES for saved in (1, 2) for loaded in (1, 2, 3)],
    1,
    always=[(3, 2, 1)],
)
def test_the_base_stays_as_it_is(
    pool: Pool, tmp_path: Path, stage: int, saved: int, loaded: int
) -> None:
    trained, expected = pool.run(saved, save, tmp_path, stage)[0]
    stored = torch.distributed.checkpoint.FileSystemReader(
        next(tmp_path.glob("step-*"))
    ).read_metadata()
    parameters = {key for key in stored.state_dict_metadata if key in expected}
    assert parameters == trained, "only what was trained"
    for values in pool.run(loaded, load, tmp_path, stage):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-7)

    for error in pool.run(2, train_what_is_not_there, tmp_path, expect_failures=True):
        assert error.is_a("CheckpointError")
        assert "was saved with frozen=False, without" in error.message
    with pytest.raises(CheckpointError, match="only what was trained"):
        onecopy.export(tmp_path, tmp_path / "weights")
