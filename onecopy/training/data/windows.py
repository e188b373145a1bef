"""How tokens become sequences of one length: cut from all of them in a row, or one per document.

windows: documents lie one after another, each with its end token, and are cut every `context`
tokens. Attention sees what comes before in the window, be it of another document. Each token but
the first is a target exactly once; the last window is filled up.
documents: each sequence is one document from its begin, filled up; what is longer than the context
is cut off. No mask is needed: fillers come last, where causal attention does not see them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.training.data.token_files import Part

__all__ = ["IGNORED", "Windows"]

IGNORED = -100  # the target that torch's cross entropy leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A part of a corpus as numbered sequences of `context` tokens.

    by_document: one sequence per document. pad: the token that fills up.
    """

    part: Part
    context: int
    by_document: bool
    pad: int

    def __len__(self) -> int:
        if self.by_document:
            return self.part.num_documents
        return -(-max(0, self.part.num_tokens - 1) // self.context)

    def take(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Sequences by their numbers, (n,): (tokens, targets), each (n, context) int64.

        `targets` is `tokens` moved on by one; `IGNORED` where there is none, and where the loss
        is not to count it.
        """
        part = self.part
        if self.by_document:
            starts, stops = part.documents[numbers], part.documents[numbers + 1]
        else:
            starts = numbers * self.context
            stops = torch.full_like(starts, part.num_tokens)
        places = starts[:, None] + torch.arange(self.context + 1)
        is_inside = places < stops[:, None]
        places = places.clamp(max=part.num_tokens - 1)
        tokens = part.tokens[places].long().masked_fill(~is_inside, self.pad)
        is_target = is_inside[:, 1:]
        if part.counted is not None:
            is_target = is_target & part.counted[places[:, 1:]].bool()
        return tokens[:, :-1], tokens[:, 1:].masked_fill(~is_target, IGNORED)
