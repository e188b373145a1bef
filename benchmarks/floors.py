"""What no way to train on several ranks can go below: compute, the messages that must be sent, the
update.

A floor's messages are plain isend and irecv of whole units between buffers that were made before,
with nothing around them: nothing is copied in or out, nobody agrees on anything, and what arrives
is not used, but for the sum, which is a part of reducing. They are hidden behind compute as well as
its order allows, one unit ahead:

    stage 0   each unit's gradients are reduced and gathered again while backward goes on
    1 and 2   gradients are reduced in backward; after the update all values are gathered, and the
              next forward waits for each unit's when it comes to it
    stage 3   each unit is gathered for forward and for backward, while the one before computes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import Contender, Setting, adamw
from benchmarks.model import GPT

__all__ = ["floor"]

GATHER, REDUCE = 0, 1


class Messages:
    """Gathers and reduces of units, each cut into one equal slice per rank.

    units: elements of each.
    """

    def __init__(self, units: Sequence[int], dtype: torch.dtype) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        slices = [-(-numel // self._size) for numel in units]
        self._flat = [torch.zeros(self._size, numel, dtype=dtype) for numel in slices]
        self._arriving = [torch.zeros(self._size, numel, dtype=dtype) for numel in slices]
        self._under_way: dict[tuple[int, int], list[dist.Work | None]] = {}

    def start(self, kind: int, unit: int) -> None:
        """Send what the others are to have, and receive what they send."""
        flat, tag = self._flat[unit], 2 * unit + kind
        works = []
        for peer in range(self._size):
            if peer == self._rank:
                continue
            if kind == GATHER:
                sent, received = flat[self._rank], flat[peer]
            else:
                sent, received = flat[peer], self._arriving[unit][peer]
            works.append(dist.irecv(received, peer, tag=tag))
            works.append(dist.isend(sent, peer, tag=tag))
        self._under_way[kind, unit] = works

    def finish(self, kind: int, unit: int) -> bool:
        """Wait for it, if it is under way; whether it was."""
        works = self._under_way.pop((kind, unit), None)
        for work in works or ():
            assert work is not None, "this rank is a member of the group"
            work.wait()
        if works and kind == REDUCE:
            for peer in range(self._size):
                if peer != self._rank:
                    self._flat[unit][self._rank].add_(self._arriving[unit][peer])
        return works is not None

    def finish_all(self) -> None:
        """Wait for whatever is under way."""
        for kind, unit in list(self._under_way):
            self.finish(kind, unit)


class Overlap:
    """The messages of a stage at their moments. Unit 0 is the root, the others are blocks."""

    def __init__(self, model: GPT, stage: int, dtype: torch.dtype) -> None:
        blocks = [_numel(block) for block in model.blocks]
        self._messages = Messages([_numel(model) - sum(blocks), *blocks], dtype)
        self._stage, self._last = stage, len(blocks)
        model.register_forward_pre_hook(self._forward_begins)
        for number, block in enumerate(model.blocks, start=1):
            block.register_forward_pre_hook(self._at_block(number, self._block_begins))
            block.register_forward_hook(self._at_block(number, self._block_ends))

    def backward(self, loss: Tensor) -> None:
        """Backward, and what its messages still take after it."""
        messages = self._messages
        if self._stage == 3:
            messages.start(GATHER, 0)
            messages.start(GATHER, self._last)
            messages.finish(GATHER, 0)
        loss.backward()
        self._reduce(0)
        for unit in (1, 0):
            self._reduced(unit)
        messages.finish_all()

    def updated(self) -> None:
        """After the optimizer's step."""
        if self._stage == 1:
            for unit in range(self._last + 1):
                self._messages.start(GATHER, unit)

    def settle(self) -> None:
        """Nothing is under way any more."""
        self._messages.finish_all()

    def _forward_begins(self, *_: Any) -> None:
        if self._stage == 3:
            self._messages.start(GATHER, 0)
            self._messages.start(GATHER, 1)
        self._messages.finish(GATHER, 0)

    def _at_block(self, number: int, act: Callable[[int, Any, Any], None]) -> Any:
        return lambda _, inputs, output=None: act(number, inputs, output)

    def _block_begins(self, number: int, inputs: Any, _: Any) -> None:
        self._messages.finish(GATHER, number)
        if self._stage == 3 and number < self._last:
            self._messages.start(GATHER, number + 1)
        inputs[0].register_hook(lambda _: self._gradients_are_there(number))

    def _block_ends(self, number: int, _: Any, output: Tensor) -> None:
        if self._stage == 3:
            output.register_hook(lambda _: self._backward_begins(number))

    def _backward_begins(self, number: int) -> None:
        self._messages.finish(GATHER, number)
        if number > 1:
            self._messages.start(GATHER, number - 1)

    def _gradients_are_there(self, number: int) -> None:
        self._reduce(number)
        if number < self._last:
            self._reduced(number + 1)

    def _reduce(self, unit: int) -> None:
        self._messages.start(REDUCE, unit)

    def _reduced(self, unit: int) -> None:
        if self._messages.finish(REDUCE, unit) and self._stage == 0:
            self._messages.start(GATHER, unit)


def floor(name: str, model: GPT, setting: Setting) -> Contender:
    """In bf16 the model is bf16 for compute, and fp32 masters are updated and copied back."""
    masters = list(model.parameters())
    if setting.dtype == "bf16":
        masters = [nn.Parameter(master.detach().clone()) for master in masters]
        model.to(torch.bfloat16)
    if name == "compute":
        return Contender(
            name=name,
            model=model,
            optimizer=adamw(masters),
            forward=model,
            step=lambda: None,
            zero_grad=model.zero_grad,
        )
    stage = int(name.removeprefix("floor-"))
    overlap = Overlap(model, stage, next(model.parameters()).dtype)
    update, optimizer = _update(model, masters, setting.nproc if stage else 1)

    def step() -> None:
        update()
        overlap.updated()

    return Contender(
        name=name,
        model=model,
        optimizer=optimizer,
        forward=model,
        backward=overlap.backward,
        step=step,
        zero_grad=model.zero_grad,
        settle=overlap.settle,
    )


def _update(
    model: nn.Module, masters: Sequence[nn.Parameter], divisor: int
) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """The optimizer's step on 1/divisor of every parameter."""
    parameters = list(model.parameters())
    cuts = [-(-master.numel() // divisor) for master in masters]
    pieces = [
        nn.Parameter(master.detach().view(-1)[:cut])
        for master, cut in zip(masters, cuts, strict=True)
    ]
    optimizer = adamw(pieces)
    low = parameters[0].dtype != masters[0].dtype

    def update() -> None:
        for piece, parameter, cut in zip(pieces, parameters, cuts, strict=True):
            assert parameter.grad is not None, "every parameter of the model gets a gradient"
            piece.grad = parameter.grad.view(-1)[:cut].to(piece.dtype)
        optimizer.step()
        optimizer.zero_grad()
        if low:
            for piece, parameter, cut in zip(pieces, parameters, cuts, strict=True):
                parameter.data.view(-1)[:cut].copy_(piece.data)

    return update, optimizer


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
