"""One-process training that N ranks of the engine must equal, bit for bit in fp32.

The ranks' micro-batches are run one after the other on one model. Each rank's gradients are added
up in fp32 in the order of the ranks and multiplied by 1/N once, as the owner of a slice does. It
knows nothing of sharding: the optimizer is a plain one over whole parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tests.models import Batch
from tests.models import loss as model_loss

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Grads = list[Tensor | None]  # one entry per parameter, in the order of `parameters()`


@dataclass
class Result:
    """What a run leaves."""

    losses: list[list[list[float]]]  # [step][rank][backward]
    parameters: dict[str, Tensor]  # the masters; a tied parameter once, by its first name
    buffers: list[dict[str, Tensor]]  # of each rank
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # of each step, reduced
    norms: list[float] = field(default_factory=list)  # before clipping, where it was asked for
    scales: list[float] = field(default_factory=list)  # of the loss, after each step


def train(  # noqa: PLR0913 - the options of a run, each with a default
    build: Callable[[], nn.Module],
    batches: Sequence[Sequence[Sequence[Batch]]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    no_sync: bool = False,
    precision: str = "fp32",
    max_grad_norm: float | None = None,
    loss_scale: float = 1.0,
    keep: Sequence[str] = (),
    keep_casts: bool = True,
    gradient_dtype: torch.dtype = torch.float32,
    loss: Callable[[nn.Module, Batch], Tensor] = model_loss,
) -> Result:
    """Train on `batches[step][rank][backward]`, see `models.batches`; return losses and parameters.

    `make_optimizer(model)` is given the master model, in the dtype that `build` makes. In
    `precision` bf16 or fp16 a copy in that dtype computes, and floating inputs are cast for it.
    With `no_sync` a rank adds up its own micro-batches' gradients before the ranks' are added;
    else every backward's are added over the ranks first; after each such sum gradients are rounded
    to `gradient_dtype`. Losses are multiplied by `loss_scale`; a
    step whose gradients overflow is not made, and halves it. Modules whose class or own name is in
    `keep` compute in fp32; with `keep_casts` their inputs and outputs are cast for them.
    """
    master = build()
    dtype = COMPUTE_DTYPE[precision]
    compute = master if dtype is torch.float32 else _lowered(master, dtype, keep, keep_casts)
    optimizer = make_optimizer(master)
    buffers = [_copy_buffers(compute) for _ in max(batches, key=len)]
    result = Result([], {}, buffers)
    for step_batches in batches:
        if compute is not master:
            _copy_values(master, compute)
        scaled = _scaled(loss, loss_scale)
        losses, rounds = _backward_all(compute, step_batches, buffers, scaled, no_sync, dtype)
        reduced: Grads = [None for _ in compute.parameters()]
        for new in rounds:
            sums = [_add(old, one) for old, one in zip(reduced, new, strict=True)]
            reduced = [None if one is None else one.to(gradient_dtype).float() for one in sums]
        result.losses.append(losses)
        for parameter, grad in zip(master.parameters(), reduced, strict=True):
            parameter.grad = None if grad is None else grad.to(parameter.dtype) / loss_scale
        result.grads.append(
            {
                name: None if p.grad is None else p.grad.clone()
                for name, p in master.named_parameters()
            }
        )
        if not all(p.grad.isfinite().all() for p in master.parameters() if p.grad is not None):
            loss_scale /= 2
            optimizer.zero_grad()
        elif max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(master.parameters(), max_grad_norm)
            result.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        result.scales.append(loss_scale)
    result.parameters = {name: p.detach().clone() for name, p in master.named_parameters()}
    return result


def _lowered(master: nn.Module, dtype: torch.dtype, keep: Sequence[str], casts: bool) -> nn.Module:
    """A copy that computes in `dtype`, but for the modules to keep and the buffers."""
    model = copy.deepcopy(master)
    for name, module in model.named_modules():
        if {type(module).__name__, name.rpartition(".")[2]}.isdisjoint(keep):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
        elif casts:
            module.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
            module.register_forward_hook(lambda _, args, output: output.to(dtype))
    return model


def _scaled(
    loss: Callable[[nn.Module, Batch], Tensor], scale: float
) -> Callable[[nn.Module, Batch], tuple[float, Tensor]]:
    """The loss to report, and the one to run backward from."""

    def both(model: nn.Module, batch: Batch) -> tuple[float, Tensor]:
        value = loss(model, batch)
        return value.item(), value * scale

    return both


def set_gradients(model: nn.Module, step_batches: Sequence[Sequence[Batch]]) -> None:
    """Give a plain model the reduced gradients of one step, `step_batches[rank][backward]`."""

    def fresh() -> nn.Module:
        one = copy.deepcopy(model)
        one.zero_grad()
        return one

    once = train(fresh, [step_batches], lambda one: torch.optim.SGD(one.parameters(), lr=0.0))
    for name, parameter in model.named_parameters():
        parameter.grad = once.grads[0][name]


def _backward_all(
    model: nn.Module,
    step_batches: Sequence[Sequence[Batch]],
    buffers: list[dict[str, Tensor]],
    loss: Callable[[nn.Module, Batch], tuple[float, Tensor]],
    no_sync: bool,
    dtype: torch.dtype,
) -> tuple[list[list[float]], list[Grads]]:
    """One step's losses by rank and backward, and its reduced gradients, one for each reduce."""
    ranks = range(len(step_batches))
    backwards = range(len(step_batches[0]))
    losses: list[list[float]] = [[] for _ in ranks]
    reduced = []
    # With no_sync one round holds all of a rank's backwards, else each backward is a round.
    for rounds in [backwards] if no_sync else [[i] for i in backwards]:
        per_rank = []
        for rank in ranks:
            _set_buffers(model, buffers[rank])
            local: Grads = [None for _ in model.parameters()]
            for micro in rounds:
                value, root = loss(model, _cast(step_batches[rank][micro], dtype))
                root.backward()
                losses[rank].append(value)
                # In fp32; what travels has the dtype of the model again.
                grads = [None if g is None else g.float() for g in _take_grads(model)]
                local = [_add(old, new) for old, new in zip(local, grads, strict=True)]
            buffers[rank] = _copy_buffers(model)
            per_rank.append(
                [
                    None if grad is None else grad.to(parameter.dtype)
                    for grad, parameter in zip(local, model.parameters(), strict=True)
                ]
            )
        reduced.append(_reduce(per_rank))
    return losses, reduced


def _take_grads(model: nn.Module) -> Grads:
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads


def _reduce(per_rank: list[Grads]) -> Grads:
    """The mean over ranks: summed in their order in fp32. Some have none: zeros. All: none."""
    reduced: Grads = []
    for grads in zip(*per_rank, strict=True):
        total: Tensor | None = None
        for grad in grads:
            total = _add(total, None if grad is None else grad.float())
        reduced.append(None if total is None else total * (1.0 / len(per_rank)))
    return reduced


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _copy_values(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for old, new in zip(target.parameters(), source.parameters(), strict=True):
            old.copy_(new)


def _copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _set_buffers(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Every rank has its own running statistics, as in DDP."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in batch.tensors.items()
    }
    return replace(batch, tensors=tensors)
