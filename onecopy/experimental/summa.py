"""Linear layers on a grid of q x q ranks: weights and activations are cut in both dimensions.

Rank (i, j) has the tokens of row i and the features of column j of every activation, and the block
of each weight for the inputs of row i and the outputs of column j. No rank has more than 1/q^2 of
anything, where tensor parallelism over as many ranks replicates activations. A product is made in q
steps: in step k the ranks of column k give their activations along the rows, and those of row k
their weights along the columns (SUMMA). Both gradients are made likewise, with sums in the place of
one of the broadcasts.

Sent per rank and element: with a = tokens x inputs / q^2 and b = inputs x outputs / q^2,
(q-1)(a + b) in forward and twice that in backward.

Source: Optimus (Xu et al. 2021), section 3; SUMMA (van de Geijn and Watts 1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from onecopy import handle
from onecopy.comm.exchange import check_same
from onecopy.comm.grid import Grid, grid_of, spread, sum_at, sum_over
from onecopy.core.compiling import not_compiled
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from onecopy.comm.groups import Group
    from onecopy.comm.transport import Finish
    from onecopy.events import Events

__all__ = ["SummaLinear", "count_in", "cut"]


class SummaLinear(nn.Module):
    """nn.Linear on a grid: takes and gives this rank's block of the activations.

    Parameters are DTensors with the shapes and names of nn.Linear's, so that state dicts and
    checkpoints have whole tensors, and `onecopy.shard` cuts each rank's block over a further data
    dimension. In fp32 outputs and gradients equal those of nn.Linear but for rounding (sums
    over inputs, and over tokens, are made in q parts); with q = 1, to the last bit.

    Values are drawn for each block, as nn.Linear draws its own: all ranks must have the same random
    state. Use `from_linear` to start from given ones.

    Args:
        mesh: the grid, a mesh of two dimensions of size q, which divides both numbers of features.

    Raises:
        ShardingError: the mesh is no grid, or q does not divide the features.

    Source: Optimus (Xu et al. 2021), section 3; SUMMA (van de Geijn and Watts 1997).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_grid(in_features, out_features, mesh)
        q, factory = self.grid.size, {"device": device, "dtype": dtype}
        weight = torch.empty(out_features // q, in_features // q, **factory)  # type: ignore[arg-type]
        column = torch.empty(out_features // q, **factory) if bias else None  # type: ignore[arg-type]
        if not weight.is_meta:
            self._draw(weight, column)
        self._set_parameters(weight, column, mesh)

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: DeviceMesh) -> SummaLinear:
        """The blocks of a layer that all ranks have, with its values and whether they train.

        Raises:
            ShardingError: the mesh is no grid, or q does not divide the features.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set_grid(linear.in_features, linear.out_features, mesh)
        grid, q = layer.grid, layer.grid.size
        rows = linear.weight.detach().chunk(q, 0)[grid.row.rank]
        bias = None if linear.bias is None else linear.bias.detach().chunk(q)[grid.row.rank]
        weight = rows.chunk(q, 1)[grid.column.rank]
        layer._set_parameters(weight.clone(), None if bias is None else bias.clone(), mesh)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(linear.get_parameter(name).requires_grad)
        return layer.train(linear.training)

    @not_compiled
    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs / q) to (..., outputs / q), of the same tokens.

        Raises:
            ShardingError: x has another number of features.
            MismatchError: ranks of a row have blocks of different shapes.
        """
        if x.shape[-1] * self.grid.size != self.in_features:
            raise ShardingError(
                f"a SummaLinear of {self.in_features} inputs on a grid of {self.grid.size} x "
                f"{self.grid.size} takes blocks of {self.in_features // self.grid.size} features, "
                f"and got {tuple(x.shape)}: cut whole activations with onecopy.experimental.summa"
                ".cut"
            )
        remedy = "They hold the same tokens, and parts of their features"
        check_same(self.grid.row, [x], "activations of the ranks of a row", remedy)
        weight, bias = (_local(one) for one in (self.weight, self.bias))
        assert weight is not None, "a bias alone may be missing"
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if self.grid.size == 1:
            return F.linear(x, weight, bias)
        rows = x.flatten(0, -2).contiguous()
        y: Tensor = _Product.apply(self.grid, self.events, rows, weight)  # type: ignore[no-untyped-call]
        if bias is not None:
            y = y + _Shared.apply(self.grid, self.events, bias)  # type: ignore[no-untyped-call]
        outputs: Tensor = y.unflatten(0, x.shape[:-1])
        return outputs

    def extra_repr(self) -> str:
        """As nn.Linear's, and the grid."""
        q, bias = self.grid.size, self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, grid={q} x {q}"

    def _set_grid(self, in_features: int, out_features: int, mesh: DeviceMesh) -> None:
        grid = grid_of(mesh)
        for what, count in (("inputs", in_features), ("outputs", out_features)):
            if count % grid.size:
                raise ShardingError(
                    f"{count} {what} cannot be cut into {grid.size} equal parts, for a grid of "
                    f"{grid.size} x {grid.size}: choose a multiple of {grid.size}"
                )
        self.in_features, self.out_features = in_features, out_features
        self.grid = grid
        self.events: Events | None = None

    def _set_parameters(self, weight: Tensor, bias: Tensor | None, mesh: DeviceMesh) -> None:
        """Inputs are cut over the rows of the grid, outputs over its columns."""
        self.weight = nn.Parameter(_placed(weight, mesh, (Shard(1), Shard(0))))
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(_placed(bias, mesh, (Replicate(), Shard(0))))

    def _draw(self, weight: Tensor, bias: Tensor | None) -> None:
        seed = int(torch.randint(2**62, ()))
        row, column, q = self.grid.column.rank, self.grid.row.rank, self.grid.size
        bound = self.in_features**-0.5
        for number, tensor in ((row * q + column, weight), (q * q + column, bias)):
            if tensor is not None:
                generator = torch.Generator(tensor.device).manual_seed(seed + number)
                tensor.uniform_(-bound, bound, generator=generator)

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no sharded model."""
        return {**vars(self), "events": None}


def cut(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's block of activations that all ranks have.

    Args:
        whole: (tokens, ..., features); q divides the first and the last.
        mesh: the grid, of q x q ranks.

    Returns:
        (tokens / q, ..., features / q), contiguous.

    Raises:
        ShardingError: the mesh is no grid, or q does not divide them.
    """
    grid = grid_of(mesh)
    if whole.ndim < 2 or whole.shape[0] % grid.size or whole.shape[-1] % grid.size:
        raise ShardingError(
            f"activations of shape {tuple(whole.shape)} cannot be cut along the first and the last "
            f"dimension into {grid.size} parts each"
        )
    rows = whole.chunk(grid.size, 0)[grid.column.rank]
    return rows.chunk(grid.size, -1)[grid.row.rank].contiguous()


def count_in(model: nn.Module) -> None:
    """Let the events of a sharded model count what its SummaLinears send ("exchange").

    Raises:
        ShardingError: the model is not sharded.
    """
    events: Events = handle.of(model).events
    for module in model.modules():
        if isinstance(module, SummaLinear):
            module.events = events


class _Product(torch.autograd.Function):
    """x weight^T from blocks: (tokens, inputs / q) and (outputs / q, inputs / q)."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, events: Events | None, x: Tensor, weight: Tensor) -> Tensor:
        ctx.grid, ctx.events = grid, events
        ctx.save_for_backward(x, weight)
        y: Tensor | None = None
        wanted = [_along(grid.row, x, events), _along(grid.column, weight, events)]
        for _, (a, b) in _steps(grid, wanted):
            y = F.linear(a, b) if y is None else y.addmm_(a, b.t())
        assert y is not None, "a grid has a step at least"
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        grid, events = ctx.grid, ctx.events
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[2:]
        gradient = gradient.contiguous()
        wanted = [_along(grid.column, weight, events)] if of_x else []
        wanted += [_along(grid.row, x, events)] if of_weight else []
        found: list[Tensor | None] = [None, None]
        pending: list[tuple[int, bool, Finish]] = []
        for k, blocks in _steps(grid, wanted):
            left = list(blocks)
            sums: list[tuple[int, bool, Finish]] = []
            if of_x:
                part = gradient @ left.pop(0)
                sums.append((0, grid.row.rank == k, sum_at(part, grid.row, k, events)))
            if of_weight:
                part = gradient.t() @ left.pop(0)
                sums.append((1, grid.column.rank == k, sum_at(part, grid.column, k, events)))
            _collect(pending, found)
            pending = sums
        _collect(pending, found)
        return None, None, *found


def _along(group: Group, own: Tensor, events: Events | None) -> Callable[[int], Finish]:
    return lambda k: spread(own, group, k, events)


def _steps(
    grid: Grid, starts: Sequence[Callable[[int], Finish]]
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The blocks of each step; those of the next one travel meanwhile."""
    under_way = [start(0) for start in starts]
    for k in range(grid.size):
        blocks = tuple(finish() for finish in under_way)
        under_way = [start(k + 1) for start in starts] if k + 1 < grid.size else []
        yield k, blocks


def _collect(pending: list[tuple[int, bool, Finish]], found: list[Tensor | None]) -> None:
    for which, is_own, finish in pending:
        total = finish()
        if is_own:
            found[which] = total


class _Shared(torch.autograd.Function):
    """A bias that the ranks of a column have in common: its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, events: Events | None, bias: Tensor) -> Tensor:
        ctx.grid, ctx.events = grid, events
        return bias.view_as(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, sum_over(gradient.clone(), ctx.grid.column, ctx.events)


def _local(parameter: Any) -> Tensor | None:
    local: Tensor | None = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local


def _placed(block: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    return DTensor.from_local(block, mesh, placements, run_check=False)
