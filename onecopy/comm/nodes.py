"""Which ranks are in one node, and what they hold together.

Links inside a node are fast, those across nodes slow. So what all ranks are to see goes in two
hops: each node first gets, from the others, every part once, spread over its ranks (across), and
these pass on to each other what they got (inside). A sum goes the other way.

How slices are numbered, so that every hop moves contiguous ranges: see parts.py.

Sources: MiCS (Zhang et al. 2022) section 3 (two-hop gather and reduce); ZeRO++ (Wang et al. 2023)
section 3.3, where the order of slices is the tensor slice reordering.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch.distributed as dist

from onecopy.comm.compare import gather_objects
from onecopy.comm.groups import Group, Groups, launched_node
from onecopy.comm.meshes import data_mesh, has_nodes
from onecopy.comm.parts import order_of_slices, parts_of
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from onecopy.comm.groups import ImaginedWorld
    from onecopy.comm.transport import Hop

__all__ = ["Column", "Nodes", "find_machines", "find_nodes", "make_groups"]


@dataclass(frozen=True, slots=True)
class Column:
    """One node part: who holds it in each node, and which slices it consists of.

    group: one rank of each node, in the order of the nodes.
    slices: numbers of the slices, in the same order.
    is_owner: of each rank in the group, whether one of them is its own.
    """

    group: Group
    slices: range
    is_owner: tuple[bool, ...]

    def numels(self, of_slices: Sequence[int]) -> tuple[int, ...]:
        """How many elements of the part each rank of the group owns."""
        own = iter(of_slices[self.slices.start : self.slices.stop])
        # A list first: no call for each node.
        return tuple([next(own) if is_owner else 0 for is_owner in self.is_owner])


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes as one rank sees them.

    inside: the ranks of its node.
    columns: the node parts that it handles.
    spans: for each rank of its node the slices of all parts that it handles.
    inner: the nodes over which the ranks of `inside` are spread, where that is a group of several.
    """

    inside: Group
    columns: tuple[Column, ...]
    spans: tuple[range, ...]
    inner: Nodes | None = None

    def inside_hop(self, hop: Hop) -> Hop:
        """The part of a hop over all ranks that goes between those of this node."""
        return hop._replace(group=self.inside, numels=self.numels(hop.numels))

    def numels(self, of_slices: Sequence[int]) -> tuple[int, ...]:
        """How many elements each rank of this node handles."""
        return tuple(sum(of_slices[one.start : one.stop]) for one in self.spans)

    def own_range(self, of_slices: Sequence[int]) -> tuple[int, int]:
        """First and last + 1 element of what this rank handles."""
        span = self.spans[self.inside.rank]
        first = sum(of_slices[: span.start])
        return first, first + sum(of_slices[span.start : span.stop])


