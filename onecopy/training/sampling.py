"""Texts that a model writes, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from onecopy.training.models import logits_of

__all__ = ["generate"]

# Slightly sharper than the model's own distribution: fewer slips, still varied.
TEMPERATURE = 0.8


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    context: int,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """`num_tokens` tokens that continue `prompt` (at least one), fewer where the model says `end`.

    The model sees at most the last `context` tokens. Equal seeds give equal texts on every rank,
    which all call it: a forward belongs to all of them.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_tokens):
        tokens = torch.tensor([text[-context:]], device=device)  # (1, time)
        logits = logits_of(model, tokens)[0, -1].float().cpu()  # (vocabulary,)
        probabilities = torch.softmax(logits / TEMPERATURE, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        if text[-1] == end:
            break
    return text[len(prompt) :]
