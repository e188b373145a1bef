"""Tied embeddings of a pipeline: the first stage embeds with the values that the last one reads."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy import handle
from onecopy.comm.compare import gather_objects
from onecopy.comm.groups import pair_group
from onecopy.core.tied import Tie
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["tie"]


def tie(module: nn.Module, name: str) -> None:
    """Let a parameter of the first and one of the last pipeline stage stay equal.

    From then on both get the sum of both gradients, once in a step, when gradients are clipped
    (`onecopy.clip_grad_norm_`, `max_grad_norm`) or the optimizer steps. Norms count the parameter
    once. All ranks of the first and of the last stage call it, after `shard`, with equal values and
    equal settings of their optimizers; other stages do not.

    Each rank sends its part of the gradient to its counterpart. Where the stages cut the parameter
    in other places, the whole gradient is gathered before: a unit of its own on both (the `units`
    of `shard`) avoids that.

    Args:
        module: the sharded module of the first or of the last stage.
        name: of the parameter in it.

    Raises:
        ShardingError: the module is not sharded with the mesh of the job, or has no such parameter
            in training; the two differ in shape or values.
    """
    engine: Engine = handle.of(module).engine
    unit, index = _find(engine, name)
    pipeline = engine.collectives.groups.pipeline
    if not pipeline or pipeline[0].rank not in (0, pipeline[0].size - 1):
        where = f"pipeline stage {pipeline[0].rank}" if pipeline else "no pipeline"
        raise ShardingError(
            f"tie({name!r}): this rank is in {where}. Shard with the mesh of the job, mesh="
            'init_device_mesh(..., mesh_dim_names=("pp", "dp")), and call tie on the ranks of its '
            "first and of its last stage"
        )
    group = pair_group(pipeline[0])
    first, last = gather_objects(group, _described(unit, index))
    if first[:-1] != last[:-1]:
        raise ShardingError(
            f"tie({name!r}): the first pipeline stage has {first[0]} with values {first[1]}, the "
            f"last one {last[0]} with values {last[1]}. Build both stages from the same seed, or "
            "copy the values before shard"
        )
    alike = engine.share(float(first[-1] == last[-1]), f"tie {name}")
    engine.owned.ties.append(Tie(engine, unit, index, group, is_alike=all(alike)))


def _find(engine: Engine, name: str) -> tuple[Unit, int]:
    found = [(unit, unit.names.index(name)) for unit in engine.units if name in unit.names]
    if not found or found[0][0].gradients is None:
        names = [one for unit in engine.units if unit.gradients is not None for one in unit.names]
        raise ShardingError(
            f"tie({name!r}): no parameter in training of this {type(engine.model).__name__} has "
            f"that name; there are {', '.join(names[:8])}, ..."
        )
    if engine.config.step_in_backward:
        raise ShardingError(
            f"tie({name!r}) with step_in_backward: the backward would step before the gradients of "
            "both stages are summed. Shard without it"
        )
    return found[0]


def _described(unit: Unit, index: int) -> tuple[str, str, tuple[int, int]]:
    """Shape, a digest of all values, and which of them this rank owns."""
    start, numel, offset = 0, 0, 0
    if index in unit.slice.pieces:
        place = unit.slice.place_of(index)
        start, numel, offset = place.start, place.numel, place.offset
    with torch.no_grad():
        whole = unit.gather_pieces(index, unit.slice.master_part(start, start + numel))
        values = unit.slice.in_memory_order(index, whole).cpu().view(torch.uint8).numpy()
    shape = f"shape {tuple(whole.shape)}, {whole.dtype}, strides {whole.stride()}"
    return shape, hashlib.sha256(values.tobytes()).hexdigest()[:8], (offset, numel)
