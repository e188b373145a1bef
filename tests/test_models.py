"""The models of the parity tests: deterministic, and as odd as they claim to be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import models


@pytest.mark.parametrize("name", models.NAMES)
def test_built_and_run_the_same_twice(name: str) -> None:
    results = []
    for _ in range(2):
        torch.rand(3)  # the global random state must not matter
        model = models.build(name, 5)
        loss = models.loss(model, models.batch(name, 1, 0))
        assert loss.shape == () and loss.dtype == torch.float32 and loss.isfinite()
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    assert torch.equal(results[0][0], results[1][0])
    for key, grad in results[0][1].items():
        again = results[1][1][key]
        assert (grad is None) == (again is None), key
        assert grad is None or again is None or torch.equal(grad, again), key


@pytest.mark.parametrize("name", models.NAMES)
def test_seeds_ranks_and_steps_differ(name: str) -> None:
    first, other = models.build(name, 0), models.build(name, 1)
    pairs = zip(first.parameters(), other.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    drawn = [models.batch(name, step, rank).tensors for step in range(2) for rank in range(2)]
    key = next(iter(drawn[0]))
    values = {tuple(tensors[key].flatten().tolist()) for tensors in drawn}
    assert len(values) == 4


def test_what_the_names_promise() -> None:
    tied = models.build("tied")
    assert len(list(tied.parameters())) < len(list(tied.named_parameters(remove_duplicate=False)))
    odd = [p.numel() for p in models.build("odd").parameters()]
    assert 0 in odd and 1 in odd
    frozen = {p.requires_grad for p in models.build("frozen").parameters()}
    assert frozen == {True, False}
    without = {}
    for rank in range(2):
        model = models.build("unused")
        models.loss(model, models.batch("unused", 0, rank)).backward()
        without[rank] = {name for name, p in model.named_parameters() if p.grad is None}
    assert "spare.weight" in without[0] & without[1]
    assert "blocks.0.even_ranks" in without[1] - without[0]


@given(st.integers(0, 2**31))
def test_random_trees_run(seed: int) -> None:
    tree = models.build("tree", seed)
    again = models.build("tree", seed)
    batch = models.batch("tree", 0, 0)
    value = models.loss(tree, batch)
    assert value.isfinite()
    value.backward()
    assert any(p.grad is not None for p in tree.parameters())
    assert torch.equal(value, models.loss(again, batch))


def test_random_trees_are_as_odd_as_wanted() -> None:
    seen = set()
    for seed in range(60):
        tree = models.random_tree(seed)
        named = list(tree.named_parameters(remove_duplicate=False))
        seen.add("shared" if len(named) > len(list(tree.parameters())) else "")
        models.loss(tree, models.batch("tree", 0, 0)).backward()
        for _, p in named:
            seen.add("frozen" if not p.requires_grad else "unused" if p.grad is None else "")
            seen.add("empty" if not p.numel() else "scalar" if p.ndim == 0 else "")
    assert seen >= {"shared", "frozen", "unused", "empty", "scalar"}
