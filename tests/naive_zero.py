"""ZeRO on one page: the executable specification. No overlap, no prefetch, no cleverness.

A unit is a block's parameters in one flat buffer, of which rank r owns slice r. Stage 0 keeps
everything whole, 1 cuts the optimizer states, 2 also the gradients, 3 also the parameters.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Unit:
    def __init__(self, params, stage):
        self.params, self.stage, self.world = params, stage, dist.get_world_size()
        numels = [p.numel() for p in params]
        self.starts = [sum(numels[:i]) for i in range(len(numels))]
        self.size = -(-sum(numels) // self.world)  # of a slice; the last one is padded
        self.flat = torch.zeros(self.size * self.world)
        for p, start in zip(params, self.starts, strict=True):
            view = self.flat[start : start + p.numel()].view(p.shape)
            p.data = view.copy_(p.detach())
        self.low = dist.get_rank() * self.size if stage > 0 else 0
        self.high = self.low + self.size if stage > 0 else len(self.flat)
        self.master = self.flat[self.low : self.high].clone()
        self.pieces = {}  # index of a parameter: the part of it that this rank updates
        for i, (start, numel) in enumerate(zip(self.starts, numels, strict=True)):
            first, last = max(start, self.low), min(start + numel, self.high)
            if first < last:
                self.pieces[i] = self.master[first - self.low : last - self.low]
        self.grads = None if stage > 1 else torch.zeros_like(self.flat)
        self.has_grad = torch.zeros(len(params))
        for i, p in enumerate(params):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, i=i: self.keep_grad(i, p))
        self.release()

    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        own = self.master if self.stage > 0 else self.master.chunk(self.world)[dist.get_rank()]
        dist.all_gather(list(self.flat.chunk(self.world)), own)

    def release(self):
        if self.stage > 2:
            self.flat.untyped_storage().resize_(0)

    def keep_grad(self, index, p):
        if self.grads is None:
            self.grads = torch.zeros(len(self.flat))
        self.grads[self.starts[index] :][: p.numel()] += p.grad.flatten()
        self.has_grad[index], p.grad = 1, None

    def reduce(self):
        """Give the owned pieces the mean of the ranks' gradients, added in the ranks' order."""
        mine = torch.zeros(len(self.flat)) if self.grads is None else self.grads
        theirs = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(theirs, mine)
        dist.all_reduce(self.has_grad)  # a parameter that no rank used is left alone by the step
        mean = sum(theirs[1:], theirs[0])[self.low : self.high] * (1 / self.world)
        for index, piece in self.pieces.items():
            if self.has_grad[index]:
                grad = mean[piece.storage_offset() :][: len(piece)]
                piece.grad = grad if piece.grad is None else piece.grad + grad
        self.has_grad.zero_()
        self.grads = None if self.stage > 1 else mine.zero_()


class NaiveZero:
    """Around a step: `zero.backward(loss)`, then step and zero_grad of `zero.optimizer`."""

    def __init__(self, model: nn.Module, stage: int, make_optimizer):
        blocks = next((list(m) for m in model.modules() if isinstance(m, nn.ModuleList)), [])
        inside = {id(p) for block in blocks for p in block.parameters()}
        self.units = [Unit(list(block.parameters()), stage) for block in blocks]
        self.root = Unit([p for p in model.parameters() if id(p) not in inside], stage)
        self.units.append(self.root)
        self.optimizer = make_optimizer([x for unit in self.units for x in unit.pieces.values()])
        self.in_backward = []
        model.register_forward_pre_hook(lambda *_: self.root.gather())
        for block, unit in zip(blocks, self.units[:-1], strict=True):
            block.register_forward_pre_hook(lambda *_, unit=unit: unit.gather())
            block.register_forward_hook(lambda *a, unit=unit: self.after_forward(unit, a[2]))

    def after_forward(self, unit: Unit, output: Tensor):
        unit.release()
        if output.requires_grad:
            output.register_hook(lambda _: self.before_backward(unit))

    def before_backward(self, unit: Unit | None):
        for finished in self.in_backward:  # the block after this one
            finished.reduce()
            finished.release()
        self.in_backward = [] if unit is None else [unit]
        if unit is not None:
            unit.gather()

    def backward(self, loss: Tensor):
        loss.backward()
        self.in_backward.append(self.root)
        self.before_backward(None)
