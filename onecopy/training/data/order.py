"""In which order sequences are trained on: shuffled anew in each epoch, known without a list.

A place in the order is one whole number, the sequences taken so far, so a run goes on from it at
once, on any number of ranks. Nothing is as long as the corpus: the shuffle of an epoch is a
permutation that is computed where it is looked at. It is a Feistel network on the smallest square
of a power of two that holds all numbers, walked again from what falls outside (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

__all__ = ["Order"]

ROUNDS = 8
WORD = 0xFFFFFFFF


class Order:
    """The endless order of `count` sequences: every epoch has each of them once."""

    def __init__(self, count: int, seed: int) -> None:
        assert count > 0, "there must be something to order"
        self._count = count
        self._seed = seed

    def numbers(self, first: int, num: int) -> Tensor:
        """The sequences at the places `first` to `first + num - 1`: (num,) int64 below `count`.

        An epoch ends anywhere in them, and the next one begins there.
        """
        parts = []
        place, stop = first, first + num
        while place < stop:
            epoch, start = divmod(place, self._count)
            taken = min(stop - place, self._count - start)
            parts.append(self._shuffled(torch.arange(start, start + taken), epoch))
            place += taken
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def _shuffled(self, places: Tensor, epoch: int) -> Tensor:
        generator = random.Random(f"{self._seed} {epoch}")
        keys = [generator.getrandbits(32) for _ in range(ROUNDS)]
        half = max(1, ((self._count - 1).bit_length() + 1) // 2)
        numbers = _feistel(places, half, keys)
        # Below four times as many numbers as places: few walks are left after some rounds.
        while (outside := numbers >= self._count).any():
            numbers[outside] = _feistel(numbers[outside], half, keys)
        return numbers


def _feistel(numbers: Tensor, half: int, keys: list[int]) -> Tensor:
    """A permutation of the numbers below 4 ** half, element by element."""
    mask = (1 << half) - 1
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right, key) & mask)
    return (left << half) | right


def _mixed(words: Tensor, key: int) -> Tensor:
    """32 bits that each depend on all bits of a word and of the key (MurmurHash3's finalizer)."""
    words = (words ^ key) & WORD
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & WORD
    return words ^ (words >> 16)
