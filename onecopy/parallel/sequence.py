"""Sequence parallelism: each rank has a part of the tokens of every sequence (Ulysses).

All layers but attention work on tokens one by one. For attention, ranks exchange: before it each
has some tokens of all heads, then all tokens of some heads, and after it the tokens again. The
weights are those of data parallelism, so ZeRO cuts them over all of these ranks.

Source: DeepSpeed-Ulysses (Jacobs et al. 2023), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from onecopy import handle
from onecopy.comm.compare import gather_numbers
from onecopy.comm.exchange import check_same, exchange, group_of
from onecopy.comm.groups import Group
from onecopy.core.compiling import not_compiled
from onecopy.errors import MismatchError, ShardingError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from onecopy.events import Events

__all__ = ["attention", "position_ids", "split_sequence"]

Batch = TypeVar("Batch")

SEQUENCE, HEADS = 2, 1
# Whole numbers of so many bytes.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@not_compiled
def attention(  # noqa: PLR0913 - those of torch's function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: DeviceMesh | dist.ProcessGroup,
    model: nn.Module | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention over sequences of which each rank has a part.

    Equal to it on whole sequences, bit for bit, for output and gradients alike: each head is
    computed by one rank as one process would. Where key and value heads had to be repeated,
    because there are fewer than ranks, their gradients are sums in another order.

    Args:
        query: (batch, heads, own part of the sequence, head dimension). All ranks have parts of
            the same length, in the order of the group.
        key, value: the same, with their own length, which all ranks share.
        attn_mask: of the whole sequences, (..., whole query length, whole key length), with one
            head or all; the same on all ranks.
        dropout_p: as in torch, drawn from this rank's random state for the heads that it computes.
        is_causal, scale, enable_gqa: as in torch; with enable_gqa key and value may have fewer
            heads, also fewer than there are ranks.
        group: the ranks of one sequence, as a mesh of one dimension or a process group.
        model: a sharded model whose events shall count the bytes ("exchange").

    Returns:
        (batch, heads, own part of the sequence, head dimension of the values)

    Raises:
        ShardingError: the number of heads, or the mask, does not fit.
        MismatchError: ranks have parts of different lengths.

    Source: DeepSpeed-Ulysses (Jacobs et al. 2023), section 3.
    """
    ranks = group_of(group)
    _check_shapes(query, key, value, enable_gqa)
    _check_heads(query, ranks)
    events: Events | None = None if model is None else handle.of(model).events
    if query.shape[1] != key.shape[1]:
        key, value = _repeated(key, ranks.size), _repeated(value, ranks.size)
    remedy = (
        "Give each rank of the group an equal part of a sequence that is padded to a multiple of "
        f"{ranks.size} (onecopy.parallel.split_sequence)"
    )
    check_same(ranks, (query, key, value), "queries, keys or values of attention", remedy)
    q, k, v = exchange((query, key, value), ranks, cut=HEADS, join=SEQUENCE, events=events)
    mask = None if attn_mask is None else _own_heads(attn_mask, q, k, ranks)
    mixed = scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    (own,) = exchange((mixed,), ranks, cut=SEQUENCE, join=HEADS, events=events)
    return own


def split_sequence(
    batch: Batch, group: DeviceMesh | dist.ProcessGroup, *, dim: int = 1, check: bool = True
) -> Batch:
    """This rank's part of whole sequences.

    All ranks of the group must pass the same batch. That is checked, by a sum of its values: a data
    loader that gives each rank other samples is the common mistake.

    Args:
        batch: a tensor, or a dict, list or tuple of tensors (None and numbers stay as they are).
        group: the ranks of one sequence, as a mesh of one dimension or a process group.
        dim: the dimension of the tokens.
        check: False leaves out the comparison, which is one small collective (on accelerators also
            a wait for it).

    Returns:
        the same structure; parts follow one another in the order of the group, and are contiguous.

    Raises:
        ShardingError: the number of tokens is no multiple of the number of ranks.
        MismatchError: ranks have passed different batches.
    """
    ranks = group_of(group)
    if check:
        _check_same_batch(batch, ranks)
    part: Batch = _part(batch, ranks, dim)
    return part


def position_ids(part: Tensor, group: DeviceMesh | dist.ProcessGroup, *, dim: int = 1) -> Tensor:
    """The positions, in the whole sequence, of the tokens that this rank has.

    Args:
        part: what split_sequence has returned, (batch, own part of the sequence, ...).
        group: the ranks of one sequence, as a mesh of one dimension or a process group.
        dim: the dimension of the tokens.

    Returns:
        (1, own part of the sequence), int64.

    Raises:
        ShardingError: the mesh has no dimension for sequences, or this rank is not in the group.
    """
    ranks, length = group_of(group), part.shape[dim]
    first = ranks.rank * length
    return torch.arange(first, first + length, device=part.device).unsqueeze(0)


