"""A run that goes on by itself after a failure, also on another number of processes.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node=2 --max-restarts=3 \\
    --rdzv-backend=c10d --rdzv-endpoint=localhost:0 resume.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import onecopy
from onecopy.checkpoint.folder import latest

RUN = "run"  # on storage that all processes share
STEPS, SAVE_EVERY = 96, 8
GLOBAL_BATCH = 96  # of all processes together: then losses do not depend on their number


def main() -> None:
    dist.init_process_group()  # reads what torchrun has set
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    inputs = torch.randn(1152, 16)
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))

    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(16, 64), nn.Sequential(*blocks), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    onecopy.shard(model, optimizer, stage=3)

    step, seen = 0, 0  # steps done, and samples seen by all processes together
    if latest(RUN):
        loaded = onecopy.load(RUN, model, optimizer, fallback=True)
        scheduler.load_state_dict(loaded.extra["scheduler"])
        step, seen = loaded.step, loaded.extra["seen"]
        if rank == 0:
            print(f"resumed from step {step} ({loaded.path}, saved by {loaded.world_size} ranks)")

    while step < STEPS:
        epoch, first = divmod(seen, len(dataset))
        # What is left of this epoch's shuffle, dealt out to the processes.
        shuffle = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))
        mine = shuffle[first:][rank::world_size].tolist()
        for x, y in DataLoader(Subset(dataset, mine), batch_size=GLOBAL_BATCH // world_size):
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            onecopy.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step, seen = step + 1, seen + GLOBAL_BATCH
            if step % SAVE_EVERY == 0:
                total = loss.detach().clone()
                dist.all_reduce(total)  # the log shows the mean over ranks
                if rank == 0:
                    print(f"step {step}  loss {total.item() / world_size:.4f}")
                extra = {"scheduler": scheduler.state_dict(), "seen": seen}
                onecopy.save(RUN, model, optimizer, step=step, extra=extra, keep=3)
            if step == STEPS:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
