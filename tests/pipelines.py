"""A small GPT cut into pipeline stages, trained by torch's schedules and by one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from tests.models import GPT, TOKENS

VOCABULARY, WIDTH, DEPTH = 31, 16, 4
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
    "dualpipe": ScheduleDualPipeV,
}
V_SHAPED = ("zero_bubble_v", "dualpipe")


class Part(nn.Module):
    """The blocks of one pipeline stage; the embeddings with the first, the head with the last."""

    def __init__(self, gpt: GPT, number: int, num_stages: int) -> None:
        super().__init__()
        each = DEPTH // num_stages
        self.first, self.last = number * each, (number + 1) * each
        if number == 0:
            self.tokens, self.positions = gpt.tokens, gpt.positions
        self.blocks = nn.ModuleDict(
            {str(index): gpt.blocks[index] for index in range(self.first, self.last)}
        )
        if number == num_stages - 1:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first == 0:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last == DEPTH else x


def build() -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(VOCABULARY, WIDTH, DEPTH)


def batch(step: int, rank: int, micro: int) -> Tensor:
    """(2 * micro, TOKENS) what one data-parallel rank sees in one step of the schedule."""
    generator = torch.Generator().manual_seed(1_009 * step + rank)
    return torch.randint(VOCABULARY, (2 * micro, TOKENS), generator=generator)


def loss_fn(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass
class Pipe:
    """One rank's part of a pipeline."""

    mesh: DeviceMesh
    stages: list[PipelineStage]
    schedule: Any

    def step(self, number: int, micro: int) -> list[float]:
        """Run the schedule; the losses of the micro-batches, where the last stage is here."""
        tokens = batch(number, self.data_rank, micro)
        is_first = any(stage.is_first for stage in self.stages)
        is_last = any(stage.is_last for stage in self.stages)
        losses: list[Tensor] = []
        self.schedule.step(
            *((tokens,) if is_first else ()),
            target=tokens if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        return [loss.item() for loss in losses]

    @property
    def data_rank(self) -> int:
        return self.mesh.get_local_rank("dp")


def make(name: str, pp: int, dp: int, gpt: GPT | None = None) -> tuple[DeviceMesh, list[Part]]:
    """The mesh, and this rank's parts of the model."""
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    gpt = gpt or build()
    return mesh, [Part(gpt, number, num_stages) for number, num_stages in _places(name, mesh)]


def connect(name: str, mesh: DeviceMesh, parts: list[Part], micro: int, **settings: Any) -> Pipe:
    """Stages around the parts, and their schedule."""
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(part, number, num_stages, torch.device("cpu"), group=group)
        for part, (number, num_stages) in zip(parts, _places(name, mesh), strict=True)
    ]
    kind = SCHEDULES[name]
    given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return Pipe(mesh, stages, kind(given, micro, loss_fn=loss_fn, **settings))


def _places(name: str, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Numbers of the pipeline stages of this rank, and how many there are."""
    pp, mine = mesh.size(0), mesh.get_local_rank("pp")
    if name in V_SHAPED:
        return [(mine, 2 * pp), (2 * pp - 1 - mine, 2 * pp)]
    if issubclass(SCHEDULES[name], PipelineScheduleMulti):
        return [(mine, 2 * pp), (mine + pp, 2 * pp)]
    return [(mine, pp)]
