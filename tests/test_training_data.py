"""Which sequences the trainer's ranks see: comparisons with one process, and properties."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecopy.errors import ConfigError
from onecopy.training import data
from onecopy.training.data import Batches, Corpus, Shard
from onecopy.training.data.order import Order
from onecopy.training.data.token_files import Part
from onecopy.training.data.tokenizer import ByteTokenizer
from onecopy.training.options import TrainOptions

CONTEXT = 8
TEXT = torch.arange(1000, dtype=torch.int64).remainder(251).to(torch.uint8)


def part(tokens: Tensor, documents: list[int] | None = None, counted: Any = None) -> Part:
    starts = documents if documents is not None else [0, len(tokens)]
    return Part(
        tokens=tokens,
        documents=torch.tensor(starts),
        counted=counted,
        counts=torch.bincount(tokens.long(), minlength=256),
        text_bytes=len(tokens),
    )


def corpus(train: Part, held_out: Part | None = None, *, by_document: bool = False) -> Corpus:
    return Corpus(
        name="made",
        tokenizer=ByteTokenizer(),
        train=train,
        held_out=held_out or train,
        fingerprint="",
        context=CONTEXT,
        by_document=by_document,
    )


def shard(rank: int, world_size: int, batch: int = 3) -> Shard:
    return Shard(rank=rank, world_size=world_size, batch=batch)


def load(tmp_path: Path, **options: Any) -> Corpus:
    return data.load_corpus(TrainOptions(context=CONTEXT, **options))


def text_of(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode()


def test_without_data_python_topics_are_english_without_runs_of_blanks(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    text = text_of(loaded.train.tokens)
    assert len(text) > 200_000
    assert "  " not in text
    assert text.count(" the ") > 1000
    assert loaded.held_out.num_tokens / (len(text) + loaded.held_out.num_tokens) == pytest.approx(
        0.05, abs=1e-4
    )


def test_the_end_of_each_text_is_held_out(tmp_path: Path) -> None:
    for name, letter in (("b.txt", "b"), ("a.txt", "a")):
        (tmp_path / name).write_text(letter * 200)
    loaded = load(tmp_path, data=(tmp_path,))
    assert text_of(loaded.train.tokens) == "a" * 190 + "b" * 190
    assert text_of(loaded.held_out.tokens) == "a" * 10 + "\0" + "b" * 10 + "\0"
    assert loaded.held_out.documents.tolist() == [0, 11, 22]
    assert loaded.train.text_bytes == 380 and loaded.held_out.text_bytes == 20


def test_a_character_is_not_cut_in_two(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("\N{GREEK SMALL LETTER ALPHA}" * 99 + "\N{GRINNING FACE}" * 5, encoding="utf-8")
    loaded = load(tmp_path, data=(file,), held_out=0.06)
    assert loaded.name == "text"
    assert text_of(loaded.held_out.tokens) == "\N{GRINNING FACE}" * 3 + "\0"
    assert loaded.train.num_tokens == 198 + 8


def test_other_files_may_be_held_out(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name * 20)
    loaded = load(tmp_path, data=(tmp_path / "a",), eval_data=(tmp_path / "b",))
    assert text_of(loaded.train.tokens) == "a" * 20 + "\0"
    assert text_of(loaded.held_out.tokens) == "b" * 20 + "\0"


def test_bad_files_give_advice(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "late").write_bytes(b"a" * (1 << 20) + "\N{SNOWMAN}".encode()[:2] + b"?" * 9)
    (tmp_path / "folder").mkdir()
    cases = {
        "missing": "no file .*missing",
        "empty": "is empty",
        "short": "fewer than the 9 bytes",
        "latin": "not UTF-8 text .byte 3 is 0xe9",
        "late": "not UTF-8 text .byte 1,048,576 is 0xe2",
        "folder": "has no .txt,",
    }
    for name, advice in cases.items():
        with pytest.raises(ConfigError, match=advice):
            load(tmp_path, data=(tmp_path / name,))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 150), st.integers(0, 5), st.integers(9, 70))
def test_every_epoch_has_each_sequence_once(count: int, seed: int, step: int) -> None:
    """However many are taken at once."""
    order = Order(count, seed)
    taken = torch.cat([order.numbers(first, step) for first in range(0, 3 * count, step)])
    epochs = taken[: 3 * count].view(3, count)
    assert torch.equal(epochs.sort().values, torch.arange(count).expand(3, count))


def test_epochs_and_seeds_are_shuffled_each_in_its_way() -> None:
    count = 100_000
    orders = torch.stack([*Order(count, 0).numbers(0, 2 * count).chunk(2), *_epochs(count, 3)])
    for one in orders:
        # Places and numbers do not go together, and neither do neighbours: +-4 sigma.
        ordered = torch.corrcoef(torch.stack([one.double(), torch.arange(count).double()]))[0, 1]
        near = torch.corrcoef(torch.stack([one[:-1].double(), one[1:].double()]))[0, 1]
        assert abs(ordered) < 4 / math.sqrt(count) and abs(near) < 4 / math.sqrt(count)
    same = (orders[:, None] == orders[None]).sum(2)
    assert (same - torch.diag(same.diag())).max() < 10  # each pair shares one place on average


def _epochs(count: int, num: int) -> list[Tensor]:
    return [Order(count, seed).numbers(0, count) for seed in range(1, num + 1)]


def test_ranks_together_see_the_batch_of_one_process() -> None:
    whole = Batches(corpus(part(TEXT)), shard(0, 1, batch=6), seed=1)
    ranks = [Batches(corpus(part(TEXT)), shard(rank, 2), seed=1) for rank in range(2)]
    for _ in range(30):
        ((tokens, targets),) = next(whole)
        seen = [next(one)[0] for one in ranks]
        assert torch.equal(tokens, torch.cat([one[0] for one in seen]))
        assert torch.equal(targets, torch.cat([one[1] for one in seen]))
        assert not torch.equal(seen[0][0], seen[1][0])


def steps(splits: list[tuple[int, int, int]], num: int) -> list[Tensor]:
    """Sequences of each step, sorted; after each step all ranks go on as the next split says."""
    sequences = []
    place = Batches(corpus(part(TEXT)), shard(0, 1), seed=1).state_dict()
    for number in range(num):
        world_size, batch, accumulate = splits[number % len(splits)]
        ranks = [
            Batches(corpus(part(TEXT)), shard(rank, world_size, batch), 1, accumulate)
            for rank in range(world_size)
        ]
        for one in ranks:
            one.load_state_dict(place)
        drawn = [next(one) for one in ranks]
        assert all(len(one) == accumulate for one in drawn)
        sequences.append(torch.cat([tokens for one in drawn for tokens, _ in one]))
        places = [one.state_dict() for one in ranks]
        place = places[0]
        assert all(one == place for one in places)
    return [one[one.argsort(dim=0)[:, 0]] for one in sequences]


def test_resumed_on_other_ranks_the_steps_have_the_same_sequences() -> None:
    """Over the end of an epoch, too: there are 125 sequences."""
    expected = steps([(1, 12, 1)], 12)
    assert len({str(one) for one in expected}) == 12
    for splits in ([(1, 3, 4)], [(2, 6, 1), (3, 4, 1), (1, 6, 2), (2, 3, 2)], [(12, 1, 1)]):
        for one, other in zip(steps(splits, 12), expected, strict=True):
            assert torch.equal(one, other)


def test_resumed_in_an_epoch_goes_on_as_uninterrupted() -> None:
    whole = Batches(corpus(part(TEXT)), shard(0, 1), seed=1)
    for _ in range(25):
        next(whole)
    resumed = Batches(corpus(part(TEXT)), shard(0, 1), seed=1)
    resumed.load_state_dict(whole.state_dict())
    for _ in range(40):
        assert torch.equal(next(whole)[0][0], next(resumed)[0][0])


def test_targets_are_the_next_tokens_and_seeds_matter() -> None:
    ((tokens, targets),) = next(Batches(corpus(part(TEXT)), shard(0, 2), seed=1))
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    ((others, _),) = next(Batches(corpus(part(TEXT)), shard(0, 2), seed=2))
    assert not torch.equal(tokens, others)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 200), st.integers(1, 5))
def test_each_token_is_a_target_once_in_an_epoch(length: int, batch: int) -> None:
    tokens = torch.arange(length).to(torch.uint8)
    made = corpus(part(tokens))
    num_windows = len(made.windows(made.train))
    assert num_windows == math.ceil((length - 1) / CONTEXT)
    batches = Batches(made, shard(0, 1, batch), seed=length)
    rows = torch.cat([next(batches)[0][1] for _ in range(math.ceil(num_windows / batch))])
    seen = Counter(rows[:num_windows].flatten().tolist())
    del seen[data.IGNORED]
    assert seen == Counter(range(1, length))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=20))
def test_a_sequence_of_each_document_is_filled_up_or_cut_off(lengths: list[int]) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    tokens = torch.arange(1, starts[-1] + 1).remainder(255).to(torch.uint8)
    made = corpus(part(tokens, starts), by_document=True)
    windows = made.windows(made.train)
    assert len(windows) == len(lengths)
    rows, targets = windows.take(torch.arange(len(lengths)))
    for start, length, row, target in zip(starts, lengths, rows, targets, strict=False):
        document = tokens[start : start + length].tolist()
        wanted = document[1 : CONTEXT + 1]
        assert target.tolist() == wanted + [data.IGNORED] * (CONTEXT - len(wanted))
        kept = document[:CONTEXT]
        assert row.tolist() == kept + [0] * (CONTEXT - len(kept))


def test_what_the_loss_leaves_out_is_no_target() -> None:
    counted = torch.arange(1000).remainder(3).eq(0).to(torch.uint8)
    made = corpus(part(TEXT, counted=counted))
    _, targets = made.windows(made.train).take(torch.tensor([0, 1]))
    everywhere = TEXT[1:17].long()
    assert torch.equal(targets.flatten(), everywhere.masked_fill(counted[1:17] == 0, data.IGNORED))


@pytest.mark.parametrize("world_size", [1, 2, 3, 200])
def test_held_out_batches_are_alike_on_all_ranks(world_size: int) -> None:
    """As many and of the same sizes; what is counted is each token but the first, once."""
    made = corpus(part(TEXT[:1], [0, 1]), part(torch.arange(250, dtype=torch.uint8)))
    of_ranks = [data.held_out_batches(made, shard(rank, world_size)) for rank in range(world_size)]
    shapes = [[tokens.shape for tokens, _ in batches] for batches in of_ranks]
    assert all(shape == shapes[0] for shape in shapes)
    counted = torch.cat([targets for batches in of_ranks for _, targets in batches]).flatten()
    assert counted[counted != data.IGNORED].sort().values.tolist() == list(range(1, 250))
    assert sum(len(tokens) for tokens, _ in of_ranks[0]) == math.ceil(32 / world_size)


def test_held_out_batches_are_limited_and_spread() -> None:
    batches = data.held_out_batches(corpus(part(TEXT)), shard(0, 1, batch=2), max_sequences=4)
    assert [tokens[0, 0].item() for tokens, _ in batches] == [0, (62 * 8) % 251]


def test_steps_of_an_epoch() -> None:
    made = corpus(part(TEXT))  # 125 sequences
    assert data.steps_per_epoch(made, shard(0, 5, batch=5), 2) == 2.5


def test_unigram_baseline() -> None:
    halves = torch.tensor([0, 1] * 4000, dtype=torch.uint8)
    assert data.unigram_bits(corpus(part(halves), part(halves[:100]))) == pytest.approx(
        1.0, abs=0.05
    )
    unseen = corpus(part(halves), part(halves[:1] + 7))
    assert data.unigram_bits(unseen) == pytest.approx(math.log2(8000 + 256))
