"""LightningModules for the runs of tests/lightning_runs.py; to be imported on ranks only."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.lightning_runs import Run
from tests.loops import net
from tests.runs import OPTIMIZERS


class Plain(LightningModule):
    """As in Lightning's documentation, with what is usual."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run_ = run
        self.save_hyperparameters({"optimizer": run.optimizer})
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.net: nn.Module | None = None
        if not run.is_built_late:
            self.build()

    def build(self) -> None:
        self.net = nn.Sequential(net(), nn.Dropout(self.run_.dropout))

    def configure_model(self) -> None:
        if self.net is None:
            self.build()

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.run_.optimizer](self)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Adversarial(Plain):
    """Two optimizers by hand; each is to leave the other's gradients alone."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def build(self) -> None:
        self.net = net(0)
        self.critic = net(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        with first.toggle_model():
            loss = nn.functional.mse_loss(self.net(x), self.critic(x) + y)
            self.manual_backward(loss)
            self.clip_gradients(first, gradient_clip_val=0.3)
            first.step()
            first.zero_grad()
        self.losses.append(loss.item())
        self.toggle_optimizer(second)
        loss = nn.functional.mse_loss(self.critic(x), self.net(x).sin())
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.run_.optimizer]
        return [make(self.net), make(self.critic)]
