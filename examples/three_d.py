"""A GPT on pipeline x data x tensor parallel ranks, its states cut over the data ranks by ZeRO.

Run: torchrun --nproc-per-node=8 three_d.py (or another multiple of 4 processes)
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import onecopy
from onecopy.training.model import GPT, GPTConfig

CONFIG = GPTConfig(layers=4, width=64, heads=4, context=32)
ROWS, MICRO_BATCHES = 8, 4  # sequences of each data rank in a step, and the parts they travel in
TEXT = b"The whole cluster keeps one copy of the model states, and every rank a part of it. " * 20


class Part(nn.Module):
    """What one pipeline stage has of the model; parameters keep the names that they have there."""

    def __init__(self, whole: GPT, stage: int, num_stages: int) -> None:
        super().__init__()
        bounds = [CONFIG.layers * i // num_stages for i in range(num_stages + 1)]
        first, end = bounds[stage], bounds[stage + 1]
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in range(first, end)})
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if self.is_first:
            self.embedding, self.positions = whole.embedding, whole.positions
        if self.is_last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:  # x: (rows, time) bytes, else (rows, time, width)
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def tensor_parallel(part: Part, mesh: DeviceMesh) -> None:
    """Heads of attention, and the inner width of the MLPs, are cut over the tensor ranks."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for block in part.blocks.values():
        plan = {
            "attention.query_key_value": columns,
            "attention.out": rows,
            "mlp.up": columns,
            "mlp.out": rows,
        }
        parallelize_module(block, mesh, plan)


def batch(step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Bytes, and those that follow them: (rows, time) each, the same on all ranks of a model."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    starts = torch.randint(len(TEXT) - CONFIG.context - 1, (ROWS,), generator=generator)
    rows = torch.stack([torch.tensor(list(TEXT[i : i + CONFIG.context + 1])) for i in starts])
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the bytes of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(mesh: DeviceMesh, device: torch.device, steps: int, stage: int = 3) -> list[float]:
    """The mean loss of each step; on the last pipeline stage, elsewhere nothing."""
    pipeline = mesh["pp"]
    torch.manual_seed(0)  # every rank builds the whole model and keeps its part of it
    part = Part(GPT(CONFIG), pipeline.get_local_rank(), pipeline.size()).to(device)
    tensor_parallel(part, mesh["tp"])
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    onecopy.shard(part, optimizer, stage=stage, mesh=mesh, max_grad_norm=1.0)
    # Of what blocks are given, each tensor rank keeps a part until backward.
    onecopy.checkpoint_activations(part, partition=mesh["tp"])

    rank, group = pipeline.get_local_rank(), pipeline.get_group()
    around = PipelineStage(part, rank, pipeline.size(), device, group=group)
    schedule = Schedule1F1B(around, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    seen = []
    for step in range(steps):
        inputs, targets = (one.to(device) for one in batch(step, mesh["dp"].get_local_rank()))
        losses: list[Tensor] = []
        # Parameters are gathered once for all micro-batches, gradients reduced once.
        given = (inputs,) if part.is_first else ()
        wanted = {"target": targets, "losses": losses} if part.is_last else {}
        with onecopy.parallel.micro_batches(part, MICRO_BATCHES):
            schedule.step(*given, **wanted)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            mean = torch.stack(losses).mean().detach()
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            seen.append(float(mean) / mesh["dp"].size())
    return seen


def main() -> None:
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    shape = 2, dist.get_world_size() // 4, 2
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    losses = train(mesh, device, steps=30)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
