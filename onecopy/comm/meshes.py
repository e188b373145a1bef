"""What the dimensions of a device mesh are for, by their names.

    data, sequence      hold the same parameters: ZeRO cuts states over all of these ranks together
    tensor              hold other parts of a parameter (DTensors), or replicas of a plain one
    pipeline            hold other parameters

A mesh of one dimension is that of the data; one of two without names says which ranks are in one
node.
"""

from __future__ import annotations

import re
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm.groups import Group, ImaginedWorld, as_group, join_or_begin
from onecopy.errors import ShardingError

__all__ = [
    "Purpose",
    "data_mesh",
    "groups_along",
    "has_nodes",
    "model_groups",
    "purpose_of",
    "world_group",
]

Purpose = Literal["data", "sequence", "tensor", "pipeline"]

# In this order: "tp_shard" is no data dimension. Abbreviations stand alone between underscores, or
# at the end of a word (fsdp); longer words may be anywhere.
_WORDS: dict[Purpose, str] = {
    "pipeline": r"pipe|stage|\bpp\b",
    "tensor": r"tensor|model|expert|\b(tp|mp|ep)\b",
    "sequence": r"seq|context|\b(sp|cp)\b",
    "data": r"data|replica|shard|node|dp\b",
}
KNOWN = "dp, data, replica, shard, node; sp, cp, seq, context; tp, tensor, model; pp, pipe, stage"


def purpose_of(name: str) -> Purpose | None:
    """What a dimension of this name is for; None where the name does not say."""
    words = re.sub(r"[^a-z]+", " ", name.lower())
    return next((one for one, pattern in _WORDS.items() if re.search(pattern, words)), None)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The data dimensions of a mesh, sequence dimensions among them.

    Raises:
        ShardingError: it has none, or the name of a dimension does not say what it is for.
    """
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim <= 2:
        return mesh
    if names is None:
        raise ShardingError(
            f"the mesh has {mesh.ndim} dimensions without names: name them, as in "
            'init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))'
        )
    purposes = [purpose_of(name) for name in names]
    if mesh.ndim == 1 and purposes[0] is None:
        return mesh
    unknown = [name for name, one in zip(names, purposes, strict=True) if one is None]
    if unknown:
        raise ShardingError(
            f"the mesh has dimensions {names}, and {unknown[0]!r} does not say what it is for. "
            f"Words that do: {KNOWN}. Or pass the data dimension alone, for example mesh"
            f'["{names[0]}"]'
        )
    data = tuple(
        name for name, one in zip(names, purposes, strict=True) if one in ("data", "sequence")
    )
    if not data:
        raise ShardingError(
            f"the mesh has dimensions {names}, none of them for data, and shard cuts states over "
            'the data-parallel ranks: pass the whole mesh, or its data dimension, mesh["dp"]. A '
            "job without data parallelism has one of size 1"
        )
    return mesh if len(data) == mesh.ndim else mesh[data]


def has_nodes(mesh: DeviceMesh | ImaginedWorld | None) -> bool:
    """Whether a mesh has two data dimensions: the nodes, and the ranks in each."""
    if mesh is None or isinstance(mesh, ImaginedWorld):
        return False
    data = data_mesh(mesh)
    names = data.mesh_dim_names or ()
    return data.ndim == 2 and all(purpose_of(name) == "data" for name in names)


def model_groups(mesh: DeviceMesh | ImaginedWorld | None, purpose: Purpose) -> tuple[Group, ...]:
    """The groups of this rank along the dimensions of that purpose, of the mesh of the whole job.

    Args:
        mesh: that mesh, or a part of it.
    """
    if mesh is None or isinstance(mesh, ImaginedWorld):
        return ()
    # Private, and asked by torch's own FSDP in the same way.
    root = mesh._get_root_mesh()
    names = root.mesh_dim_names or ()
    return tuple(
        group
        for name, group in zip(names, groups_along(root, with_single=True), strict=False)
        if purpose_of(name) == purpose and group.size > 1
    )


def groups_along(mesh: DeviceMesh, *, with_single: bool = False) -> tuple[Group, ...]:
    """The groups of this rank along each dimension of a mesh.

    Args:
        with_single: also where it is alone.
    """
    found = []
    for dimension, size in enumerate(mesh.shape):
        if size > 1:
            group = as_group(mesh.get_group(dimension))
            assert group is not None, "a rank is in the groups of its mesh"
            found.append(group)
        elif with_single:
            found.append(Group(None, (dist.get_rank(),), 0))
    return tuple(found)


def world_group(mesh: DeviceMesh | ImaginedWorld | None = None) -> Group:
    """The data-parallel ranks: those of `mesh`, else all.

    Without a process group, one is made: from the environment that torchrun sets, else a world of
    one rank, so that a script also runs without a launcher.

    Raises:
        ShardingError: see `data_mesh`; or this rank is not in the mesh.
    """
    if isinstance(mesh, ImaginedWorld):
        return Group(None, tuple(range(mesh.size)), mesh.rank, mesh.native)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        hint = 'init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))'
        if isinstance(mesh, dist.ProcessGroup):
            hint = "DeviceMesh.from_group(group, device_type)"
        raise ShardingError(f"mesh is a {type(mesh).__name__}: give a DeviceMesh, as in {hint}")
    if not dist.is_initialized():
        join_or_begin()
    process_group = dist.group.WORLD if mesh is None else _group_of(data_mesh(mesh))
    group = as_group(process_group)
    if group is None:
        ranks = dist.get_process_group_ranks(process_group)
        raise ShardingError(
            f"rank {dist.get_rank()} is not in the mesh, whose ranks are {ranks}: call shard only "
            "on the ranks that hold this model"
        )
    return group


def _group_of(data: DeviceMesh) -> dist.ProcessGroup | None:
    """One group of all ranks of a mesh."""
    if data.ndim == 1:
        return data.get_group()
    is_all = data.size() == dist.get_world_size()
    return dist.group.WORLD if is_all else data._flatten().get_group()
