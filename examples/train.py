"""A whole script, that of docs/quick-start.md. Run: torchrun --nproc-per-node=2 train.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import onecopy


def main() -> None:
    dist.init_process_group()  # reads what torchrun has set
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(16, 64), nn.Sequential(*blocks), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    onecopy.shard(model, optimizer, stage=3)

    for epoch in range(8):
        sampler.set_epoch(epoch)  # another shuffle in each epoch
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            onecopy.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        scheduler.step()
        dist.all_reduce(total)  # the log shows the mean over ranks, not one rank's part
        if rank == 0:
            print(f"epoch {epoch}  loss {total.item() / len(loader) / world_size:.4f}")

    weights = model.state_dict()  # whole tensors; all ranks ask together
    if rank == 0:
        torch.save(weights, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
