"""What the ranks of tests/test_lightning.py run: trainers of Lightning, with and without onecopy.

Without (`stage` is None) the strategy is DDP on several ranks. lightning is imported in the
functions: it takes seconds.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import onecopy

# What Lightning says of small runs like these.
SAID = (
    "The '.*_dataloader' does not have many workers",
    "The number of training batches .* is smaller than the logging interval",
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed from",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "It is recommended to use `self.log",
    "Be aware that when using `ckpt_path`, callbacks",
    "You defined a `validation_step` but have no `val_dataloader`",
    "You're resuming from a checkpoint that ended before the epoch ended",
)


@contextmanager
def launched() -> Iterator[None]:
    """As torchrun sets it: Lightning looks for the environment of its ranks."""
    size, rank = str(dist.get_world_size()), str(dist.get_rank())
    names = {
        "WORLD_SIZE": size,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    os.environ.update(names)
    try:
        with warnings.catch_warnings():
            for message in SAID:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for name in names:
            os.environ.pop(name, None)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a trainer; the stage None leaves onecopy out."""

    stage: int | None
    optimizer: str = "adamw"
    epochs: int = 2
    batch_size: int = 4
    dropout: float = 0.0
    loss_scale: float | None = None  # of a GradScaler, on which Lightning insists on GPUs only
    is_built_late: bool = False  # in configure_model
    module: str = "Plain"
    trainer: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def samples(batch_size: int = 4) -> DataLoader[Any]:
    """Batches of a rank: every other sample. One process takes those of two ranks in turn."""
    x = torch.sin(torch.arange(32 * 4.0).view(32, 4))
    if dist.get_world_size() == 1:
        x = x.view(4, 4, 2, 4).transpose(1, 2).reshape(32, 4)
    dataset = TensorDataset(x, x.cumsum(1)[:, :3])
    return DataLoader(
        dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, shuffle=False)
    )


def trainer_of(run: Run, **settings: Any) -> Any:
    """The trainer, quiet."""
    from lightning.pytorch import Trainer

    strategy: Any = "ddp_find_unused_parameters_true" if dist.get_world_size() > 1 else "auto"
    if run.stage is not None:
        from onecopy.integrations.lightning import OneCopyStrategy

        strategy = OneCopyStrategy(stage=run.stage, **run.settings)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        **quiet,
        **({} if run.loss_scale is None else {"plugins": [_scaled(run.loss_scale)]}),
        **run.trainer,
        **settings,
    }
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=run.epochs,
        **given,
    )


def _scaled(loss_scale: float) -> Any:
    """fp16, of which the first step overflows."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale, backoff_factor=2.0**-120)
    return MixedPrecision("16-mixed", "cpu", scaler)


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def fit(run: Run) -> dict[str, Any]:
    """Train and validate; what the module has seen, and its values in the end."""
    with launched():
        module, trainer = module_of(run), trainer_of(run)
        trainer.fit(module, samples(run.batch_size), samples())
        return {
            "losses": module.losses,
            "norms": module.norms,
            "metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
            "rates": [one["lr"] for one in trainer.optimizers[0].param_groups],
            "values": values(module),
        }


def module_of(run: Run) -> Any:
    """The module that a run asks for."""
    from tests import lightning_modules

    return getattr(lightning_modules, run.module)(run)


# By what is wrong, a pattern of the message.
REFUSED = {
    "setting": r"unknown setting 'stagee'. Did you mean 'stage'",
    "average": r"StochasticWeightAveraging keeps a second, whole model",
    "plugin": r"the plugin AsyncCheckpointIO would write checkpoints as one file",
    "remote": r"cannot be written to s3://bucket/a\.ckpt.*storage that all ranks share",
    "file": r"a\.ckpt is a file, written by another strategy",
}


def refusals() -> list[str]:
    """What is said of each."""
    with launched():
        return [_refusal(case) for case in REFUSED]


def _refusal(case: str) -> str:
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    settings: dict[str, Any] = {"stagee": 2} if case == "setting" else {}
    given: dict[str, Any] = {}
    if case == "average":
        given["callbacks"] = [StochasticWeightAveraging(0.1)]
    if case == "plugin":
        given["plugins"] = [AsyncCheckpointIO()]
    run = Run(stage=3, epochs=1, settings=settings)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("a.ckpt").touch()
        try:
            trainer = trainer_of(run, **given)
            trainer.fit(module_of(run), samples(), samples())
            trainer.save_checkpoint("s3://bucket/a.ckpt" if case == "remote" else "a.ckpt")
        except onecopy.OneCopyError as error:
            return str(error)
    return "nothing"
