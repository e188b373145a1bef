"""Transports whose values travel as codes of few bits, over one that sends bytes: ZeRO++.

`gather` codes the own slice, exchanges payloads (see coding.py) and decodes every part, the own one
too, so that all ranks hold the same bits. `reduce` codes each part for its owner, who adds up what
it decodes, in fp32 at least and in rank order, with its own part as it is. What must stay exact
travels beside the codes. Whatever the number of ranks, a value is coded once a hop.

Sources: ZeRO++ (Wang et al. 2023) sections 3.1 (qwZ) and 3.3 (qgZ).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from onecopy.comm.codec import CODED_DTYPES, decode, encode
from onecopy.comm.coding import SCALE_BYTES, Coding
from onecopy.comm.feedback import Feedback
from onecopy.comm.groups import Group, Groups
from onecopy.comm.neighbours import Neighbours
from onecopy.comm.transport import Finish, Hop, Mean, Messages, Native, Nothing, Parts, Transport
from onecopy.policies import Quantize

__all__ = ["Quantized", "Transports", "transports_of"]

# While so many values travel, the next are coded: enough that a message costs little.
WINDOW_NUMEL = 1 << 19

Ranges = Sequence[tuple[int, int]]


class Transports(NamedTuple):
    """How each kind of hop is made.

    plain: everything that has no other. weights: values of parameters on the hop that goes far,
    across nodes or, where there is one node, the only one. inside, across: gradients.
    """

    plain: Transport
    weights: Transport
    inside: Transport
    across: Transport


def transports_of(
    groups: Groups,
    *,
    native: bool,
    quantize: Quantize | None = None,
    neighbours: Neighbours | None = None,
) -> Transports:
    """The transports of one model's collectives.

    Args:
        native: on the backend's own collectives.
        neighbours: the ranks with which messages go by reading.
    """
    plain: Transport = Native() if native else Messages(neighbours)
    if groups.world.is_imagined:
        plain = Nothing(native=native)
    if quantize is None:
        return Transports(plain, plain, plain, plain)

    def transport(code: str | None, *, error_feedback: bool = False) -> Transport:
        if code is None:
            return plain
        return Quantized(plain, Coding(code, quantize.block), error_feedback=error_feedback)

    inside, across = (
        transport(code, error_feedback=quantize.error_feedback)
        for code in quantize.gradients or (None, None)
    )
    is_one_node = groups.num_nodes == 1
    goes_far = is_one_node or any(groups.is_away(rank) for rank in groups.shard.ranks)
    weights = transport(quantize.weights if goes_far else None)
    return Transports(plain, weights, inside, inside if is_one_node else across)


class Quantized(Transport):
    """See the module's docstring; values of dtypes that have no codes travel as they are."""

    def __init__(self, plain: Transport, coding: Coding, *, error_feedback: bool = False) -> None:
        self._plain = plain
        self._coding = coding
        self._feedback = Feedback(coding.block) if error_feedback else None

    def num_bytes(self, hop: Hop, dtype: torch.dtype) -> list[int]:
        if dtype not in CODED_DTYPES:
            return self._plain.num_bytes(hop, dtype)
        if not hop.exact:
            return [self._coding.num_bytes(numel) for numel in hop.lengths]
        exact = (_numel(hop.exact_of(place)) * dtype.itemsize for place in range(hop.group.size))
        return [
            self._coding.num_bytes(numel, exact_bytes)
            for numel, exact_bytes in zip(hop.lengths, exact, strict=True)
        ]

    def gather(self, flat: torch.Tensor, own: torch.Tensor, hop: Hop) -> Finish:
        if flat.dtype not in CODED_DTYPES:
            return self._plain.gather(flat, own, hop)
        sizes, rank = self.num_bytes(hop, flat.dtype), hop.group.rank
        payloads = Parts(_bytes(sum(sizes), own.device), sizes)
        own_payload = payloads.each[rank]
        self._encode(own, hop.exact_of(rank), own_payload)
        # Payloads are whole bytes: nothing in them is exact in particular.
        finish = self._plain.gather(payloads.buffer, own_payload, Hop(hop.group, sizes, hop.tag))

        def wait() -> torch.Tensor:
            finish()
            parts = flat.split_with_sizes(list(hop.numels))
            for place, (part, payload) in enumerate(zip(parts, payloads.each, strict=True)):
                decode(payload, self._coding, part)
                exact = hop.exact_of(place)
                _put(part, exact, self._exact_in(payload, part, exact))
            return flat

        return wait

    def reduce(self, buffer: torch.Tensor, mean: Mean, hop: Hop) -> Finish:
        if buffer.dtype not in CODED_DTYPES:
            return self._plain.reduce(buffer, mean, hop)
        group, rank = hop.group, hop.group.rank
        sizes = self.num_bytes(hop, buffer.dtype)
        incoming = [0 if place == rank else sizes[rank] for place in range(group.size)]
        received = Parts(_bytes(sum(incoming), buffer.device), incoming)
        sizes[rank] = 0
        sent = Parts(_bytes(sum(sizes), buffer.device), sizes)
        parts = hop.split(buffer)
        for place, (part, payload) in enumerate(zip(parts, sent.each, strict=True)):
            if place != rank:
                self._encode(
                    part, hop.exact_of(place), payload, (hop.tag, hop.begin, group.ranks, place)
                )
        finish = self._plain.exchange(received, sent, hop)

        def wait() -> torch.Tensor:
            finish()
            return self._sum(parts[rank], received.each, mean, hop)

        return wait

    def over(self, plain: Transport) -> Quantized:
        """The same codes, sent by another transport."""
        return Quantized(plain, self._coding)

    @property
    def window_numel(self) -> int:
        """How much of a slice is coded and sent at a time, where further hops follow."""
        return -(-WINDOW_NUMEL // self._coding.block) * self._coding.block

    def exchange(self, received: Parts, sent: Parts, hop: Hop) -> Finish:
        return self._plain.exchange(received, sent, hop)

    def interrupt(self, group: Group, tag: int) -> None:
        self._plain.interrupt(group, tag)

    def as_sent(self, values: torch.Tensor) -> torch.Tensor:
        """What other ranks will have of values that this one gathers: coded and decoded."""
        if values.dtype not in CODED_DTYPES:
            return values
        payload = _bytes(self._coding.num_bytes(values.numel()), values.device)
        encode(values, self._coding, payload)
        decoded = torch.empty_like(values)
        decode(payload, self._coding, decoded)
        return decoded

    # Details ----------------------------------------------------------------------------------

    def _encode(
        self,
        part: torch.Tensor,
        exact: Ranges,
        payload: torch.Tensor,
        key: Hashable = None,
    ) -> None:
        """Flags are no part of what the codes see: their scale would be that of their block.

        Args:
            key: identifies the part of a reduce, from one to the next.
        """
        if not exact:
            self._code(part, payload, key)
            return
        places = [part[first:end] for first, end in exact]
        kept = self._exact_in(payload, part, exact)
        torch.cat(places, out=kept)
        for place in places:
            place.zero_()
        self._code(part, payload, key)
        _put(part, exact, kept)

    def _code(self, part: torch.Tensor, payload: torch.Tensor, key: Hashable) -> None:
        if key is None or self._feedback is None:
            encode(part, self._coding, payload)
            return

        def code(wanted: torch.Tensor) -> torch.Tensor:
            encode(wanted, self._coding, payload)
            arriving = torch.empty_like(wanted)
            decode(payload, self._coding, arriving)
            return arriving

        self._feedback.send(key, part, code)

    def _exact_in(self, payload: torch.Tensor, part: torch.Tensor, exact: Ranges) -> torch.Tensor:
        """The exact values in a payload of `part`, one range after the other."""
        first = SCALE_BYTES * self._coding.num_blocks(part.numel())
        return payload[first : first + _numel(exact) * part.itemsize].view(part.dtype)

    def _sum(
        self, own: torch.Tensor, payloads: Sequence[torch.Tensor], mean: Mean, hop: Hop
    ) -> torch.Tensor:
        """All ranks' parts for this one, in rank order."""
        exact = hop.exact_of(hop.group.rank)
        total = torch.empty_like(own, dtype=mean.dtype)
        flags = total.new_zeros(_numel(exact))
        for place, payload in enumerate(payloads):
            if place == hop.group.rank:
                if place:
                    total.add_(own)
                else:
                    total.copy_(own)
                for first, end, target in _places(exact):
                    flags[target].add_(own[first:end])
            else:
                decode(payload, self._coding, total, add=place > 0)
                flags.add_(self._exact_in(payload, own, exact))
        _put(total, exact, flags)
        return total.mul_(mean.scale)


def _bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _numel(ranges: Ranges) -> int:
    return sum(end - first for first, end in ranges)


def _places(ranges: Ranges) -> list[tuple[int, int, slice]]:
    """Each range, and where its values are when they lie one range after the other."""
    ends = accumulate(end - first for first, end in ranges)
    return [
        (first, end, slice(stop - (end - first), stop))
        for (first, end), stop in zip(ranges, ends, strict=True)
    ]


def _put(values: torch.Tensor, ranges: Ranges, exact: torch.Tensor) -> None:
    for first, end, source in _places(ranges):
        values[first:end].copy_(exact[source])
