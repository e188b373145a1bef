"""Ways to save and load: what a user of each kind of training would call, and the disk itself.

Floors, which keep no model: one process writes as many bytes as the states have, and reads them.
    disk            plain sequential writes, then fsync
    disk-early      the same, and each block is sent to the disk and out of the page cache at
                    once (posix_fadvise), which keeps the disk busy while the next is copied

Peers: ddp (torch.save of both state dicts on rank 0, then fsync; every rank loads the file) and
fsdp2 (torch.distributed.checkpoint with get_state_dict and set_state_dict, files flushed as is its
default). Ours: onecopy-1 to onecopy-3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import onecopy
from benchmarks.contenders import Contender, Setting, build
from benchmarks.model import GPT, SIZES

__all__ = ["FLOORS", "WAYS", "Way", "make"]

FLOORS = ("disk", "disk-early")
WAYS = (*FLOORS, "ddp", "fsdp2", "onecopy-1", "onecopy-2", "onecopy-3")
BLOCK_BYTES = 8 << 20
COPIES = 3  # AdamW: the parameter and its two moments, all fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to save and load; each takes a folder of its own that exists and is empty at first.

    save, load: all ranks call them; what was saved is on the disk when save returns.
    start_save: returns when training may go on, with what waits until all is on the disk.
    contender: trains the model that is saved; the floors have none.
    """

    save: Callable[[Path], object]
    load: Callable[[Path], object]
    start_save: Callable[[Path], Callable[[], object]] | None = None
    contender: Contender | None = None


def make(name: str, setting: Setting) -> Way:
    """A way, in the default process group."""
    if name in FLOORS:
        return _disk(setting, early=name == "disk-early")
    contender = build(name, setting)
    if name == "ddp":
        return _torch_save(contender)
    if name == "fsdp2":
        return _dcp(contender)
    return _onecopy(contender)


def _disk(setting: Setting, early: bool) -> Way:
    with torch.device("meta"):
        model = GPT(SIZES[setting.size], setting.context)
    num_bytes = COPIES * sum(one.numel() * one.itemsize for one in model.parameters())
    # Random, so that no layer below can store it as less.
    source = memoryview(torch.randint(256, (BLOCK_BYTES,), dtype=torch.uint8).numpy())
    target = memoryview(torch.ones(BLOCK_BYTES, dtype=torch.uint8).numpy())

    def blocks() -> Iterator[tuple[int, int]]:
        for offset in range(0, num_bytes, BLOCK_BYTES):
            yield offset, min(BLOCK_BYTES, num_bytes - offset)

    def save(folder: Path) -> None:
        if dist.get_rank() != 0:
            return
        with (folder / "states").open("xb", buffering=0) as file:
            for offset, length in blocks():
                file.write(source[:length])
                if early:
                    os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
            os.fsync(file.fileno())

    def load(folder: Path) -> None:
        if dist.get_rank() != 0:
            return
        with (folder / "states").open("rb", buffering=0) as file:
            for _, length in blocks():
                assert file.readinto(target[:length]) == length, "the file is as it was written"

    return Way(save=save, load=load)


def _torch_save(contender: Contender) -> Way:
    model, optimizer = contender.model, contender.optimizer

    def save(folder: Path) -> None:
        if dist.get_rank() == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with (folder / "states.pt").open("xb") as file:
                torch.save(states, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(folder: Path) -> None:
        states = torch.load(folder / "states.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])

    return Way(save=save, load=load, contender=contender)


def _dcp(contender: Contender) -> Way:
    model, optimizer = contender.model, contender.optimizer
    # What is saved in the background needs a process group that training does not use meanwhile.
    background = dist.new_group(backend="gloo")

    def states() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def start_save(folder: Path) -> Callable[[], object]:
        future = dcp.async_save(states(), checkpoint_id=folder, process_group=background)
        return future.result

    def load(folder: Path) -> None:
        found = states()
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )

    return Way(
        save=lambda folder: dcp.save(states(), checkpoint_id=folder),
        load=load,
        start_save=start_save,
        contender=contender,
    )


def _onecopy(contender: Contender) -> Way:
    model, optimizer = contender.model, contender.optimizer

    def start_save(folder: Path) -> Callable[[], object]:
        return onecopy.async_save(folder, model, optimizer, step=1).wait

    return Way(
        save=lambda folder: onecopy.save(folder, model, optimizer, step=1),
        load=lambda folder: onecopy.load(folder, model, optimizer),
        start_save=start_save,
        contender=contender,
    )
