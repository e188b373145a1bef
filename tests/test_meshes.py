"""What the dimensions of a mesh are for, and which ranks ZeRO cuts over."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from onecopy.comm.meshes import Purpose, has_nodes, model_groups, purpose_of, world_group
from tests.pool import Pool

PURPOSES: dict[str, Purpose | None] = {
    **dict.fromkeys(["dp", "fsdp", "data", "dp_replicate", "dp_shard", "data_parallel"], "data"),
    **dict.fromkeys(["sp", "cp", "seq", "context_parallel"], "sequence"),
    **dict.fromkeys(["tp", "tensor", "tp_shard", "model", "ep", "TP"], "tensor"),
    **dict.fromkeys(["pp", "pipe", "pipeline_stage", "stage"], "pipeline"),
    **dict.fromkeys(["trial", "x", "ppp", "steps"], None),
}


@pytest.mark.parametrize("name", PURPOSES)
def test_names_say_what_a_dimension_is_for(name: str) -> None:
    assert purpose_of(name) == PURPOSES[name]


def groups_of(names: tuple[str, ...], part: tuple[str, ...]) -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    chosen = mesh[part] if part else mesh
    found = [world_group(chosen), *model_groups(chosen, "tensor")]
    found += model_groups(chosen, "pipeline")
    assert has_nodes(chosen) is (names == ("replica", "shard"))
    return [list(one.ranks) for one in found]


@pytest.mark.parametrize("part", [(), ("dp",)])
def test_a_mesh_of_data_and_tensors(pool: Pool, part: tuple[str, ...]) -> None:
    runs = pool.run(4, groups_of, ("dp", "tp"), part)
    assert runs == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


def test_sequence_ranks_are_cut_over_with_the_others(pool: Pool) -> None:
    assert pool.run(4, groups_of, ("dp", "sp"), ()) == [[[0, 1, 2, 3]]] * 4
    assert pool.run(4, groups_of, ("replica", "shard"), ()) == [[[0, 1, 2, 3]]] * 4


@pytest.mark.slow
def test_all_dimensions(pool: Pool) -> None:
    runs = pool.run(8, groups_of, ("pp", "dp", "tp"), ())
    assert runs[0] == [[0, 2], [0, 1], [0, 4]]
    assert runs[7] == [[5, 7], [6, 7], [3, 7]]
    runs = pool.run(8, groups_of, ("dp", "cp", "tp"), ("dp", "cp"))
    assert runs[0] == [[0, 2, 4, 6], [0, 1]]
