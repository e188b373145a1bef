"""The trainer's GPT and its sampling."""

from __future__ import annotations

import math

import pytest
import torch

from onecopy.training.data import IGNORED
from onecopy.training.model import GPT, GPTConfig
from onecopy.training.sampling import generate

CONFIG = GPTConfig(context=16, layers=2, width=32, heads=4)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def test_loss_is_that_of_the_logits_and_near_uniform_at_first(model: GPT) -> None:
    tokens, targets = torch.randint(256, (2, 3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 256)
    chosen = logits.log_softmax(-1).gather(-1, targets[..., None])
    loss = model(tokens, targets)
    assert loss.shape == ()
    torch.testing.assert_close(loss, -chosen.mean())
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_targets_that_are_ignored_do_not_count(model: GPT) -> None:
    tokens, targets = torch.randint(256, (2, 3, 16))
    expected = model(tokens[:2], targets[:2])
    targets[2] = IGNORED
    torch.testing.assert_close(model(tokens, targets), expected)


def test_no_position_sees_what_follows_it(model: GPT) -> None:
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (tokens[0, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_a_tied_head_is_the_embedding() -> None:
    model = GPT(GPTConfig(context=16, layers=1, width=32, heads=4, tie_head=True))
    assert model.head.weight is model.embedding.weight


def test_generation_is_seeded_and_longer_than_the_context(model: GPT) -> None:
    text = generate(model, [1, 2], 40, context=CONFIG.context, seed=1)
    assert len(text) == 40
    assert generate(model, [1, 2], 40, context=CONFIG.context, seed=1) == text
    assert generate(model, [1, 2], 40, context=CONFIG.context, seed=2) != text
    end = text[10]
    assert generate(model, [1, 2], 40, context=CONFIG.context, seed=1, end=end)[-1] == end


def test_generation_writes_what_was_learned(model: GPT) -> None:
    text = torch.tensor([list(b"abcd" * 4 + b"a")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bytes(generate(model, b"abcd", 8, context=CONFIG.context)) == b"abcdabcd"
