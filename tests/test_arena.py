"""Arenas: memory that is taken once, lent, and lent again."""

from __future__ import annotations

import random

import pytest
import torch

from onecopy.memory.arena import ALIGNMENT, Arena, Slot

Made = list[torch.Tensor]


def arena(chunk_bytes: int = 0) -> tuple[Arena[torch.Tensor], Made]:
    """One of bytes in memory, and the blocks that it has taken."""
    made: Made = []

    def make(num_bytes: int) -> torch.Tensor:
        made.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return made[-1]

    return Arena(make, chunk_bytes=chunk_bytes), made


def view(slot: Slot[torch.Tensor]) -> torch.Tensor:
    """Its bytes."""
    return slot.block[slot.start : slot.start + slot.num_bytes]


def test_the_second_round_has_one_block() -> None:
    """As long as the most that was lent at once, and not taken again in the rounds to come."""
    memory, made = arena()
    for _ in range(5):
        slots = [memory.take(num_bytes) for num_bytes in (1000, 5000, 300)]
        assert memory.used_bytes == memory.num_bytes == 1024 + 5120 + 512
        del slots
    assert [len(block) for block in made] == [1024, 5120, 512, 1024 + 5120 + 512]


def test_longer_rounds_grow_it_once() -> None:
    """What a longer round needs more comes on top of the block, and is one with it afterwards."""
    memory, made = arena()
    for num_slots in (2, 2, 4, 4, 3):
        slots = [memory.take(ALIGNMENT) for _ in range(num_slots)]
        del slots
    assert [len(block) // ALIGNMENT for block in made] == [1, 1, 2, 1, 1, 4]
    assert memory.num_bytes == 4 * ALIGNMENT


def test_chunks_stay() -> None:
    """What is dear to take is never let go of."""
    memory, made = arena(chunk_bytes=1 << 14)
    for _ in range(3):
        slots = [memory.take(1 << 12) for _ in range(9)]
        del slots
    assert [len(block) for block in made] == [1 << 15, 1 << 15]


@pytest.mark.parametrize("chunk_bytes", [0, 1 << 14])
def test_slots_never_overlap(seed: int, chunk_bytes: int) -> None:
    """Lent and given back in any order, each slot keeps what was written to it."""
    draw = random.Random(seed)
    memory, made = arena(chunk_bytes)
    held: dict[int, Slot[torch.Tensor]] = {}
    most = 0
    for number in range(600):
        if held and draw.random() < 0.5:
            mark = draw.choice(list(held))
            slot = held.pop(mark)
            assert (view(slot) == mark % 251).all()
            del slot
        else:
            held[number] = memory.take(draw.randrange(1, 6000))
            view(held[number]).fill_(number % 251)
            most = max(most, memory.used_bytes)
        del number
    assert all((view(slot) == mark % 251).all() for mark, slot in held.items())
    held.clear()
    memory.tidy()
    assert memory.used_bytes == 0
    assert memory.num_bytes <= sum(map(len, made))
    slot = memory.take(most)
    assert memory.num_bytes >= len(view(slot)) == most


def test_a_failure_leaves_it_whole() -> None:
    """What `make` raises comes out, and what was lent stays."""
    left = [1 << 12]

    def make(num_bytes: int) -> torch.Tensor:
        if num_bytes > left[0]:
            raise MemoryError("no more")
        left[0] -= num_bytes
        return torch.zeros(num_bytes, dtype=torch.uint8)

    memory = Arena(make)
    slot = memory.take(1 << 12)
    with pytest.raises(MemoryError):
        memory.take(1)
    assert memory.used_bytes == memory.num_bytes == 1 << 12
    del slot
    assert memory.take(64).start == 0