def find_nodes(
    world: Group, mesh: DeviceMesh | ImaginedWorld | None, node_size: int | None
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, in order; all ranks agree, since those of one launcher know it.

    Args:
        mesh: says it where it has two data dimensions.
        node_size: so many ranks that follow one another; None for what torchrun says, which is one
            node where it did not start these processes.

    Raises:
        ShardingError: the mesh and node_size contradict each other, or the ranks of a mesh do not
            ascend.
    """
    if has_nodes(mesh):
        rows = tuple(tuple(row) for row in data_mesh(mesh).mesh.tolist())  # type: ignore[arg-type]
        if node_size not in (None, len(rows[0])):
            raise ShardingError(
                f"node_size={node_size}, but the mesh has {len(rows[0])} ranks in each node: "
                "leave node_size out"
            )
        if sorted(sum(rows, ())) != list(sum(rows, ())):
            raise ShardingError(
                f"the mesh has nodes {[list(row) for row in rows]}, whose ranks do not ascend: its "
                "first dimension is that of the nodes, its second that of the ranks in each"
            )
        return rows
    ranks = world.ranks
    if node_size is not None:
        return tuple(ranks[low : low + node_size] for low in range(0, len(ranks), node_size))
    return find_machines(world)


def find_machines(world: Group) -> tuple[tuple[int, ...], ...]:
    """The ranks that torchrun has started on each machine; one, where it has started none."""
    here = launched_node()
    if here is None or world.process_group is None:
        return (world.ranks,)
    of_rank = dict(zip(world.ranks, gather_objects(world, here), strict=True))
    return tuple(
        tuple(rank for rank in world.ranks if of_rank[rank] == node)
        for node in dict.fromkeys(of_rank.values())
    )


def make_groups(
    world: Group,
    cut: str,
    nodes: tuple[tuple[int, ...], ...] = (),
    *,
    machines: tuple[tuple[int, ...], ...] = (),
    in_hops: bool = False,
) -> Groups:
    """The groups of a model; a collective where there are nodes.

    Args:
        cut: how far optimizer states are cut: "whole", "node" or "world".
        nodes: the ranks of each; none is one node.
        machines: where a node group consists of several machines, the ranks of each: it gathers and
            sums in two hops itself.
        in_hops: transfers over the world go across nodes first, then inside.

    Raises:
        ShardingError: states cut inside nodes that differ in size.
    """
    alone = Group(None, (world.ranks[world.rank],), 0)
    if cut == "whole":
        return Groups(alone, world, world, node_ranks=nodes)
    if len(nodes) < 2:
        return Groups(world, alone, world)
    if cut == "world" and not in_hops:
        return Groups(world, alone, world, node_ranks=nodes)
    sizes = [len(one) for one in nodes]
    if cut == "node" and len(set(sizes)) > 1:
        raise ShardingError(
            f"the nodes have {sizes} ranks: optimizer states that are cut inside a node need equal "
            'nodes, as every node holds the same slices. Say stage="hpz" or "hfsdp", which cut '
            "them over all ranks, or give a node_size that divides the number of ranks"
        )
    of_nodes = _machines_in(nodes, machines) if in_hops else []
    if of_nodes:
        # In the order in which these hand on to each other what they get.
        ordered = tuple(order_of_slices(one) for one in of_nodes)
        of_node = of_nodes[_place_of(world.ranks[world.rank], nodes)]
    else:
        ordered, of_node = nodes, ()
    inside, columns_by_part = _subgroups(world, ordered)
    inner = _spread(inside, of_node) if of_node else None
    if cut == "node":
        return Groups(inside, columns_by_part[inside.rank], world, inner, nodes)
    order = order_of_slices(ordered)
    shard = Group(world.process_group, order, order.index(world.ranks[world.rank]), world.is_native)
    return Groups(shard, alone, world, _spread(world, ordered, inner), nodes)


def _machines_in(
    nodes: tuple[tuple[int, ...], ...], machines: tuple[tuple[int, ...], ...]
) -> list[tuple[tuple[int, ...], ...]]:
    """The machines that each node group consists of; none unless all consist of as many alike."""
    found = [tuple(one for one in machines if set(one) <= set(node)) for node in nodes]
    are_whole = all(sum(one, ()) == node for one, node in zip(found, nodes, strict=True))
    sizes = {tuple(len(one) for one in machines_of_node) for machines_of_node in found}
    is_several = are_whole and len(sizes) == 1 and len(found[0]) > 1
    return found if is_several else []


def _place_of(rank: int, nodes: tuple[tuple[int, ...], ...]) -> int:
    return next(place for place, one in enumerate(nodes) if rank in one)


def _spread(group: Group, nodes: tuple[tuple[int, ...], ...], inner: Nodes | None = None) -> Nodes:
    """How a group hands things on that is spread over nodes, for this rank."""
    here, sizes = _place_of(group.ranks[group.rank], nodes), [len(one) for one in nodes]
    inside, columns_by_part = _subgroups(group, nodes)
    parts = parts_of(sizes)
    firsts = list(accumulate((sum(part.is_owner) for part in parts), initial=0))
    columns = tuple(
        Column(columns_by_part[number], range(*firsts[number : number + 2]), part.is_owner)
        for number, part in enumerate(parts)
        if part.handlers[here] == inside.rank
    )
    size, num_parts = inside.size, len(parts)
    borders = [firsts[place * num_parts // size] for place in range(size + 1)]
    return Nodes(inside, columns, tuple(range(*pair) for pair in pairwise(borders)), inner)


# By the group of the world, then by nodes: models share them.
_known: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], tuple[Group, dict[int, Group]]]
] = weakref.WeakKeyDictionary()


def _subgroups(world: Group, nodes: tuple[tuple[int, ...], ...]) -> tuple[Group, dict[int, Group]]:
    """The group inside this node, and by node part those across nodes that this rank is in."""
    if world.process_group is None:
        return _make_subgroups(world, nodes)
    known = _known.setdefault(world.process_group, {})
    if nodes not in known:
        known[nodes] = _make_subgroups(world, nodes)
    return known[nodes]


def _make_subgroups(
    world: Group, nodes: tuple[tuple[int, ...], ...]
) -> tuple[Group, dict[int, Group]]:
    me, sizes = world.ranks[world.rank], [len(one) for one in nodes]
    inside = _subgroup(world, nodes[_place_of(me, nodes)])
    columns = {}
    for number, part in enumerate(parts_of(sizes)):
        ranks = [one[place] for one, place in zip(nodes, part.handlers, strict=True)]
        if me in ranks:
            columns[number] = _subgroup(world, ranks)
        elif len(set(sizes)) > 1:
            # torch names a group by its ranks and by how many this rank has made: each makes one.
            _subgroup(world, (me,))
    return inside, columns


def _subgroup(world: Group, ranks: Sequence[int]) -> Group:
    """Some ranks of the world, which all call this."""
    place, made = ranks.index(world.ranks[world.rank]), None
    if world.process_group is not None:
        made = dist.new_group(list(ranks), use_local_synchronization=True)
    return Group(made if len(ranks) > 1 else None, tuple(ranks), place, world.is_native)
