"""Parameters that are DTensors: tensor parallelism, with ZeRO over the data ranks beside it.

`parallelize_module` leaves a model whose parameters are cut over the tensor-parallel ranks. Such a
parameter stays the user's; the tensor inside it, which is this rank's part, is what lies in the
flat buffer, is cut over the data ranks, gathered, released and updated. So everything physical is
about `local_of(parameter)`, and only names, hooks and guards are about the parameter itself.

What ranks of a tensor group have of a parameter is a part (Shard) or the same (Replicate, and every
plain parameter of such a model). Norms add up parts and count replicas once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from onecopy.comm.compare import gather_objects
from onecopy.comm.meshes import groups_along
from onecopy.errors import MismatchError, ShardingError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor import DTensor

    from onecopy.comm.groups import Group

__all__ = [
    "box_of",
    "check_dtensor",
    "check_replicas",
    "dimensions_cut",
    "is_cut_over",
    "is_dtensor",
    "like",
    "local_of",
    "local_values",
    "tensor_groups",
]

# Sums of replicas, in their norm: more than what other orders of sums leave.
SAME_WITHIN = 0.01


def is_dtensor(tensor: object) -> bool:
    """Whether it is one, without importing what they need."""
    # Of its class: to take it from a released parameter would gather (see guard.py).
    return hasattr(type(tensor), "_local_tensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside a DTensor, or the tensor itself; released or not."""
    if not is_dtensor(tensor):
        return tensor
    kind: Any = type(tensor)
    local: torch.Tensor = getattr(kind, "_plain", kind)._local_tensor.__get__(tensor)
    return local


def box_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where this rank's part of a DTensor lies in it: the first element and how many, by dimension.

    None where the rank has all of the tensor. Placements must be Shard and Replicate.
    """
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    return None if tuple(sizes) == shape else (tuple(offsets), tuple(sizes))


def like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank has `local`: a DTensor where the parameter is one."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.size(),
        stride=parameter.stride(),
    )


def local_values(parameter: Any, value: Any) -> Any:
    """This rank's part of what is given for a parameter, in the way in which that is cut.

    A collective of the tensor group where a DTensor is cut otherwise, or is partial sums still, as
    gradients of replicas are (of norms between sequence-parallel layers).
    """
    if not is_dtensor(value) or not is_dtensor(parameter):
        return value
    given: DTensor = value
    if given.placements != parameter.placements:
        given = given.redistribute(placements=parameter.placements)
    local = local_of(given)
    # Redistribution may still be under way.
    return local.wait() if hasattr(local, "wait") else local


def check_dtensor(name: str, parameter: Any) -> None:
    """Refuse what has no one tensor inside, or not all of what this rank is to have.

    Raises:
        ShardingError: names the parameter and its placements.
    """
    for placement in parameter.placements:
        # Others, _StridedShard among them, are made by other data-parallel wrappers.
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise ShardingError(
                f"parameter {name} is a DTensor placed as {parameter.placements}, and shard takes "
                "Shard and Replicate: parallelize the model over its tensor dimension alone "
                "(parallelize_module), and leave the data dimension to shard"
            )
    if parameter.is_meta:
        raise ShardingError(
            f"parameter {name} is a DTensor without values (on the meta device): after "
            "parallelize_module call model.to_empty(device=...) and initialise it, then shard"
        )


def tensor_groups(
    models: Iterable[nn.Module], data: Group, known: tuple[Group, ...]
) -> tuple[Group, ...]:
    """The groups that DTensor parameters are cut over, those in `known` first.

    Args:
        data: the data-parallel ranks.

    Raises:
        ShardingError: a parameter is cut over ranks of the data group.
    """
    found = list(known)
    parameters: list[Any] = [one for model in models for one in model.parameters()]
    meshes = {id(one.device_mesh): one.device_mesh for one in parameters if is_dtensor(one)}
    for mesh in meshes.values():
        for group in groups_along(mesh):
            both = sorted(set(group.ranks) & set(data.ranks))
            if len(both) > 1:
                raise ShardingError(
                    f"the model has DTensor parameters over ranks {list(group.ranks)}, and shard "
                    f"was to cut over ranks {list(data.ranks)}: {both} are in both. Pass the mesh "
                    'of the job, as in shard(model, optimizer, mesh=init_device_mesh("cuda", '
                    '(2, 4), mesh_dim_names=("dp", "tp"))), and parallelize over mesh["tp"]'
                )
            if all(group.ranks != one.ranks for one in found):
                found.append(group)
    return tuple(found)


def check_replicas(models: Iterable[nn.Module], data: Group, groups: Iterable[Group]) -> None:
    """Refuse what ranks of a tensor group should have alike and do not. A collective.

    torch broadcasts what it cuts, but no plain parameter: seeds that differ leave models that each
    rank trains in its own way. Last bits may differ, as after other orders of sums.

    Raises:
        MismatchError: names the first such parameter, and the ranks.
    """
    parameters = [pair for model in models for pair in model.named_parameters()]
    for group in groups:
        if not any(is_cut_over(parameter, group) for _, parameter in parameters):
            # Whole models side by side.
            continue
        mine = {
            name: _sum_and_norm(local_of(parameter))
            for name, parameter in parameters
            if not parameter.is_meta and not is_cut_over(parameter, group)
        }
        everyone = gather_objects(group, mine)
        unequal = [name for name in mine if not _are_alike([one[name] for one in everyone])]
        # The other data ranks take the values of the first.
        unequal = gather_objects(data, unequal)[0]
        if unequal:
            raise MismatchError(
                f"{len(unequal)} parameters differ between the ranks of a tensor group, for one "
                f"{unequal[0]} on ranks {list(group.ranks)}, and should be replicas: none of these "
                "ranks has a part of them. Set the same seed on them before the model is built. If "
                "they are to be parts, let parallelize_module cut them, or make them DTensors"
            )


def _sum_and_norm(values: torch.Tensor) -> tuple[float, float]:
    values = values.detach().double()
    return float(values.sum()), float(torch.linalg.vector_norm(values))


def _are_alike(found: list[tuple[float, float]]) -> bool:
    """Values that were drawn apart differ in their sum by about their norm."""
    (total, norm), *others = found
    return not any(abs(one - total) > SAME_WITHIN * max(norm, other) for one, other in others)


def dimensions_cut(parameter: Any) -> tuple[int, ...]:
    """The dimensions of its mesh that a parameter is cut over; none where it is a replica."""
    placements = parameter.placements if is_dtensor(parameter) else ()
    return tuple(number for number, one in enumerate(placements) if one.is_shard())


def is_cut_over(parameter: Any, group: Group) -> bool:
    """Whether ranks of a tensor group have different parts of a parameter."""
    if not is_dtensor(parameter):
        return False
    along = groups_along(parameter.device_mesh, with_single=True)
    return any(
        one.ranks == group.ranks and placement.is_shard()
        for one, placement in zip(along, parameter.placements, strict=True)
    )
