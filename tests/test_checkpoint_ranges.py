"""Ranges of tensors as boxes: every element once, at its place, whatever the order in memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.checkpoint import ranges
from onecopy.checkpoint.ranges import Range, memory_order, whole_tensor
from tests import motley
from tests.motley import compare, snapshot
from tests.pool import Pool

hypothesis = pytest.importorskip("hypothesis", reason="pip install 'onecopy[test]' brings it")
st = pytest.importorskip("hypothesis.strategies")


@hypothesis.given(st.data())
def test_boxes_of_ranges(data: Any) -> None:
    """Cut anywhere, in any memory order, with any largest size of a box."""
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    numel = math.prod(shape)
    in_memory = torch.arange(numel, dtype=torch.float32)
    places = sorted(range(len(order)), key=order.__getitem__)
    tensor = in_memory.view([shape[dim] for dim in order]).permute(places)
    assert tensor.shape == shape
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=4)))
    limit = data.draw(st.integers(1, numel + 1))
    found = torch.full(shape, -1.0)
    numbers = 0
    for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
        if start == stop and numel:
            continue

        def values(first: int, last: int, start: int = start) -> torch.Tensor:
            return in_memory[start + first : start + last]

        one = Range("t", shape, torch.float32, start, stop - start, values, order)
        with mock.patch.object(ranges, "MAX_ITEM_BYTES", 4 * limit):
            boxes = list(one.boxes())
        for box, part in boxes:
            values = part.values()
            assert values.shape == box.sizes
            assert box.numel <= limit
            where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            assert (found[where] == -1.0).all(), "an element came twice"
            found[where] = values
            numbers += box.numel
        if limit > numel:
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert numbers == numel
    assert torch.equal(found, tensor)


@hypothesis.given(st.data())
def test_whole_tensors(data: Any) -> None:
    """Also of tensors that are not dense: the values are those, in the order that is claimed."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.randn([2 * size for size in shape]).permute(order)
    tensor = tensor[tuple(slice(None, None, data.draw(st.integers(1, 2))) for _ in shape)]
    one = whole_tensor("t", tensor)
    assert (one.offset, one.numel, one.shape) == (0, tensor.numel(), tuple(tensor.shape))
    found = torch.empty(tensor.shape)
    for box, part in one.boxes():
        where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        found[where] = part.values()
    assert torch.equal(found, tensor)
    assert sorted(memory_order(tensor)) == list(range(tensor.dim()))


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
)


class OfAllDtypes(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), float(value), dtype=torch.float64))
        for dtype in DTYPES:
            # A part of a larger tensor: no byte of the rest is to be saved.
            whole = torch.full((4, 6), value, dtype=torch.float32).to(dtype)
            self.register_buffer(str(dtype).replace("torch.", "of_"), whole[1:3, ::2])
        self.register_buffer("one_number", torch.tensor(value))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("absent", None)


def all_dtypes(root: Path) -> None:
    expected = OfAllDtypes(1).state_dict()
    models = [OfAllDtypes(value + dist.get_rank()) for value in (1, 0)]
    for model in models:
        onecopy.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    onecopy.save(root, models[0])
    onecopy.load(root, models[1])
    for model in models:
        for name, value in model.state_dict().items():
            assert value.dtype == expected[name].dtype, name
            assert torch.equal(value, expected[name]), name


def test_all_dtypes(pool: Pool, tmp_path: Path) -> None:
    """Buffers of any dtype, parts of larger ones among them, and parameters in fp64."""
    pool.run(2, all_dtypes, tmp_path)


def in_small_items(root: Path, whole_parameters: bool) -> None:
    """Written in items of a few bytes, or read in boxes of a few bytes."""
    made = []
    for seed in (0, 1):
        model, optimizers = motley.make("three", seed)
        # Running statistics differ from rank to rank, and those of the first are saved.
        model.batch_norm.eval()
        settings = {"stage": 2 + seed, "whole_parameters": whole_parameters == bool(seed)}
        onecopy.shard(model, list(optimizers.values()), **settings)
        motley.train(model, optimizers, [seed])
        made.append((model, optimizers))
    (first, first_optimizers), (second, second_optimizers) = made
    with mock.patch.object(ranges, "MAX_ITEM_BYTES", 24):
        onecopy.save(root, first, first_optimizers)
    onecopy.load(root, second, second_optimizers)
    expected = snapshot(first, first_optimizers)
    compare("read", snapshot(second, second_optimizers), expected)
    motley.train(second, second_optimizers, [5])
    onecopy.save(root / "again", first, first_optimizers)
    with mock.patch.object(ranges, "MAX_ITEM_BYTES", 24):
        onecopy.load(root / "again", second, second_optimizers)
    compare("written", snapshot(second, second_optimizers), expected)


@pytest.mark.parametrize("whole_parameters", [False, True])
def test_large_tensors_are_cut(pool: Pool, tmp_path: Path, whole_parameters: bool) -> None:
    """As those above MAX_ITEM_BYTES are, here small ones."""
    pool.run(2, in_small_items, tmp_path, whole_parameters)
