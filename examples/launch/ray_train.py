"""A training loop on the workers of Ray Train, which goes on after a failure by itself.

python ray_train.py [WORKERS]
"""

import sys
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn

import onecopy
from onecopy.checkpoint.folder import latest

STEPS, SAVE_EVERY = 24, 8


def train(settings: dict[str, Any]) -> dict[str, float]:
    """What each worker runs. Ray Train has made the process group, of NCCL or Gloo."""
    device = ray.train.torch.get_device()
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()

    torch.manual_seed(0)
    inputs = torch.randn(192, 16)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(16, 64), nn.Sequential(*blocks), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    onecopy.shard(model, optimizer, stage=3)

    done = 0
    if latest(settings["run"]):  # after a failure, or started again; also on other workers
        done = onecopy.load(settings["run"], model, optimizer).step
    for step in range(done + 1, STEPS + 1):
        x, y = inputs[rank::world_size].to(device), targets[rank::world_size].to(device)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        onecopy.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            onecopy.save(settings["run"], model, optimizer, step=step, keep=2)
            # Numbers alone: the checkpoint is where all workers have written it.
            ray.train.report({"step": step, "loss": loss.item()})
    return {"step": step, "loss": loss.item()}


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    run = Path("run").resolve()  # on storage that all workers share
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"run": str(run)},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="ray", storage_path=str(run), failure_config=FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print("step {step}  loss {loss:.4f}".format(**result.return_value))


if __name__ == "__main__":
    main()