def _part(batch: Any, ranks: Group, dim: int) -> Any:
    if isinstance(batch, Mapping):
        return type(batch)({key: _part(one, ranks, dim) for key, one in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        parts = [_part(one, ranks, dim) for one in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if not isinstance(batch, Tensor):
        return batch
    length = batch.shape[dim]
    if length % ranks.size:
        raise ShardingError(
            f"rank {ranks.ranks[ranks.rank]}: a batch of shape {tuple(batch.shape)} cannot be cut "
            f"along dimension {dim} into {ranks.size} equal parts: pad its {length} tokens to "
            f"{math.ceil(length / ranks.size) * ranks.size}, with targets of -100, which losses "
            "ignore, and weigh the ranks' losses (onecopy.loss_weight)"
        )
    own = length // ranks.size
    return batch.narrow(dim, ranks.rank * own, own).contiguous()


def _check_same_batch(batch: Any, ranks: Group) -> None:
    tensors = [one for one in _tensors(batch) if one.device.type != "meta"]
    if ranks.process_group is None or not tensors:
        return
    device = tensors[0].device
    sums = [_checksum(one).to(device) for one in tensors]
    shapes = torch.tensor([hash(tuple(one.shape)) for one in tensors], device=device)
    # Two numbers, whatever a rank has brought.
    own = torch.stack([shapes.sum(), torch.stack(sums).sum()])
    found = gather_numbers(ranks, own)
    different = [r for r, one in zip(ranks.ranks, found, strict=True) if one != found[0]]
    if different:
        raise MismatchError(
            f"ranks {different} have brought another batch to split_sequence than rank "
            f"{ranks.ranks[0]}: the ranks {list(ranks.ranks)} hold parts of the same sequences, so "
            "each must pass the same whole batch. Make the sampler of the data loader from the "
            "data parallel dimension alone (num_replicas and rank of the other mesh dimension)"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """One number that other values, or the same in another order, hardly have."""
    flat = tensor.detach().flatten()
    bits = flat.view(BITS[min(flat.element_size(), 8)]).to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    return (bits * (place * 2654435761 % 4294967291)).sum()


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [one for item in batch for one in _tensors(item)]
    return []


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shapes = [tuple(one.shape) for one in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes):
        raise ShardingError(
            f"attention takes (batch, heads, sequence, head dimension), and got {shapes}"
        )
    heads, of_key, of_value = (shape[HEADS] for shape in shapes)
    if of_key != of_value or (heads != of_key and not enable_gqa) or heads % of_key:
        raise ShardingError(
            f"queries have {heads} heads, keys {of_key} and values {of_value}: keys and values "
            "need as many as queries, or, with enable_gqa=True, a number that divides it"
        )


def _check_heads(query: Tensor, ranks: Group) -> None:
    heads = query.shape[HEADS]
    if heads % ranks.size:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ShardingError(
            f"rank {ranks.ranks[ranks.rank]}: {heads} heads cannot be dealt to {ranks.size} ranks "
            f"evenly: each computes whole heads. Make groups of one of these sizes: {divisors}"
        )


def _repeated(heads: Tensor, size: int) -> Tensor:
    """Each head as often as it takes for every rank to have whole ones.

    No rank receives one that its queries do not need.
    """
    times = size // math.gcd(size, heads.shape[HEADS])
    return heads if times == 1 else heads.repeat_interleave(times, HEADS)


def _own_heads(mask: Tensor, query: Tensor, key: Tensor, ranks: Group) -> Tensor:
    """What of a mask concerns the heads that this rank computes."""
    own = query.shape[HEADS]
    whole = (query.shape[SEQUENCE], key.shape[SEQUENCE])
    fits = all(size in (1, full) for size, full in zip(mask.shape[-2:], whole, strict=True))
    per_head = mask.shape[-3] if mask.ndim > 2 else 1
    if mask.ndim < 2 or not fits or per_head not in (1, own * ranks.size):
        raise ShardingError(
            f"attn_mask has shape {tuple(mask.shape)}: it must be that of the whole sequences, "
            f"(..., {whole[0]}, {whole[1]}), with 1 or {own * ranks.size} heads, on every rank"
        )
    if per_head == 1:
        return mask
    return mask.narrow(-3, ranks.rank * own, own)
